"""Whether the next tokens are written in rounds of proposals, or by the top gear alone, as mlx-lm would write them.

A round has to know its token before it can propose what follows, so that mlx-lm cannot run ahead; and no model of costs
is exact. So both ways are timed on the clock, over stretches of some tokens, and the faster one writes. The other one
gets a short stretch in between, ever more rarely while it loses.
"""

import time
from collections import deque
from collections.abc import Callable

TRIAL = {True: 24, False: 8}  # tokens of a stretch that tries a way: rounds differ more than tokens of the top gear
FIRST, LONGEST = 96, 384  # tokens of the faster way between two trials: at first, and where trials were in vain
REMEMBERED = 4  # stretches of each way that count


class Stretches:
    """Divides a text into stretches in rounds and stretches of the top gear alone.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._timed: dict[bool, deque[tuple[float, int]]] = {way: deque(maxlen=REMEMBERED) for way in (True, False)}
        self._pause = FIRST
        self._trial = True
        self._latest: float | None = None
        self._start(True, TRIAL[True])

    def begin(self) -> None:
        """A text begins: the time since the one before does not count."""
        self._latest = None

    def token(self) -> None:
        """A token begins in the present stretch."""
        now = self._clock()
        if self._latest is not None:
            self._spent += now - self._latest
            self._tokens += 1
        self._latest = now

    @property
    def over(self) -> bool:
        """Whether the next token may begin another stretch."""
        return self._tokens >= self._length

    def turn(self) -> None:
        """End the stretch, and choose the way of the next one."""
        self._timed[self.in_rounds].append((self._spent, self._tokens))
        other = not self.in_rounds
        if not self._timed[other]:
            self._start(other, TRIAL[other])
            return
        rounds_win = self._seconds(True) <= self._seconds(False)
        if self._trial:  # it was compared just now
            vain = rounds_win != self.in_rounds
            self._pause = min(2 * self._pause, LONGEST) if vain else FIRST
            self._trial = False
            self._start(rounds_win, self._pause)
        else:
            self._trial = True
            self._start(other, TRIAL[other])

    def _seconds(self, way: bool) -> float:
        """What a token took, over the latest stretches."""
        seconds, tokens = map(sum, zip(*self._timed[way]))
        return seconds / tokens

    def _start(self, in_rounds: bool, length: int) -> None:
        self.in_rounds, self._length = in_rounds, length
        self._tokens, self._spent = 0, 0.0  # tokens that are complete, and their seconds
