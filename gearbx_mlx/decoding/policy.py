"""Choice of the number of tokens to propose: the number that saves most time.

A round proposes k tokens, and verifies them and the token before them in one forward pass. The unit of time is C(0), a
round's time extrapolated to no proposed tokens, so a uniform slowdown changes nothing.

    C(k) = 1 + c k                 cost of a round; each additional pass over the weights adds a step
    T(k) = 1 + a_1 + ... + a_k     expected tokens of a round; the first i proposed tokens are accepted with prob. a_i
    s                              cost of a token in plain decoding
    g = min(s, C / T)              cost of a token now, in rounds or in plain decoding

A round saves g T(k) - C(k), and the best k is the one that saves most (renewal reward):

- **Proposals with probabilities**, such as prompt lookup's: k of the largest saving; none if it is negative.
- **Drafts whose margins are known token by token**: continue while any number of further tokens saves time. The
  drafter's logits have a normal error, so a token of margin m is accepted with a(m) = Phi(m / error). If all tokens so
  far are accepted with probability P, the next ones are accepted with P p, P p^2, ...
- **Other drafts**: a_i = p^i, where p is the acceptance rate; the best k has the least C / T.

**Rounds or plain decoding.** Rounds run while the measured C / T is below s. A trial runs a few passes of the slower
method. It is due once its expected loss is a small share of the time since the previous one: a method that is much
slower is tried rarely, and one that was faster in the latest trial is tried soon.

**Drafters.** A sequence drafts with the drafter of least C / T / s; before measurements, p depends on the drafter.

**Learned values**: c of drafts, from two rounds of different lengths; c of lookup, from a round and the median unit of
the latest passes; p; the error, from how far a(m) was off; tokens and cost of a round; s. The next start reads these
numbers and makes its own choices. Regret is in research/tables.md (`python -m research policy-regret`).
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from ..errors import GearbxError
from ..routing.gates import RunningMean

MAX_DRAFTED = 15  # with the previous token 16 vectors: native kernels take them in one pass over the weights
MAX_ROWS = MAX_DRAFTED + 1
MAX_ON_GPU = 4  # with the previous token 5 rows: MLX multiplies them in one tile on an M3 and later (qmv_wide)
# Comments below name recordings: times and margins of real runs, which `research policy-regret` replays.
DEFAULT_LENGTH = 3  # without measurements: the best fixed length of 4 of 6 recordings, near the best of the others

PLAIN = 0.95  # s before it is measured: 0.81 to 0.96 on the recordings; a high value tries drafts first
ROW, STEP = 0.07, 0.35  # cost of a row, and of an additional pass over the weights, on CPUs; a GPU's is lower
ACCEPTANCE, ERROR = 0.85, 0.8  # initial p and error of 4-bit drafts: 0.88 to 0.96, and 0.65, on the recordings
ACCEPTANCE_KEPT, ACCEPTANCE_PRIOR = 0.995, 20.0  # weight kept per token, tokens of the prior; 0.98, 10: 0.6% slower
ROUNDS_KEPT, ROUNDS_PRIOR = 0.98, 10.0  # per round; a prior of 20 turns slow drafts off twice as late
ROWS_PRIOR = 4.0  # weight of lookup's initial c, in rounds; small, as some kernels need a pass for each row
ERROR_RATE, SLOPE_RATE = 0.08, 0.01  # steps of the error per token, of c per pair of rounds; 0.03 for c: 0.2% slower
MIN_COST, MAX_COST = 0.01, 4.0  # limits of learned numbers: drafts above the maximum are never faster
MAX_ERROR = 50.0  # a(m) is then 0.5 for all m; with 4, uninformative margins cost 9% instead of 3%
MAX_SURPRISE = 0.5  # more than 50% slower than expected: the pass includes a pause of the machine
AHEAD = 4  # tokens: a token that saves nothing may lead to tokens that do

# Trials. Keys: is_round, True for rounds between plain tokens, False for plain tokens between rounds.
TRIAL = {True: 3, False: 4}  # passes, whose median counts; 2 and 6 are equally good
TRIAL_LENGTH = 1  # drafted tokens of a trial round; more are 11% slower if drafts cost twice a plain token
LATEST = 8  # passes of each method; their medians are compared
TRUST = 0.5  # weight of the latest trial: single trials are off by 40% on noisy machines
TRIAL_SHARE = {True: 0.02, False: 0.005}  # maximum cost per token since the last trial; 0.01 for False: 0.5% slower
TRIAL_WAIT = {True: (16, 192), False: (64, 1024)}  # minimum and maximum tokens between trials


def expected_tokens(acceptance: float, most: int) -> list[float]:
    """Return T(0), T(1), ... T(most), if all tokens have the same acceptance rate."""
    return list(itertools.accumulate(acceptance**place for place in range(most + 1)))


def within(value: float, minimum: float = MIN_COST, maximum: float = MAX_COST) -> float:
    """Return a value clipped to its limits."""
    return min(max(value, minimum), maximum)


def surprise(unit: float, other: float) -> float:
    """Return by how much more a unit took than another one, as a share; a pause counts as `MAX_SURPRISE`."""
    return within(unit / other - 1, -MAX_SURPRISE, MAX_SURPRISE)


class Trials:
    """Choice of rounds or plain decoding. tokens: expected per unit in rounds."""

    def __init__(self, kept: Mapping[str, float], tokens: float):
        self.plain = self._latest = within(kept.get("plain token", PLAIN if tokens else 1.0))  # s; 1 without a drafter
        self._is_known = "plain token" in kept  # a trial has measured s
        self._since = kept.get("tokens since a trial", 0.0)
        self._rounds_win = self._runs_rounds = self.plain * tokens > 1
        self._is_trial = False
        self._seconds = {is_round: deque[float](maxlen=LATEST) for is_round in (True, False)}  # per unit; per token

    @property
    def state(self) -> dict[str, float]:
        """Measurements for the next start."""
        known = {"plain token": self.plain} if self._is_known else {}
        return known | {"tokens since a trial": max(self._since, MIN_COST)}

    @property
    def unit(self) -> float | None:
        """Seconds of a unit now; None before a measurement."""
        latest = self._seconds[self._runs_rounds]
        return statistics.median(latest) / (1 if self._runs_rounds else self.plain) if latest else None

    def add(self, is_round: bool, tokens: int, seconds: float | None) -> None:
        """Take a pass and the seconds of its unit, or of a plain token; None: they do not count."""
        self._since += tokens
        if seconds is not None:
            self._seconds[is_round].append(seconds)

    def choose(self, tokens: float, units: float) -> int:
        """Return the most tokens of the next draft, from the tokens and units of a round; 0: plain decoding."""
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
        self._runs_rounds = wins is not self._is_trial  # a trial runs the slower method
        if self._runs_rounds is not runs:
            self._seconds[self._runs_rounds].clear()
        return 0 if not self._runs_rounds else TRIAL_LENGTH if self._is_trial else MAX_DRAFTED

    def _wait(self, tokens: float, units: float) -> float:
        """Return the tokens until a trial, from its cost by the latest trial; the very first trial comes soon."""
        slower = self._latest * tokens / units  # time of plain decoding over the time of rounds
        cost = TRIAL[False] * (slower - 1) if self._rounds_win else TRIAL[True] * tokens * (1 / slower - 1)
        of_rounds = not self._rounds_win
        least, most = TRIAL_WAIT[of_rounds]
        return within(cost / TRIAL_SHARE[of_rounds], least, most if self._is_known else least)


class LearnedPolicy:
    """Draft lengths that are fastest on this machine; 0 if plain decoding is faster.

    Args:
        kept: `state` of an earlier start.
        draft_share: cost of a drafted token over a plain one's, before measurements; None: no drafter.
        most: tokens of a draft.
        tile: rows that kernels multiply in one pass over the weights.
        acceptance: p before measurements.
    """

    def __init__(
        self,
        kept: Mapping[str, float] | None = None,
        draft_share: float | None = 0.36,
        most: int = MAX_DRAFTED,
        tile: int = MAX_ROWS,
        acceptance: float = ACCEPTANCE,
    ):
        kept = kept or {}
        self._most, self._tile = 0 if draft_share is None else most, tile
        self._slope = within(kept.get("drafted token", PLAIN * (draft_share or 0.0) + ROW))  # c of drafts
        self._row = RunningMean(ROUNDS_KEPT, within(kept.get("row", ROW)), ROWS_PRIOR)  # c of lookup
        known = within(kept.get("acceptance", acceptance), maximum=1.0)
        self._acceptance = RunningMean(ACCEPTANCE_KEPT, known, ACCEPTANCE_PRIOR)  # p
        self._error = within(kept.get("error", ERROR), maximum=MAX_ERROR)
        tokens, cost = expected_tokens(acceptance, DEFAULT_LENGTH)[-1], self.cost(DEFAULT_LENGTH)
        self._tokens = RunningMean(ROUNDS_KEPT, kept.get("tokens of a round", tokens), ROUNDS_PRIOR)
        self._units = RunningMean(ROUNDS_KEPT, kept.get("cost of a round", cost), ROUNDS_PRIOR)
        self.trials = Trials(kept, self._tokens.value / self._units.value if self._most else 0.0)
        self._before: tuple[int, float] | None = None  # drafted tokens, and seconds of a unit, of the previous round
        self._kinds = set[tuple[bool, int]]()  # (is drafted, rows) of earlier rounds

    @property
    def acceptance(self) -> float:
        """Acceptance rate of drafted tokens."""
        return self._acceptance.value

    @property
    def token_cost(self) -> float:
        """Time per token of rounds, divided by the time of a plain token."""
        return self._units.value / self._tokens.value / self.trials.plain if self._most else 1.0

    @property
    def state(self) -> dict[str, float]:
        """Costs and rates for the next start, all positive."""
        return {
            "drafted token": self._slope,
            "row": within(self._row.value),
            "acceptance": max(self.acceptance, MIN_COST),
            "error": self._error,
            "tokens of a round": self._tokens.value,
            "cost of a round": self._units.value,
        } | self.trials.state

    def cost(self, proposed: int, slope: float | None = None) -> float:
        """Return C(k); slope: c; None: c of drafts."""
        return 1 + (self._slope if slope is None else slope) * proposed + STEP * (proposed // self._tile)

    def best(self, acceptance: float) -> tuple[float, int]:
        """Return the least C(k) / T(k) if all drafts have the same length k, and this k."""
        return min((self.cost(k) / tokens, k) for k, tokens in enumerate(expected_tokens(acceptance, self._most)) if k)

    def is_first(self, drafted: int, rows: int) -> bool:
        """Return whether this round is the first of its kind; it may compile kernels and fill caches."""
        return (drafted > 0, rows) not in self._kinds

    def length(self, room: int, early: bool = False) -> int:
        """Return the most tokens of the next draft, 0: plain decoding; early: `goes_on` may end it sooner."""
        if min(room, self._most) < 1:
            return 0
        most = min(room, self._most, self.trials.choose(self._tokens.value, self._units.value))
        return most if early else min(most, self.best(self.acceptance)[1])

    def goes_on(self, margins: Sequence[float]) -> bool:
        """Return whether one or a few more tokens save time after drafted tokens with these margins."""
        drafted, right = len(margins), math.prod(map(self._right, margins))
        following = [right * self.acceptance**n for n in range(1, min(AHEAD, self._most - drafted) + 1)]
        return any(saved > 0 for saved in self._saved(following, self._slope, drafted))

    def lookup_length(self, probabilities: Sequence[float]) -> int:
        """Return how many tokens of a proposal to verify; probabilities: that the first 1, 2, ... are accepted."""
        saved = [1 - self._token, *self._saved(probabilities, self._row.value)]  # first: no proposal
        return saved.index(max(saved))

    def add_round(
        self,
        *,
        drafted: int,
        accepted: int,
        tokens: int,
        rows: int,
        seconds: float | None,
        margins: Sequence[float] = (),
    ) -> None:
        """Take a round. The time of the first round of a kind does not count.

        Args:
            drafted: tokens of the drafter; 0 for prompt lookup.
            accepted: tokens of the proposal.
            tokens: that the round generated: the accepted ones and one more, unless these ended the sequence.
            rows: of the verification.
            seconds: of draft and verification, without the time of the tokens' consumer; None if unknown.
            margins: of the drafted tokens, if their sampler has them.
        """
        cost = self.cost(drafted) if drafted else self.cost(rows - 1, self._row.value)
        is_timed = seconds is not None and not self.is_first(drafted, rows)
        unit = (seconds or 0.0) / cost
        self._kinds.add((drafted > 0, rows))
        if not drafted:
            if is_timed and self.trials.unit is not None:
                self._row.add((cost * (1 + surprise(unit, self.trials.unit)) - 1) / (rows - 1))
            self.trials.add(True, tokens, None)
            return
        self.trials.add(True, tokens, unit if is_timed else None)
        self._tokens.add(tokens)
        self._units.add(cost)
        # Tokens after a rejected one, or after the end of the sequence, carry no information.
        outcomes = [True] * accepted + [False] * (accepted < min(drafted, tokens))
        for is_right in outcomes:
            self._acceptance.add(is_right)
        for margin, is_right in zip(margins, outcomes):
            step = ERROR_RATE * (self._right(margin) - is_right)
            self._error = within(self._error * math.exp(step), maximum=MAX_ERROR)
        if is_timed:
            length, before = self._before or (drafted, unit)
            self._slope = within(self._slope + SLOPE_RATE * (drafted - length) * surprise(unit, before))
            self._before = drafted, unit

    def add_plain(self, seconds: float) -> None:
        """Take a token of plain decoding."""
        self.trials.add(False, 1, seconds)
        self._before = None

    @property
    def _token(self) -> float:  # g
        return self.trials.plain * min(self.token_cost, 1.0)

    def _right(self, margin: float) -> float:  # a(m)
        return 0.5 * math.erfc(-margin / (self._error * math.sqrt(2)))

    def _saved(self, probabilities: Iterable[float], slope: float, proposed: int = 0) -> list[float]:
        """Return the savings of 1, 2, ... tokens after `proposed` ones, from their cumulative acceptance rates."""
        token, spent, tokens = self._token, self.cost(proposed, slope), itertools.accumulate(probabilities)
        return [token * more - self.cost(proposed + n, slope) + spent for n, more in enumerate(tokens, 1)]


class FixedPolicy(LearnedPolicy):
    """Drafts of a fixed length, without measurements. Raises GearbxError if a verification cannot take them."""

    def __init__(self, length: int = DEFAULT_LENGTH, draft_share: float | None = None):
        if not 1 <= length <= MAX_DRAFTED:
            raise GearbxError(f"draft length: must be 1 to {MAX_DRAFTED} tokens, got {length}; choose a valid one")
        super().__init__(draft_share=draft_share)
        self._length = length

    def length(self, room: int, early: bool = False) -> int:
        return max(0, min(self._length, room))

    def goes_on(self, margins: Sequence[float]) -> bool:
        return len(margins) < self._length

    def add_round(self, **round: object) -> None: ...
    def add_plain(self, seconds: float) -> None: ...
