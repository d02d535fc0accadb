"""How many tokens to draft before the next verification: as many as save most time here, and none where none saves any.

A round drafts k tokens, and verifies them and the token before them in one pass: C(k) seconds, with all that a round
does beside. If the i-th token is accepted with probability a_i where those before it are, the round writes
T(k) = 1 + a_1 + a_1 a_2 + ... + a_1...a_k tokens. Without a round, the top gear writes one token in s seconds. So a
token takes

    g = min(s, min over k of C(k) / T(k)),

and the k of this minimum is best (renewal reward). Where the margin of each drafted token is read at once, a(m) says
more than the place of the token. Of a draft of j tokens, all of which are right with probability P, n more are worth
their time while they save more than they take, by the same theorem:

    P g (a_1 + a_1 a_2 + ... + a_1...a_n)  >  C(j + n) - C(j)      for some n.

A proposal of n tokens that costs no draft is worth g (1 + p_1 + ... + p_n) - w(n), where its verification takes w(n)
seconds and the first i are right with probability p_i.

**What is learned.** C, w and s are medians of the latest times, a(m) and a_i are shares of the latest tokens. Nothing
else is kept for the next start, and no choice that followed from it. What seems best runs next and is measured then, so
that a time that was too short corrects itself; one that was too long does so by trials. Times are not divided by how
fast the machine is at the moment: that gains less in slow minutes than it loses, since some passes suffer more.

**What trials cost.** Each way is tried while the other one writes, for five tokens alone or one round. A trial expected
to lose x seconds is due when the better way has written for x / 0.005 seconds: half a per cent of the time. The first
few of a start come sooner, and double their distance: of n tokens they take log2(n / 24) more. One round in 16 drafts
two tokens more than is best.
"""

import bisect
import itertools
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Protocol

import numpy as np

from ..errors import GearbxError
from ..routing.lookup import RunningMean

MOST_DRAFTED = 15  # with the token before them 16 vectors, which native kernels take in one pass over the weights
MOST_ROWS = MOST_DRAFTED + 1
USUAL_LENGTH = 3  # of drafts where nothing may be measured: not the best anywhere, and seldom far from it

OUTSIDE = 2.0  # times the line, or a part of it: what is further away counts as this
SPREAD = 32.0  # of the lengths that the usual slope counts for: two times each of 4 tokens more, and 4 less
REMEMBERED, FEW = 9, 3  # times whose median counts, and as many as say something
ROUND = 1.03  # a round of one row over a token alone, and what a row more takes of it, before they are measured: on
ROW = 0.12  # processors; on a GPU less, so that longer drafts are tried there too (docs/performance.md)
FIXED_SHARE = 0.15  # of a pass does not depend on the bits of the gear: attention, norms, the host

MARGINS = (0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # between the bins of a(m)
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise((0.0, *MARGINS, 10.0))]
USUAL_ERROR = NormalDist(0.0, 0.8)  # of the difference between two logits in a low gear; SmolLM2's of 4 bits has 0.65
USUAL_SHARES = (0.7, 0.75, 0.8)  # accepted at the first, second and any later place: what follows an easy token is easy
KEPT, PRIOR_TOKENS = 0.997, 8.0  # of the weight of earlier tokens at each further one; tokens that a guess counts for
KEPT_ROUNDS, PRIOR_ROUNDS = 0.98, 8.0  # the same of rounds
USUAL_ROUND = 3.5, 3.0  # tokens drafted and written in a round, where margins end it
LEAST_SHARE = 1e-6

AHEAD = 4  # tokens that are looked ahead: rows cost in steps, where a kernel takes some at once
BURST, ROUNDS = 5, 1  # tokens alone, of which the first begins to run ahead and does not count; rounds of a trial
BURSTS, KEPT_BURSTS = 5, 2  # whose median counts, and as many as the time of an earlier start counts for
TRIALS_SHARE = 0.005  # of the time that trials may lose
SHORTEST, LONGEST = 24, 1024  # tokens between two trials of a way
FIRST_ALONE = 16  # tokens before the first trial of a start that knows no s
ENOUGH = 6  # rounds of a first start before there is a choice
TRIALS = 4  # of a way, before which it is tried more often
NEIGHBOUR, LONGER = 16, 2  # rounds between two that draft more tokens than is best, as many more


def draft_share(draft_bits: float, top_bits: float) -> float:
    """Return what a drafted token takes of one by the top gear alone, before either is measured."""
    return FIXED_SHARE + (1 - FIXED_SHARE) * draft_bits / top_bits


def pool_adjacent_violators(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-increasing sequence closest to `values` in weighted squares (isotonic regression)."""
    blocks: list[list[float]] = []  # mean, weight, count
    for value, weight in zip(values, weights):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            mean, weight, count = blocks.pop()
            before = blocks[-1]
            total = before[1] + weight
            blocks[-1] = [(before[0] * before[1] + mean * weight) / total, total, before[2] + count]
    return [mean for mean, _, count in blocks for _ in range(int(count))]


class Chooses(Protocol):
    """What the loop asks, and what it tells."""

    def length(self, room: int) -> int:
        """Return the most tokens of the next draft; 0: the top gear writes a token alone. Ask once for each."""

    def goes_on(self, margins: Sequence[float]) -> bool:
        """Return whether one more token pays after those with these margins, where they are read one by one."""

    def looked_up(self, probabilities: Sequence[float], room: int) -> int:
        """Return how many tokens of a proposal to verify, if the first, the first two, ... are right with these."""

    def add_round(
        self,
        *,
        drafted: int,
        accepted: int,
        rows: int,
        seconds: float,
        margins: Sequence[float] = (),
    ) -> None:
        """Take a round.

        Args:
            drafted: tokens of the low gear; 0 where the text proposed.
            accepted: of those that were verified. rows: of the verification.
            seconds: of all of it, without what a reader of the tokens took.
            margins: of the drafted tokens, if their sampler tells them.
        """

    def add_alone(self, seconds: float) -> None:
        """Take a token of the top gear alone."""


class Fixed:
    """Drafts of always the same length, for which nothing is measured.

    Raises:
        GearbxError: a length that a verification cannot take.
    """

    alone_seconds = round_seconds = None

    def __init__(self, length: int = USUAL_LENGTH):
        if not 1 <= length <= MOST_DRAFTED:
            raise GearbxError(f"draft length is {length}; give 1 to {MOST_DRAFTED} tokens")
        self._length = length
        self.state: dict[str, float] = {}

    def length(self, room: int) -> int:
        return max(0, min(self._length, room))

    def goes_on(self, margins: Sequence[float]) -> bool:
        return len(margins) < self._length

    def looked_up(self, probabilities: Sequence[float], room: int) -> int:
        """Return those that are more likely right than not."""
        return sum(probability > 0.5 for probability in probabilities[: max(0, room)])

    def add_round(self, **round: object) -> None: ...
    def add_alone(self, seconds: float) -> None: ...


class Latest:
    """The lower median of the latest times of a kind of pass, without its first one.

    Args:
        kept: from an earlier start, which counts as a few times.
    """

    def __init__(self, kept: float | None = None):
        self._times: deque[float] = deque([kept] * FEW if kept else [], maxlen=REMEMBERED)
        self._begun = False

    def add(self, seconds: float) -> None:
        if self._begun:
            self._times.append(seconds)
        self._begun = True

    @property
    def weight(self) -> int:
        return len(self._times)

    @property
    def median(self) -> float | None:
        """None where nothing is known."""
        return statistics.median_low(self._times) if self._times else None


class Curve:
    """Seconds by a number of tokens from 0 to 15: of rounds by what they draft, or of verifications of a proposal.

    A line through the medians, which at first has the slope that is usual; what a number was seen to take beyond the
    line counts the more, the more often it was seen, and its neighbours take as much. Never less for more tokens.

    Args:
        kept: `state` of an earlier start. name: of the times there.
        first, more: the line at first: at 0, and for each token more, in tokens of the top gear alone.
    """

    def __init__(self, kept: Mapping[str, float], name: str, first: float, more: float):
        self._names = [f"seconds {name} {tokens}" for tokens in range(MOST_ROWS)]
        self._times = [Latest(kept.get(each)) for each in self._names]
        self._first, self._more = first, more
        self.unit: float | None = None
        """Seconds of a token alone, if the line is right but for a factor; None: nothing was seen."""
        self._find()

    def _usual(self, tokens: int) -> float:
        return self._first + self._more * tokens

    def add(self, tokens: int, seconds: float) -> None:
        self._times[tokens].add(seconds)
        self._find()

    def _find(self) -> None:
        found = ((tokens, times.median, times.weight) for tokens, times in enumerate(self._times))
        self._seen = [(tokens, seconds, weight) for tokens, seconds, weight in found if seconds is not None]
        units = [seconds / self._usual(tokens) for tokens, seconds, weight in self._seen for _ in range(weight)]
        self.unit = statistics.median_low(units) if units else None

    def values(self, unit: float) -> list[float]:
        """Return all of them, where a token alone takes so long."""
        if self.unit is None:
            return [unit * self._usual(tokens) for tokens in range(MOST_ROWS)]
        near = [
            (tokens, min(max(seconds, usual / OUTSIDE), usual * OUTSIDE), weight)
            for tokens, seconds, weight in self._seen
            if (usual := self.unit * self._usual(tokens))
        ]
        total = sum(weight for *_, weight in near)
        middle = sum(weight * tokens for tokens, _, weight in near) / total
        height = sum(weight * seconds for _, seconds, weight in near) / total
        rising = sum(weight * (tokens - middle) * (seconds - height) for tokens, seconds, weight in near)
        wide = sum(weight * (tokens - middle) ** 2 for tokens, _, weight in near)
        slope = (rising + SPREAD * unit * self._more) / (wide + SPREAD)
        beyond = [
            (seconds - height - slope * (tokens - middle)) * weight / (weight + REMEMBERED)
            for tokens, seconds, weight in near
        ]
        line = height + slope * (np.arange(MOST_ROWS) - middle)
        line += np.interp(np.arange(MOST_ROWS), [tokens for tokens, *_ in near], beyond)
        return list(np.maximum.accumulate(line).tolist())

    @property
    def state(self) -> dict[str, float]:
        return {name: value for name, times in zip(self._names, self._times) if (value := times.median)}


class Costs:
    """C(k), w(r) and s in seconds.

    Args:
        kept: `state` of an earlier start.
        draft_share: of a token alone that a drafted one takes, before anything is measured.
    """

    def __init__(self, kept: Mapping[str, float], draft_share: float):
        self._rounds = Curve(kept, "drafted", ROUND, ROW + draft_share)
        self._verified = Curve(kept, "looked up", ROUND, ROW)
        self._burst: list[float] = []
        alone = kept.get("seconds alone")
        self._alone = deque([alone] * KEPT_BURSTS if alone else [], maxlen=BURSTS)
        self.bursts = 0
        """Bursts of tokens alone that were timed in this start."""
        self._update()

    def add_round(self, drafted: int, rows: int, seconds: float) -> None:
        if drafted:
            self._rounds.add(drafted, seconds)
        else:
            self._verified.add(rows - 1, seconds)
        self._update()

    def add_alone(self, place: int, seconds: float) -> None:
        """Take a token alone, the first one after a round at place 1."""
        self._burst.append(seconds)
        if place % BURST == 0:
            self._alone.append(statistics.median_low(self._burst[1 - BURST :]))
            self._burst = []
            self.bursts += 1
            self._update()

    @property
    def alone_median(self) -> float | None:
        return statistics.median_low(self._alone) if self._alone else None

    @property
    def state(self) -> dict[str, float]:
        alone = {"seconds alone": self.alone_median} if self.alone_median else {}
        return self._rounds.state | self._verified.state | alone

    def of_round(self, drafted: float) -> float:
        """C(k), between whole numbers too."""
        low = int(drafted)
        return self.rounds[low] + (drafted - low) * (self.rounds[min(low + 1, MOST_DRAFTED)] - self.rounds[low])

    def _update(self) -> None:
        self.alone = self.alone_median or self._rounds.unit or self._verified.unit or 1.0
        self.rounds, self.verified = (curve.values(self.alone) for curve in (self._rounds, self._verified))


class Agreement:
    """a(m) by the margins of drafted tokens, and a_i by their places: shares of what the top gear accepted.

    The margin m is how much the logit of a drafted token could lose before another token is chosen: the difference from
    the next one, after the noise of a sampler. The low gear's logits are off by an error that is much the same for
    all tokens, and m says whether it may change the choice, the same at every temperature. Before anything is known,
    the error is taken to be normal. A token after one that was rejected says nothing: the draft had left the text.

    Args:
        kept: `state` of an earlier start.
    """

    def __init__(self, kept: Mapping[str, float]):
        self._kept = kept
        names = [*(f"below {margin:g}" for margin in MARGINS), "beyond"]
        self._bins = {name: self._mean(name, USUAL_ERROR.cdf(middle)) for name, middle in zip(names, MIDDLES)}
        self._places = {
            f"place {place}": self._mean(f"place {place}", share) for place, share in enumerate(USUAL_SHARES)
        }
        self._update()

    def _mean(self, name: str, share: float) -> RunningMean:
        share = min(self._kept.get(f"share {name}", share), 1.0)
        return RunningMean(KEPT, share, self._kept.get(f"count {name}", PRIOR_TOKENS))

    def of_margin(self, margin: float) -> float:
        return self._by_margin[bisect.bisect_right(MARGINS, margin)]

    def of_place(self, place: int) -> float:
        """The share at a place in a draft, from 0."""
        return self._by_place[min(place, len(self._by_place) - 1)]

    def add(self, drafted: int, accepted: int, margins: Sequence[float]) -> None:
        means = [*self._bins.values()]
        for margin, right in zip(margins, self._seen(drafted, accepted)):
            means[bisect.bisect_right(MARGINS, margin)].add(right)
        means = [*self._places.values()]
        for place, right in enumerate(self._seen(drafted, accepted)):
            means[min(place, len(means) - 1)].add(right)
        self._update()

    @staticmethod
    def _seen(drafted: int, accepted: int) -> list[bool]:
        return [True] * accepted + [False] * (accepted < drafted)

    @property
    def state(self) -> dict[str, float]:
        means = self._bins | self._places
        shares = {f"share {name}": max(mean.value, LEAST_SHARE) for name, mean in means.items()}
        return shares | {f"count {name}": mean.weight for name, mean in means.items()}

    def _update(self) -> None:
        means = [*self._bins.values()][::-1]
        falling = pool_adjacent_violators([mean.value for mean in means], [mean.weight for mean in means])
        self._by_margin, self._by_place = falling[::-1], [mean.value for mean in self._places.values()]


class Policy:
    """Drafts that are as long as saves time on this machine, and none where none saves any.

    Args:
        kept: `state` of an earlier start.
        draft_share: of a token alone that a drafted one takes, before anything is measured (`draft_share`);
            None: nothing drafts, and the text alone proposes.
        early: whether `goes_on` is asked after each drafted token; else the length alone ends a draft.
    """

    def __init__(self, kept: Mapping[str, float] | None = None, draft_share: float | None = 0.36, early: bool = False):
        kept = kept or {}
        self._early, self._has_drafts = early, draft_share is not None
        self._costs, self._agreement = Costs(kept, draft_share or 0.0), Agreement(kept)
        weight = kept.get("rounds", PRIOR_ROUNDS)
        self._drafted = RunningMean(KEPT_ROUNDS, kept.get("drafted in a round", USUAL_ROUND[0]), weight)
        self._written = RunningMean(KEPT_ROUNDS, kept.get("written in a round", USUAL_ROUND[1]), weight)
        self._since = {True: 0, False: 0}  # tokens since there were rounds, and since the top gear wrote alone
        self._trials = {True: 2, False: 0}  # of rounds, and of tokens alone
        self._stays = 0  # tokens alone, or rounds, that are to come before the next choice
        self._drafts = True  # the present choice
        self._rounds = 0
        self._spent = self._tokens = 0.0

    def length(self, room: int) -> int:
        most = min(room, MOST_DRAFTED)
        if most < 1 or not self._has_drafts:
            return 0
        self._choose()
        if not self._drafts:
            return 0
        self._rounds += 1
        return most if self._early else min(most, self._length())

    def _choose(self) -> None:
        if self._stays > 0:
            self._stays -= 1
            return
        pays = self._in_rounds() < self._costs.alone or self._written.weight < PRIOR_ROUNDS + ENOUGH
        if pays:
            self._trials[True] = 0
        if self._written.weight >= PRIOR_ROUNDS + ENOUGH and self._since[not pays] >= self._wait(pays):
            pays = not pays
            self._trials[pays] += 1
            self._stays = ROUNDS - 1 if pays else 0
        if not pays:
            self._stays = BURST - 1
        self._drafts = pays

    def _wait(self, pays: bool) -> float:
        """Tokens until the other way is tried: as many as make what that loses a small share."""
        rounds, alone = self._in_rounds(), self._costs.alone
        lost = BURST * (alone / rounds - 1) if pays else ROUNDS * self._in_a_round() * (rounds / alone - 1)
        if pays and self._costs.alone_median is None:
            return FIRST_ALONE
        wait = min(max(lost / TRIALS_SHARE, SHORTEST), LONGEST)
        if pays:
            return max(wait * min(1.0, (1 + self._trials[False]) / TRIALS), SHORTEST)
        return min(wait, SHORTEST * 2.0 ** self._trials[True])

    def _in_a_round(self) -> float:
        return self._written.value if self._early else self._expected(self._best())

    def _in_rounds(self) -> float:
        """Seconds of a token in rounds."""
        if self._early:
            return self._costs.of_round(self._drafted.value) / self._written.value
        best = self._best()
        return self._costs.of_round(best) / self._expected(best)

    def _token(self) -> float:
        """Return g."""
        return min(self._in_rounds(), self._costs.alone) if self._has_drafts else self._costs.alone

    def _expected(self, length: int) -> float:
        """T(k)."""
        return 1 + sum(itertools.accumulate(map(self._agreement.of_place, range(length)), float.__mul__))

    def _best(self) -> int:
        return min(range(1, MOST_DRAFTED + 1), key=lambda k: self._costs.of_round(k) / self._expected(k))

    def _length(self) -> int:
        best = self._best()
        if self._rounds % NEIGHBOUR:
            return best
        return max(1, best + (1 if self._rounds % (2 * NEIGHBOUR) else -1))

    def goes_on(self, margins: Sequence[float]) -> bool:
        drafted, costs = len(margins), self._costs
        if self._rounds % NEIGHBOUR == 0 and drafted < self._drafted.value + LONGER:
            return True
        saved = self._token()
        for margin in margins:
            saved *= self._agreement.of_margin(margin)
        gained = 0.0
        for more in range(1, min(AHEAD, MOST_DRAFTED - drafted) + 1):
            saved *= self._agreement.of_place(drafted + more - 1)
            gained += saved
            if gained > costs.rounds[drafted + more] - costs.rounds[drafted]:
                return True
        return False

    def looked_up(self, probabilities: Sequence[float], room: int) -> int:
        token = self._token()
        best, most, written = 0, 0.0, token
        for count, probability in enumerate(probabilities[: max(0, min(room, MOST_DRAFTED))], 1):
            written += token * probability
            if written - self._costs.verified[count] > most:
                best, most = count, written - self._costs.verified[count]
        return best

    def add_round(
        self,
        *,
        drafted: int,
        accepted: int,
        rows: int,
        seconds: float,
        margins: Sequence[float] = (),
    ) -> None:
        self._costs.add_round(drafted, rows, seconds)
        if drafted:
            if seconds < self._expected(drafted) * self._costs.alone:
                self._trials[True] = 0  # this one paid: if it was a trial, the next one comes soon
            self._agreement.add(drafted, accepted, margins)
            self._drafted.add(drafted)
            self._written.add(accepted + 1)
        self._count(True, accepted + 1)
        self._tokens += accepted + 1
        self._spent += seconds

    def add_alone(self, seconds: float) -> None:
        self._count(False, 1)
        self._costs.add_alone(self._since[True], seconds)

    def _count(self, rounds: bool, tokens: int) -> None:
        self._since[rounds] = 0
        self._since[not rounds] += tokens

    @property
    def state(self) -> dict[str, float]:
        """What the next start may begin with: times of passes and shares, all positive."""
        rounds = {"drafted in a round": self._drafted.value, "written in a round": self._written.value}
        rounds["rounds"] = self._written.weight
        return self._costs.state | self._agreement.state | rounds

    @property
    def alone_seconds(self) -> float | None:
        """A token alone as measured in this run, at the speed that the machine had in its rounds; None: too few."""
        if not self._costs.bursts or not self._spent:
            return None
        return self._costs.alone

    @property
    def round_seconds(self) -> float | None:
        """A token in rounds as measured in this run; None where there were too few."""
        return self._spent / self._tokens if self._tokens >= SHORTEST else None
