"""Controller of the speed in tokens per second, by caps on the bits of layers (Manifest document, "Runtime Policy").

The document raises precision when generation is too slow. This is unstable, since fewer bytes are faster, so here it
lowers precision. Time is nearly proportional to bytes, so all values are logarithms: an error of ln(speed / target) is
corrected by an equal change of ln(bytes).

The state of the machine limits the bytes (same document, "Architecture"): "If thermal state is nominal and battery
exceeds 50%, allow all layers to use max_precision. Under throttling or low battery, shift layers toward min_precision
starting with the least sensitive." The document does not define how far. Here it is a share of the range from the
fewest bytes to the most: 1 is every layer at its most bits, 0 at its fewest.

The cap schedule has all caps that a controller can choose from, one layer and one width per step.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import GearbxError
from .sensors import THERMAL, MachineState

Sensitivity = Callable[[str, int], float]
"""(path, bits) -> cost of this layer at these bits, such as its KL. Only the order matters."""


@dataclass(frozen=True)
class Range:
    """A layer that can be capped.

    widths: its possible caps in bits, ascending. gears: its bits in each gear of the ladder, without a cap. read: bits
    to the bytes that a token reads. weights: number of its weights.
    """

    path: str
    widths: tuple[int, ...]
    gears: tuple[int, ...]
    read: Mapping[int, int]
    weights: int = 0

    def bytes_in(self, gear: int, cap: int) -> int:
        """Return the bytes that a token reads in a gear, under a cap."""
        return self.read[min(self.gears[gear], cap)]


@dataclass(frozen=True)
class CapStep:
    """Change of a layer's cap, in bits."""

    path: str
    before: int
    after: int


class CapSchedule:
    """Caps by position, from 0 (every layer at its most bits) to the last one (every layer at its fewest).

    Steps are sorted by cost, the cheapest first. The way down starts with the least sensitive layers, and the way up
    with the most sensitive ones.

    Args:
        layers: that can be capped.
        sensitivity: the cost of a layer at some bits.
        fixed: bytes that a token reads from the rest of the model.
    """

    def __init__(self, layers: Sequence[Range], sensitivity: Sensitivity, fixed: float = 0):
        self.layers = {layer.path: layer for layer in layers}
        self.fixed = fixed
        self.weights = sum(layer.weights for layer in layers)
        self.gears = len(layers[0].gears) if layers else 1
        costed = []
        for place, layer in enumerate(layers):
            cost = -math.inf
            for before, after in itertools.pairwise(reversed(layer.widths)):
                # A layer's bits descend in order, even if the measured costs do not rise.
                cost = max(cost, sensitivity(layer.path, after))
                costed.append((cost, -after, place, CapStep(layer.path, before, after)))
        self.steps = tuple(step for *_, step in sorted(costed, key=lambda item: item[:3]))
        self._bytes = np.array([self._in_gear(gear) for gear in range(self.gears)], dtype=float)

    @property
    def last(self) -> int:
        return len(self.steps)

    def read(self, passes: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the bytes that these passes in each gear read, at every position."""
        return np.asarray(passes, dtype=float) @ self._bytes

    def bits(self, read: float, passes: float) -> float:
        """Return bits per weight of the layers that can be capped, from the bytes that these passes read."""
        return 8 * (float(read) - passes * self.fixed) / self.weights if self.weights else 0.0

    def within(self, share: float) -> int:
        """Return the first position within a budget, a share of the range from the top gear's fewest bytes to its
        most."""
        read = self._bytes[-1]
        most = read[-1] + share * (read[0] - read[-1])
        return int(np.argmax(read <= most + 1e-9 * read[0]))

    def caps(self, position: int) -> dict[str, int]:
        """Return the most bits of every layer at a position, by path."""
        most = {path: layer.widths[-1] for path, layer in self.layers.items()}
        return most | {step.path: step.after for step in self.steps[:position]}

    def _in_gear(self, gear: int) -> list[float]:
        """Return the bytes of a pass in a gear, at every position."""
        most = self.fixed + sum(layer.bytes_in(gear, layer.widths[-1]) for layer in self.layers.values())
        each = ((self.layers[step.path], step) for step in self.steps)
        change = (layer.bytes_in(gear, step.after) - layer.bytes_in(gear, step.before) for layer, step in each)
        return [*itertools.accumulate(change, initial=most)]


PROPORTIONAL, INTEGRAL, DERIVATIVE = 0.1, 0.85, 0.05  # factors of the error, of its sum and of its change


class PID:
    """PID controller: u = Kp e + I + Kd (e - e'), where I is the sum of Ki e.

    **Anti-windup** by back-calculation: `track` takes the actuator's real position. If the actuator cannot follow u (at
    its limit, or because it moves in steps), the integral is set to match that position. It therefore never
    accumulates an unreachable error. (Astrom and Hagglund, PID Controllers, 1995, section 3.5, with a tracking time of
    one sample.)
    """

    def __init__(self) -> None:
        self.integral = 0.0
        self._error = self._slope = 0.0

    def update(self, error: float) -> float:
        """Return the requested position of the actuator."""
        self._slope, self._error = error - self._error, error
        self.integral += INTEGRAL * error
        return self.integral + self._immediate()

    def track(self, actual: float) -> None:
        """Take the real position of the actuator."""
        self.integral = actual - self._immediate()

    def rest(self, actual: float) -> None:
        """Take an error of 0 (within the dead band), and the actuator's unchanged position."""
        self._error = self._slope = 0.0
        self.integral = actual

    def _immediate(self) -> float:
        return PROPORTIONAL * self._error + DERIVATIVE * self._slope


THERMAL_SHARES = dict(zip(THERMAL, (1.0, 2 / 3, 1 / 3, 0.0)))
MEMORY_FULL = 0.95
MIN_CHANGE = 0.02  # change of the budget, except to 0 and to 1
PATIENCE = 5  # higher readings in a row; their lowest is then the budget


def budget(state: MachineState) -> float:
    """Return the smallest share that a known part of the state allows; 1 if all are unknown.

    The charge counts unless the machine is on a charger. Memory counts because weights that are not read may be paged
    out: fewer planes are a smaller working set.
    """
    shares = [1.0]
    if state.thermal is not None:
        shares.append(THERMAL_SHARES[state.thermal])
    if state.battery is not None and not state.charging:
        shares.append(float(np.interp(state.battery, (0.1, 0.5), (0.0, 1.0))))
    if state.memory is not None:
        shares.append(float(np.interp(state.memory, (0.85, MEMORY_FULL), (1.0, 0.0))))
    return min(shares)


class SteadyBudget:
    """A budget that falls at once and rises with a delay, so that caps do not follow noisy readings."""

    def __init__(self) -> None:
        self.share = 1.0
        self._higher: list[float] = []

    def update(self, state: MachineState) -> float:
        share = budget(state)
        if share <= self.share:
            self._higher.clear()
            if share <= self.share - MIN_CHANGE or share == 0.0:
                self.share = share
            return self.share
        self._higher.append(share)
        if len(self._higher) >= PATIENCE:
            lowest = min(self._higher)
            if lowest >= self.share + MIN_CHANGE or lowest == 1.0:
                self.share = lowest
            self._higher.clear()
        return self.share


DECIDE_EVERY = 10  # tokens between decisions
DEAD_BAND = 0.05  # an error up to this share of the target is ignored
LAG = 2  # tokens that mlx-lm has already computed with the old caps when caps change
REMEMBERED = 60  # most tokens under the same caps in the mean


@dataclass(frozen=True)
class CapDecision:
    """Decision after a token, with its reason.

    token: number of tokens so far. position: on the cap schedule, in steps down from no cap. tokens_per_second: over
    the latest tokens under the same caps; None without any. share: the machine's budget. machine: the known part of its
    state. bits_per_weight: of the top gear now. moved: layers, with their caps before and after.
    """

    token: int
    reason: str
    position: int
    tokens_per_second: float | None
    target: float | None
    share: float
    machine: Mapping[str, Any]
    bits_per_weight: float
    moved: tuple[CapStep, ...]


@dataclass(frozen=True)
class Measured:
    """Speed of some tokens. error: ln(speed / target). chance: the part of it that may be noise."""

    tokens_per_second: float
    error: float
    chance: float


class Controller:
    """Regulator that takes the time of every token, and every few tokens chooses a position on the cap schedule.

    It knows numbers only: its owner applies `caps` to the model after a decision that moved layers.

    Args:
        schedule: the possible positions.
        target: tokens per second; None: only the machine's budget caps.

    Raises:
        GearbxError: a target that is not positive, or no layer that can be capped.
    """

    def __init__(self, schedule: CapSchedule, target: float | None = None):
        if target is not None and not 0 < target < math.inf:
            raise GearbxError(f"target: must be more than 0 tokens per second, got {target}; set a larger number")
        if not schedule.last:
            raise GearbxError(
                "target: needs layers with several widths, got nothing to cap; use a ladder of more gears"
            )
        self.schedule = schedule
        self.target = target
        self.pid = PID()
        self.position = 0
        self.tokens = 0
        self.top = np.eye(schedule.gears)[-1]  # one pass in the top gear
        self.out_of_reach: str | None = None
        """Reason why the target cannot be met; None while it may be."""
        self._is_steady = False
        self._skip = 0
        self._seen: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=REMEMBERED)
        self._new = 0  # number of these since the last decision
        self._spreads: deque[float] = deque(maxlen=9)  # relative deviation of token times between decisions

    @property
    def caps(self) -> dict[str, int]:
        """Most bits of each layer, by path."""
        return self.schedule.caps(self.position)

    @property
    def due(self) -> bool:
        """Need of a decision after the next token."""
        return (self.tokens + 1) % DECIDE_EVERY == 0

    def token(self, seconds: float | None, passes: Sequence[float], share: float = 1.0) -> CapDecision | None:
        """Take one token, and return a decision every few tokens, else None.

        Args:
            seconds: its time; None if it does not count, as for the first token with prefill.
            passes: over the weights, in each gear.
            share: the machine's budget, 0 to 1; used if a decision is `due`.
        """
        self.tokens += 1
        if self._skip:
            self._skip -= 1
        elif seconds is not None and seconds > 0:
            self._seen.append((seconds, tuple(passes)))
            self._new = min(self._new + 1, REMEMBERED)
        return None if self.tokens % DECIDE_EVERY else self._decide(share)

    def _decide(self, share: float) -> CapDecision:
        before, limit = self.caps, self.schedule.within(share)
        self._notice_spread()
        measured, recent = self._measured(REMEMBERED), self._measured(self._new)
        if recent is not None and abs(recent.error) > self._tolerated(recent):
            measured = recent
        self._new = 0
        if self.position < limit:
            goal, reason = limit, f"the machine allows {share:.0%}"
            self._rest()
        elif self.target is None:
            goal = limit
            reason = f"the machine allows {share:.0%}" if goal != self.position else "nothing has changed"
        elif measured is None:
            goal, reason = self.position, "no token has been timed yet under these caps"
        else:
            goal, reason = self._regulate(measured, limit)
        self.position = goal
        after = self.caps
        moved = tuple(CapStep(path, before[path], after[path]) for path in after if before[path] != after[path])
        if moved:
            self._skip = LAG
            self._seen.clear()
        speed = None if measured is None else measured.tokens_per_second
        bits = self.schedule.bits(self.schedule.read(self.top)[goal], 1)
        return CapDecision(self.tokens, reason, goal, speed, self.target, share, {}, bits, moved)

    def _regulate(self, measured: Measured, limit: int) -> tuple[int, str]:
        """Return the position nearest to the PID's output within the schedule and the budget, and the reason."""
        assert self.target is not None
        error = measured.error
        speed = f"{measured.tokens_per_second:.3g} tokens/s for a target of {self.target:.3g}"
        if abs(error) <= self._tolerated(measured):
            self._rest()
            near = abs(error) <= DEAD_BAND
            self._is_steady |= near and measured.chance <= DEAD_BAND
            return self.position, f"{speed}: near enough" if near else f"{speed}: may be chance"
        self._is_steady = False
        read = np.log(self.schedule.read(self._passes()))
        self.pid.track(read[self.position])  # since the gate may have shifted
        bytes_asked = self.pid.update(error)  # logarithm
        most = len(self.schedule.layers)  # steps per decision: one per layer
        up, down = max(limit, self.position - most), self.position + most
        goal = up + int(np.argmin(np.abs(read[up : down + 1] - bytes_asked)))
        self.pid.track(read[goal])
        if read[goal] == read[self.position]:  # the steps have no effect in these gears
            goal = self.position
        if goal != self.position:
            return goal, speed
        if error < 0 and read[self.position] == read[self.schedule.last]:
            self.out_of_reach = f"no table meets {self.target:.3g} tokens/s: every layer is at its fewest bits"
            return goal, f"{speed}: every layer is at its fewest bits"
        if error > 0 and self.position == limit:
            return goal, f"{speed}: " + (
                "every layer is at its most bits" if not limit else "the machine allows no more"
            )
        return goal, f"{speed}: no step brings it nearer"

    def _tolerated(self, measured: Measured) -> float:
        """Return the error to ignore: the larger of dead band and chance, or their sum while the target is met.

        Near the target, the speed thus has to change more before caps move, and caps do not follow noise.
        """
        if self._is_steady:
            return DEAD_BAND + measured.chance
        return max(DEAD_BAND, measured.chance)

    def _rest(self) -> None:
        self.pid.rest(float(np.log(self.schedule.read(self._passes())[self.position])))

    def _passes(self) -> np.ndarray:
        """Return the mean passes per token in each gear, under these caps."""
        if not self._seen:
            return self.top
        return np.mean([passes for _, passes in self._seen], axis=0)

    def _latest(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds, and seconds per byte, of the latest tokens under the same caps.

        Tokens that took three times the median for their bytes are omitted, since they waited for other programs.
        """
        tokens = list(self._seen)[-count:] if count else []
        seconds = np.array([taken for taken, _ in tokens])
        read = np.array([self.schedule.read(passes)[self.position] for _, passes in tokens])
        pace = seconds / read
        usual = pace <= 3.0 * np.median(pace) if tokens else []
        return seconds[usual], pace[usual]

    def _notice_spread(self) -> None:
        """Record the deviation of token times that their gears do not explain."""
        _, pace = self._latest(self._new)
        if len(pace) >= 5:  # fewer tokens have no meaningful deviation
            self._spreads.append(float(np.std(pace, ddof=1) / np.mean(pace)))

    def _measured(self, count: int) -> Measured | None:
        """Return the speed over the latest `count` tokens at most; None without tokens."""
        seconds, _ = self._latest(count)
        if not len(seconds):
            return None
        mean = float(np.mean(seconds))
        error = -math.log(mean * self.target) if self.target else 0.0
        # A jump affects only one or two of them.
        spread = float(np.median(self._spreads)) if self._spreads else math.inf
        return Measured(1 / mean, error, 3.0 * spread / math.sqrt(len(seconds)))  # three standard errors may be noise
