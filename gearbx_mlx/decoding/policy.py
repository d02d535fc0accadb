"""Choice of the number of tokens to propose: the one whose expected tokens are worth most over their cost.

A round proposes k tokens, and verifies them and the token before them in one forward pass. The unit of time is a round
that proposes nothing, so that whatever slows all passes alike changes nothing.

    C(k) = 1 + c k                 cost of a round, and a step more for each further pass over the weights
    T(k) = 1 + a_1 + ... + a_k     expected tokens of a round; the first i proposals are right with probability a_i
    s                              cost of a token in plain decoding
    g = min(s, C / T)              cost of a token now, in rounds or in plain decoding

A round saves g T(k) - C(k), and the best k is the one that saves most (renewal reward):

- **Proposals with probabilities**, such as those of prompt lookup: k of the largest saving; none if that is negative.
- **Drafts whose margins arrive one by one**: one token more, as long as some further tokens save more than they cost.
  The drafter's logits have a normal error, so a token of margin m is right with a(m) = Phi(m / error). If all tokens
  so far are right with probability P, the next ones are right with P p, P p^2, ...
- **Other drafts**: a_i = p^i, where p is the acceptance rate; this k has the least C / T, which is then g.

**Rounds or plain decoding?** Rounds run as long as C / T, measured, is below s. A trial compares both: a few plain
tokens between rounds, or rounds between plain tokens. It is due once its expected cost is a small share of the tokens
since the last one, so that slow methods are tried rarely, and one that was faster in the latest trial is tried soon.

**What is learned?** c, for drafts and for lookup, from two rounds of different lengths near each other; p; the error,
which a rejected token of high a(m) raises; tokens and cost of a round; and s. The next start begins with these
numbers and makes its own choices. Nothing here knows the drafter, except for c before the first round.

**Regret**: research/tables.md (`python -m research policy-regret`), on whose recordings the constants were measured.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from ..errors import GearbxError
from ..routing.gates import RunningMean

MAX_DRAFTED = 15  # with the token before them 16 vectors, which native kernels take in one pass over the weights
MAX_ROWS = MAX_DRAFTED + 1
MAX_ON_GPU = 4  # with the token before them 5 rows, which MLX multiplies in one tile on an M3 and later (qmv_wide)
DEFAULT_LENGTH = 3  # without measurements: the best fixed length of 4 of 6 recordings, near the best of the others

PLAIN = 0.95  # s before it is measured: 0.81 to 0.96 on the recordings, of which a high one tries drafts first
ROW, STEP = 0.07, 0.35  # cost of a row, and of a further pass over the weights, on processors; a GPU's is lower
ACCEPTANCE, ERROR = 0.85, 0.8  # p and error of 4-bit drafts before any: 0.88 to 0.96, and 0.65, on the recordings
ACCEPTANCE_KEPT, ACCEPTANCE_PRIOR = 0.995, 20.0  # weight kept per token, and tokens of the prior: 0.98, 10 lose 0.6 %
ROUNDS_KEPT, ROUNDS_PRIOR = 0.98, 10.0  # the same per round: a prior of 20 has drafts that lose off twice as late
ERROR_RATE, SLOPE_RATE = 0.08, 0.01  # steps of the error per token, of c per pair of rounds: 0.03 for c loses 0.2 %
MIN_COST, MAX_COST = 0.01, 4.0  # of a token or a row: a slower one is never worth a draft
MAX_ERROR = 50.0  # a(m) is then 0.5 for all m: with 4, margins that are worth nothing lose 9 % in place of 3 %
MAX_SURPRISE = 0.5  # a pass that takes longer than expected by more was a pause of the machine
AHEAD = 4  # tokens: one that does not save alone may lead to some that do

# Of trials, where True stands for rounds between plain tokens, and False for plain tokens between rounds:
TRIAL = {True: 3, False: 4}  # passes, whose median counts: 2 and 6 do as well
TRIAL_LENGTH = 1  # drafted tokens of its rounds: if they cost twice as much as plain ones, the usual length loses 11 %
LATEST = 8  # passes of the other kind, whose median counts
TRUST = 0.5  # weight of the latest trial: single ones are off by 40 % on noisy machines
TRIAL_SHARE = {True: 0.02, False: 0.005}  # of the tokens they may cost: 0.01 for plain ones loses 0.5 % in short starts
TRIAL_WAIT = {
    True: (16, 192),
    False: (64, 1024),
}  # fewest and most tokens before one, which bound what a wrong one costs


def expected_tokens(acceptance: float, most: int) -> list[float]:
    """Return T(0), T(1), ... T(most), if each token is right with the same probability."""
    return list(itertools.accumulate(acceptance**place for place in range(most + 1)))


def within(value: float, minimum: float = MIN_COST, maximum: float = MAX_COST) -> float:
    """Return a value, or the limit that it passes."""
    return min(max(value, minimum), maximum)


class Trials:
    """Comparison of rounds, which generate so many tokens in a unit, with plain decoding, and the choice of one."""

    def __init__(self, kept: Mapping[str, float], tokens: float):
        self.plain = self._latest = within(kept.get("plain token", PLAIN))
        """s."""
        self._is_known = "plain token" in kept  # whether there was a trial
        self._since = kept.get("tokens since a trial", 0.0)
        self._rounds_win = self._runs_rounds = self.plain * tokens > 1
        self._is_trial = False
        self._seconds = {is_round: deque[float](maxlen=LATEST) for is_round in (True, False)}  # of units; plain tokens

    @property
    def state(self) -> dict[str, float]:
        """Return what the next start may begin with."""
        known = {"plain token": self.plain} if self._is_known else {}
        return known | {"tokens since a trial": max(self._since, MIN_COST)}

    @property
    def unit(self) -> float | None:
        """Seconds of a unit now; None before anything is measured."""
        latest = self._seconds[self._runs_rounds]
        return statistics.median(latest) / (1 if self._runs_rounds else self.plain) if latest else None

    def add(self, is_round: bool, tokens: int, seconds: float | None) -> None:
        """Take a pass and the seconds of its unit, or of a plain token; None: they are not to count."""
        self._since += tokens
        if seconds is not None:
            self._seconds[is_round].append(seconds)

    def choose(self, tokens: float, units: float) -> int:
        """Return the most tokens of the next draft, by the tokens and units of a round; 0: plain decoding."""
        runs = self._runs_rounds
        if self._is_trial and len(self._seconds[runs]) < TRIAL[runs]:
            return TRIAL_LENGTH if runs else 0
        if self._is_trial:
            self._latest = statistics.median(self._seconds[False]) / statistics.median(self._seconds[True])
            self.plain = within(self.plain ** (1 - TRUST) * self._latest**TRUST)
            self._is_known, self._since = True, 0
        wins = self.plain * tokens > units
        if wins is not self._rounds_win:
            self._rounds_win, self._since = wins, 0
        is_measured = len(self._seconds[wins]) >= TRIAL[wins]
        self._is_trial = is_measured and self._since >= self._wait(tokens, units)
        self._runs_rounds = wins is not self._is_trial
        if self._runs_rounds is not runs:
            self._seconds[self._runs_rounds].clear()
        return 0 if not self._runs_rounds else TRIAL_LENGTH if self._is_trial else MAX_DRAFTED

    def _wait(self, tokens: float, units: float) -> float:
        """Return the tokens until a trial, by its cost if the latest one was right; the first one of all comes soon."""
        slower = self._latest * tokens / units  # plain decoding than rounds
        cost = TRIAL[False] * (slower - 1) if self._rounds_win else TRIAL[True] * tokens * (1 / slower - 1)
        of_rounds = not self._rounds_win
        least, most = TRIAL_WAIT[of_rounds]
        return within(cost / TRIAL_SHARE[of_rounds], least, most if self._is_known else least)


class LearnedPolicy:
    """Drafts as long as is fastest on this machine, and none if plain decoding is faster.

    Args:
        kept: `state` of an earlier start.
        draft_share: cost of a drafted token over a plain one's, before anything is measured; None: nothing drafts.
        most: tokens of a draft.
        tile: rows that kernels multiply in one pass over the weights.
    """

    def __init__(
        self,
        kept: Mapping[str, float] | None = None,
        draft_share: float | None = 0.36,
        most: int = MAX_DRAFTED,
        tile: int = MAX_ROWS,
    ):
        kept = kept or {}
        self._most, self._tile = 0 if draft_share is None else most, tile
        self._slope = within(kept.get("drafted token", PLAIN * (draft_share or 0.0) + ROW))  # c of drafts
        self._row = within(kept.get("row", ROW))  # c of proposals that need no draft
        acceptance = within(kept.get("acceptance", ACCEPTANCE), maximum=1.0)
        self._acceptance = RunningMean(ACCEPTANCE_KEPT, acceptance, ACCEPTANCE_PRIOR)  # p
        self._error = within(kept.get("error", ERROR), maximum=MAX_ERROR)
        tokens, cost = expected_tokens(ACCEPTANCE, DEFAULT_LENGTH)[-1], self.cost(DEFAULT_LENGTH)
        self._tokens = RunningMean(ROUNDS_KEPT, kept.get("tokens of a round", tokens), ROUNDS_PRIOR)
        self._units = RunningMean(ROUNDS_KEPT, kept.get("cost of a round", cost), ROUNDS_PRIOR)
        self.trials = Trials(kept, self._tokens.value / self._units.value if self._most else 0.0)
        self._before: tuple[int, float] | None = None  # drafted tokens, and seconds of a unit, of the round before
        self._kinds = set[tuple[bool, int]]()  # whether drafted, and rows, of earlier rounds

    @property
    def acceptance(self) -> float:
        """Probability that a drafted token is right."""
        return self._acceptance.value

    @property
    def state(self) -> dict[str, float]:
        """Return what the next start may begin with: costs and rates, all positive."""
        return {
            "drafted token": self._slope,
            "row": self._row,
            "acceptance": max(self.acceptance, MIN_COST),
            "error": self._error,
            "tokens of a round": self._tokens.value,
            "cost of a round": self._units.value,
        } | self.trials.state

    def cost(self, proposed: int, slope: float | None = None) -> float:
        """Return C(k), of a draft if no other c is given."""
        return 1 + (self._slope if slope is None else slope) * proposed + STEP * (proposed // self._tile)

    def best(self, acceptance: float) -> tuple[float, int]:
        """Return the least cost of a token in drafts of one length, and this length."""
        return min((self.cost(k) / tokens, k) for k, tokens in enumerate(expected_tokens(acceptance, self._most)) if k)

    def is_first(self, drafted: int, rows: int) -> bool:
        """Return whether this round is the first of its kind, which may compile kernels and fill caches."""
        return (drafted > 0, rows) not in self._kinds

    def length(self, room: int, early: bool = False) -> int:
        """Return the most tokens of the next draft; 0: plain decoding. Ask once for each.

        Args:
            early: whether `goes_on` is asked after each token of this draft; else the length alone ends it.
        """
        most = min(room, self._most)
        if most < 1:
            return 0
        most = min(most, self.trials.choose(self._tokens.value, self._units.value))
        return most if early else min(most, self.best(self.acceptance)[1])

    def goes_on(self, margins: Sequence[float]) -> bool:
        """Return whether one more token pays after those with these margins, where they are read one by one."""
        drafted, right = len(margins), math.prod(map(self._right, margins))
        following = [right * self.acceptance**n for n in range(1, min(AHEAD, self._most - drafted) + 1)]
        return any(saved > 0 for saved in self._saved(following, self._slope, drafted))

    def lookup_length(self, probabilities: Sequence[float], room: int) -> int:
        """Return how many tokens of a proposal to verify, if the first, the first two, ... are right with these."""
        saved = self._saved(probabilities[: max(0, min(room, MAX_DRAFTED))], self._row)
        plain = 1 - self._token  # a round that proposes nothing costs 1
        return max(range(len(saved) + 1), key=[plain, *saved].__getitem__)

    def add_round(
        self,
        *,
        drafted: int,
        accepted: int,
        rows: int,
        seconds: float | None,
        draft_seconds: float | None = None,
        margins: Sequence[float] = (),
    ) -> None:
        """Take a round. The time of the first one of a kind does not count.

        Args:
            drafted: tokens of the drafter; 0 for prompt lookup.
            accepted: tokens of the proposal.
            rows: of the verification.
            seconds: of draft and verification, without those of a reader of the tokens; None if they are not known.
            draft_seconds: of the draft; for classes that record rounds, since c needs only the sum.
            margins: of the drafted tokens, if their sampler has them.
        """
        cost = self.cost(drafted) if drafted else self.cost(rows - 1, self._row)
        is_timed, unit = seconds is not None and not self.is_first(drafted, rows), (seconds or 0.0) / cost
        self._kinds.add((drafted > 0, rows))
        if not drafted:
            if is_timed and self.trials.unit is not None:
                self._row = self._learned(self._row, rows - 1, unit, self.trials.unit)
            self.trials.add(True, accepted + 1, None)
            return
        self.trials.add(True, accepted + 1, unit if is_timed else None)
        self._tokens.add(accepted + 1)
        self._units.add(cost)
        seen = [True] * accepted + [False] * (accepted < drafted)  # what follows a rejected token says nothing
        for is_right in seen:
            self._acceptance.add(is_right)
        for margin, is_right in zip(margins, seen):
            surprise = self._right(margin) - is_right
            self._error = within(self._error * math.exp(ERROR_RATE * surprise), maximum=MAX_ERROR)
        if is_timed:
            length, before = self._before or (drafted, unit)
            self._slope = self._learned(self._slope, drafted - length, unit, before)
            self._before = drafted, unit

    def add_plain(self, seconds: float) -> None:
        """Take a token of plain decoding."""
        self.trials.add(False, 1, seconds)
        self._before = None

    @staticmethod
    def _learned(slope: float, more: int, unit: float, other: float) -> float:
        """Return c after a round with so many more tokens than another one, by the seconds of a unit in both."""
        return within(slope + SLOPE_RATE * more * within(unit / other - 1, -MAX_SURPRISE, MAX_SURPRISE))

    @property
    def _token(self) -> float:  # g
        return min(self._units.value / self._tokens.value, self.trials.plain) if self._most else self.trials.plain

    def _right(self, margin: float) -> float:  # a(m)
        return 0.5 * math.erfc(-margin / (self._error * math.sqrt(2)))

    def _saved(self, probabilities: Iterable[float], slope: float, begun: int = 0) -> list[float]:
        """Return what 1, 2, ... proposed tokens more save than `begun` ones, if they are right with these."""
        spent, tokens = self.cost(begun, slope), itertools.accumulate(probabilities)
        return [self._token * more - self.cost(begun + n, slope) + spent for n, more in enumerate(tokens, 1)]


class FixedPolicy(LearnedPolicy):
    """Drafts of a fixed length, for which nothing is measured. Raises GearbxError if a verification cannot take it."""

    def __init__(self, length: int = DEFAULT_LENGTH):
        if not 1 <= length <= MAX_DRAFTED:
            raise GearbxError(f"draft length: must be 1 to {MAX_DRAFTED} tokens, got {length}; choose another one")
        super().__init__(draft_share=None)  # prompt lookup is compared with plain decoding
        self._length = length

    def length(self, room: int, early: bool = False) -> int:
        return max(0, min(self._length, room))

    def goes_on(self, margins: Sequence[float]) -> bool:
        return len(margins) < self._length

    def add_round(self, **round: object) -> None: ...
    def add_plain(self, seconds: float) -> None: ...
