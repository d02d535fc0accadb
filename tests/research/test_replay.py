"""Policies replayed along a text: the figures of each policy."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox
from gearbx_mlx.decoding.kickdown import Kickdown
from gearbx_mlx.decoding.route import Route
from gearbx_mlx.evaluation import predictions
from gearbx_mlx.evaluation.predictions import Recording, read_at_once, read_in_mode, recording_of
from gearbx_mlx.routing.gates import Monitor, ThresholdGate
from research.evaluation.driving import RoutePolicy, StaticPolicy, driven
from research.evaluation.policies import Planned, SameToken
from research.evaluation.replay import Reference, drafted, targets_of

WINDOWS = [[1, 5, 9, 2, 7, 33, 8, 4, 100, 3, 17, 6], [9, 9, 8, 1, 0, 2]]
TOKENS = 16


@pytest.fixture
def geared() -> Gearbox:
    return Gearbox(tiny_model(), "2,4,16", group_size=32)


@pytest.fixture
def reference(geared, tmp_path) -> Reference:
    predictions = driven(geared, WINDOWS, StaticPolicy(geared.ladder.top))
    return Reference(tmp_path / "r.npy", predictions, targets_of(WINDOWS))


def recorded(geared, policy, reference) -> Recording:
    return recording_of(driven(geared, WINDOWS, policy), reference)


class TestReplay:
    def test_the_top_gear_is_the_reference(self, geared, reference):
        result = recorded(geared, StaticPolicy(geared.ladder.top), reference)
        assert (result.kl == 0).all()
        assert (result.kl_reverse == 0).all()
        assert result.agree.all()
        assert result.passes.tolist() == [[0, 0, 1]] * TOKENS

    def test_the_reference_is_mlx_lm(self, reference):
        model = tiny_model()
        logits = np.array(model(mx.array([WINDOWS[0][:-1]]))[0])
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(reference.stored[:11], expected, atol=1e-4)
        assert reference.nll[0] == pytest.approx(-expected[0, WINDOWS[0][1]], abs=1e-4)

    def test_low_gear_tokens_stay_in_cache(self, geared, reference):
        """Only the last token in the top gear, after low ones: this differs from the top gear alone."""
        top, low = geared.ladder.top, geared.ladder[0]
        result = recorded(geared, Planned([low] * (TOKENS - 1) + [top]), reference)
        assert result.gear.tolist() == [0] * (TOKENS - 1) + [2]
        assert result.kl[-1] > 1e-6

    def test_everything_computed_again_is_the_top_gear(self, geared, reference):
        """Nothing of the low passes is left in the cache."""
        always = SameToken(geared.ladder[0], geared.ladder.top, lambda place, q: 1.0, 0.0)
        result = recorded(geared, always, reference)
        assert (result.kl == 0).all()
        assert result.passes.tolist() == [[1, 0, 1]] * TOKENS

    def test_route_acts_two_tokens_later_per_window(self, geared, reference):
        gate = ThresholdGate((1e-9, 2e-9), hysteresis=0, min_gear_duration=1)  # any entropy is too much
        result = recorded(geared, RoutePolicy(geared.ladder, gate, Monitor(128)), reference)
        assert result.gear.tolist() == [0, 0] + [2] * 9 + [0, 0] + [2] * 3

    def test_tokens_in_single_pass_give_same_result(self, geared, reference):
        read = (each for window in WINDOWS for each in read_at_once(geared, window, geared.ladder.top))
        at_once = recording_of(read, reference)
        assert at_once.kl.max() < 1e-9
        assert len(at_once.kl) == TOKENS

    def test_lossless_equals_top_gear_and_counts_passes(self, geared, reference):
        low, top = geared.ladder[1], geared.ladder.top
        result = recording_of(drafted(geared, WINDOWS, low, top, 3), reference)
        assert result.kl.max() < 1e-9
        assert result.agree.all()
        assert (result.gear == 2).all()
        drafts, checks = result.passes[:, 1].sum(), result.passes[:, 2].sum()
        assert TOKENS / 4 <= checks < TOKENS
        assert checks <= drafts <= 3 * checks

    def test_study_modes_equal_shipped_modes(self, demo):
        """With two gears, a window in mode kickdown or route is that of the studies' policy."""

        def entropy(place: int, q: np.ndarray) -> float:
            return float(predictions.entropy_of_logprobs(predictions.log_softmax(q)))

        box = Gearbox(tiny_model(), "2,4,16", group_size=32, kernels="mlx")
        found = [entropy(0, s.logprobs) for s in driven(box, WINDOWS[:1], StaticPolicy(box.ladder[0]))]
        thresholds = [float(np.quantile(found, share)) for share in (0.45, 0.75)]  # between two tokens
        steps = list(read_in_mode(box, demo.tokenizer, Kickdown(thresholds), WINDOWS[0]))
        assert 0 < sum(step.passes[1] for step in steps) < len(steps)
        pair = Gearbox(tiny_model(), "2,16", group_size=32, kernels="mlx")
        gate, monitor = ThresholdGate(thresholds[:1], hysteresis=0, min_gear_duration=1), Monitor(128, 1)
        for mode, policy in (
            (Kickdown(thresholds[:1]), SameToken(*pair.ladder, entropy, thresholds[0])),
            (Route(thresholds[:1], 1, 0, 1, "low"), RoutePolicy(pair.ladder, gate, monitor)),
        ):
            one = list(read_in_mode(pair, demo.tokenizer, mode, WINDOWS[0]))
            other = list(driven(pair, WINDOWS[:1], policy))
            assert [tuple(step.passes) for step in one] == [tuple(step.passes) for step in other]
            assert [step.target for step in one] == WINDOWS[0][1:]
            for mine, theirs in zip(one, other):
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-6)


class TestWindows:
    class Tokenizer:
        bos_token_id = 0

        def encode(self, document: str, verbose: bool = True) -> list[int]:
            return [0, *map(ord, document)]

    def test_text_splits_into_windows_that_start_alike(self):
        """Documents are windows of their own."""
        windows = predictions.windows_of(self.Tokenizer(), ["abcdefg"], 4, 100, "t")
        assert windows == [[0, *b"abc"], [0, *b"def"], [0, *b"g"]]
        assert predictions.windows_of(self.Tokenizer(), ["abcdefg", "x"], 4, 100, "t") == [[0, *b"abc"], [0, *b"x"]]

    @pytest.mark.parametrize("tokens", [1, 3, 4, 7])
    def test_the_limit_is_kept_exactly(self, tokens):
        windows = predictions.windows_of(self.Tokenizer(), ["abcdefghijkl"], 4, tokens, "t")
        assert sum(len(window) - 1 for window in windows) == tokens

    def test_text_shorter_than_window(self):
        with pytest.raises(ValueError, match=r"t: must have a window of 8 tokens, got 4.*--context 4"):
            predictions.windows_of(self.Tokenizer(), ["abc"], 8, 100, "t")
