"""Routing by entropies of which only bounds are known: the gear by each bound, and every gear that is possible."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .gates import ThresholdGate
from .monitor import Monitor, Reading

DELAY = 2  # tokens from the one that causes a shift to the first that it acts on, as in mode route


@dataclass(frozen=True)
class Bounded:
    """A token's rolling means, in bits, and the gears that would have computed it, by the lower and the upper bound.

    possible: every gear that entropies between the bounds may lead to.
    """

    means: tuple[float, float]
    gears: tuple[int, int]
    possible: frozenset[int]


class BoundedRouting:
    """The gears of a text by both bounds of its entropies. Gears are numbered from 0, the lowest precision.

    The same entropies as both bounds give what mode route gives. Gears that the bounds agree on are not certain: a gate
    remembers when it shifted last, and stays, so that entropies between the bounds can lead to a third gear. So all
    states that a gate can be in are followed as well. The true gear is always among the possible ones.

    Args:
        make_monitor, make_gate: a new one for each bound.
        first: the gear that the text begins in.
        delay: tokens between the one that a gate has judged and the first one in the gear that it chose.
    """

    def __init__(
        self,
        make_monitor: Callable[[], Monitor],
        make_gate: Callable[[], ThresholdGate],
        first: int,
        delay: int = DELAY,
    ):
        self.monitors = [make_monitor() for _ in range(2)]
        self.gates = [make_gate() for _ in range(2)]
        self.any_gate = make_gate()
        for gate in (*self.gates, self.any_gate):
            gate.reset(first)
        self.states = {(self.any_gate.gear, self.any_gate.duration)}
        self.coming = deque([((first, first), frozenset({first}))] * delay)

    def update(self, entropies: tuple[float, float]) -> Bounded:
        """Take the bounds of the next token's entropy, in bits."""
        readings = [monitor.update(value) for monitor, value in zip(self.monitors, entropies)]
        low, high = (gate.update(reading) for gate, reading in zip(self.gates, readings))
        between = list(distinct_readings(self.any_gate, *readings))
        self.states = {self.after(state, reading) for state in self.states for reading in between}
        self.coming.append(((low, high), frozenset(gear for gear, _ in self.states)))
        return Bounded((readings[0].mean, readings[1].mean), *self.coming.popleft())

    def after(self, state: tuple[int, int], reading: Reading) -> tuple[int, int]:
        """The gear and the duration of a gate after a reading."""
        gate = self.any_gate
        gate.gear, gate.duration = state
        gate.update(reading)
        return gate.gear, min(gate.duration, gate.min_gear_duration)


def distinct_readings(gate: ThresholdGate, low: Reading, high: Reading) -> Iterator[Reading]:
    """Readings between two that lead a gate to everything that readings between them can lead it to.

    A gate compares the mean with its levels; so these levels, what follows them and the ends stand for all means.
    """
    levels = [level for level in (*gate.up, *gate.down) if low.mean <= level <= high.mean]
    means = {low.mean, high.mean, *levels, *(min(math.nextafter(level, math.inf), high.mean) for level in levels)}
    for catastrophe in {low.catastrophe, high.catastrophe}:
        for mean in means:
            yield replace(low, mean=mean, catastrophe=catastrophe)
