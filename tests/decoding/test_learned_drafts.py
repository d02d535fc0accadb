"""What drafts show of a model is learned while texts are written."""

import pytest
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

from gearbx_mlx import Gearbox, Lossless, stream_generate
from gearbx_mlx.routing.acceptance import (
    LearnedAgreement,
)
from gearbx_mlx.routing.rounds import CostRule, Costs, Rounds

QUESTION = "Question: Tom has 5 apples and buys 7 more. How many apples does he have?\nAnswer:"


class TestWhatIsLearned:
    @pytest.fixture
    def untaught(self, fresh_demo, monkeypatch):
        """A gearbox that drafts whatever passes cost here, and whatever an earlier start has seen."""
        monkeypatch.setenv("GEARBX_TUNE", "1")
        monkeypatch.setattr(Rounds, "drafts", lambda *_: True)
        gearbox = Gearbox(fresh_demo.model, "3,16")
        cache = gearbox.kernel_choices.tuner.cache
        monkeypatch.setattr(cache, "times", {})
        monkeypatch.setattr(cache, "save_soon", lambda: None)
        return gearbox

    def test_drafts_say_how_often_gears_agree(self, untaught, demo):
        mode = Lossless(lookup_tokens=0)
        learned = mode.plan(untaught).agreement
        text = list(stream_generate(untaught.model, demo.tokenizer, QUESTION, 20, mode=mode, gearbox=untaught))
        rounds = rounds_of(text)
        known = sum(min(tokens[0].drafted, len(tokens)) for tokens in rounds[:-1])
        assert 0 < known <= learned.drafted <= known + rounds[-1][0].drafted

    def test_they_do_by_mlxs_kernels_in_half_precision(self, fresh_demo):
        gearbox = Gearbox(fresh_demo.model, "4,16", kernels="mlx", dtype="bfloat16")
        mode = Lossless(rule=CostRule(LearnedAgreement(), Costs(lambda: 1.0, lambda rows: 4.0)))
        text = stream_generate(fresh_demo.model, fresh_demo.tokenizer, QUESTION, 20, mode=mode, gearbox=gearbox)
        assert sum(response.drafted for response in text) > 0

    def test_a_sampler_without_a_kernel_says_nothing_about_others(self, geared_demo, demo, monkeypatch):
        monkeypatch.setenv("GEARBX_TUNE", "1")
        mode = Lossless(lookup_tokens=0)
        own, theirs = (mode.plan(geared_demo, has_kernel).stretches for has_kernel in (True, False))
        before = own.seconds
        how = {"mode": mode, "gearbox": geared_demo, "sampler": mlx_lm_sampler(0.5)}
        list(stream_generate(demo.model, demo.tokenizer, QUESTION, 60, **how))
        assert theirs.seconds
        assert own.seconds == before


def rounds_of(responses):
    """The tokens of a text by the passes of the top gear that made them."""
    rounds = []
    for response in responses:
        if response.passes[-1]:
            rounds.append([])
        rounds[-1].append(response)
    return rounds
