"""Gates turn a monitor's reading into a gear (GEARBX 3.3, 3.5 and 10.2)."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..errors import GearbxError
from .monitor import Monitor, Reading
from .thresholds import check_thresholds

DEFAULT_HYSTERESIS = 0.1  # bits
DEFAULT_MIN_GEAR_DURATION = 4  # tokens


class Gate(Protocol):
    """Chooses the gear. Gears are numbered from 0, the lowest precision."""

    def update(self, reading: Reading) -> int:
        """Take the reading of a token. Returns the gear for what follows."""
        ...

    def peek(self, level: float) -> int:
        """The gear that a mean entropy of `level` bits would lead to; changes nothing."""
        ...

    def reset(self, gear: int) -> None:
        """Start a sequence in `gear`."""
        ...


class ThresholdGate:
    """Gear k while the rolling mean is between threshold k-1 and threshold k.

    To leave the lowest or the highest gear, the mean has to pass the threshold by `hysteresis` bits. In ladders of four
    gears and more this goes for every step up between inner gears too, so that no boundary is without a margin. The
    gate stays in a gear for at least `min_gear_duration` tokens. Only catastrophic entropy leads to the top gear at
    once: waiting in a low gear would protect nothing.

    Args:
        thresholds: ascending, in bits, one fewer than there are gears; empty for a ladder of one.
        hysteresis: in bits.
        min_gear_duration: in tokens.

    Raises:
        GearbxError: thresholds out of order or not finite, a negative hysteresis, a duration below 1.
    """

    def __init__(
        self,
        thresholds: Sequence[float],
        hysteresis: float = DEFAULT_HYSTERESIS,
        min_gear_duration: int = DEFAULT_MIN_GEAR_DURATION,
        initial_gear: int = 0,
    ):
        check_thresholds(thresholds, len(thresholds) + 1)
        if not hysteresis >= 0:
            raise GearbxError(f"hysteresis is {hysteresis}; give bits, 0 or more")
        if min_gear_duration < 1:
            raise GearbxError(f"minimum gear duration is {min_gear_duration}; give tokens, 1 or more")
        last = len(thresholds) - 1
        # A step up over the last threshold of a longer ladder enters the top gear: GEARBX puts no margin there.
        self.up = [t + (hysteresis if i < last or i == 0 else 0.0) for i, t in enumerate(thresholds)]
        self.down = [t - (hysteresis if i == last else 0.0) for i, t in enumerate(thresholds)]
        self.thresholds = tuple(thresholds)
        self.top = len(thresholds)
        self.min_gear_duration = min_gear_duration
        self.reset(initial_gear)

    def reset(self, gear: int) -> None:
        self.gear = gear
        self.duration = 0

    def peek(self, level: float) -> int:
        gear = self.gear
        while gear < self.top and self._rises_above(gear, level):
            gear += 1
        while gear > 0 and gear <= self.gear and self._falls_below(gear, level):
            gear -= 1
        return gear

    def update(self, reading: Reading) -> int:
        self.duration += 1
        target = self.top if reading.catastrophe else self.peek(reading.mean)
        free = self.duration >= self.min_gear_duration or (reading.catastrophe and self.gear < self.top)
        if target != self.gear and free:
            self.reset(target)
        return self.gear

    def _rises_above(self, gear: int, level: float) -> bool:
        # GEARBX 3.3: low up to and including its threshold, high from its own on.
        reaches_top = gear == self.top - 1 and gear > 0
        return level >= self.up[gear] if reaches_top else level > self.up[gear]

    def _falls_below(self, gear: int, level: float) -> bool:
        leaves_top = gear == self.top and gear > 1
        return level < self.down[gear - 1] if leaves_top else level <= self.down[gear - 1]


class OneGear:
    """A gate that stays in one gear, of mode static and as a control."""

    def __init__(self, gear: int = 0):
        self.gear = gear

    def reset(self, gear: int) -> None:
        self.gear = gear

    def peek(self, level: float) -> int:
        return self.gear

    def update(self, reading: Reading) -> int:
        return self.gear


def replay(entropies: Iterable[float], monitor: Monitor, gate: Gate) -> list[int]:
    """Routing without a model: the gear that the gate chooses after each recorded entropy (bits)."""
    return [gate.update(monitor.update(value)) for value in entropies]
