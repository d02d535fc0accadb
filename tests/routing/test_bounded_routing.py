"""Gears by bounds of the entropies: the gear of the true entropies is always among the possible ones."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from gearbx_mlx.routing.bounds import BoundedRouting
from gearbx_mlx.routing.gates import RUN_AHEAD, Monitor, ThresholdGate, replay

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
def test_the_gear_of_entropies_between_the_bounds_is_possible(settings, window, tokens, data):
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
def test_a_known_entropy_has_one_gear_which_is_that_of_mode_route(settings, window, entropies, data):
    first = data.draw(st.integers(0, len(settings[0])))
    bounded, monitor, gate = routing(settings, window, first)
    for value, gear in zip(entropies, delayed(replay(entropies, monitor, gate), first)):
        seen = bounded.update((value, value))
        assert (seen.gears, seen.possible) == ((gear, gear), {gear})


def test_bounds_that_agree_may_both_be_wrong():
    """The lower bounds stay below the threshold; the upper ones rise at once and fall again; those between rise later,
    and then have to stay for the least duration.
    """
    bounded, monitor, gate = routing(((1.0,), 0.0, 3), 1, 0)
    true, low, high = [0.0, 0.0, 0.0, 2.0, 0.5, 0.5], [0.0] * 6, [0.0, 0.0, 2.0, 2.0, 0.5, 0.5]
    seen = [bounded.update(pair) for pair in [*zip(low, high), (0.0, 0.0), (0.0, 0.0)]]
    gears = delayed([*replay(true, monitor, gate), 0, 0], 0)
    assert gears[-1] == 1
    assert seen[-1].gears == (0, 0)
    assert seen[-1].possible == {0, 1}
