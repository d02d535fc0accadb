"""Tokens per second held at a target by capping the bits of layers (Manifest document, "Runtime Policy").

That text raises precision when too slow and lowers it when too fast, which runs away: fewer bytes are faster. Here
it is the other way round. Everything is in logarithms, where time is proportional to bytes: an error of
ln(speed / target) is made good by as much more ln(bytes).
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..errors import GearbxError
from .cap_schedule import CapSchedule, Step
from .pid import GAINS, PID, Gains

EVERY = 10  # tokens between decisions
DEAD_BAND = 0.05  # of the target
LAG = 2  # tokens that are still computed with the caps from before: mlx-lm runs ahead
MEMORY = 60  # tokens under the same caps that are averaged at most
ENOUGH = 5  # tokens whose spread says something
SURE = 3.0  # standard errors that are put down to chance
PAUSE = 3.0  # times the median for its bytes: a token that took longer is left out


@dataclass(frozen=True)
class Decision:
    """What was decided after a token, and why.

    token: how many there were. tokens_per_second: over the latest tokens that are under the same caps; None where there
    are none. share: of the way from the fewest bytes to the most that the machine allows. machine: its state, where
    something is known of it. position: on the stairs, steps down from no cap. moved: layers, with their caps before
    and after. bits_per_weight: that the top gear has now.
    """

    token: int
    reason: str
    position: int
    tokens_per_second: float | None = None
    target: float | None = None
    share: float = 1.0
    machine: Mapping[str, Any] = field(default_factory=dict)
    bits_per_weight: float = 0.0
    moved: tuple[Step, ...] = ()

    def record(self) -> dict[str, Any]:
        """For a trace."""
        return {**asdict(self), "moved": [asdict(step) for step in self.moved]}


@dataclass(frozen=True)
class Measured:
    """Of some tokens: how much faster than the target (logarithm), and how much of that may be chance."""

    tokens_per_second: float
    error: float
    chance: float


class Controller:
    """Is given the time of every token, and every so many tokens decides how far down the stairs the caps are.

    Numbers only: whoever owns it puts `caps` into the model when a decision has moved something.

    Args:
        stairs: what there is to choose from.
        target: tokens per second; None: the machine's budget alone caps.
        every: tokens between decisions.
        dead_band: relative to the target: as near as this is right.
        gains: of the PID.

    Raises:
        GearbxError: a target that is not positive, nothing to cap.
    """

    def __init__(
        self,
        stairs: CapSchedule,
        target: float | None = None,
        *,
        every: int = EVERY,
        dead_band: float = DEAD_BAND,
        gains: Gains = GAINS,
        lag: int = LAG,
    ):
        if target is not None and not 0 < target < math.inf:
            raise GearbxError(f"the target is {target} tokens per second; give more than 0")
        if not stairs.last:
            raise GearbxError(
                "no layer has more than one width, so there is nothing to cap; give a ladder of more gears"
            )
        self.stairs = stairs
        self.target = target
        self.every = every
        self.dead_band = dead_band
        self.lag = lag
        self.pid = PID(gains)
        self.position = 0
        self.tokens = 0
        self.top = np.eye(stairs.gears)[-1]  # one pass in the top gear
        self.out_of_reach: str | None = None
        """That the target cannot be met, once it was found so."""
        self._share = 1.0
        self._settled = False
        self._skip = 0
        self._seen: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=MEMORY)
        self._new = 0  # how many of them came since the decision before
        self._spreads: deque[float] = deque(maxlen=9)  # relative deviation of token times between decisions

    @property
    def caps(self) -> dict[str, int]:
        """Path to the most bits that a layer may have."""
        return self.stairs.caps(self.position)

    @property
    def due(self) -> bool:
        """Whether the next token is one after which to decide."""
        return (self.tokens + 1) % self.every == 0

    def token(self, seconds: float | None, passes: Sequence[float], share: float = 1.0) -> Decision | None:
        """Take one token; every so many, decide.

        Args:
            seconds: that it took; None for one that says nothing, such as the first, which has the prompt in it.
            passes: over the weights, in each gear.
            share: that the machine's budget allows, 0 to 1; looked at where a decision is `due`.
        """
        self.tokens += 1
        if self._skip:
            self._skip -= 1
        elif seconds is not None and seconds > 0:
            self._seen.append((seconds, tuple(passes)))
            self._new = min(self._new + 1, MEMORY)
        return None if self.tokens % self.every else self._decide(share)

    def lower(self, paths: Set[str], reason: str) -> Decision:
        """Have these layers at their fewest bits from now on, wherever the others are; of none: free them all."""
        before = self.caps
        self.stairs.hold(paths)
        return self._decided(before, self.position, reason, None)

    def _decide(self, share: float) -> Decision:
        before, limit = self.caps, self.stairs.within(share)
        self._share = share
        self._notice_spread()
        measured, recent = self._measured(MEMORY), self._measured(self._new)
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
        return self._decided(before, goal, reason, measured)

    def _regulate(self, measured: Measured, limit: int) -> tuple[int, str]:
        """The position that the PID asks for, as near as the stairs and the budget let it."""
        assert self.target is not None
        error = measured.error
        told = f"{measured.tokens_per_second:.3g} tokens/s for a target of {self.target:.3g}"
        if abs(error) <= self._tolerated(measured):
            self._rest()
            near = abs(error) <= self.dead_band
            self._settled |= near and measured.chance <= self.dead_band
            return self.position, f"{told}: near enough" if near else f"{told}: may be chance"
        self._settled = False
        read = np.log(self.stairs.read(self._passes()))
        self.pid.track(read[self.position])  # where the caps are: the gears that tokens take may have changed
        wanted = self.pid.update(error)
        most = len(self.stairs.layers)  # steps at a time: as many as if each layer took one
        up, down = max(limit, self.position - most), self.position + most
        goal = up + int(np.argmin(np.abs(read[up : down + 1] - wanted)))
        self.pid.track(read[goal])
        if read[goal] == read[self.position]:  # steps that these gears do not feel
            goal = self.position
        if goal != self.position:
            return goal, told
        if error < 0 and read[self.position] == read[self.stairs.last]:
            self.out_of_reach = f"no table meets {self.target:.3g} tokens/s: every layer is at its fewest bits"
            return goal, f"{told}: every layer is at its fewest bits"
        if error > 0 and self.position == limit:
            return goal, f"{told}: " + (
                "every layer is at its most bits" if not limit else "the machine allows no more"
            )
        return goal, f"{told}: no step brings it nearer"

    def _tolerated(self, measured: Measured) -> float:
        """The error that is let be: the dead band, or what may be chance; both, once the target was surely met.

        So it takes more to leave the target than to stay away from it, and caps do not follow noise up and down.
        """
        if self._settled:
            return self.dead_band + measured.chance
        return max(self.dead_band, measured.chance)

    def _rest(self) -> None:
        self.pid.rest(float(np.log(self.stairs.read(self._passes())[self.position])))

    def _passes(self) -> np.ndarray:
        """Passes per token in each gear, of the tokens under these caps."""
        if not self._seen:
            return self.top
        return np.mean([passes for _, passes in self._seen], axis=0)

    def _latest(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and seconds for a byte, of the latest tokens, as far as they are under the same caps.

        Without those that took several times as long as their bytes explain: something else had the machine.
        """
        tokens = list(self._seen)[-count:] if count else []
        seconds = np.array([taken for taken, _ in tokens])
        read = np.array([self.stairs.read(passes)[self.position] for _, passes in tokens])
        pace = seconds / read
        usual = pace <= PAUSE * np.median(pace) if tokens else []
        return seconds[usual], pace[usual]

    def _notice_spread(self) -> None:
        """How much tokens differ, beyond what their gears explain."""
        _, pace = self._latest(self._new)
        if len(pace) >= ENOUGH:
            self._spreads.append(float(np.std(pace, ddof=1) / np.mean(pace)))

    def _measured(self, count: int) -> Measured | None:
        """Speed over the latest tokens, at most so many."""
        seconds, _ = self._latest(count)
        if not len(seconds):
            return None
        mean = float(np.mean(seconds))
        error = -math.log(mean * self.target) if self.target else 0.0
        spread = float(np.median(self._spreads)) if self._spreads else math.inf  # a jump is in one or two of them
        return Measured(1 / mean, error, SURE * spread / math.sqrt(len(seconds)))

    def _decided(self, before: dict[str, int], position: int, reason: str, measured: Measured | None) -> Decision:
        self.position = position
        after = self.caps
        moved = tuple(Step(path, before[path], after[path]) for path in after if before[path] != after[path])
        if moved:
            self._skip, self._new = self.lag, 0
            self._seen.clear()
        speed = None if measured is None else measured.tokens_per_second
        bits = self.stairs.bits(self.stairs.read(self.top)[position], 1)
        return Decision(self.tokens, reason, position, speed, self.target, self._share, {}, bits, moved)
