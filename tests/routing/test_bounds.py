"""The entropy of a whole distribution lies between the bounds from its largest log-probabilities."""

import math
from collections import deque

import mlx.core as mx
import numpy as np
import pytest
from conftest import float64
from hypothesis import assume, given
from hypothesis import strategies as st

from gearbx_mlx import GearbxError
from gearbx_mlx.routing.bounds import BoundedRouting, Rounding, bits, entropy_bounds, rounding_as_written
from gearbx_mlx.routing.gates import RUN_AHEAD, Monitor, ThresholdGate, replay

ROUNDED = 1e-9  # of sums of float64, on either side
WEIGHTS = st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1e-12, 1.0, 50.0]), min_size=1, max_size=40)


@st.composite
def distributions(draw) -> list[float]:
    """Probabilities, the largest first: peaked, flat, with zeros."""
    weights = draw(WEIGHTS)
    power = draw(st.sampled_from([0.5, 1.0, 3.0]))
    powered = [weight**power for weight in weights]
    assume(math.fsum(powered) > 0)
    return sorted((weight / math.fsum(powered) for weight in powered), reverse=True)


def entropy(probabilities) -> float:
    return math.fsum(map(bits, probabilities))


def logs(probabilities) -> list[float]:
    return [math.log(p) if p > 0 else -math.inf for p in probabilities]


@given(distributions(), st.data())
def test_entropy_is_between_bounds(probabilities, data):
    k = data.draw(st.integers(1, len(probabilities)))
    low, high = entropy_bounds(logs(probabilities[:k]), len(probabilities))
    assert low - ROUNDED <= entropy(probabilities) <= high + ROUNDED


@given(distributions(), st.data())
def test_upper_bound_is_attained_by_flat_rest(probabilities, data):
    k = data.draw(st.integers(1, len(probabilities)))
    others = len(probabilities) - k
    flat = probabilities[:k] + [math.fsum(probabilities[k:]) / max(1, others)] * others
    assert entropy_bounds(logs(flat[:k]), len(flat))[1] == pytest.approx(entropy(flat))


@given(distributions(), st.data())
def test_lower_bound_is_attained_by_packed_rest(probabilities, data):
    """The rest consists of as many tokens of the k-th one's probability as fit, and one with the remainder."""
    k = data.draw(st.integers(1, len(probabilities)))
    rest, each, packed = math.fsum(probabilities[k:]), probabilities[k - 1], probabilities[:k]
    while len(packed) < len(probabilities):
        packed.append(min(rest, each))
        rest = max(0.0, rest - packed[-1])
    assume(rest < ROUNDED)
    assert entropy_bounds(logs(packed[:k]), len(packed))[0] == pytest.approx(entropy(packed))


@given(distributions(), st.data())
def test_partial_lists_bracket_the_entropy(probabilities, data):
    listed = data.draw(st.sets(st.integers(0, len(probabilities) - 1), min_size=1))
    low, high = entropy_bounds(logs(probabilities[i] for i in sorted(listed)), len(probabilities), unlisted=0.0)
    assert low - ROUNDED <= entropy(probabilities) <= high + ROUNDED


@given(distributions(), st.data())
def test_rounded_log_probabilities_bracket_the_entropy(probabilities, data):
    k = data.draw(st.integers(1, len(probabilities)))
    rounding = Rounding(data.draw(st.sampled_from([1e-6, 1e-3, 0.06])), data.draw(st.sampled_from([0.0, 2.0**-8])))
    off = data.draw(st.lists(st.floats(-0.99, 0.99), min_size=k, max_size=k))
    given = [max(value, -700) for value in logs(probabilities[:k])]
    given = [value + part * rounding.absolute for value, part in zip(given, off)]
    low, high = entropy_bounds(given, len(probabilities), rounding)
    assert low - ROUNDED <= entropy(probabilities) <= high + ROUNDED


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("shift", [0.0, 40.0, -80.0, 400.0])
@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_server_values_in_any_dtype_bracket_entropy(dtype, shift, scale):
    """mlx-lm subtracts the rounded log(sum(exp)) of logits in the model's type, so no list adds up to 1."""
    for seed in range(30):
        logits = (shift + scale * mx.random.normal((512,), key=mx.random.key(seed))).astype(dtype)
        exact = float64(logits)
        probabilities = np.exp(exact - exact.max())
        probabilities /= probabilities.sum()
        given = sorted((logits - mx.logsumexp(logits, keepdims=True)).astype(mx.float32).tolist(), reverse=True)[:11]
        low, high = entropy_bounds(given, 512, rounding_as_written(given))
        assert low <= entropy(probabilities) <= high


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        ([], "must not be empty"),
        ([0.3], "must be 0 or less, got 0.3"),
        ([math.nan, -1.0], "must be 0 or less, got nan"),
        ([math.inf], "must be 0 or less, got inf"),
        ([-0.1, -0.1], "must sum to at most 1, got 1.81"),
        ([-3.0, -3.0, -3.0], "5 unlisted tokens of at most 0.0498 cannot sum to 0.851"),
        ([-5.0] * 9, "must be at most 8, got 9"),
    ],
)
def test_impossible_probabilities_are_refused(logprobs, words):
    with pytest.raises(GearbxError, match=words):
        entropy_bounds(logprobs, 8)


VOCABULARY = 4096
ENTROPY = st.floats(0, 12) | st.sampled_from([1.0, 1.1, 2.0, 2.1, 3.0, 2.9, 11.9])
GATES = st.tuples(
    st.sampled_from([(), (1.0,), (1.0, 2.0), (1.0, 2.0, 3.0)]), st.sampled_from([0.0, 0.1, 1.5]), st.integers(1, 5)
)


def routing(settings, window: int, first: int) -> tuple[BoundedRouting, Monitor, ThresholdGate]:
    """Routing by bounds, and a monitor and a gate for entropies between them."""

    def monitor() -> Monitor:
        return Monitor(VOCABULARY, window)

    def gate() -> ThresholdGate:
        return ThresholdGate(*settings, initial_gear=first)

    return BoundedRouting(monitor, gate, first), monitor(), gate()


def delayed(gears: list[int], first: int) -> list[int]:
    """The gears that compute the tokens, where each decision acts some tokens later."""
    coming = deque([first] * RUN_AHEAD)
    coming.extend(gears)
    return list(coming)[: len(gears)]


@given(GATES, st.integers(1, 3), st.lists(st.tuples(ENTROPY, ENTROPY, st.floats(0, 1)), max_size=30), st.data())
def test_gear_of_entropy_within_bounds_is_possible(settings, window, tokens, data):
    first = data.draw(st.integers(0, len(settings[0])))
    bounded, monitor, gate = routing(settings, window, first)
    bounds = [(min(a, b), max(a, b)) for a, b, _ in tokens]
    true = [min(high, low + part * (high - low)) for (low, high), (_, _, part) in zip(bounds, tokens)]
    gears = delayed(replay(true, monitor, gate), first)
    for pair, gear in zip(bounds, gears):
        seen = bounded.update(pair)
        assert gear in seen.possible
        assert set(seen.gears) <= seen.possible


@given(GATES, st.integers(1, 3), st.lists(ENTROPY, max_size=30), st.data())
def test_known_entropy_has_single_gear_of_route(settings, window, entropies, data):
    first = data.draw(st.integers(0, len(settings[0])))
    bounded, monitor, gate = routing(settings, window, first)
    for value, gear in zip(entropies, delayed(replay(entropies, monitor, gate), first)):
        seen = bounded.update((value, value))
        assert (seen.gears, seen.possible) == ((gear, gear), {gear})


@given(distributions(), st.integers(2, 6))
def test_decimals_bracket_the_entropy(probabilities, digits):
    given = [round(max(value, -700), digits) for value in logs(probabilities[:5])]
    low, high = entropy_bounds(given, len(probabilities), rounding_as_written(given))
    assert low - ROUNDED <= entropy(probabilities) <= high + ROUNDED
