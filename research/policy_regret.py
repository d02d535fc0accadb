"""What the policy of mode lossless loses against the best choice in hindsight, on passes and margins recorded here.

`record_rounds` records a model on a machine: along the top gear's own text what the low gear drafts at every token,
with its margins, and how much of that the top gear accepts; and seconds of rounds and of tokens alone, in the order in
which they happened, so that noise keeps its correlation. `policy_regret` starts many times on such recordings.
"""

import bisect
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from rich.progress import track

from gearbx_mlx import Gearbox, load
from gearbx_mlx.compat.classes import generation_stream
from gearbx_mlx.decoding.caches import in_common
from gearbx_mlx.decoding.drafters import LowGear, TextSoFar
from gearbx_mlx.decoding.loop import Loop
from gearbx_mlx.decoding.policy import Acceptance, FixedPolicy, LearnedPolicy, draft_share
from gearbx_mlx.decoding.rows import Rows, Verifier
from gearbx_mlx.decoding.sampling import GREEDY, reader_of
from gearbx_mlx.files.writing import write_text
from gearbx_mlx.routing.lookup import Lookup, LookupAgreement

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
ALONE = 5  # tokens alone between two rounds that count, after one with which running ahead begins
OWN_TEXTS = DATA / "own_texts.jsonl"


class Machine:
    """A model in two gears, and a text that is written with it."""

    def __init__(self, model: str | None, gears: str):
        loaded, self.tokenizer = load(model)
        self.gearbox = Gearbox(loaded, gears)
        self.top, self.low = self.gearbox.ladder.top, self.gearbox.ladder[0]
        self.verifier = Verifier(self.gearbox, self.top)
        self.gearbox.make(self.low)
        self.drafter = LowGear(self.gearbox, self.low, GREEDY, reader_of(self.gearbox))
        self.gearbox.shift(self.top)

    def begin(self, prompt: list[int]) -> list[Any]:
        """Return a KV cache with all of a prompt but its last token."""
        self.gearbox.shift(self.top)
        cache = make_prompt_cache(self.gearbox.model)
        mx.eval(self.gearbox.model(mx.array(prompt[:-1])[None], cache=cache))
        return cache

    def draft(self, token: int, cache: list[Any], count: int) -> tuple[list[int], list[float]]:
        """Draft so many tokens after one; returns them and their margins."""
        draft = self.drafter.propose(TextSoFar([token], frozenset()), cache, count, lambda _: True)
        margins = [] if draft.margins is None else list(np.array(draft.margins).tolist())
        return list(np.array(draft.tokens).tolist()), margins

    def verify(self, tokens: list[int], cache: list[Any]) -> list[int]:
        """Choose the top gear's token after each of some; the cache is then as after the first."""
        rows = Rows(self.verifier, mx.array(tokens)[None], cache)
        chosen = list(np.array(mx.argmax(rows.logits[0], axis=-1)).tolist())
        rows.keep(1)
        return chosen

    def write(self, prompt: list[int], policy: "Recorder", tokens: int) -> None:
        """Write a text as mode lossless does, by a policy."""
        text = TextSoFar(list(prompt), frozenset(self.tokenizer.eos_token_ids), tokens)
        kept = make_prompt_cache(self.gearbox.model)
        reader, stream = reader_of(self.gearbox), generation_stream()
        loop = Loop(self.gearbox, kept, text, GREEDY, policy, reader, self.drafter, stream=stream)
        for _ in loop.write():
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
    lookup, seen = Lookup(LookupAgreement()), [*prompt]
    for place, (drafted, margins) in enumerate(drafts):
        following = tokens[len(prompt) + place :]
        lookup.follow(seen, len(prompt))
        found["margins"].append([round(margin, 2) for margin in margins])
        found["accepted"].append(in_common(drafted, following))
        found["run"].append(lookup.run)
        found["repeated"].append(in_common(lookup.proposed(MOST), following))
        seen.append(following[0])
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

    def _in_turn(self) -> Iterator[int]:
        while True:
            yield from self._rng.sample(LENGTHS, len(LENGTHS))
            yield from [0] * (ALONE + 1)

    def length(self, room: int, early: bool = False) -> int:
        self._length = next(self._next)
        return min(self._length, room)

    def goes_on(self, margins: Sequence[float]) -> bool:
        return len(margins) < self._length

    def looked_up(self, probabilities: Sequence[float], room: int) -> int:
        return 0

    def add_round(self, **found: Any) -> None:
        draft = found["draft_seconds"] or 0.0
        self._note(found["drafted"], draft, found["seconds"] - draft)
        self._is_ahead = False

    def add_alone(self, seconds: float) -> None:
        if self._is_ahead:  # the first one has to begin
            self._note(-1, 0.0, seconds)
        self._is_ahead = True

    def _note(self, length: int, draft: float, rest: float) -> None:
        now = time.perf_counter() - self._begun
        self.events.append([length, *(round(1e6 * each) for each in (now, draft, rest))])


def recorded_times(machine: Machine, prompts: list[list[int]], seconds: float, seed: int) -> dict[str, list[Any]]:
    """Return what rounds of all lengths and tokens alone took, in turn, while texts were written."""
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
    """Record what the study policy-regret replays: drafts along texts of a model, or seconds of passes.

    Args:
        name: Of the file, such as smollm2-4,16 for texts, and smollm2-4,16-quiet for times.
        what: Drafts along texts depend on the model alone; times on the machine and on what else runs there.
        num_prompts: Of each file.
        tokens: Of each text.
        seconds: To record times for.
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

    def near(self, length: int, at: float, rng: random.Random) -> tuple[float, float, float]:
        """Return what a round takes that was measured next to a moment: its draft, the rest, and the usual for both.

        The last is the mean of those around it: what a choice costs, without the luck of one pass.
        """
        if length not in self.events:
            low = max(each for each in self.events if each < length)
            high = min(each for each in self.events if each > length)
            share = (length - low) / (high - low)
            pairs = zip(self.near(low, at, rng), self.near(high, at, rng))
            draft, rest, usual = ((1 - share) * a + share * b for a, b in pairs)
            return draft, rest, usual
        when, what = self.events[length]
        place = bisect.bisect(when, at % self.seconds)
        around = what[max(place - AROUND, 0) : place + AROUND]
        return *rng.choice(around), sum(map(sum, around)) / len(around)

    @property
    def alone(self) -> float:
        return statistics.median(rest for _, rest in self.events[-1][1])


@dataclass
class Machines:
    """What a start runs on: a machine, and the same one beside other work between two moments.

    It is as slow at a place in a text as at a time that belongs to the place, whichever way writes: else ways would
    differ by what noise they met.
    """

    quiet: Series
    noisy: Series
    at: float
    noise: tuple[float, float]

    def __post_init__(self) -> None:
        self.spent, self.tokens = 0.0, 0
        self.rng = random.Random(int(1e6 * self.at))
        self.begun: set[int] = set()
        self.token = self.quiet.alone

    def take(self, length: int, tokens: int) -> tuple[float, float]:
        """Let a round of so many drafted tokens pass, or a token alone (-1), which writes some tokens."""
        now = self.tokens * self.token
        series = self.noisy if self.noise[0] <= now < self.noise[1] else self.quiet
        draft, rest, usual = series.near(length, self.at + now, self.rng)
        first = 1.0
        if length not in self.begun:  # compiles, and fills caches
            first = FIRST_PASS
            self.begun.add(length)
        self.spent += usual
        self.tokens += tokens
        return draft, rest * first


class Threshold:
    """Drafts that end where the probability that all of it is right falls below a bound."""

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
    def add_alone(self, seconds: float) -> None: ...


class Alone(Threshold):
    def __init__(self) -> None: ...
    def length(self, room: int, early: bool = False) -> int:
        return 0


def written(policy: Any, texts: list[dict[str, list[Any]]], machine: Machines, early: bool) -> float:
    """Write texts by a policy; returns the seconds of a token."""
    for text in texts:
        place, end = 0, len(text["accepted"])
        while place < end:
            most = policy.length(end - place - 1, early)
            if most < 1:
                policy.add_alone(machine.take(-1, 1)[1])
                place += 1
                continue
            margins = text["margins"][place]
            count = most
            if early:
                count = 1
                while count < most and policy.goes_on(margins[:count]):
                    count += 1
            accepted = min(count, text["accepted"][place])
            draft, rest = machine.take(count, accepted + 1)
            known = margins[:count] if early else []
            policy.add_round(
                drafted=count,
                accepted=accepted,
                rows=count + 1,
                seconds=draft + rest,
                draft_seconds=draft if early else None,
                margins=known,
            )
            place += 1 + accepted
    return machine.spent / machine.tokens


@dataclass
class Start:
    """One start of a series: the texts that it writes, and the machine that it runs on."""

    first: bool
    texts: list[dict[str, list[Any]]]
    at: float
    noise: tuple[float, float]

    def seconds(self, policy: Any, quiet: Series, noisy: Series, early: bool) -> float:
        """Return the seconds of a token by a policy."""
        return written(policy, self.texts, Machines(quiet, noisy, self.at, self.noise), early)


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
    ways: dict[str, Any] = {"0": Alone()} | {str(k): FixedPolicy(k) for k in range(1, 9)}
    if early:
        ways |= {f"margins {bound}": Threshold(bound, fitted(texts)) for bound in (0.3, 0.5, 0.7)}
    return ways


def seconds_of_policy(
    starts: list[Start], quiet: Series, noisy: Series, early: bool, share: float, tile: int
) -> list[float]:
    """Return the seconds of a token of each start, which begins with what the one before it kept."""
    found: list[float] = []
    kept: dict[str, float] = {}
    for start in starts:
        policy = LearnedPolicy({} if start.first else kept, share, tile=tile)
        found.append(start.seconds(policy, quiet, noisy, early))
        kept = policy.state
    return found


def state_of_quiet(
    texts: list[dict[str, list[Any]]], quiet: Series, early: bool, share: float, tile: int
) -> dict[str, float]:
    """Return what a long start on the machine without other work keeps."""
    policy = LearnedPolicy({}, share, tile=tile)
    written(policy, texts * 4, Machines(quiet, quiet, 0.0, (math.inf, math.inf)), early)
    return policy.state


def fitted(texts: list[dict[str, list[Any]]]) -> Callable[[float], float]:
    """Return a(m) of all texts."""
    agreement = Acceptance({})
    for text in texts:
        for margins, accepted in zip(text["margins"], text["accepted"]):
            agreement.add(len(margins), accepted, margins)
    return agreement.of_margin


def recordings() -> Iterator[tuple[str, str, Series, Series]]:
    """Yield the name of each machine, of the texts there, and its times: quiet, and beside another process if known."""
    for file in sorted(RECORDED.glob(f"*{QUIET}.json")):
        name = file.stem.removesuffix(QUIET)
        noisy = name + NOISY
        quiet = Series.read(file.stem)
        yield (
            name,
            name.removesuffix(AVX2),
            quiet,
            Series.read(noisy) if (RECORDED / f"{noisy}.json").is_file() else quiet,
        )


def percentile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share, method="higher"))


@study("research/tables.md", minutes=5)
def policy_regret(count: int = 1000) -> Found:
    """What the policy of drafts loses against the best fixed way, on recorded passes and margins.

    A start writes two texts. Series of four starts begin with what the one before kept; somewhere another process
    begins to compute too, for half a second to a minute. Fixed ways are the top gear alone, 1 to 8 tokens in every
    draft, and drafts that end where the probability of all of it falls below 0.3, 0.5 or 0.7. Lengths alone are what
    the policy chooses where margins come too late. Informed: a start that begins with what a long quiet one has kept.

    Args:
        count: Starts on each recorded machine.
    """
    rows, data = [], []
    for name, model, quiet, noisy in recordings():
        texts = json.loads((RECORDED / f"{model}.json").read_text("utf-8"))["texts"]
        gears = [float(bits) for bits in model.rpartition("-")[2].split(",")]
        starts = drawn(texts, count)
        for early in (True, False):
            ways = {
                way: [start.seconds(policy, quiet, noisy, early and way.startswith("margins")) for start in starts]
                for way, policy in fixed_ways(texts, early).items()
            }
            best = min(ways, key=lambda way: statistics.mean(ways[way]))
            share = draft_share(gears[0], gears[-1])
            tile = 4 if name.endswith(AVX2) else 8  # of the kernels that measured them
            policy = seconds_of_policy(starts, quiet, noisy, early, share, tile)
            lost = [own / other - 1 for own, other in zip(policy, ways[best])]
            known = state_of_quiet(texts, quiet, early, share, tile)
            informed = [start.seconds(LearnedPolicy(known, share, tile=tile), quiet, noisy, early) for start in starts]
            least = percentile([own / other - 1 for own, other in zip(informed, ways[best])], 0.99)
            faster = [other / own for own, other in zip(policy, ways["0"])]
            mean = statistics.mean(policy) / statistics.mean(ways[best]) - 1
            figures = [mean, statistics.median(lost), percentile(lost, 0.9), percentile(lost, 0.99), least]
            gained = f"{statistics.median(faster):.2f} ({percentile(faster, 0.01):.2f})"
            how = "margins" if early else "lengths"
            rows.append([name, how, best, *(f"{100 * each:+.1f} %" for each in figures), gained])
            data.append({"name": name, "how": how, "best": best, "lost": lost, "faster": faster})
    head = ["model, gears, machine", "by", "best fixed way", "time over it: mean", "median", "90th", "99th percentile"]
    head.append("99th, informed")
    head.append("times as fast as alone: median (1st percentile)")
    return Found({"policy_regret": table_here(head, rows)}, data)
