"""Keep a target in tokens per second by capping the bits of layers (Manifest document, "Runtime Policy").

The document raises precision when generation is too slow, which runs away: fewer bytes are faster. Here it is the other
way round. Time is nearly proportional to bytes, so everything is in logarithms: an error of ln(speed / target) is
corrected by an equal change of ln(bytes).

The state of the machine sets the most that it may read (same document, "Architecture"): "If thermal state is nominal
and battery exceeds 50%, allow all layers to use max_precision. Under throttling or low battery, shift layers toward
min_precision starting with the least sensitive." The document does not say how far. Here it is a share of the way from
the fewest bytes to the most: 1 is every layer at its most bits, 0 at its fewest.

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
"""(path, bits) -> the cost of this layer at these bits, such as its KL. Only the order matters."""


@dataclass(frozen=True)
class Range:
    """A layer that can be capped.

    widths: the bits that it may be capped to, ascending. gears: its bits in each gear of the ladder, without a cap.
    read: bits to the bytes that a token reads at them. weights: their number.
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
    """A layer's cap, before and after."""

    path: str
    before: int
    after: int


class CapSchedule:
    """Positions from 0, every layer at its most bits, to the last one, every layer at its fewest.

    Steps are in the order of their cost, the cheapest first. So the way down begins with the least sensitive layers.
    The way up takes back the latest step first, so it begins with the most sensitive ones.

    Args:
        layers: those that can be capped.
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
                # A layer goes down in order, even if the measured costs do not rise.
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
        """Bits per weight of the layers that can be capped, from the bytes that these passes read."""
        return 8 * (float(read) - passes * self.fixed) / self.weights if self.weights else 0.0

    def within(self, share: float) -> int:
        """Return the first position within a budget: a share of the way from the top gear's fewest bytes to
        its most."""
        read = self._bytes[-1]
        most = read[-1] + share * (read[0] - read[-1])
        return int(np.argmax(read <= most + 1e-9 * read[0]))

    def caps(self, position: int) -> dict[str, int]:
        """Path to the most bits of every layer, at a position."""
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
    """u = Kp e + I + Kd (e - e'), with I the sum of Ki e.

    **Anti-windup** by back-calculation: `track` takes the actuator's real position. Where the actuator could not follow
    u (it is at its end, or it moves in steps), the integral becomes what explains that position. So it never
    accumulates what the actuator cannot do. (Astrom and Hagglund, PID Controllers, 1995, section 3.5, with a tracking
    time of one sample.)
    """

    def __init__(self) -> None:
        self.integral = 0.0
        self._error = self._slope = 0.0

    def update(self, error: float) -> float:
        """Return the position that the actuator should take."""
        self._slope, self._error = error - self._error, error
        self.integral += INTEGRAL * error
        return self.integral + self._immediate()

    def track(self, actual: float) -> None:
        """Take the position that the actuator has."""
        self.integral = actual - self._immediate()

    def rest(self, actual: float) -> None:
        """There is no error (it is within the dead band), and the actuator stays at its position."""
        self._error = self._slope = 0.0
        self.integral = actual

    def _immediate(self) -> float:
        return PROPORTIONAL * self._error + DERIVATIVE * self._slope


THERMAL_SHARES = dict(zip(THERMAL, (1.0, 2 / 3, 1 / 3, 0.0)))
MEMORY_FULL = 0.95
MIN_CHANGE = 0.02  # change of the budget, except to 0 and to 1
PATIENCE = 5  # readings in a row that have to be higher; their lowest is then the budget


def budget(state: MachineState) -> float:
    """Return the smallest share that a known part of the state allows; 1 where nothing is known.

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
    """A budget that falls at once, and rises only after a while: caps must not follow a reading up and down."""

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
LAG = 2  # tokens that mlx-lm has computed ahead when caps change, with the caps from before
REMEMBERED = 60  # the most tokens under the same caps that are averaged


@dataclass(frozen=True)
class CapDecision:
    """What was decided after a token, and why.

    token: their number so far. position: on the cap schedule, in steps down from no cap. tokens_per_second: over the
    latest tokens under the same caps; None where there are none. share: the machine's budget. machine: what is known of
    its state. bits_per_weight: of the top gear now. moved: layers, with their caps before and after.
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
    """The speed of some tokens. error: ln(speed / target). chance: the part of it that may be chance."""

    tokens_per_second: float
    error: float
    chance: float


class Controller:
    """Takes the time of every token and, every few tokens, chooses a position on the cap schedule.

    It knows numbers only: its owner puts `caps` into the model when a decision has moved something.

    Args:
        schedule: the positions to choose from.
        target: tokens per second; None: the machine's budget alone caps.

    Raises:
        GearbxError: a target that is not positive, nothing to cap.
    """

    def __init__(self, schedule: CapSchedule, target: float | None = None):
        if target is not None and not 0 < target < math.inf:
            raise GearbxError(f"the target is {target} tokens per second; give more than 0")
        if not schedule.last:
            raise GearbxError(
                "no layer has more than one width, so there is nothing to cap; give a ladder of more gears"
            )
        self.schedule = schedule
        self.target = target
        self.pid = PID()
        self.position = 0
        self.tokens = 0
        self.top = np.eye(schedule.gears)[-1]  # one pass in the top gear
        self.out_of_reach: str | None = None
        """Why the target cannot be met, once this is known."""
        self._settled = False
        self._skip = 0
        self._seen: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=REMEMBERED)
        self._new = 0  # the number of these that came since the last decision
        self._spreads: deque[float] = deque(maxlen=9)  # relative deviation of token times between decisions

    @property
    def caps(self) -> dict[str, int]:
        """Path to the most bits that each layer may have."""
        return self.schedule.caps(self.position)

    @property
    def due(self) -> bool:
        """True if a decision follows the next token."""
        return (self.tokens + 1) % DECIDE_EVERY == 0

    def token(self, seconds: float | None, passes: Sequence[float], share: float = 1.0) -> CapDecision | None:
        """Take one token. Returns a decision every few tokens.

        Args:
            seconds: its time; None where it does not count, as for the first token, which includes the prompt.
            passes: over the weights, in each gear.
            share: the machine's budget, 0 to 1; used where a decision is `due`.
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
        """Return the position nearest to what the PID asks for that the schedule and the budget allow, and the
        reason."""
        assert self.target is not None
        error = measured.error
        speed = f"{measured.tokens_per_second:.3g} tokens/s for a target of {self.target:.3g}"
        if abs(error) <= self._tolerated(measured):
            self._rest()
            near = abs(error) <= DEAD_BAND
            self._settled |= near and measured.chance <= DEAD_BAND
            return self.position, f"{speed}: near enough" if near else f"{speed}: may be chance"
        self._settled = False
        read = np.log(self.schedule.read(self._passes()))
        self.pid.track(read[self.position])  # the router may have changed gear since
        bytes_asked = self.pid.update(error)  # logarithm
        most = len(self.schedule.layers)  # steps at a time: one for each layer
        up, down = max(limit, self.position - most), self.position + most
        goal = up + int(np.argmin(np.abs(read[up : down + 1] - bytes_asked)))
        self.pid.track(read[goal])
        if read[goal] == read[self.position]:  # the steps change nothing in these gears
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
        """Return the error to ignore: the larger of dead band and chance, or their sum once the target was surely met.

        So a speed near the target has to change more before caps move, and caps do not follow noise up and down.
        """
        if self._settled:
            return DEAD_BAND + measured.chance
        return max(DEAD_BAND, measured.chance)

    def _rest(self) -> None:
        self.pid.rest(float(np.log(self.schedule.read(self._passes())[self.position])))

    def _passes(self) -> np.ndarray:
        """Mean passes per token in each gear, under these caps."""
        if not self._seen:
            return self.top
        return np.mean([passes for _, passes in self._seen], axis=0)

    def _latest(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds, and seconds per byte, of the latest tokens under the same caps.

        It leaves out tokens that took several times as long as their bytes explain: another program had the machine.
        """
        tokens = list(self._seen)[-count:] if count else []
        seconds = np.array([taken for taken, _ in tokens])
        read = np.array([self.schedule.read(passes)[self.position] for _, passes in tokens])
        pace = seconds / read
        # A token that took three times the median for its bytes is left out.
        usual = pace <= 3.0 * np.median(pace) if tokens else []
        return seconds[usual], pace[usual]

    def _notice_spread(self) -> None:
        """Note how much tokens differ beyond what their gears explain."""
        _, pace = self._latest(self._new)
        if len(pace) >= 5:  # the fewest tokens whose spread means something
            self._spreads.append(float(np.std(pace, ddof=1) / np.mean(pace)))

    def _measured(self, count: int) -> Measured | None:
        """Return the speed over the latest `count` tokens at most; None without tokens."""
        seconds, _ = self._latest(count)
        if not len(seconds):
            return None
        mean = float(np.mean(seconds))
        error = -math.log(mean * self.target) if self.target else 0.0
        # A jump shows in one or two of them only.
        spread = float(np.median(self._spreads)) if self._spreads else math.inf
        return Measured(1 / mean, error, 3.0 * spread / math.sqrt(len(seconds)))  # three errors may be chance
