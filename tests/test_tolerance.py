"""The dial between lossless and fast: which drafted tokens stay, and the reported loss of a text."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from test_bad_input import assert_refused

from gearbx_mlx import GearbxError, Lossless, Static, batch_generate, stream_generate
from gearbx_mlx.decoding.sampling import Tolerance
from gearbx_mlx.routing.acceptance import Dial

TALE = "Once upon a time there was a king"
PROMPTS = (TALE, "There was a poor miller who", "Tom has 5 apples and buys 7 more.")
SAVING = {"cost": "bytes", "lookup_tokens": 0}


def written(demo, gearbox, mode, prompt=TALE, count=40, **keywords):
    return list(stream_generate(demo.model, demo.tokenizer, prompt, count, mode=mode, gearbox=gearbox, **keywords))


def recomputed(demo, gearbox, prompt, tokens):
    """How many nats less likely each token is than the best one, from the top gear's logits over the whole text."""
    gearbox.shift("high")
    prompt = demo.tokenizer.encode(prompt)
    logits = demo.model(mx.array([[*prompt, *tokens[:-1]]]))[0, len(prompt) - 1 :].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], -1)[:, 0]
    return np.array(logprobs.max(axis=-1) - own)


class TestGreedy:
    def test_zero_is_lossless(self, demo, geared_demo):
        top = [response.token for response in written(demo, geared_demo, Static())]
        found = written(demo, geared_demo, Lossless(tolerance=0.0, **SAVING))
        assert [response.token for response in found] == top
        assert {response.given_up for response in found} == {0.0}

    @pytest.mark.parametrize("nats", [0.3, 2.0])
    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_the_certificate_is_the_top_gears(self, demo, geared_demo, nats, prompt):
        responses = stream_generate(
            demo.model, demo.tokenizer, prompt, 40, mode=Lossless(tolerance=nats, **SAVING), gearbox=geared_demo
        )
        found = list(responses)
        lost = recomputed(demo, geared_demo, prompt, [response.token for response in found])
        assert np.allclose([response.given_up for response in found], lost, atol=1e-4)
        assert max(lost) <= nats + 1e-4
        summary = responses.summary()
        assert summary["nats_given_up"] == pytest.approx(lost.sum(), abs=1e-3)
        assert summary["not_first_choice"] == (lost > 1e-5).sum()

    def test_a_tolerance_without_end_keeps_every_draft(self, demo, geared_demo):
        mode = Lossless(tolerance=1e6, draft_length=4, lookup_tokens=0)
        drafted = [response for response in written(demo, geared_demo, mode) if response.drafted]
        found = written(demo, geared_demo, mode)
        assert sum(response.from_draft for response in found) == sum(response.drafted for response in found)
        assert drafted

    def test_a_batch_gives_up_what_it_says(self, demo, geared_demo):
        mode = Lossless(tolerance=1.0, draft_length=3, lookup_tokens=0)
        found = batch_generate(
            demo.model,
            demo.tokenizer,
            list(PROMPTS),
            max_tokens=30,
            mode=mode,
            gearbox=geared_demo,
            return_token_ids=True,
        )
        for prompt, trace in zip(PROMPTS, found.traces):
            lost = recomputed(demo, geared_demo, prompt, [response.token for response in trace])
            assert np.allclose([response.given_up for response in trace], lost, atol=1e-4)
        assert any(response.given_up for trace in found.traces for response in trace)

    def test_what_processors_forbid_never_stays(self, demo, geared_demo):
        usual = [response.token for response in written(demo, geared_demo, Static("low"))]
        forbidden = mx.array(sorted({*usual}))

        def forbid(tokens, logits):
            logits[:, forbidden] = -math.inf
            return logits

        mode = Lossless(tolerance=1e6, draft_length=4, lookup_tokens=0)
        found = written(demo, geared_demo, mode, logits_processors=[forbid])
        assert not {response.token for response in found} & {*usual}


class TestSampled:
    def test_typical_tokens_stay(self):
        """Medusa's rule: p > min(e, sqrt(e) exp(-H)), with H in nats."""
        probabilities = np.array([0.55, 0.25, 0.15, 0.05])
        logprobs = mx.log(mx.array(probabilities))[None]
        entropy = -(probabilities * np.log(probabilities)).sum()
        for nats in (0.5, 1.0, 2.4):
            epsilon = math.exp(-nats)
            least = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy))
            for draft, probability in enumerate(probabilities):
                token, given_up = Tolerance(nats, greedy=False).kept(logprobs, mx.array([0]), mx.array([draft]))
                stays = draft == 0 or probability > least
                assert token.item() == (draft if stays else 0)
                expected = math.log(probabilities[0] / probability) if stays else 0
                assert given_up.item() == pytest.approx(expected, abs=1e-5)

    def test_a_text_says_what_it_gave_up(self, demo, geared_demo):
        mx.random.seed(3)
        mode = Lossless(tolerance=3.0, draft_length=3, lookup_tokens=0)
        found = written(demo, geared_demo, mode, sampler=make_sampler(0.9))
        assert any(response.given_up for response in found)
        assert all(math.isfinite(response.given_up) for response in found)


class TestDial:
    @given(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.3, 0.3, 1.0, 4.0]), min_size=1), st.floats(0.01, 1))
    def test_an_agreement_is_kept(self, gaps, agreement):
        tolerance = Dial(agreement=agreement).tolerance(gaps)
        assert sum(0 < gap <= tolerance for gap in gaps) <= (1 - agreement) * len(gaps) + 1e-6

    @given(st.lists(st.floats(0, 9), min_size=1, unique=True), st.floats(0, 2))
    def test_a_regret_is_kept(self, gaps, regret):
        tolerance = Dial(regret=regret).tolerance(gaps)
        assert sum(gap for gap in gaps if gap <= tolerance) <= regret * len(gaps) + 1e-6

    @pytest.mark.parametrize(
        "given", [{}, {"nats": 1.0, "regret": 1.0}, {"nats": -1.0}, {"regret": math.inf}, {"agreement": 1.5}]
    )
    def test_what_cannot_be(self, given):
        with pytest.raises(GearbxError):
            Dial(**given)


class TestCommands:
    def test_calibrate_chooses_it_and_generate_takes_it(self, command, tmp_path):
        out, summary = tmp_path / "drafting.json", tmp_path / "summary.json"
        shared = ["--gears", "3,16", "--num-prompts", 2, "-m", 40]
        found = command("calibrate", "--mode", "lossless", "--target-agreement", 0.9, "--out", out, *shared)
        assert found.status == 0, found.err
        assert json.loads(out.read_text())["tolerance"] > 0
        result = command("generate", "--curve", out, "-p", TALE, "-m", 60, "--summary", summary, "--cost", "bytes")
        assert result.status == 0, result.err
        made = json.loads(summary.read_text())
        assert made.get("not_first_choice", 0) <= 0.2 * made["tokens"]

    @pytest.mark.parametrize(
        "flags",
        [
            ["--tolerance", "-1"],
            ["--tolerance", "inf"],
            ["--tolerance", "nan"],
            ["--tolerance", "1", "--mode", "static"],
            ["--tolerance", "1", "--mode", "route"],
        ],
    )
    def test_what_cannot_be(self, command, flags):
        result = command("generate", "-p", "Once", "-m", 3, *flags)
        assert_refused(result)
        assert "--tolerance" in result.err

    @pytest.mark.parametrize(
        "flags",
        [["--target-regret", "0.1"], ["--tolerance", "1"], ["--mode", "lossless", "--target-kl", "1"]],
    )
    def test_targets_of_another_mode(self, command, flags):
        result = command("calibrate", *flags)
        assert_refused(result)
        assert flags[-2] in result.err
