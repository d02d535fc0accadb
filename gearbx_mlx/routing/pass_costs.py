"""What passes cost in lossless mode: a drafted token, and a verification of several tokens.

Costs are in one unit, bytes or seconds. Rules compare them with each other and never with anything else.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .acceptance import MOST_ROWS, pool_adjacent_violators

TIME, BYTES = "time", "bytes"
COSTS = (TIME, BYTES)
REMEMBERED = 9  # passes whose median counts: the time of a pass changes with the context and with what else runs
FIRST_PASSES = 2  # of a kind, that are not measured: they make modules, compile, and fill caches
# What a row of a verification computes, as a share of a pass over one: on one thread 8 vectors take about 1.75 times,
# and 16 about 3.35 times, as long as it takes to read the weights (docs/performance.md).
ROW_SHARE = 0.1
REFRESHED = 16  # a pass of this kind is measured once in so many


class PassCosts(Protocol):
    """What passes cost now."""

    measured: bool
    """Whether the costs come from passes that run, so that each kind has to run once in a while."""
    row_share: float
    """What a row beyond the first costs at least, as a share of a pass over one: bytes do not count its computation."""

    @property
    def ready(self) -> bool:
        """Whether the cost of the top gear alone is known, to which all else is compared."""
        ...

    def draft(self) -> float:
        """Of one drafted token."""
        ...

    def verification(self, rows: int) -> float:
        """Of one pass of the top gear over so many tokens, drafted ones and the one before them."""
        ...

    def wants_verification(self, rows: int) -> bool:
        """Whether the time of the next pass over so many tokens would say something new; ask once for each pass."""
        ...

    def add_verification(self, rows: int, seconds: float) -> None:
        """Take the time of a pass that was wanted."""
        ...

    def add_draft(self, seconds: float) -> None:
        """Take the time of a drafted token."""
        ...


class FixedCosts:
    """Costs that no measurement of a pass changes."""

    measured, ready, row_share = False, True, 0.0

    def wants_verification(self, rows: int) -> bool:
        return False

    def add_verification(self, rows: int, seconds: float) -> None:
        pass

    def add_draft(self, seconds: float) -> None:
        pass


class Costs(FixedCosts):
    """Costs that are functions.

    Args:
        draft: of a drafted token. verification: of a pass of the top gear over so many tokens.
        measured: whether the functions follow what passes cost on this machine. If not, a row has a `row_share`.
    """

    def __init__(self, draft: Callable[[], float], verification: Callable[[int], float], measured: bool = False):
        self._draft, self._verification, self.measured = draft, verification, measured
        self.row_share = 0.0 if measured else ROW_SHARE

    def draft(self) -> float:
        return self._draft()

    def verification(self, rows: int) -> float:
        return self._verification(rows)


class RoundCounts:
    """What rounds with drafts cost and gave. The latest weigh most.

    Args:
        kept: of the weight of earlier rounds, at each further one.
    """

    def __init__(self, kept: float):
        self._kept = kept
        self._draft_passes = self.tokens = 0.0
        self._verified: dict[int, float] = {}

    def add(self, drafted: int, tokens: float, discarded: int = 0) -> None:
        """Count a round: tokens drafted, tokens of text that it made, and steps beyond the end of the draft."""
        self._draft_passes = self._kept * self._draft_passes + drafted + discarded
        self.tokens = self._kept * self.tokens + tokens
        self._verified = {rows: self._kept * count for rows, count in self._verified.items()}
        self._verified[drafted + 1] = self._verified.get(drafted + 1, 0.0) + 1

    def spent(self, costs: PassCosts) -> float:
        """What these rounds would cost now."""
        verified = sum(count * costs.verification(rows) for rows, count in self._verified.items())
        return self._draft_passes * costs.draft() + verified


class LatestTimes:
    """The lower median of the latest times of one kind of pass, but for the first ones."""

    def __init__(self) -> None:
        self._seen = 0
        self._values: deque[float] = deque(maxlen=REMEMBERED)

    def begun(self) -> bool:
        """Whether the next value counts; call it once for each value that there could be."""
        self._seen += 1
        return self._seen > FIRST_PASSES

    def wanted(self) -> bool:
        """Whether it also says something new; to be called instead."""
        return self.begun() and (len(self._values) < REMEMBERED or self._seen % REFRESHED == 0)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float | None:
        return statistics.median_low(self._values) if self._values else None

    @property
    def count(self) -> int:
        return len(self._values)


class LearnedCosts:
    """Seconds, measured while a text is written.

    Rows that were not measured cost what lies between their neighbours; never less than fewer rows, by isotonic
    regression, where a kind of pass weighs by how often it was measured. Beyond the most rows that were measured, more
    cost as much: so that they are tried. Where several texts share the passes, each row has its `ROW_SHARE` there, or a
    trial of long drafts would cost as much as many tokens.

    Args:
        seconds: of a drafted token, and of verifications of 1, 2, ... tokens, from an earlier measurement.
        texts: that share the passes; rows are those of one of them.
    """

    measured, row_share = True, 0.0

    def __init__(self, seconds: tuple[float, Sequence[float]] | None = None, texts: int = 1):
        self._untried = ROW_SHARE * texts if texts > 1 else 0.0  # of a row, as a share of the smallest pass
        self._draft = LatestTimes()
        self._rows: dict[int, LatestTimes] = {}
        self._costs = [1.0 + self._untried * rows for rows in range(MOST_ROWS)]
        if seconds is not None:
            self._draft.add(seconds[0])
            for rows, value in enumerate(seconds[1], 1):
                self._of(rows).add(value)
            self._update()

    @property
    def ready(self) -> bool:
        return 1 in self._rows and self._rows[1].value is not None

    def draft(self) -> float:
        return self._draft.value or 0.0

    def verification(self, rows: int) -> float:
        return self._costs[rows - 1]

    def wants_verification(self, rows: int) -> bool:
        return self._of(rows).wanted()

    def add_draft(self, seconds: float) -> None:
        if self._draft.begun():
            self._draft.add(seconds)

    def add_verification(self, rows: int, seconds: float) -> None:
        self._of(rows).add(seconds)
        self._update()

    def _of(self, rows: int) -> LatestTimes:
        return self._rows.setdefault(rows, LatestTimes())

    def _update(self) -> None:
        known = [(rows, -times.value, times.count) for rows, times in sorted(self._rows.items()) if times.value]
        if known:
            rows, falling, weights = zip(*known)
            seconds = [-value for value in pool_adjacent_violators(falling, weights)]
            every = np.arange(1, MOST_ROWS + 1)
            untried = np.maximum(every - rows[-1], 0) * self._untried * seconds[0]
            self._costs = (np.interp(every, rows, seconds) + untried).tolist()
