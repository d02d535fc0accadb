"""What the next round of lossless mode does, when its draft ends, and where there are rounds at all.

**Rounds.** A round ends with a verification by the top gear, which makes one token more than it accepts. Be r what a
token costs in rounds with drafts, or with the top gear alone where that is less. A proposal of the text pays where
its round costs less than r for each token that it is expected to make; it is as long as saves most. Drafts pay while
a token of theirs costs less than one of the top gear alone. What loses is tried once in a while, since texts and
machines change. Costs that nobody measures say nothing about this machine: with them, drafts are as calibrated.

**Drafts.** Be g the cost of a token of text, and p the probability that the top gear accepts a whole draft. One more
token, which is accepted with probability a if the others are, saves g with probability p a. It is worth its cost c
while p a g > c: so the bound on p is c / (a g). The dearer a verification, the larger g, and the longer the drafts. g
in turn depends on the bound; both settle in a few drafts, on the bound that costs least. Several texts draft
together: one more step costs c for all of them, and saves g with probability p_i a for each; it is worth its cost
while g a times the sum of p_i is above c.

**Stretches.** A round has to know its token before it can propose what follows, so that mlx-lm cannot run ahead; and
no model of costs is exact. So rounds and the top gear alone are both timed on the clock, over stretches of some
tokens, and the faster way writes. The other one gets a short stretch in between, ever more rarely while it loses.
Whoever reads the tokens may pause between them, and the clock runs on. So what took far longer than the median token
of its stretches counts as the median. Not every token does: rounds differ, and their mean decides.
"""

import copy
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .acceptance import DEFAULT_BOUND, MOST_DRAFTED, DraftRule, replay_drafts
from .lookup import LookupAgreement
from .pass_costs import PassCosts, RoundCounts

KEPT_ROUNDS = 0.97  # of the weight of earlier rounds with drafts, at each further one
PRIOR_TOKENS = 16.0  # tokens for which drafts are taken to cost what the top gear alone costs
PROBED = 32  # rounds between two that try what loses
KEPT_DRAFTS = 0.95  # of the weight of earlier drafts in g, at each further draft
KEPT_AGREEMENT = 0.99  # the same of a, at each further token
AHEAD = 4  # rows over which the cost of one more is taken: single rows cost in steps, where a kernel takes some at once
TRIAL = {True: 24, False: 8}  # tokens of a stretch that tries a way: rounds differ more than tokens of the top gear
FIRST, LONGEST = 96, 384  # tokens of the faster way between two trials: at first, and where trials were in vain
REMEMBERED = 4  # stretches of each way that count
PAUSE = 4  # times the median, and somebody paused: a verification of 16 tokens takes less (docs/performance.md)


def predicted_cost(
    sequences: Sequence[tuple[Sequence[float], Sequence[bool]]],
    agreement: Callable[[float], float],
    costs: PassCosts,
) -> float:
    """What a token costs with a CostRule, replayed on recorded tokens (`acceptance.replay_drafts`)."""
    done = replay_drafts(sequences, CostRule(agreement, costs))
    verified = sum(count * costs.verification(1 + drafted) for drafted, count in done.drafts.items())
    return (done.drafted * costs.draft() + verified) / done.tokens


class RunningMean:
    """The mean of values, the latest of which weigh most; 1 before there are any."""

    def __init__(self) -> None:
        self._sum = self._count = 0.0

    def add(self, value: float) -> None:
        self._sum = KEPT_AGREEMENT * self._sum + value
        self._count = KEPT_AGREEMENT * self._count + 1

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else 1.0


def of_one_more(costs: PassCosts, drafted: int) -> float:
    """The cost of one more drafted token after so many, and of a row for it."""
    rows = min(drafted + 1, MOST_DRAFTED + 1 - AHEAD)
    row = (costs.verification(rows + AHEAD) - costs.verification(rows)) / AHEAD
    return costs.draft() + row


class CostRule:
    """Drafts that end where one more token costs more than it is expected to save.

    Args:
        agreement: the function a, from the low gear's entropy (bits) to a probability.
        costs: of a drafted token and of verifications, now.
    """

    def __init__(self, agreement: Callable[[float], float], costs: PassCosts):
        self.agreement, self.costs = agreement, costs
        self._counts = RoundCounts(KEPT_DRAFTS)
        self._mean = RunningMean()
        self._begin()

    def begin(self) -> None:
        if self._drafted:
            self._counts.add(self._drafted, self._expected)
        self._begin()

    def goes_on(self, entropy: float) -> bool:
        agreement = self.agreement(entropy)
        self._mean.add(agreement)
        self._product *= agreement
        self._drafted += 1
        self._expected += self._product
        return self._product >= self.bound

    @property
    def bound(self) -> float:
        """The product of a(H) below which a draft ends now."""
        of_text = self.costs.verification(1)  # at first as if nothing were accepted
        if self._counts.tokens:
            of_text = self._counts.spent(self.costs) / self._counts.tokens
        saved = of_text * self._mean.value
        return of_one_more(self.costs, self._drafted) / saved if saved else 1.0

    def _begin(self) -> None:
        self._product, self._drafted = 1.0, 0
        self._expected = 1.0  # tokens of this draft's text: a verification makes one of its own


class BatchRule(Protocol):
    """Decides when the drafts of a batch end."""

    def begin(self, rows: int) -> None:
        """Start new drafts of so many sequences."""
        ...

    def goes_on(self, entropies: Sequence[float], live: Sequence[bool]) -> bool:
        """Whether to draft one more token for all.

        Args:
            entropies: of the distributions of the last tokens, bits.
            live: whether more may follow in this sequence at all.
        """
        ...

    def end(self, drafted: int, tokens: int) -> None:
        """Count a round: steps of the draft, and tokens of text that it made in all sequences."""
        ...


class EachRule:
    """Drafts that go on while a rule for single texts wants to, for any of the sequences."""

    def __init__(self, rule: DraftRule):
        self._rule = rule

    def begin(self, rows: int) -> None:
        self._rules = [copy.copy(self._rule) for _ in range(rows)]
        for rule in self._rules:
            rule.begin()
        self._wants = [True] * rows

    def goes_on(self, entropies: Sequence[float], live: Sequence[bool]) -> bool:
        for row, entropy in enumerate(entropies):
            self._wants[row] = live[row] and self._wants[row] and self._rules[row].goes_on(entropy)
        return any(self._wants)

    def end(self, drafted: int, tokens: int) -> None:
        pass


class BatchCostRule:
    """Drafts that end where one more step costs more than it is expected to save over all sequences.

    Args:
        agreement: the function a, from the low gear's entropy (bits) to a probability.
        costs: of a step of the draft, and of verifications by rows of one sequence, for a batch of this size.
    """

    def __init__(self, agreement: Callable[[float], float], costs: PassCosts):
        self.agreement, self.costs = agreement, costs
        self._counts = RoundCounts(KEPT_DRAFTS)
        self._mean = RunningMean()

    def begin(self, rows: int) -> None:
        self._products, self._drafted = [1.0] * rows, 0

    def goes_on(self, entropies: Sequence[float], live: Sequence[bool]) -> bool:
        agreed = [self.agreement(entropy) if on else 0.0 for entropy, on in zip(entropies, live)]
        for value, on in zip(agreed, live):
            if on:
                self._mean.add(value)
        self._products = [product * value for product, value in zip(self._products, agreed)]
        self._drafted += 1
        alive = sum(self._products)
        if not self.costs.draft():  # nothing is measured yet
            return alive >= DEFAULT_BOUND * max(sum(live), 1)
        return alive * self._mean.value * self._of_token() > of_one_more(self.costs, self._drafted)

    def end(self, drafted: int, tokens: int) -> None:
        self._counts.add(drafted, tokens)

    def _of_token(self) -> float:
        """What a token of text costs; at first as if nothing were accepted."""
        if self._counts.tokens:
            return self._counts.spent(self.costs) / self._counts.tokens
        return self.costs.verification(1) / len(self._products)


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


class Rounds:
    """Chooses what a round does, by the costs of passes and the results of earlier rounds. Texts do not depend on it.

    Args:
        costs: of passes.
        most_looked_up: tokens of a proposal of the text; 0: none.

    `agreement` is of proposals of the text.
    """

    def __init__(self, costs: PassCosts, most_looked_up: int = MOST_DRAFTED):
        self.costs, self.most_looked_up = costs, most_looked_up
        self.agreement = LookupAgreement()
        self._counts = RoundCounts(KEPT_ROUNDS)
        self._since_probe = 0

    def with_drafts(self) -> float:
        """What a token costs in rounds with drafts, at the costs of now."""
        prior = PRIOR_TOKENS * self.costs.verification(1)
        return (self._counts.spent(self.costs) + prior) / (self._counts.tokens + PRIOR_TOKENS)

    def looked_up(self, run: int, room: int) -> int:
        """How many tokens to take of what the text proposes; 0: none.

        Args:
            run: tokens that occurred before, as in `Lookup`; 0: none.
            room: the most that there are, or that are wanted.
        """
        count = min(room, self.most_looked_up)
        if count < 1 or not run or not self.costs.ready:
            return 0
        token = min(self.with_drafts(), self.costs.verification(1))
        best, most, tokens = 0, 0.0, 1.0
        for taken, probability in enumerate(self.agreement.probabilities(run, count), 1):
            tokens += probability
            saved = token * tokens - self._proposal(taken)
            if saved > most:
                best, most = taken, saved
        return best

    def _proposal(self, taken: int) -> float:
        """What a round with so many tokens of the text costs: its bytes may be those of one row, but not its time."""
        computed = self.costs.verification(1) * (1 + self.costs.row_share * taken)
        return max(self.costs.verification(1 + taken), computed)

    def drafts(self) -> bool:
        """Whether the low gear drafts in this round: always, unless costs are measured, and drafts lose.

        Call it once for each round without a proposal of the text.
        """
        if not self.costs.measured:
            return True
        if not self.costs.ready:
            return False
        pays = self.with_drafts() <= self.costs.verification(1)
        self._since_probe += 1
        if self._since_probe < PROBED:
            return pays
        self._since_probe = 0
        return not pays

    def note_drafts(self, drafted: int, tokens: int, discarded: int = 0) -> None:
        """Count a round with drafts, as `RoundCounts.add` does."""
        self._counts.add(drafted, tokens, discarded)
