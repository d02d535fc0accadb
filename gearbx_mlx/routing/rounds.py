"""What passes cost in lossless mode, and what follows: what a round does, when its draft ends, where there are rounds.

**Costs** are those of a drafted token and of a verification of several tokens, in one unit. Rules compare them with
each other and never with anything else.

**Rounds.** A round ends with a verification by the top gear, which makes one token more than it accepts. Let r be what
a token costs in rounds with drafts, or with the top gear alone where that is less. A proposal of the text pays where
its round costs less than r for each token that it is expected to make; it is as long as saves most. Drafts pay while a
token of theirs costs less than one of the top gear alone. What loses is tried once in a while, since texts and machines
change. Costs that are not measured say nothing about this machine: with them, every round drafts.

**Drafts.** Let g be the cost of a token of text, and p the probability that the top gear accepts a whole draft. One
more token, which is accepted with probability a if the others are, saves g with probability p a. It is worth its cost c
while p a g > c: so the bound on p is c / (a g). The dearer a verification, the larger g, and the longer the drafts. g
in turn depends on the bound; both settle in a few drafts, on the bound that costs least.

**Stretches.** A round has to know its token before it can propose what follows, so that mlx-lm cannot run ahead; and
no model of costs is exact. So rounds and the top gear alone are both timed on the clock, over stretches of some
tokens, and the faster way writes. How many tokens a round makes is chance, so that a few rounds say little: rounds
lose only where they are slower by more than chance explains. The way that does not write gets a short stretch in
between, the more rarely the more it loses. Rounds that lost with one text are tried again soon with the next one, if
they did not lose by much: texts differ in how well they can be drafted. A reader of the tokens may pause between
them, and the clock runs on. So what took far longer than the median token counts as the median.
"""

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .acceptance import (
    MOST_DRAFTED,
    MOST_ROWS,
    DraftRule,
    LearnedAgreement,
    pool_adjacent_violators,
)
from .lookup import LookupAgreement, RunningMean

REMEMBERED = 9  # passes whose median counts: the time of a pass changes with the context and with what else runs
FEW = 3  # passes that say how fast the machine is in this moment
FIRST_PASSES = 2  # of a kind, that are not measured: they make modules, compile, and fill caches

# What a row of a verification computes, as a share of a pass over one: on one thread 8 vectors take about 1.75 times,
# and 16 about 3.35 times, as long as it takes to read the weights (docs/performance.md).
ROW_SHARE = 0.1
REFRESHED = 16  # a pass of this kind is measured once in so many

KEPT_ROUNDS = 0.97  # of the weight of earlier rounds with drafts, at each further one
PRIOR_TOKENS = 16.0  # tokens for which drafts are taken to cost what the top gear alone costs
# Times what the top gear alone costs. Drafts that cost more are left out of rounds: one that is rejected says little,
# and stretches are compared by the clock. In a trial of rounds they have to lose by far.
LOSES, TRIED = 1.1, 1.5
PROBED = 32  # rounds between two that try what loses
KEPT_DRAFTS = 0.95  # of the weight of earlier drafts in g, at each further draft
KEPT_AGREEMENT = 0.99  # the same of a, at each further token
# What a is before tokens show it, and for how many this counts: after few unlikely ones drafts would be too short to
# ever show more.
PRIOR_AGREEMENT, PRIOR_DRAFTED = 0.9, 16.0
UNMEASURED = 0.5  # probability that a draft is right below which it ends, before costs are known
AHEAD = 4  # rows over which the cost of one more is taken: single rows cost in steps, where a kernel takes some at once
TRIAL = {True: 24, False: 8}  # tokens of a stretch that tries a way: rounds differ more than tokens of the top gear
FIRST, LONGEST = 96, 768  # tokens of the faster way between two trials, at least and at most
UNMADE = 8 * LONGEST  # where a trial has to make a gear first, which takes as long as a hundred tokens
HOPELESS = 0.5  # of the time alone: what rounds lose by where a trial ends early
TRIALS_SHARE = 0.01  # of the time is lost by trials, within these limits
COMPARED = 64  # rounds, or tokens of the top gear alone, that count
OTHER_TEXTS = 0.25  # of the weight of what is known, when another text begins
CHANCE = 0.2  # half of how much the tokens of a round vary, as a share of their mean
TEXTS_DIFFER = 0.15  # what rounds may have lost by to be tried at once with another text
PAUSE = 4  # times the median means a pause: a verification of 16 tokens takes less (docs/performance.md)


PassTimes = tuple[float, Mapping[int, float]]
"""Seconds of a drafted token, and of verifications by their number of rows."""


class Costs:
    """What passes cost now, in one unit. No measurement of a pass changes these costs.

    Args:
        draft: of a drafted token. verification: of a pass of the top gear over so many tokens, drafted ones and the one
            before them.
        measured: whether they come from passes that run on this machine, so that each kind has to run once in a while.

    `ready` says whether the cost of the top gear alone is known, to which all else is compared. `row_share` is what a
    row beyond the first costs at least, as a share of a pass over one.
    """

    ready = True

    def __init__(self, draft: Callable[[], float], verification: Callable[[int], float], measured: bool = False):
        self.draft, self.verification, self.measured = draft, verification, measured
        self.row_share = 0.0 if measured else ROW_SHARE

    def wants_verification(self, rows: int) -> bool:
        """Whether the time of the next pass over so many tokens would say something new; ask once for each pass."""
        return False

    def add_verification(self, rows: int, seconds: float) -> None:
        """Take the time of a pass that was wanted."""

    def add_draft(self, seconds: float, steps: int = 1) -> None:
        """Take the time of a draft of so many steps."""


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

    def known(self, value: float) -> None:
        """Take a time from before: what the first passes would do is done."""
        self._seen = FIRST_PASSES
        self.add(value)

    @property
    def value(self) -> float | None:
        return statistics.median_low(self._values) if self._values else None

    @property
    def latest(self) -> float:
        """The lower median of the last few alone."""
        return statistics.median_low([*self._values][-FEW:])

    def __len__(self) -> int:
        return len(self._values)


class LearnedCosts(Costs):
    """Seconds, measured while a text is written.

    The machine is faster at one moment than at another. So a verification counts in relation to the drafted tokens just
    before it, and what is known of one kind of pass stays true of the others while only some kinds run.

    Rows that were not measured cost what lies between their neighbours; never less than fewer rows, by isotonic
    regression, where a kind of pass weighs by how often it was measured. Beyond the most rows that were measured, more
    cost as much: so that they are tried.

    Args:
        seconds: of a drafted token, and of verifications by their number of rows, from an earlier measurement.
        drafts: whether there is a gear that drafts.
    """

    def __init__(self, seconds: PassTimes | None = None, drafts: bool = True):
        super().__init__(
            lambda: self._draft.value or 0.0, lambda rows: self._costs[rows - 1] * self._slowness, measured=True
        )
        self._drafts = drafts
        self._draft = LatestTimes()
        self._usual: float | None = None  # seconds of the first drafted token that counts: the machine at speed 1
        self._slowness = self._now = 1.0  # times as long as then: over the latest drafts, and in this moment
        self._rows: defaultdict[int, LatestTimes] = defaultdict(LatestTimes)
        self._costs = [1.0] * MOST_ROWS
        if seconds is not None:
            if seconds[0]:
                self._usual = seconds[0]
                self._draft.known(seconds[0])
            for rows, value in seconds[1].items():
                self._rows[rows].known(value)
            self._update()

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return 1 in self._rows and self._rows[1].value is not None

    @property
    def seconds(self) -> PassTimes | None:
        """What another text may begin with; None as long as drafts and the top gear alone were not both measured."""
        if not self.ready or (self._drafts and not self._draft.value):
            return None
        return self.draft(), {rows: self.verification(rows) for rows in range(1, MOST_ROWS + 1)}

    def wants_verification(self, rows: int) -> bool:
        return self._rows[rows].wanted()

    def add_draft(self, seconds: float, steps: int = 1) -> None:
        if not self._draft.begun():
            return
        self._draft.add(seconds / steps)
        self._usual = self._usual or seconds / steps
        self._slowness, self._now = self.draft() / self._usual, self._draft.latest / self._usual

    def add_verification(self, rows: int, seconds: float) -> None:
        self._rows[rows].add(seconds / self._now)
        self._update()

    def _update(self) -> None:
        known = [(rows, -times.value, len(times)) for rows, times in sorted(self._rows.items()) if times.value]
        if known:
            rows, falling, weights = zip(*known)
            seconds = [-value for value in pool_adjacent_violators(falling, weights)]
            self._costs = np.interp(np.arange(1, MOST_ROWS + 1), rows, seconds).tolist()


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

    def spent(self, costs: Costs) -> float:
        """What these rounds would cost now."""
        verified = sum(count * costs.verification(rows) for rows, count in self._verified.items())
        return self._draft_passes * costs.draft() + verified


class Rounds:
    """Chooses what a round does, by the costs of passes and the results of earlier rounds. Texts do not depend on it.

    Args:
        costs: of passes.
        most_looked_up: tokens of a proposal of a text; 0: none.
        agreement: of proposals of the texts.
        drafts: whether there is a gear that drafts; without it the text alone proposes.
    """

    def __init__(
        self,
        costs: Costs,
        most_looked_up: int = MOST_DRAFTED,
        agreement: LookupAgreement | None = None,
        drafts: bool = True,
    ):
        self._drafts = drafts
        self.costs, self.most_looked_up = costs, most_looked_up
        self.agreement = agreement or LookupAgreement()
        self._counts = RoundCounts(KEPT_ROUNDS)
        self._since_probe = 0

    def alone(self) -> float:
        """What a token costs by the top gear alone."""
        return self.costs.verification(1)

    def with_drafts(self) -> float:
        """What a token costs in rounds with drafts, at the costs of now."""
        spent = self._counts.spent(self.costs) + PRIOR_TOKENS * self.alone()
        return spent / (self._counts.tokens + PRIOR_TOKENS)

    def looked_up(self, run: int, room: int) -> int:
        """How many tokens to take of what a text proposes; 0: none.

        Args:
            run: tokens that occurred before, as in `Lookup`; 0: none.
            room: the most that there are, or that are wanted.
        """
        count = min(room, self.most_looked_up)
        if count < 1 or not run or not self.costs.ready:
            return 0
        token = min(self.alone(), self.with_drafts())
        best, most, tokens = 0, 0.0, 1.0
        for taken, probability in enumerate(self.agreement.probabilities(run, count), 1):
            tokens += probability
            computed = self.costs.verification(1) * (1 + self.costs.row_share * taken)
            saved = token * tokens - max(self.costs.verification(1 + taken), computed)
            if saved > most:
                best, most = taken, saved
        return best

    def drafts(self, trial: bool = False) -> bool:
        """Whether the low gear drafts in this round: always, unless costs are measured, and drafts lose.

        Call it once for each round in which the low gear might draft.

        Args:
            trial: of rounds: then drafts that do not lose by far are tried too, so that their costs are measured again.
        """
        if not self._drafts:
            return False
        if not self.costs.measured:
            return True
        if not self.costs.ready:
            return False
        pays = self.with_drafts() <= self.alone() * (TRIED if trial else LOSES)
        self._since_probe += 1
        if self._since_probe < PROBED:
            return pays
        self._since_probe = 0
        return not pays

    def note_drafts(self, drafted: int, tokens: int, discarded: int = 0) -> None:
        """Count a round with drafts, as `RoundCounts.add` does."""
        self._counts.add(drafted, tokens, discarded)


class CostRule:
    """A DraftRule that ends drafts where one more token costs more than it is expected to save.

    Args:
        agreement: the function a, from the low gear's entropy (bits) to a probability; or from the margin of its token,
            if it is learned.
        costs: of a drafted token, and of verifications by rows, now.
    """

    def __init__(self, agreement: Callable[[float], float], costs: Costs):
        self.agreement, self.costs = agreement, costs
        self._counts = RoundCounts(KEPT_DRAFTS)
        self._mean = RunningMean(KEPT_AGREEMENT, PRIOR_AGREEMENT, PRIOR_DRAFTED)
        self._product, self._drafted, self._expected = 1.0, 0, 1.0

    def begin(self) -> None:
        if self._drafted:
            self._counts.add(self._drafted, self._expected)
        self._product, self._drafted = 1.0, 0
        self._expected = 1.0  # tokens of this draft's text: a verification makes one of its own

    def goes_on(self, reading: float) -> bool:
        agreed = self.agreement(reading)
        if self._drafted:  # the first one follows what was rejected, and is harder
            self._mean.add(agreed)
        self._product *= agreed
        self._drafted += 1
        self._expected += self._product
        return self._product >= self.bound

    @property
    def bound(self) -> float:
        """The product of a below which this draft ends now."""
        if not self.costs.draft():  # nothing is measured yet
            return UNMEASURED
        of_text = self.costs.verification(1)  # at first as if nothing were accepted
        if self._counts.tokens:
            of_text = self._counts.spent(self.costs) / self._counts.tokens
        saved, rows = of_text * self._mean.value, min(self._drafted + 1, MOST_ROWS - AHEAD)
        row = (self.costs.verification(rows + AHEAD) - self.costs.verification(rows)) / AHEAD
        return (self.costs.draft() + row) / saved if saved else math.inf


def reads_margins(rule: DraftRule) -> bool:
    """Whether a rule judges the margins of tokens in place of their entropies."""
    return isinstance(rule, CostRule) and isinstance(rule.agreement, LearnedAgreement)


class Stretches:
    """Divides a text into stretches in rounds and stretches of the top gear alone.

    Args:
        clock: seconds.
        rounds_win: which way was the faster one at an earlier start; None: nothing is known, and trials come first.
        left: tokens until the other way is tried again. Where rounds lose, a trial costs more than the other way round.
        longest: tokens between two trials of rounds, where they lost at the earlier start: a first trial may cost more.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        rounds_win: bool | None = None,
        left: int | None = None,
        longest: int = LONGEST,
    ):
        self._clock = clock
        self._seen: dict[bool, Times] = {True: Times(), False: TimesAlone()}
        self._latest: float | None = None  # when the token that is not complete yet began
        self._begins_round = True
        self._count, self._length = 0, 0  # tokens of the stretch, those that it has and those that end it
        self._waited, self._pause = 0, FIRST  # tokens since the other way was tried, of those that it has to wait
        if rounds_win is None:
            self._trial = True
            self._start(True)
        else:
            self._pause = FIRST if rounds_win else longest
            self._waited = self._pause - min(left or self._pause, self._pause)
            self._trial = False
            self._start(rounds_win)

    def begin(self) -> None:
        """A text begins: the time since the one before does not count, and rounds may do better than with that one."""
        self._latest = None
        for seen in self._seen.values():
            seen.fade()
        if self._lost is not None and self._lost <= TEXTS_DIFFER:
            self._pause = min(self._pause, FIRST // 2)
            self._length = min(self._length, self._count + self.left)

    def token(self, begins_round: bool = True) -> None:
        """A token begins in the present stretch.

        Args:
            begins_round: whether it has to be computed. In a round of several tokens, the others are there already.
        """
        now = self._clock()
        if self._latest is not None:
            self._seen[self.in_rounds].add(now - self._latest, self._begins_round)
            self._count += 1
            self._waited += not self._trial
        self._latest, self._begins_round = now, begins_round

    def waited(self) -> None:
        """The token that begins has waited for the one before, which ran ahead: this time is not its own."""
        self._latest = self._clock()

    @property
    def tries_rounds(self) -> bool:
        """Whether this stretch is a trial of rounds."""
        return self._trial and self.in_rounds

    @property
    def over(self) -> bool:
        """Whether the next token may begin another stretch: where rounds lose by far, a third of a trial says so."""
        if self._count >= self._length:
            return True
        return self.tries_rounds and 3 * self._count >= self._length and (self._lost or 0.0) > HOPELESS

    @property
    def untried(self) -> bool:
        """Whether nothing was tried since the start: one way wrote everything."""
        return not (all(self._seen.values()) or self._trial)

    @property
    def left(self) -> int:
        """Tokens, one or more, until the way that loses is tried again; those of a trial do not count."""
        return max(1, self._pause - self._waited)

    @property
    def _lost(self) -> float | None:
        """By how much rounds lose beyond what chance explains, as a share of the time alone; None where they win."""
        if not all(self._seen.values()):
            return None
        rounds, alone = self._seen[True].least(), self._seen[False].least()
        return rounds / alone - 1 if rounds > alone else None

    def turn(self) -> None:
        """End the stretch, and choose the way of the next one."""
        other = not self.in_rounds
        if self._trial and len(self._seen[other]) < TRIAL[other]:
            self._start(other)
            return
        rounds_win = self._lost is None if self._seen[other] else self.in_rounds
        if not self._trial and rounds_win == self.in_rounds:
            self._trial = self._waited >= self._pause
            self._start(self.in_rounds != self._trial)
            return
        rounds, alone = (self._seen[way].per_token() for way in (True, False))
        lost = TRIAL[not rounds_win] * (max(rounds, alone) / min(rounds, alone) - 1)  # tokens' time, a trial
        self._waited, self._pause = 0, round(min(max(lost / TRIALS_SHARE, FIRST), LONGEST))
        self._trial = False
        self._start(rounds_win)

    @property
    def seconds(self) -> dict[bool, float]:
        """What a token took in rounds (True) and by the top gear alone, as far as known."""
        return {way: seen.per_token() for way, seen in self._seen.items() if len(seen) >= TRIAL[way]}

    def _start(self, in_rounds: bool) -> None:
        """Begin a stretch: of a trial, or as long as the other way has to wait, with a look at the clock in between."""
        self.in_rounds, self._count = in_rounds, 0
        self._length = TRIAL[in_rounds] if self._trial else min(self.left, TRIAL[True])


class OneStretch:
    """Rounds everywhere: a stretch without end, which nothing is timed for."""

    in_rounds, over, tries_rounds = True, False, False

    def begin(self) -> None: ...
    def token(self, begins_round: bool = True) -> None: ...
    def turn(self) -> None: ...
    def waited(self) -> None: ...


class Times:
    """Seconds of tokens in rounds: of those that began one, and of those that a round had already made."""

    def __init__(self) -> None:
        self._rounds: deque[TimedRound] = deque(maxlen=COMPARED)

    def __len__(self) -> int:
        """Tokens."""
        return sum(1 + len(timed.made) for timed in self._rounds)

    def add(self, seconds: float, begins_round: bool) -> None:
        if begins_round or not self._rounds:
            self._rounds.append(TimedRound(seconds))
        else:
            self._rounds[-1].made.append(seconds)

    def fade(self) -> None:
        """Let what comes weigh more than what is known."""
        for timed in self._rounds:
            timed.weight *= OTHER_TEXTS

    def per_token(self) -> float:
        """The mean without pauses."""
        usual = statistics.median_low(timed.begun for timed in self._rounds)
        made = [seconds for timed in self._rounds for seconds in timed.made]
        usual_made = statistics.median_low(made) if made else 0.0
        spent = tokens = 0.0
        for timed in self._rounds:
            begun = timed.begun if timed.begun <= PAUSE * usual else usual
            rest = (seconds if seconds <= PAUSE * usual else usual_made for seconds in timed.made)
            spent += timed.weight * (begun + sum(rest))
            tokens += timed.weight * (1 + len(timed.made))
        return spent / tokens

    def least(self) -> float:
        """The mean, less what may be chance in so many rounds."""
        weights = np.array([timed.weight for timed in self._rounds])
        rounds = weights.sum() ** 2 / (weights**2).sum()
        return self.per_token() * (1 - CHANCE / math.sqrt(rounds))


class TimesAlone(Times):
    """Seconds of tokens of the top gear alone, which all take as long.

    Where a stretch begins and ends, mlx-lm's run ahead begins and ends too, so that those tokens say nothing.
    """

    def per_token(self) -> float:
        return statistics.median_low(timed.begun for timed in self._rounds)

    least = per_token


@dataclass
class TimedRound:
    """Seconds of the token that began a round, and of each of those that it had made."""

    begun: float
    made: list[float] = field(default_factory=list)
    weight: float = 1.0
