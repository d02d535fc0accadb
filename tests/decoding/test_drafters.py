"""Drafters: what they propose, that they leave no trace, and another model in the low gear's place."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import PROMPT, tiny_model
from lossless_texts import assert_written, endless, written
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxWarning, Lossless, stream_generate
from gearbx_mlx.decoding.drafters import LowGear, TextSoFar, draft_cost
from gearbx_mlx.decoding.sampling import Chooser, reader_of
from gearbx_mlx.ranks.agreement import Agreement

SAMPLERS = {"greedy": greedy_sampler, "sampled": make_sampler(0.8, top_p=0.9), "ours": gearbx_mlx.make_sampler(0.8)}
PROCESSORS = {"plain": (), "repetition": tuple(make_logits_processors(repetition_penalty=1.3))}
TOKENS = PROMPT[0].tolist()


@pytest.fixture(params=["mlx", "native"])
def kernels(request) -> str:
    """The kernels available here."""
    if request.param == "native":
        request.getfixturevalue("compiled")
    return request.param


def native_box():
    """A gearbox whose low gear drafts natively, token by token."""
    return Gearbox(tiny_model(dtype=mx.bfloat16), "4,16", kernels="native")


def drafted(gearbox, most, goes_on=lambda margins: True, ends=frozenset(), settings=None, **choosing):
    """What the low gear proposes after the prompt; it leaves neither its entries nor its random numbers behind."""
    gearbox.make(gearbox.ladder[0])
    chooser = Chooser(**choosing)
    drafter = LowGear(gearbox, gearbox.ladder[0], chooser, reader_of(gearbox), **(settings or {}))
    gearbox.shift("high")
    cache = make_prompt_cache(gearbox.model)
    mx.eval(gearbox.model(PROMPT[:, :-1], cache=cache))
    mx.random.seed(7)
    proposal = drafter.propose(TextSoFar(list(TOKENS), ends), cache, most, goes_on)
    assert mx.random.state[0].tolist() == mx.random.key(7).tolist()
    assert {part.offset for part in cache} == {len(TOKENS) - 1}
    return proposal


class TestTheLowGear:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("processors", PROCESSORS)
    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_proposes_what_it_would_write_with_the_same_random_numbers(self, kernels, sampler, processors):
        gearbox = Gearbox(tiny_model(), "6,16", kernels=kernels)
        given = {"sampler": SAMPLERS[sampler], "processors": PROCESSORS[processors]}
        proposal = drafted(gearbox, 6, **given)
        gearbox.shift("low")
        mx.random.seed(7)
        how = {"sampler": given["sampler"], "logits_processors": given["processors"]}
        how |= {"mode": gearbx_mlx.Static("low"), "gearbox": gearbox}
        run = stream_generate(gearbox.model, endless(), TOKENS, 6, **how)
        assert proposal.tokens.tolist() == [r.token for r in run]
        assert proposal.count == 6
        assert proposal.weight_bytes == 6 * gearbox.weight_bytes_per_token(gearbox.ladder[0])

    def test_margins_are_the_same_natively_and_by_mlx(self, compiled):
        of_ranks = {"agreement": Agreement()}  # which draft by MLX's graph
        margins = [np.array(drafted(native_box(), 5, settings=each).margins) for each in ({}, of_ranks)]
        assert margins[0] == pytest.approx(margins[1], abs=1e-2)
        assert (margins[0] > 0).all()

    def test_a_sampler_that_hides_its_margins_has_none(self, kernels):
        gearbox = Gearbox(tiny_model(), "6,16", kernels=kernels)
        proposal = drafted(gearbox, 5, goes_on=lambda margins: False, sampler=SAMPLERS["sampled"])
        assert proposal.margins is None
        assert proposal.count == 5  # nothing ends a draft early

    def test_a_margin_ends_a_draft_where_it_is_known_at_once(self, compiled):
        gearbox, asked = native_box(), []

        def goes_on(margins):
            asked.append(len(margins))
            return len(margins) < 3

        proposal = drafted(gearbox, 9, goes_on)
        assert proposal.count == 3
        assert asked == [1, 2, 3]

    def test_a_native_draft_ends_at_a_stop_token(self, compiled):
        gearbox = native_box()
        whole = drafted(gearbox, 9).tokens.tolist()
        place = next(place for place, token in enumerate(whole) if place and token not in whole[:place])
        assert drafted(gearbox, 9, ends=frozenset({whole[place]})).tokens.tolist() == whole[: place + 1]


class TestAnotherModel:
    """A draft model with a KV cache of its own; the text is the same as without."""

    @pytest.mark.some(2)
    @pytest.mark.parametrize("processors", PROCESSORS)
    @pytest.mark.parametrize("sampler", SAMPLERS)
    @pytest.mark.parametrize("seed", [0, 1])  # the same model, and one that agrees by chance
    def test_the_text_is_that_of_the_model_alone(self, seed, sampler, processors):
        gearbox, given = Gearbox(tiny_model(), "16"), {"logits_processors": PROCESSORS[processors]}
        given["sampler"] = SAMPLERS[sampler]
        theirs = written(gearbox, TOKENS, 30, **given)
        for mode in (Lossless(draft_length=4), Lossless(draft_length=1), Lossless()):
            ours = written(gearbox, TOKENS, 30, mode, draft_model=tiny_model(seed=seed), **given)
            assert_written(ours, theirs)

    @pytest.mark.parametrize(("seed", "accepted"), [(0, (20, 24)), (1, (0, 12))])
    def test_drafts_are_counted_with_their_bytes(self, seed, accepted):
        gearbox, other = Gearbox(tiny_model(), "16"), tiny_model(seed=seed)
        mode = Lossless(draft_length=3, lookup_tokens=0)
        run = stream_generate(gearbox.model, endless(), TOKENS, 30, gearbox=gearbox, mode=mode, draft_model=other)
        responses = list(run)
        assert accepted[0] <= sum(r.from_draft for r in responses) <= accepted[1]
        drafted, passes = sum(r.drafted for r in responses), sum(r.passes[0] for r in responses)
        one, two = (gearbox.weight_bytes_per_token(gearbox.ladder.top, rows) for rows in (1, 2))
        assert sum(r.weight_bytes for r in responses) == drafted * (one + two - one) + passes * one
        assert run.summary()["draft_model"]["passes"] == drafted

    def test_one_whose_cache_cannot_be_cut_drafts_nothing(self):
        gearbox = Gearbox(tiny_model(), "16")
        theirs = written(gearbox, TOKENS, 20)
        with pytest.warns(GearbxWarning, match=r"keeps a state instead of entries.*it drafts nothing") as said:
            ours = written(gearbox, TOKENS, 20, Lossless(), draft_model=tiny_model("mamba"))
        assert len(said) == 1
        assert_written(ours, theirs)


@pytest.mark.parametrize("draft", ["4", "8"])
def test_low_gear_names_itself_and_its_cost_follows_its_bits(draft):
    gearbox = Gearbox(tiny_model(), "4,8,16")
    drafter = Lossless(draft).drafter(gearbox, Chooser(greedy_sampler))
    assert drafter.name == f"{draft} bits"
    assert int(draft) / 16 < drafter.cost < 1


def test_draft_of_the_top_gears_bits_costs_a_plain_token():
    assert draft_cost(8, 8) == 1.0
    assert draft_cost(4, 16) < draft_cost(4, 8) < draft_cost(8, 8)
