"""Whether the next tokens are written in rounds of proposals, or by the top gear alone, as mlx-lm would write them.

A round has to know its token before it can propose what follows, so that mlx-lm cannot run ahead; and no model of costs
is exact. So both ways are timed on the clock, over stretches of some tokens, and the faster one writes. The other one
gets a short stretch in between, ever more rarely while it loses.

Whoever reads the tokens may pause between them, and the clock runs on. So what took far longer than the median token of
its stretches counts as the median. Not every token does: rounds differ, and their mean decides.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TRIAL = {True: 24, False: 8}  # tokens of a stretch that tries a way: rounds differ more than tokens of the top gear
FIRST, LONGEST = 96, 384  # tokens of the faster way between two trials: at first, and where trials were in vain
REMEMBERED = 4  # stretches of each way that count
PAUSE = 4  # times the median, and somebody paused: a verification of 16 tokens takes less (docs/performance.md)


@dataclass
class Times:
    """Seconds of tokens that are complete: of those that began a round, and of those that a round had already made."""

    begun: list[float] = field(default_factory=list)
    made: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.begun) + len(self.made)

    def __add__(self, other: "Times") -> "Times":
        return Times(self.begun + other.begun, self.made + other.made)

    def per_token(self) -> float:
        """The mean without pauses."""
        longest = PAUSE * statistics.median_low(self.begun or self.made)
        return (without_pauses(self.begun, longest) + without_pauses(self.made, longest)) / len(self)


def without_pauses(seconds: Sequence[float], longest: float) -> float:
    """The sum, where the median stands for what took longer than `longest`."""
    usual = statistics.median_low(seconds) if seconds else 0.0
    return sum(value if value <= longest else usual for value in seconds)


class Stretches:
    """Divides a text into stretches in rounds and stretches of the top gear alone.

    Several texts that share their passes begin with the top gear alone: rounds are less likely to pay for them, and
    each of their rounds shows more of them, so that trials may be shorter.

    Args:
        clock: seconds.
        texts: that share their passes. A token means one of each.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, texts: int = 1):
        self._clock = clock
        self._trials = {way: max(TRIAL[False], length // texts) for way, length in TRIAL.items()}
        self._timed: dict[bool, deque[Times]] = {way: deque(maxlen=REMEMBERED) for way in (True, False)}
        self._pause = FIRST
        self._trial = True
        self._latest: float | None = None  # when the token that is not complete yet began
        self._begins_round = True
        first = texts == 1
        self._start(first, self._trials[first])

    def begin(self) -> None:
        """A text begins: the time since the one before does not count."""
        self._latest = None

    def token(self, begins_round: bool = True) -> None:
        """A token begins in the present stretch.

        Args:
            begins_round: whether it has to be computed. In a round of several tokens, the others are there already.
        """
        now = self._clock()
        if self._latest is not None:
            times = self._times.begun if self._begins_round else self._times.made
            times.append(now - self._latest)
        self._latest, self._begins_round = now, begins_round

    @property
    def over(self) -> bool:
        """Whether the next token may begin another stretch."""
        return len(self._times) >= self._length

    def turn(self) -> None:
        """End the stretch, and choose the way of the next one."""
        self._timed[self.in_rounds].append(self._times)
        other = not self.in_rounds
        if not self._timed[other]:
            self._start(other, self._trials[other])
            return
        rounds_win = self._seconds(True) <= self._seconds(False)
        if self._trial:  # it was compared just now
            vain = rounds_win != self.in_rounds
            self._pause = min(2 * self._pause, LONGEST) if vain else FIRST
            self._trial = False
            self._start(rounds_win, self._pause)
        else:
            self._trial = True
            self._start(other, self._trials[other])

    def _seconds(self, way: bool) -> float:
        """What a token took, over the latest stretches."""
        return sum(self._timed[way], Times()).per_token()

    def _start(self, in_rounds: bool, length: int) -> None:
        self.in_rounds, self._length = in_rounds, length
        self._times = Times()
