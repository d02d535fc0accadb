"""How many tokens to draft before the next verification: as many as save most time here, and none where none saves any.

A round drafts k tokens, and verifies them and the token before them in one pass. It takes C(k) seconds. If the i-th
token is accepted with probability a_i where those before it are, the round writes T(k) = 1 + a_1 + a_1 a_2 + ... +
a_1...a_k tokens. Without a round, the top gear writes a token in s seconds. So a token takes

    g = min(s, min over k of C(k) / T(k)),

and the k of this minimum is best (renewal reward). Where the margin of each drafted token is read at once, a(m) says
more than the place of the token. Of a draft of j tokens, all of which are right with probability P, n more are worth
their time while they save more than they take, by the same theorem:

    P g (a_1 + a_1 a_2 + ... + a_1...a_n)  >  C(j + n) - C(j)      for some n.

A proposal of n tokens that costs no draft is worth g (1 + p_1 + ... + p_n) > w(n), where the first i are right with
probability p_i, and w(n) are the seconds of a round that verifies them.

**What is learned.** A machine is slower at one moment than at the next, by more than drafts gain. But what moves passes
moves them alike, so only times of one moment are compared, as ratios. The unit is what a round takes that proposes
nothing. A round of n proposed tokens takes w(n) = 1 + r n, and a step more for each further pass over the weights that
a kernel needs; r is the slope of a line through the latest rounds (least squares), each over the pace of its
neighbours. C(k) = w(k) + d k, where d is what a drafted token takes: the mean of the latest ratios of two parts of one
round, where drafted tokens are read at once, and else a guess, for which r makes up. s is the ratio of a few tokens
alone to the rounds around them. a(m) and a_i are shares of the latest tokens. What is kept for the next start is these
numbers, and no choice that followed from them.

**What trials cost.** Each way is tried while the other one writes: 8 tokens alone, or three rounds, within 1,024 tokens
of the better way, so that trials lose a per cent of the time or less. The first ones of a start come sooner, since
nothing is known of this moment: drafts are tried after 32 tokens alone, then after 64, 128, and so on; and the top gear
alone after 256 in rounds each, until there were three comparisons. Before the first one of all, rounds run unless they
are expected to lose much. A wrong comparison is outvoted by the next two, and by the usual ratio, which counts as much
as two of the latest five. These five are kept, and not what follows from them.

**Expected regret.** A per cent of the time, and what the first rounds cost until their times are known. What it is on
recorded passes, with another process beside them, is in research/tables.md (`python -m research policy-regret`).
"""

import bisect
import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from ..errors import GearbxError
from ..routing.lookup import RunningMean

MOST_DRAFTED = 15  # with the token before them 16 vectors, which native kernels take in one pass over the weights
MOST_ROWS = MOST_DRAFTED + 1
MOST_ON_GPU = 4  # with the token before them 5 rows, which MLX multiplies in one tile on an M3 and later (qmv_wide)
USUAL_LENGTH = 3  # of drafts where nothing may be measured: not the best anywhere, and seldom far from it

# Before they are measured, in rounds that propose nothing, as on processors: a token alone, and what a row more takes.
# On a GPU it takes less, so that longer drafts are tried there too (docs/performance.md).
ALONE, ROW = 0.95, 0.07
STEP = 0.35  # what a further pass over the weights adds, where a kernel needs one for more rows
FIXED_SHARE = 0.15  # of a pass does not depend on the bits of the gear: attention, norms, the host

MARGINS = (0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # between the bins of a(m)
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise((0.0, *MARGINS, 10.0))]
USUAL_ERROR = NormalDist(0.0, 0.8)  # of the difference between two logits in a low gear; SmolLM2's of 4 bits has 0.65
USUAL_SHARES = (0.7, 0.75, 0.8)  # accepted at the first, second and any later place: what follows an easy token is easy
USUAL_ROUND = 3, 2.6  # tokens drafted and written in a round, where margins end it

# Of the weight of earlier values at each further one; and values that an earlier start's or a guess counts for.
SHARES_KEPT, PRIOR_TOKENS = 0.997, 8.0
ROUNDS_KEPT, PRIOR_ROUNDS = 0.98, 12.0
DRAFTS_KEPT, PRIOR_DRAFTS = 0.98, 8.0
LINE_KEPT, PRIOR_LINE = 0.995, 16.0
PRIOR_POINTS = (0, 4, 8, 12)  # proposed tokens of the rounds that an earlier start's line stands for
LEAST_SHARE = 1e-6

PASS, ROUND = "seconds of a pass", "seconds of a round"  # in what is kept
DRAFTED, PROPOSED = "seconds of a drafted token", "seconds of a proposed token"  # d, and r
OUTSIDE = 1.5  # times what is expected, and a part of it: what is further away counts as this
MOST_ROUND = 30.0  # passes: what takes longer was a pause of the machine
MOST_RATIO = 4.0  # of a token or a row to a pass: nothing is drafted by what is slower than that

NEAR, PACED = 48, 4  # tokens, and rounds, around tokens alone that these are compared with
COMPARED, PRIOR_COMPARED = 5, 2  # comparisons whose median counts, with those of earlier starts; as many is a guess
KEPT_ALONE = [f"comparison {n}" for n in range(COMPARED)]
BURST, TRIAL = 8, 3  # tokens alone of a trial, of which the first begins to run ahead and does not count; rounds of one
GUESS = 1.3  # times a token alone, below which rounds run before any comparison
SHORTEST, LONGEST = 32, 1024  # tokens between two trials
KNOWN, EARLY = 3, 256  # comparisons of a start before which trials are due sooner: after so many tokens in rounds
NEIGHBOUR = 8  # rounds between two that draft one token more or less, where margins come too late
AHEAD = 4  # tokens that are looked ahead: a token that does not pay alone may lead to some that do


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


class FixedPolicy:
    """Drafts of always the same length, for which nothing is measured. Its methods are those of LearnedPolicy.

    Raises:
        GearbxError: a length that a verification cannot take.
    """

    alone_seconds = round_seconds = None

    def __init__(self, length: int = USUAL_LENGTH):
        if not 1 <= length <= MOST_DRAFTED:
            raise GearbxError(f"draft length is {length}; give 1 to {MOST_DRAFTED} tokens")
        self._length, self._usual = length, LearnedPolicy()
        self.state: dict[str, float] = {}

    def length(self, room: int, early: bool = False) -> int:
        return max(0, min(self._length, room))

    def goes_on(self, margins: Sequence[float]) -> bool:
        return len(margins) < self._length

    def looked_up(self, probabilities: Sequence[float], room: int) -> int:
        """Return how many are worth a verification at usual costs."""
        return self._usual.looked_up(probabilities, room)

    def gain(self, mended: float) -> None: ...
    def add_round(self, **round: object) -> None: ...
    def add_plain(self, seconds: float) -> None: ...


def kept_ratio(kept: Mapping[str, float], name: str, usual: float, most: float = MOST_RATIO) -> float:
    """Return a time that an earlier start kept, over its pass; `usual` where it kept none."""
    return min(kept[name] / kept[PASS] if {name, PASS} <= kept.keys() else usual, most)


def within(value: float, expected: float) -> float:
    """Return a ratio, or the limit where it is far from what is expected: the machine paused."""
    return min(max(value, expected / OUTSIDE), expected * OUTSIDE)


class Line:
    """w(n) = 1 + r n + steps: what a round takes that proposes n tokens, in rounds that propose nothing.

    Args:
        row: r, before anything is measured.
        tile: rows that a kernel multiplies in one pass over the weights.
    """

    def __init__(self, row: float, tile: int = MOST_ROWS):
        self.row, self._tile = row, tile
        points = zip(*(self._products(n, 1 + row * n) for n in PRIOR_POINTS))
        self._usual = [PRIOR_LINE * statistics.mean(values) for values in points]
        self._found = [0.0] * len(self._usual)

    def __call__(self, proposed: int) -> float:
        return 1 + self.row * proposed + self._steps(proposed)

    def _steps(self, proposed: int) -> float:
        return STEP * (proposed // self._tile)

    @staticmethod
    def _products(n: float, time: float) -> tuple[float, float, float, float, float]:
        return 1.0, n, n * n, time, n * time

    def add(self, proposed: int, ratio: float) -> None:
        """Take what a round took over the pace. Only r is learned: how high the line is depends on the unit alone."""
        time = within(ratio, self(proposed)) - self._steps(proposed)
        self._found = [LINE_KEPT * before + new for before, new in zip(self._found, self._products(proposed, time))]
        count, n, nn, y, ny = map(float.__add__, self._usual, self._found)
        slope = (count * ny - n * y) / (count * nn - n * n)
        height = (y - slope * n) / count
        if height > 0:
            self.row = min(max(slope / height, LEAST_SHARE), MOST_RATIO)


class Comparisons:
    """s, from tokens alone and the rounds around them; and the pace: seconds of a round that proposes nothing, now.

    Args:
        kept: `state` of an earlier start.
    """

    def __init__(self, kept: Mapping[str, float]):
        self._found: deque[float] = deque((kept[name] for name in KEPT_ALONE if name in kept), maxlen=COMPARED)
        self._rounds: deque[tuple[int, float]] = deque(maxlen=PACED)  # when, and the pace
        self._alone: deque[float] = deque(maxlen=2 * BURST)
        self._is_compared = True  # these tokens alone
        self._after = 0  # rounds since tokens alone
        self._token = 0
        self.seen = 0
        """Comparisons in this start."""

    @property
    def value(self) -> float:
        """s, which is taken to be as usual before it is compared."""
        return statistics.median([*self._found, *[ALONE] * PRIOR_COMPARED])

    @property
    def measured(self) -> float:
        """The same by what this start compared alone, once it has compared something."""
        return statistics.median([*self._found][-self.seen :])

    @property
    def doubt(self) -> float:
        """Return how many times a token alone one in rounds may seem to take, and rounds still run."""
        return 1.0 if self._found else GUESS

    @property
    def of_rounds(self) -> float | None:
        """The pace of the latest rounds, if there were some lately."""
        near = [pace for when, pace in self._rounds if self._token - when <= NEAR]
        return statistics.median(near) if near else None

    @property
    def pace(self) -> float | None:
        """The pace of this moment, by rounds or by tokens alone; None where nothing is known of it."""
        if self.of_rounds is not None or not self._alone:
            return self.of_rounds
        return statistics.mean(self._alone) / self.value

    @property
    def state(self) -> dict[str, float]:
        return dict(zip(KEPT_ALONE, self._found))

    def add_round(self, tokens: int, pace: float) -> None:
        self._token += tokens
        self._rounds.append((self._token, pace))
        self._after += 1
        if self._after == TRIAL:
            self._compare()

    def add_plain(self, seconds: float) -> None:
        self._token += 1
        if self._after:  # the first one begins to run ahead
            self._compare()
            self._alone.clear()
            self._is_compared, self._after = False, 0
        else:
            self._alone.append(seconds)

    def _compare(self) -> None:
        """Compare the latest tokens alone with rounds before and after them, once."""
        pace = self.of_rounds
        if pace and not self._is_compared and len(self._alone) >= BURST - 1:
            self._found.append(statistics.mean(self._alone) / pace)
            self._is_compared = True
            self.seen += 1


class Acceptance:
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
        return RunningMean(SHARES_KEPT, share, self._kept.get(f"count {name}", PRIOR_TOKENS))

    def of_margin(self, margin: float) -> float:
        return self._by_margin[bisect.bisect_right(MARGINS, margin)]

    def of_place(self, place: int) -> float:
        """Return the share at a place in a draft, from 0."""
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


class LearnedPolicy:
    """Drafts that are as long as saves time on this machine, and none where none saves any.

    Args:
        kept: `state` of an earlier start.
        draft_share: of a token alone that a drafted one takes, before anything is measured (`draft_share`); None:
            nothing drafts, and the text alone proposes tokens.
        most: of the tokens of a draft.
        tile: rows that kernels multiply in one pass over the weights.
    """

    def __init__(
        self,
        kept: Mapping[str, float] | None = None,
        draft_share: float | None = 0.36,
        most: int = MOST_DRAFTED,
        tile: int = MOST_ROWS,
    ):
        kept = kept or {}
        self._most = most
        self._has_drafter = draft_share is not None
        share = (draft_share or LEAST_SHARE) * ALONE
        self._drafted_token = RunningMean(DRAFTS_KEPT, kept_ratio(kept, DRAFTED, share), PRIOR_DRAFTS)  # d
        self._verification = Line(kept_ratio(kept, PROPOSED, ROW), tile)  # w
        self._alone = Comparisons(kept)
        self._acceptance = Acceptance(kept)
        drafted, written = USUAL_ROUND
        self._taken = RunningMean(ROUNDS_KEPT, kept_ratio(kept, ROUND, self._round(drafted), MOST_ROUND), PRIOR_ROUNDS)
        self._written = RunningMean(ROUNDS_KEPT, kept.get("written in a round", written), PRIOR_ROUNDS)
        self._since = {True: 0, False: 0}  # tokens since there were rounds, and since the top gear wrote alone
        self._trials = 0  # of drafts
        self._stays = 0  # tokens alone, or rounds, that are to come before the next choice
        self._drafts, self._rounds = True, 0
        self._begun = set[tuple[bool, int]]()  # kinds of rounds that there were
        self._spent = self._units = 0.0  # seconds of rounds, and what their line says
        self._tokens = 0

    def length(self, room: int, early: bool = False) -> int:
        """Return the most tokens of the next draft; 0: the top gear writes a token alone. Ask once for each.

        Args:
            early: whether `goes_on` is asked after each token of this draft; else the length alone ends it.
        """
        most = min(room, self._most)
        if most < 1 or not self._has_drafter:
            return 0
        self._choose()
        if not self._drafts:
            return 0
        return most if early else min(most, self._length())

    def _choose(self) -> None:
        """Go on with the faster way, or with a trial of the other one where it is due."""
        if self._stays > 0:
            self._stays -= 1
            return
        pays = self._in_rounds() < self._alone.value * self._alone.doubt
        self._drafts = pays
        if self._since[not pays] >= self._wait(pays):
            self._drafts = not pays
            self._trials += self._drafts
            self._stays = (TRIAL if self._drafts else BURST) - 1

    def _wait(self, pays: bool) -> int:
        """Return tokens until the other way is tried, next to which a trial is short."""
        if pays:
            return EARLY if self._alone.seen < KNOWN else LONGEST
        return min(SHORTEST * 2**self._trials, LONGEST)

    def _round(self, drafted: int) -> float:
        """C(k)."""
        return self._verification(drafted) + self._drafted_token.value * drafted

    def _in_rounds(self) -> float:
        """Return what a token takes in rounds."""
        return self._taken.value / self._written.value if self._has_drafter else math.inf

    def _expected(self, length: int, mended: float = 0.0) -> float:
        """Return T(k). mended: the share of rejected tokens that would be accepted."""
        shares = map(self._acceptance.of_place, range(length))
        return 1 + sum(itertools.accumulate((share + mended * (1 - share) for share in shares), float.__mul__))

    def _best(self) -> int:
        return min(range(1, self._most + 1), key=lambda k: self._round(k) / self._expected(k))

    def _length(self) -> int:
        """Return the best length, and now and then its neighbours, without which w(n) would stay a guess."""
        self._rounds += 1
        if self._rounds % NEIGHBOUR:
            return self._best()
        return max(1, self._best() + (1 if self._rounds % (2 * NEIGHBOUR) else -1))

    def goes_on(self, margins: Sequence[float]) -> bool:
        """Return whether one more token pays after those with these margins, where they are read one by one."""
        drafted, saved = len(margins), min(self._in_rounds(), self._alone.value)
        for margin in margins:
            saved *= self._acceptance.of_margin(margin)
        gained, taken = 0.0, self._round(drafted)
        for more in range(1, min(AHEAD, self._most - drafted) + 1):
            saved *= self._acceptance.of_place(drafted + more - 1)
            gained += saved
            if gained > self._round(drafted + more) - taken:
                return True
        return False

    def looked_up(self, probabilities: Sequence[float], room: int) -> int:
        """Return how many tokens of a proposal to verify, if the first, the first two, ... are right with these."""
        token = min(self._in_rounds(), self._alone.value)
        best, most, written = 0, 0.0, token
        for count, probability in enumerate(probabilities[: max(0, min(room, MOST_DRAFTED))], 1):
            written += token * probability
            if written - self._verification(count) > most:
                best, most = count, written - self._verification(count)
        return best

    def add_round(
        self,
        *,
        drafted: int,
        accepted: int,
        rows: int,
        seconds: float,
        draft_seconds: float | None = None,
        margins: Sequence[float] = (),
    ) -> None:
        """Take a round. The first one of a kind may compile kernels and fill caches: then its time does not count.

        Args:
            drafted: tokens of the low gear; 0 where the text proposed.
            accepted: of those that were verified.
            rows: of the verification.
            seconds: of all of it, without what a reader of the tokens took.
            draft_seconds: of these, until the last drafted token was read; None where it was not.
            margins: of the drafted tokens, if their sampler tells them.
        """
        if drafted:
            self._acceptance.add(drafted, accepted, margins)
            self._since[True] = 0
        self._since[not self._drafts] += accepted + 1
        proposed, now = rows - 1, self._alone.pace
        usual = self._verification(proposed)
        if draft_seconds is None:
            pace = seconds / (usual + self._drafted_token.value * drafted)
            passes = seconds - self._drafted_token.value * drafted * (now or pace)
        else:
            passes = seconds - draft_seconds
            pace = passes / usual
        kind = drafted > 0, rows
        is_first = kind not in self._begun
        self._begun.add(kind)
        if is_first and (now is None or pace > OUTSIDE * now):
            return
        if now is not None:
            self._verification.add(proposed, passes / now)
        if draft_seconds is not None:
            self._drafted_token.add(within(draft_seconds / drafted / pace, self._drafted_token.value))
        if drafted:
            self._taken.add(min(seconds / (now or pace), MOST_ROUND))
            self._written.add(accepted + 1)
        if drafted or not self._has_drafter:
            self._alone.add_round(accepted + 1, pace)
        self._spent += seconds
        self._units += seconds / pace
        self._tokens += accepted + 1

    def add_plain(self, seconds: float) -> None:
        """Take a token of the top gear alone."""
        self._alone.add_plain(seconds)
        self._since[False] = 0
        self._since[not self._drafts] += 1

    @property
    def state(self) -> dict[str, float]:
        """Return what the next start may begin with: times and shares, all positive."""
        found = self._acceptance.state
        found |= {"written in a round": self._written.value}
        pace = self._alone.pace
        if pace is not None:
            found |= {PASS: pace, ROUND: self._taken.value * pace} | self._alone.state
            found |= {DRAFTED: self._drafted_token.value * pace, PROPOSED: self._verification.row * pace}
        return found

    @property
    def alone_seconds(self) -> float | None:
        """A token alone as compared in this run with rounds around it, at their mean pace; None: too few were."""
        if self._alone.seen < KNOWN or self.round_seconds is None:
            return None
        return self._alone.measured * self._spent / self._units

    @property
    def round_seconds(self) -> float | None:
        """A token in rounds as measured in this run; None where there were too few."""
        return self._spent / self._tokens if self._tokens >= SHORTEST else None

    def gain(self, mended: float) -> float | None:
        """Return how many times as fast a token would be if this share of the rejected drafts were accepted.

        None where this run has seen too few rounds for an estimate.
        """
        if self.round_seconds is None:
            return None
        return min(self._least(0.0), self._alone.value) / self._least(mended)

    def _least(self, mended: float) -> float:
        """Return what a token takes in drafts of the best length, if this share of the rejected ones were accepted."""
        return min(self._round(k) / self._expected(k, mended) for k in range(1, self._most + 1))


DraftPolicy = FixedPolicy | LearnedPolicy
