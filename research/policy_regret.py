"""Regret of the draft policy of mode lossless against the best choice in hindsight, on recorded passes and margins.

`record_rounds` records a model on a machine: the low gear's drafts and margins at every token of the top gear's output,
and the number of accepted tokens; and the times of rounds and of plain tokens in their order, so that noise keeps its
correlation. `policy_regret` replays many starts on such recordings, and special cases: slow drafts, short starts,
noise.
"""

import bisect
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from rich.progress import track

from gearbx_mlx import Gearbox, load
from gearbx_mlx.decoding.caches import in_common
from gearbx_mlx.decoding.drafters import DraftTarget
from gearbx_mlx.decoding.drafters.lookup import Lookup
from gearbx_mlx.decoding.drafters.low_gear import LowGear, draft_cost
from gearbx_mlx.decoding.loop import decode
from gearbx_mlx.decoding.plan import DecodePlan, DecodeState, Keywords
from gearbx_mlx.decoding.policy import FixedPolicy, LearnedPolicy
from gearbx_mlx.decoding.response import GeneratedText
from gearbx_mlx.decoding.rows import Proposal, Verification, Verifier
from gearbx_mlx.decoding.sampling import GREEDY, reader_of
from gearbx_mlx.files.writing import write_text
from gearbx_mlx.kernels.compiler import vectors_at_once
from gearbx_mlx.routing.ngrams import NgramTable

from .lossless import ASSISTANT, first_prompts
from .studies import DATA, HELD_OUT, Found, study, table_here

RECORDED = DATA / "rounds"
MOST = 15  # drafted tokens: with the one before them as many rows as a verification takes
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 15)  # of drafts in a recording; others take what lies between
QUIET, NOISY, AVX2 = "-quiet", "-noisy", "-avx2"  # what the names of recordings end with
SETTLED = 32  # events at the beginning of a recording that are left out
AROUND = 3  # rounds of a length before and after one, whose mean is what such a round takes
FIRST_PASS = 3.0  # times as long as usual, as the policy sees it: kernels are compiled, caches filled
CHAIN = 4  # starts, each of which begins with what the one before kept
TEXTS = 2  # of a start
TOKENS = 112  # of a text
PLAIN = 5  # plain tokens between two rounds that count, after one with which running ahead begins
SEEDS = 3  # times that a case is played on each recording
OFF = 16  # plain tokens in a row, after which drafts are off
STEP_SIZE = 256  # tokens of a step of a(m)
OWN_TEXTS = DATA / "own_texts.jsonl"


class Machine:
    """A model in two gears, and a text that is written with it."""

    def __init__(self, model: str | None, gears: str):
        loaded, self.tokenizer = load(model)
        self.gearbox = Gearbox(loaded, gears)
        self.top, self.low = self.gearbox.ladder.top, self.gearbox.ladder[0]
        self.verifier = Verifier(self.gearbox, self.top)
        self.gearbox.make(self.low)
        self.gearbox.shift(self.top)

    def begin(self, prompt: list[int]) -> list[Any]:
        """Return a KV cache with all of a prompt but its last token."""
        self.gearbox.shift(self.top)
        cache = make_prompt_cache(self.gearbox.model)
        mx.eval(self.gearbox.model(mx.array(prompt[:-1])[None], cache=cache))
        return cache

    def draft(self, token: int, cache: list[Any], count: int) -> tuple[list[int], list[float]]:
        """Draft so many tokens after one; returns them and their margins."""
        draft = self.drafter(cache).propose(GeneratedText([token]), count, FixedPolicy(MOST))
        margins = [] if draft.margins is None else list(np.array(draft.margins).tolist())
        return list(np.array(draft.tokens).tolist()), margins

    def drafter(self, cache: list[Any]) -> LowGear:
        return LowGear(DraftTarget(self.gearbox, cache, GREEDY, reader_of(self.gearbox)), self.low)

    def verify(self, tokens: list[int], cache: list[Any]) -> list[int]:
        """Choose the top gear's token after each of some; the cache is then as after the first."""
        rows = Verification(self.verifier, tokens, cache)
        chosen = list(np.array(mx.argmax(rows.logits[0], axis=-1)).tolist())
        rows.keep(1)
        return chosen

    def write(self, prompt: list[int], policy: "Recorder", tokens: int) -> None:
        """Write a text as mode lossless does, by a policy."""
        text = GeneratedText(list(prompt), frozenset(self.tokenizer.eos_token_ids), tokens)
        cache = make_prompt_cache(self.gearbox.model)
        plan = DecodePlan(self.verifier, Keywords(), GREEDY, reader_of(self.gearbox), policy)
        drafter = TimedLowGear(DraftTarget(self.gearbox, cache, GREEDY, reader_of(self.gearbox)), self.low)
        for _ in decode(plan, DecodeState(text, cache, [drafter])):
            pass


def recorded_text(machine: Machine, prompt: list[int], count: int) -> dict[str, list[Any]]:
    """Return, for tokens along the top gear's text, the margins of a draft and how many of its tokens are right.

    And what the text itself proposes: the run of tokens that occurred before, and how many of the next are right.
    """
    cache, tokens, drafts = machine.begin(prompt), [*prompt], []
    for _ in range(count):
        drafts.append(machine.draft(tokens[-1], cache, MOST))
        tokens.append(machine.verify(tokens[-1:], cache)[0])
        if tokens[-1] in machine.tokenizer.eos_token_ids:
            break
    found: dict[str, list[Any]] = {"margins": [], "accepted": [], "run": [], "repeated": []}
    lookup, seen = Lookup(NgramTable()), [*prompt]
    for place, (drafted, margins) in enumerate(drafts):
        following = tokens[len(prompt) + place :]
        lookup.follow(seen, len(prompt))
        found["margins"].append([round(margin, 2) for margin in margins])
        found["accepted"].append(in_common(drafted, following))
        found["run"].append(lookup.table.run)
        found["repeated"].append(in_common(lookup.table.proposed(MOST), following))
        seen.append(following[0])
    return found


class TimedLowGear(LowGear):
    """A low gear that tells the recorder the seconds of each draft."""

    def propose(self, text: GeneratedText, length: int, policy: Any) -> Proposal:
        begun = time.perf_counter()
        found = super().propose(text, length, policy)
        policy.draft_seconds = time.perf_counter() - begun
        return found


class Recorder(FixedPolicy):
    """A policy that drafts all lengths in turn, with tokens alone in between, and notes what each took.

    Attributes:
        events: [length, microseconds since the beginning, of the draft, and of the rest]; length -1: a token alone.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.events: list[list[int]] = []
        self._rng, self._begun = random.Random(seed), time.perf_counter()
        self._next = self._in_turn()
        self._length = 0
        self._is_ahead = False
        self.draft_seconds = 0.0  # of the latest draft

    def _in_turn(self) -> Iterator[int]:
        while True:
            yield from self._rng.sample(LENGTHS, len(LENGTHS))
            yield from [0] * (PLAIN + 1)

    def length(self, room: int, early: bool = False) -> int:
        self._length = next(self._next)
        return min(self._length, room)

    def goes_on(self, margins: Sequence[float]) -> bool:
        return len(margins) < self._length

    def lookup_length(self, probabilities: Sequence[float]) -> int:
        return 0

    def add_round(self, **found: Any) -> None:
        self._note(found["drafted"], self.draft_seconds, found["seconds"] - self.draft_seconds)
        self._is_ahead = False

    def add_plain(self, seconds: float) -> None:
        if self._is_ahead:  # the first one has to begin
            self._note(-1, 0.0, seconds)
        self._is_ahead = True

    def _note(self, length: int, draft: float, rest: float) -> None:
        now = time.perf_counter() - self._begun
        self.events.append([length, *(round(1e6 * each) for each in (now, draft, rest))])


def recorded_times(machine: Machine, prompts: list[list[int]], seconds: float, seed: int) -> dict[str, list[Any]]:
    """Return the times of rounds of all lengths and of plain tokens, alternating during generation."""
    recorder, end = Recorder(seed), time.perf_counter() + seconds
    for prompt in itertools.cycle(prompts):
        machine.write(prompt, recorder, TOKENS)
        if time.perf_counter() > end:
            return {"events": recorder.events}
    return {}


@study(writes="research/data/rounds", minutes=2)
def record_rounds(
    name: str,
    what: Literal["texts", "times"] = "times",
    model: str | None = None,
    gears: str = "4,16",
    prompts: list[Path] = [HELD_OUT, ASSISTANT, OWN_TEXTS],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [6, 6, 2],  # noqa: B006
    tokens: int = TOKENS,
    seconds: float = 45.0,
    seed: int = 0,
) -> Found:
    """Record data for the study policy-regret: drafts along outputs of a model, or times of passes.

    Args:
        name: Name of the file, such as smollm2-4,16 for outputs, and smollm2-4,16-quiet for times.
        what: Drafts along outputs depend only on the model; times also on the machine and its other work.
        num_prompts: Number of prompts of each file.
        tokens: Tokens of each output.
        seconds: Duration of the recording of times.
    """
    machine = Machine(model, gears)
    asked = first_prompts(machine.tokenizer, prompts, num_prompts)
    found: dict[str, Any]
    if what == "texts":
        found = {"texts": [recorded_text(machine, prompt, tokens) for prompt in track(asked, "texts")]}
    else:
        found = recorded_times(machine, asked, seconds, seed)
    RECORDED.mkdir(exist_ok=True)
    write_text(RECORDED / f"{name}.json", json.dumps(found, separators=(",", ":")) + "\n")
    return Found()


@dataclass
class Series:
    """Recorded times of one machine, in the order in which they happened; after its end it begins again."""

    events: dict[int, tuple[list[float], list[tuple[float, float]]]]
    seconds: float

    @classmethod
    def read(cls, name: str) -> "Series":
        events: dict[int, tuple[list[float], list[tuple[float, float]]]] = {}
        recorded = json.loads((RECORDED / f"{name}.json").read_text("utf-8"))["events"][SETTLED:]
        for length, at, draft, rest in recorded:
            when, what = events.setdefault(length, ([], []))
            when.append(at / 1e6)
            what.append((draft / 1e6, rest / 1e6))
        return cls(events, recorded[-1][1] / 1e6)

    def near(self, length: int, at: float, rng: random.Random) -> tuple[float, float, float, float]:
        """Return the draft and the rest of a round measured next to a moment, and the usual seconds of both.

        Usual is the mean of those around it: what a choice costs, without the luck of one pass.
        """
        if length not in self.events:
            low = max(each for each in self.events if each < length)
            high = min(each for each in self.events if each > length)
            share = (length - low) / (high - low)
            pairs = zip(self.near(low, at, rng), self.near(high, at, rng))
            draft, rest, usual_draft, usual_rest = ((1 - share) * a + share * b for a, b in pairs)
            return draft, rest, usual_draft, usual_rest
        when, what = self.events[length]
        place = bisect.bisect(when, at % self.seconds)
        around = what[max(place - AROUND, 0) : place + AROUND]
        usual_draft, usual_rest = (sum(part) / len(around) for part in zip(*around))
        return *rng.choice(around), usual_draft, usual_rest

    @property
    def plain(self) -> float:
        """Seconds of a plain token."""
        return statistics.median(rest for _, rest in self.events[-1][1])


Slower = Callable[[int, int], float]
"""From the drafted tokens of a round (-1: a plain token), and the tokens before it, to how many times as long as
recorded it takes, its draft left out."""


Passes = list[tuple[int, int, float]]
"""Drafted tokens of rounds (-1: a plain token), the tokens that each writes, and its usual seconds."""

Begin = Callable[[Mapping[str, float]], Any]
"""From what an earlier start kept to a policy."""


@dataclass
class Machines:
    """What a start runs on: a machine, and the same one beside other work between two moments.

    It is as slow at a place in a text as at a time that belongs to the place, whichever way writes: else ways would
    differ by what noise they met.
    """

    quiet: Series
    noisy: Series
    at: float
    noise: tuple[float, float] = (math.inf, math.inf)
    slower: Slower = lambda length, token: 1.0

    def __post_init__(self) -> None:
        self.tokens = 0
        self.rng = random.Random(int(1e6 * self.at))
        self.begun: set[int] = set()
        self.token = self.quiet.plain
        self.passes = Passes()

    def take(self, length: int, tokens: int) -> tuple[float, float]:
        """Let a round of so many drafted tokens pass, or a plain token (-1), which writes some tokens."""
        now = self.tokens * self.token
        series = self.noisy if self.noise[0] <= now < self.noise[1] else self.quiet
        draft, rest, usual_draft, usual_rest = series.near(length, self.at + now, self.rng)
        times = self.slower(length, self.tokens)
        first = 1.0
        if length not in self.begun:  # compiles, and fills caches
            first = FIRST_PASS
            self.begun.add(length)
        self.passes.append((length, tokens, usual_draft + times * usual_rest))
        self.tokens += tokens
        return draft, rest * first * times


class Threshold:
    """Drafts that end where the probability that all of it is right falls below a bound."""

    state: ClassVar[dict[str, float]] = {}

    def __init__(self, bound: float, agreement: Callable[[float], float]):
        self.bound, self.agreement = bound, agreement

    def length(self, room: int, early: bool = False) -> int:
        return min(room, MOST)

    def goes_on(self, margins: list[float]) -> bool:
        probability = 1.0
        for margin in margins:
            probability *= self.agreement(margin)
        return probability >= self.bound

    def add_round(self, **_: Any) -> None: ...
    def add_plain(self, seconds: float) -> None: ...


class Plain(Threshold):
    def __init__(self) -> None: ...
    def length(self, room: int, early: bool = False) -> int:
        return 0


def seconds_of_token(passes: Passes) -> float:
    return sum(seconds for _, _, seconds in passes) / sum(tokens for _, tokens, _ in passes)


def written(
    policy: Any, texts: Iterable[dict[str, list[Any]]], machine: Machines, early: bool, most: float = math.inf
) -> None:
    """Write texts by a policy, or so many tokens of them."""
    for text in texts:
        place, end = 0, len(text["accepted"])
        while place < end:
            if machine.tokens >= most:
                return
            length = policy.length(end - place - 1, early)
            if length < 1:
                policy.add_plain(machine.take(-1, 1)[1])
                place += 1
                continue
            margins = text["margins"][place]
            count = length
            if early:
                count = 1
                while count < length and policy.goes_on(margins[:count]):
                    count += 1
            accepted = min(count, text["accepted"][place])
            draft, rest = machine.take(count, accepted + 1)
            known = margins[:count] if early else []
            policy.add_round(
                drafted=count,
                accepted=accepted,
                tokens=accepted + 1,
                rows=count + 1,
                seconds=draft + rest,
                margins=known,
            )
            place += 1 + accepted


@dataclass
class Start:
    """One start of a series: the texts that it writes, and the machine that it runs on."""

    first: bool
    texts: list[dict[str, list[Any]]]
    at: float
    noise: tuple[float, float]

    def seconds(self, policy: Any, quiet: Series, noisy: Series, early: bool) -> float:
        """Return the seconds of a token by a policy."""
        machine = Machines(quiet, noisy, self.at, self.noise)
        written(policy, self.texts, machine, early)
        return seconds_of_token(machine.passes)


def drawn(texts: list[dict[str, list[Any]]], count: int) -> list[Start]:
    """Draw starts: series of some, in each of which another process computes too, from a moment on and for a while."""
    found = []
    for start in range(count):
        rng = random.Random(start // CHAIN)
        begin, length = rng.uniform(-30, 30), rng.choice((0.5, 5, 30, 60))
        rng, gap = random.Random(start), 8.0 * (start % CHAIN)
        noise = begin - gap, begin + length - gap
        found.append(Start(start % CHAIN == 0, rng.choices(texts, k=TEXTS), rng.uniform(0, 30), noise))
    return found


def fixed_ways(texts: list[dict[str, list[Any]]], early: bool) -> dict[str, Any]:
    """Return the ways to write that a policy is compared with, which know nothing and learn nothing."""
    ways: dict[str, Any] = {"0": Plain()} | {str(k): FixedPolicy(k) for k in range(1, 9)}
    if early:
        agreement = fitted(texts)
        ways |= {f"margins {bound}": Threshold(bound, agreement) for bound in (0.3, 0.5, 0.7)}
    return ways


@dataclass
class Recording:
    """A recorded machine: its times, quiet and beside another process, texts, and how a policy begins there."""

    name: str
    quiet: Series
    noisy: Series
    texts: list[dict[str, list[Any]]]
    share: float
    tile: int

    @classmethod
    def read_all(cls) -> Iterator["Recording"]:
        for file in sorted(RECORDED.glob(f"*{QUIET}.json")):
            name = file.stem.removesuffix(QUIET)
            model, quiet, noisy = name.removesuffix(AVX2), Series.read(file.stem), name + NOISY
            texts = json.loads((RECORDED / f"{model}.json").read_text("utf-8"))["texts"]
            low, *_, top = (float(bits) for bits in model.rpartition("-")[2].split(","))
            tile = vectors_at_once("AVX2" if name.endswith(AVX2) else "AVX-512")
            beside = Series.read(noisy) if (RECORDED / f"{noisy}.json").is_file() else quiet
            yield cls(name, quiet, beside, texts, draft_cost(low, top), tile)

    @property
    def is_real(self) -> bool:
        return not self.name.startswith("demo")

    def policy(self, kept: Mapping[str, float]) -> LearnedPolicy:
        return LearnedPolicy(kept, self.share, tile=self.tile)

    def state_of_quiet(self, early: bool) -> dict[str, float]:
        """Return the numbers that a long start without other work keeps."""
        policy = self.policy({})
        written(policy, self.texts * 4, Machines(self.quiet, self.quiet, 0.0), early)
        return policy.state

    def seconds(self, starts: list[Start], early: bool) -> list[float]:
        """Return the seconds of a token of each start by the policy, which begins with what the one before it kept."""
        found: list[float] = []
        kept: dict[str, float] = {}
        for start in starts:
            policy = self.policy({} if start.first else kept)
            found.append(start.seconds(policy, self.quiet, self.noisy, early))
            kept = policy.state
        return found


@dataclass(frozen=True)
class Case:
    """What may go wrong, played on a recording.

    Attributes:
        right: the share of the right drafted tokens that stays right.
        slower: how many times as long as recorded passes take.
        tokens: of a start.
        counted: from this token on they count.
        starts: each begins with what the one before it kept.
        first: the first start that counts.
    """

    right: float = 1.0
    slower: Slower = lambda length, token: 1.0
    tokens: int = 4000
    counted: int = 0
    starts: int = 1
    first: int = 0

    def passes(self, recording: Recording, seed: int, early: bool, begin: Begin) -> Passes:
        """Return the passes that count, by policies that begin with what is kept."""
        rng, found, kept = random.Random(seed), Passes(), dict[str, float]()
        for start in range(self.starts):
            policy = begin(kept)
            machine = Machines(recording.quiet, recording.quiet, rng.uniform(0, 30), slower=self.slower)
            written(policy, self._texts(recording, rng.random()), machine, early, self.tokens)
            kept = policy.state
            ends = itertools.accumulate(tokens for _, tokens, _ in machine.passes)
            if start >= self.first:
                found += [each for each, end in zip(machine.passes, ends) if end > self.counted]
        return found

    def _texts(self, recording: Recording, seed: float) -> Iterator[dict[str, list[Any]]]:
        """Yield texts without end."""
        rng = random.Random(seed)
        while True:
            text = rng.choice(recording.texts)
            right = [next((n for n in range(most) if rng.random() >= self.right), most) for most in text["accepted"]]
            yield text | {"accepted": right}


def dear(length: int, token: int) -> float:
    """Return the relative time of a round if its rows cost half as much again."""
    return 1.5 if length > 0 else 1.0


HALF = "half of the right tokens are wrong"
CASES = {
    "undisturbed": Case(),
    HALF: Case(right=0.5),
    "rounds take half as long again": Case(slower=dear),
    "rounds take half as long again, starts 11 to 20 of 100 tokens": Case(slower=dear, tokens=100, starts=20, first=10),
    "rounds took three times as long for 4,000 tokens, the next 2,000": Case(
        slower=lambda length, token: 3.0 if length > 0 and 1000 <= token < 5000 else 1.0, tokens=7000, counted=5000
    ),
    "all takes half as long again from the middle on": Case(slower=lambda length, token: 1.5 if token >= 2000 else 1.0),
}


def kept_by(way: Any, kept: Mapping[str, float]) -> Any:
    """Return a fixed way, which keeps nothing."""
    return way


def lost_in(case: Case, recording: Recording, early: bool) -> float:
    """Return the share of the time that the policy loses in a case, over the best fixed policy."""

    def seconds(early: bool, begin: Begin) -> float:
        return seconds_of_token([each for seed in range(SEEDS) for each in case.passes(recording, seed, early, begin)])

    ways = fixed_ways(recording.texts, early)
    best = min(seconds(early and name.startswith("margins"), partial(kept_by, way)) for name, way in ways.items())
    return seconds(early, recording.policy) / best - 1


def tokens_until_off(case: Case, recording: Recording, early: bool) -> float:
    """Return the tokens that a policy writes before it writes `OFF` plain ones in a row, the median of series."""
    found = []
    for seed in range(SEEDS):
        written = in_a_row = 0
        for length, tokens, _ in case.passes(recording, seed, early, recording.policy):
            in_a_row = in_a_row + 1 if length < 0 else 0
            written += tokens
            if in_a_row == OFF:
                break
        found.append(written - OFF)
    return statistics.median(found)


def fitted(texts: list[dict[str, list[Any]]]) -> Callable[[float], float]:
    """Return the share of the drafted tokens of all texts that is right, from their margin: a step for `STEP_SIZE`."""
    seen = [
        (margin, place < accepted)
        for text in texts
        for margins, accepted in zip(text["margins"], text["accepted"])
        for place, margin in enumerate(margins[: accepted + 1])
    ]
    seen.sort()
    steps = [seen[begin : begin + STEP_SIZE] for begin in range(0, len(seen), STEP_SIZE)]
    bounds, shares = [step[0][0] for step in steps], [statistics.mean(right for _, right in step) for step in steps]
    return lambda margin: shares[max(bisect.bisect_right(bounds, margin) - 1, 0)]


def percentile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share, method="higher"))


def regret(recording: Recording, starts: list[Start], early: bool) -> tuple[list[str], dict[str, Any]]:
    """Return a row of the table, and its figures."""
    quiet, noisy = recording.quiet, recording.noisy
    ways = {
        name: [start.seconds(way, quiet, noisy, early and name.startswith("margins")) for start in starts]
        for name, way in fixed_ways(recording.texts, early).items()
    }
    best = min(ways, key=lambda name: statistics.mean(ways[name]))
    own = recording.seconds(starts, early)
    lost = [seconds / other - 1 for seconds, other in zip(own, ways[best])]
    known = recording.state_of_quiet(early)
    informed = [start.seconds(recording.policy(known), quiet, noisy, early) for start in starts]
    least = percentile([seconds / other - 1 for seconds, other in zip(informed, ways[best])], 0.99)
    faster = [other / seconds for seconds, other in zip(own, ways["0"])]
    mean = statistics.mean(own) / statistics.mean(ways[best]) - 1
    figures = [mean, statistics.median(lost), percentile(lost, 0.9), percentile(lost, 0.99), least]
    gained = f"{statistics.median(faster):.2f} ({percentile(faster, 0.01):.2f})"
    how = "margins" if early else "lengths"
    row = [recording.name, how, best, *(f"{100 * each:+.1f} %" for each in figures), gained]
    return row, {"name": recording.name, "how": how, "best": best, "mean": mean, "lost": lost, "faster": faster}


def cases(recordings: list[Recording]) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Return the table of cases on the recordings of real models, and its figures."""
    rows, data = [], []
    for label, case in CASES.items():
        row = [label]
        for early in (True, False):
            lost = [lost_in(case, recording, early) for recording in recordings]
            row += [f"{100 * statistics.mean(lost):+.1f} %", f"{100 * max(lost):+.1f} %"]
            off = [tokens_until_off(case, recording, early) for recording in recordings] if label == HALF else []
            data.append({"case": label, "how": "margins" if early else "lengths", "lost": lost, "until off": off})
        rows.append(row)
    return rows, data


@study("research/tables.md", minutes=4)
def policy_regret(count: int = 200) -> Found:
    """Measure the regret of the draft policy against the best fixed policy, on recorded passes and margins.

    A start generates two outputs. In a series of four starts, each begins with the numbers that the previous one kept.
    At some point, another process also computes for half a second to a minute. Fixed policies are plain decoding, 1 to
    8 tokens in every draft, and drafts that end once the probability of the whole draft is below 0.3, 0.5 or 0.7. By
    lengths: the policy's choice if margins arrive too late. Informed: a start with the numbers of a long quiet
    start. Special cases on recordings of real models are slow drafts, short starts, and noise.

    Args:
        count: Starts on each recorded machine.
    """
    recordings = list(Recording.read_all())
    rows, data = [], []
    for recording in recordings:
        starts = drawn(recording.texts, count)
        for early in (True, False):
            row, figures = regret(recording, starts, early)
            rows.append(row)
            data.append(figures)
    head = [
        "model, gears, machine",
        "by",
        "best fixed policy",
        "time over it: mean",
        "median",
        "90th",
        "99th percentile",
    ]
    head.append("99th, informed")
    head.append("speedup over plain decoding: median (1st percentile)")
    found, more = cases([each for each in recordings if each.is_real])
    of_case = ["case", *(f"time over the best fixed policy, by {how}" for how in ("margins: mean", "margins: worst"))]
    of_case += ["by lengths: mean", "worst"]
    tables = {"policy_regret": table_here(head, rows), "policy_cases": table_here(of_case, found)}
    return Found(tables, {"starts": data, "cases": more})
