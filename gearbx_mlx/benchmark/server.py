"""Our server beside mlx_lm.server, and under many clients at once.

Trials: one client alternates between both servers, for tokens per second and the time to the first token.
Soak: many clients for some minutes; no error, memory that stays, and each answer the one that is given alone.
Cancelled: a fifth of the requests go away at a random moment; the others do not wait for them, and nothing stays.
Modes: every mode under several clients; each text is the one that is given alone.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bit_selection.sensitivity import CALIBRATION
from ..cli.flags import output_path
from ..cli.terminal import progress_bar, spinner
from ..errors import GearbxError
from ..evaluation.text import read_documents
from ..files.writing import write_text
from ..loading import DEMO_MODEL
from ..telemetry.summary import as_json
from . import ServerBenchmark
from .measuring import Rows, machine_name, print_table, spread_of
from .server_clients import (
    MLX_LM,
    OURS,
    Client,
    ClientAnswer,
    ClientRequest,
    CrowdOutcome,
    MemoryLog,
    ServerProcess,
    crowd,
    leave,
    process_of,
    prompts,
    random_requests,
    started,
)

COLUMNS = ("part", "kernels", "measure", "value", "spread", "least", "most", "count")
BY_SPEED = ("tokens/s", "time", "median latency", "longest latency", "share of a core")
"""What other programs on the machine change as well."""


@dataclass(frozen=True)
class Subject:
    """What is measured. flags: of our server besides the model. words: of the prompts."""

    model: str
    kernels: str
    flags: tuple[object, ...]
    words: Sequence[str]

    def started(self) -> AbstractContextManager[ServerProcess]:
        """Our server, while the context lasts."""
        return started(OURS, "--model", self.model, *self.flags, "--kernels", self.kernels)


def run(settings: ServerBenchmark) -> int:
    """Measure, print and write. Returns 1 where something came that must not: an error, another text, more memory.

    Raises:
        GearbxError: a server that does not start, a file that cannot be written.
    """
    out = None if settings.json is None else output_path(settings.json)
    shared = {"machine": machine_name(), "date": time.strftime("%Y-%m-%d")}
    rows = [row | shared for row in measure(settings)]
    if not rows:
        raise GearbxError("nothing was measured: answers were too short; give more --tokens or --trials")
    print_table([{name: "" if value is None else value for name, value in row.items()} for row in rows], COLUMNS)
    if out is not None:
        write_text(out, as_json({"rows": rows}))
    return 0 if all(row["reached"] for row in rows if not row["measure"].startswith(BY_SPEED)) else 1


def measure(settings: ServerBenchmark) -> Rows:
    """The rows of all parts that were asked for."""
    model, rows = settings.model or str(DEMO_MODEL), Rows()
    words = " ".join(read_documents(Path(CALIBRATION))).split()
    for kernels in settings.kernels.split(","):
        subject = Subject(model, kernels, ("--gears", settings.gears, "--mode", "static"), words)
        found = Rows()
        if settings.trials:
            with progress_bar() as progress:
                trials = measure_rates(subject, settings.tokens, settings.trials)
                found += [*progress.track(trials, settings.trials + 1, description=f"trials, {kernels}")][-1]
        if settings.soak:
            with spinner(f"{settings.clients} clients for {settings.soak} seconds"):
                found += measure_soak(subject, settings.clients, settings.soak)
        if settings.cancel:
            with spinner(f"{settings.cancel} requests, a fifth cancelled"):
                found += measure_cancelled(subject, settings.cancel)
        if settings.modes:
            with spinner("every mode"):
                found += measure_modes(Subject(model, kernels, ("--gears", "4,8,16"), words))
        rows += [{"part": row["part"], "kernels": kernels, **row} for row in found]
    return rows


def row(
    part: str,
    measure: str,
    values: Sequence[float],
    least: float | None = None,
    most: float | None = None,
    count: int | None = None,
) -> dict[str, Any]:
    """The median of some values and their spread; least, most: what is aimed at. count: of what was measured."""
    value = statistics.median(values)
    reached = (least is None or value >= least) and (most is None or value <= most)
    return {
        **{"part": part, "measure": measure, "value": value, "spread": spread_of(values) if len(values) > 1 else None},
        **{"least": least, "most": most, "reached": reached},
        "count": len(values) if count is None else count,
    }


def unlike_row(part: str, outcome: CrowdOutcome, alone: dict[ClientRequest, ClientAnswer]) -> dict[str, Any]:
    """How many texts are others than those given alone."""
    unlike = outcome.unlike(alone)
    examples = {asked.prompt: [asked.prompt, alone[asked].text, answer.text] for asked, answer in unlike}
    found = row(part, "answers unlike the one alone", [len(unlike)], most=0, count=len(outcome.answers))
    return found | {"examples": [*examples.values()][:8]}


# One client beside mlx_lm.server

LEAST_RATE, MOST_WAIT = 0.97, 1.05  # times mlx_lm.server's
RATE_WORDS = 60  # of a prompt
LEAST_TOKENS = 8  # of an answer; one that ends sooner says nothing of the speed


def going_on(client: Client, prompt: str, tokens: int) -> ClientAnswer:
    """A stream whose prompt goes on from an answer, so that its KV cache is used."""
    before = client.ask(ClientRequest(prompt, 4))
    return client.ask(ClientRequest(prompt + before.text + " And then?", tokens, stream=True))


PARTS: dict[str, Callable[[Client, str, int], ClientAnswer]] = {
    "whole": lambda client, prompt, tokens: client.ask(ClientRequest(prompt, tokens)),
    "stream": lambda client, prompt, tokens: client.ask(ClientRequest(prompt, tokens, stream=True)),
    "stream, cached prompt": going_on,
}


@dataclass(frozen=True)
class TimedAnswer:
    """An answer, and the processor seconds that the server took for it, the asking before it included."""

    answer: ClientAnswer
    processor: float


Pair = tuple[TimedAnswer, TimedAnswer]  # ours, and mlx_lm.server's


def measure_rates(subject: Subject, tokens: int, trials: int) -> Iterator[Rows]:
    """A list of rows for each trial at its end, the last with all of them: ratios to mlx_lm.server."""
    found: dict[str, list[Pair]] = {part: [] for part in PARTS}
    texts = prompts(subject.words, [RATE_WORDS] * (trials + 1) * len(PARTS))
    with ExitStack() as stack:
        sides = []
        for server in (subject.started(), started(MLX_LM, "--model", subject.model)):
            listening = stack.enter_context(server)
            sides.append((stack.enter_context(Client(listening.url)), process_of(listening.pid)))
        for trial in range(trials + 1):
            for part, ask in PARTS.items():
                prompt = texts.pop()
                answers = {}
                for client, process in sides if trial % 2 else sides[::-1]:
                    before = processor_seconds(process)
                    answer = ask(client, prompt, tokens)
                    answers[client] = TimedAnswer(answer, processor_seconds(process) - before)
                long_enough = all(timed.answer.tokens >= LEAST_TOKENS for timed in answers.values())
                if trial and long_enough:  # the first one is a warm-up
                    ours, theirs = (answers[client] for client, _ in sides)
                    found[part].append((ours, theirs))
            yield rate_rows(found) if trial else []


def rate_rows(found: dict[str, list[Pair]]) -> Rows:
    rows = []
    for part, timed in found.items():
        if not timed:
            continue
        pairs = [(mine.answer, other.answer) for mine, other in timed]
        rates = [mine.tokens_per_second / other.tokens_per_second for mine, other in pairs]
        rows.append(row(part, "tokens/s, times mlx_lm.server's", rates, least=LEAST_RATE))
        rows.append(row(part, "tokens/s", [mine.tokens_per_second for mine, _ in pairs]))
        waits = [mine.first / other.first for mine, other in pairs if mine.first and other.first]
        if waits:
            rows.append(row(part, "time to first token, times mlx_lm.server's", waits, most=MOST_WAIT))
            rows.append(row(part, "time to first token, s", [mine.first or 0.0 for mine, _ in pairs]))
        spent, others = (sum(each.processor for each in side) for side in zip(*timed))
        if others:  # the system counts in hundredths of a second
            rows.append(row(part, "processor time, times mlx_lm.server's", [spent / others], count=len(pairs)))
        same = sum(mine.text == other.text for mine, other in pairs)
        rows.append(row(part, "texts equal to mlx_lm.server's", [same / len(pairs)], count=len(pairs)))
    return rows


def processor_seconds(process: Any) -> float:
    """Of a process until now."""
    return float(sum(process.cpu_times()[:2]))


# Many clients for some minutes

REQUESTS = 48  # unlike ones
SHARED = 3  # every third prompt begins as another does
SOAK_WORDS, SOAK_TOKENS = (4, 150), (4, 96)  # of prompts and answers, at random
WARM_UP = 0.2  # share of the time
FLAT = 0.02  # growth of memory after it, as a share
SOAK_SEED = 17


def requests_of(words: Sequence[str], count: int = REQUESTS) -> list[ClientRequest]:
    """Requests of many lengths, whole and streamed; some begin with the words of the one before."""
    drawn = random.Random(SOAK_SEED)
    lengths = [drawn.randint(*SOAK_WORDS) for _ in range(count)]
    texts = prompts(words, lengths)
    for number in range(SHARED, count, SHARED):
        begin = texts[number - 1].split()[: lengths[number] * 2 // 3]
        texts[number] = " ".join(begin + texts[number].split()[len(begin) :])
    return [ClientRequest(text, drawn.randint(*SOAK_TOKENS), drawn.random() < 0.5) for text in texts]


def measure_soak(subject: Subject, clients: int, seconds: float) -> Rows:
    """Rows of one soak. The answers that are given alone come from a server of their own."""
    requests = requests_of(subject.words)
    alone = answers_alone(subject, requests)
    with subject.started() as server, MemoryLog(server.pid) as memory:
        outcome = crowd(server.url, clients, random_requests(requests, seconds, SOAK_SEED))
    part = f"soak, {clients} clients, {seconds:.0f} s"
    return [
        row(part, "answers", [len(outcome.answers)]),
        row(part, "errors", [len(outcome.errors)], most=0, count=len(outcome.answers)),
        unlike_row(part, outcome, alone),
        *memory_rows(part, memory.samples),
    ]


def answers_alone(subject: Subject, requests: Sequence[ClientRequest]) -> dict[ClientRequest, ClientAnswer]:
    """What a server of ours answers to one request after the other."""
    with subject.started() as server, Client(server.url) as client:
        return {asked: client.ask(asked) for asked in requests}


def memory_rows(part: str, samples: Sequence[tuple[float, int]]) -> Rows:
    """Growth and range of the memory after the warm-up, as shares of its median."""
    settled = samples[round(len(samples) * WARM_UP) :]
    if len(settled) < 3:
        return []
    seconds, sizes = zip(*settled)
    middle = statistics.median(sizes)
    growth = statistics.linear_regression(seconds, sizes).slope * (seconds[-1] - seconds[0]) / middle
    return [
        row(part, "memory of the process, MB", [middle / 1e6], count=len(settled)),
        row(part, "growth of memory, share", [growth], most=FLAT, count=len(settled)),
        row(part, "range of memory, share", [(max(sizes) - min(sizes)) / middle], count=len(settled)),
    ]


# Requests of which a fifth go away

CLIENTS = 8
CANCELLED_WORDS, CANCELLED_TOKENS = (8, 60), (8, 48)  # of prompts and answers, at random
GONE = 5  # one of so many goes away
ROUNDS = 10  # the two servers in turn, since other programs use the machine too
SLOWER = 1.1  # times the latency without them, at most: they are computed too until they go
CANCELLED_SEED = 5
SETTLE = 3.0  # seconds after which nothing of the requests is left


def measure_cancelled(subject: Subject, count: int) -> Rows:
    """Rows of `count` requests to one server without those that go away, and to another with them, in turn."""
    drawn = random.Random(CANCELLED_SEED)
    texts = prompts(subject.words, [drawn.randint(*CANCELLED_WORDS) for _ in range(count)])
    requests = [ClientRequest(text, drawn.randint(*CANCELLED_TOKENS), drawn.random() < 0.5) for text in texts]
    with subject.started() as calm, subject.started() as disturbed:
        for server in (calm, disturbed):
            crowd(server.url, CLIENTS, requests[:CLIENTS])  # a warm-up
        process = process_of(disturbed.pid)
        before = kept_open(process)
        rounds = [both(calm.url, disturbed.url, part) for part in parts_of(requests)]
        time.sleep(SETTLE)
        after, busy = kept_open(process), busy_share(process)
        with Client(disturbed.url) as client:
            last = client.ask(requests[1])
    part, outcomes = f"{count} requests, a fifth cancelled", [outcome for pair in rounds for outcome in pair]
    answers = sum(len(outcome.answers) for outcome in outcomes)
    unlike = sum(len(with_.unlike(dict(without.answers))) for without, with_ in rounds)
    return [
        row(part, "errors", [sum(len(outcome.errors) for outcome in outcomes)], most=0, count=answers),
        row(part, "answers unlike those without", [unlike], most=0, count=answers),
        *latency_rows(part, rounds),
        row(part, "threads, files and sockets that stay", [max(0, after - before)], most=0),
        row(part, "share of a core used afterwards", [busy], most=0.05),
        row(part, "tokens of an answer afterwards", [last.tokens], least=1),
    ]


def parts_of(requests: Sequence[ClientRequest]) -> list[Sequence[ClientRequest]]:
    """The requests in ROUNDS parts, or fewer, each of which has some that go away and some that stay."""
    rounds = max(1, min(ROUNDS, len(requests) // (2 * GONE)))
    bounds = [len(requests) * place // rounds for place in range(rounds + 1)]
    return [requests[start:end] for start, end in itertools.pairwise(bounds)]


def both(calm: str, disturbed: str, requests: Sequence[ClientRequest]) -> tuple[CrowdOutcome, CrowdOutcome]:
    """What those that stay get where nobody leaves, and where a fifth of the requests go away."""
    staying = [asked for number, asked in enumerate(requests) if number % GONE]
    without = crowd(calm, CLIENTS - 1, staying)
    typical = statistics.median(answer.seconds for _, answer in without.answers)
    drawn = random.Random(CANCELLED_SEED)
    moments = [(drawn.uniform(0, typical), drawn.random() < 0.5) for _ in requests[::GONE]]
    with ThreadPoolExecutor(1) as pool:  # those that leave, in place of a client that stays
        leaving = [pool.submit(leave, disturbed, asked, *moment) for asked, moment in zip(requests[::GONE], moments)]
        with_ = crowd(disturbed, CLIENTS - 1, staying)
        for one in leaving:
            one.result()
    return without, with_


def latency_rows(part: str, rounds: Sequence[tuple[CrowdOutcome, CrowdOutcome]]) -> Rows:
    """Seconds of answers that were waited for, beside those where nobody left: a ratio for each round."""
    rows = []
    for name, share in (("median", 0.5), ("longest", 1.0)):
        seconds = [
            [percentile([answer.seconds for _, answer in each.answers], share) for each in pair] for pair in rounds
        ]
        ratios = [with_ / without for without, with_ in seconds]
        rows.append(row(part, f"{name} latency, times that without", ratios, most=SLOWER))
    return rows


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def kept_open(process: Any) -> int:
    """Threads, files and sockets of a server."""
    return int(process.num_threads() + process.num_fds())


def busy_share(process: Any, seconds: float = 2.0) -> float:
    """The share of a core that a server uses."""
    before = processor_seconds(process)
    time.sleep(seconds)
    return (processor_seconds(process) - before) / seconds


# Every mode at once

EACH = 8  # requests of a mode
MODE_WORDS, MODE_TOKENS = (8, 40), (12, 48)
MODE_SEED = 3
WARM = {"temperature": 0.9}
MODES: dict[str, dict[str, Any]] = {
    "static, low": {"gearbx": {"mode": "static", "gear": "low"}},
    "static, high": {"gearbx": {"mode": "static", "gear": "high"}},
    "lossless": {"gearbx": {"mode": "lossless"}},
    "route": {"gearbx": {"mode": "route"}, "seed": 7},  # without one its gears are those of its company
    "kickdown": {"gearbx": {"mode": "kickdown"}},
    "static with a seed": {"gearbx": {"mode": "static", "gear": "low"}, "seed": 7, **WARM},
    "lossless with a seed": {"gearbx": {"mode": "lossless"}, "seed": 7, **WARM},
    "route with a seed": {"gearbx": {"mode": "route"}, "seed": 7, **WARM},
    "kickdown with a seed": {"gearbx": {"mode": "kickdown"}, "seed": 7, **WARM},
}


def measure_modes(subject: Subject, each: int = EACH) -> Rows:
    """A row for each mode: how many texts are others than those that a server of its own gave one after the other."""
    drawn = random.Random(MODE_SEED)
    texts = iter(prompts(subject.words, [drawn.randint(*MODE_WORDS) for _ in range(each * len(MODES))]))
    requests = {
        mode: [
            ClientRequest(next(texts), drawn.randint(*MODE_TOKENS), number % 2 == 0, further) for number in range(each)
        ]
        for mode, further in MODES.items()
    }
    everything = [asked for several in requests.values() for asked in several]
    alone = answers_alone(subject, everything)
    with subject.started() as server:
        outcome = crowd(server.url, CLIENTS, drawn.sample(everything, len(everything)))
    part = f"every mode, {CLIENTS} clients"
    rows = [row(part, "errors", [len(outcome.errors)], most=0, count=len(outcome.answers))]
    got = dict(outcome.answers)
    for mode, several in requests.items():
        pairs = [(alone[asked].text, got[asked].text) for asked in several if asked in got]
        unlike = [texts for texts in pairs if texts[0] != texts[1]]
        found = row(part, f"{mode}: answers unlike the one alone", [len(unlike)], most=0, count=len(pairs))
        rows.append(found | {"examples": unlike[:4]})
    return rows
