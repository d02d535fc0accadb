"""Requests of which a fifth go away at a random moment: the others do not wait for them, and nothing of them stays."""

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .client import Asked, Client, leave, prompts
from .crowd import Outcome, crowd, each_of, process_of
from .process import OURS, ServerProcess, started
from .rows import row

CLIENTS = 8
WORDS, TOKENS = (8, 60), (8, 48)  # of prompts and answers, at random
GONE = 5  # one of so many goes away
ROUNDS = 10  # the two servers in turn, since other programs use the machine too
SLOWER = 1.1  # times the latency without them, at most: they are computed too until they go
SEED = 5
SETTLE = 3.0  # seconds after which nothing of the requests is left


def measure_cancelled(
    model: str, ours: tuple[object, ...], kernels: str, words: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """Rows of `count` requests to one server without those that go away, and to another with them, in turn."""
    drawn = random.Random(SEED)
    texts = prompts(words, [drawn.randint(*WORDS) for _ in range(count)])
    requests = [Asked(text, drawn.randint(*TOKENS), drawn.random() < 0.5) for text in texts]
    with started(OURS, "--model", model, *ours) as calm, started(OURS, "--model", model, *ours) as disturbed:
        for server in (calm, disturbed):
            crowd(server.url, CLIENTS, each_of(requests[:CLIENTS]))  # a warm-up
        before = kept_open(disturbed)
        rounds = [both(calm.url, disturbed.url, part) for part in parts_of(requests)]
        time.sleep(SETTLE)
        after, busy = kept_open(disturbed), busy_share(disturbed)
        with Client(disturbed.url) as client:
            last = client.ask(requests[1])
    part, outcomes = f"{count} requests, a fifth cancelled", [outcome for pair in rounds for outcome in pair]
    answers = sum(len(outcome.answers) for outcome in outcomes)
    unlike = sum(len(with_.unlike(dict(without.answers))) for without, with_ in rounds)
    return [
        row(part, "errors", [sum(len(outcome.errors) for outcome in outcomes)], kernels, most=0, count=answers),
        row(part, "answers unlike those without", [unlike], kernels, most=0, count=answers),
        *latency_rows(part, kernels, rounds),
        row(part, "threads, files and sockets that stay", [max(0, after - before)], kernels, most=0),
        row(part, "share of a core used afterwards", [busy], kernels, most=0.05),
        row(part, "tokens of an answer afterwards", [last.tokens], kernels, least=1),
    ]


def parts_of(requests: Sequence[Asked]) -> list[Sequence[Asked]]:
    """The requests in ROUNDS parts, or fewer, each of which has some that go away and some that stay."""
    rounds = max(1, min(ROUNDS, len(requests) // (2 * GONE)))
    bounds = [len(requests) * place // rounds for place in range(rounds + 1)]
    return [requests[start:end] for start, end in itertools.pairwise(bounds)]


def both(calm: str, disturbed: str, requests: Sequence[Asked]) -> tuple[Outcome, Outcome]:
    """What those that stay get where nobody leaves, and where a fifth of the requests go away."""
    staying = [asked for number, asked in enumerate(requests) if number % GONE]
    without = crowd(calm, CLIENTS - 1, each_of(staying))
    typical = statistics.median(answer.seconds for _, answer in without.answers)
    return without, crowd_that_leaves(disturbed, requests, typical)


def crowd_that_leaves(url: str, requests: Sequence[Asked], typical: float) -> Outcome:
    """All requests; each fifth goes away within the typical time of an answer, in place of a client that stays."""
    drawn, gone = random.Random(SEED), requests[::GONE]
    moments = [(drawn.uniform(0, typical), drawn.random() < 0.5) for _ in gone]
    staying = [asked for number, asked in enumerate(requests) if number % GONE]

    def go(asked: Asked, moment: tuple[float, bool]) -> None:
        leave(url, asked, *moment)

    with ThreadPoolExecutor(1) as pool:
        leaving = [pool.submit(go, *each) for each in zip(gone, moments)]
        outcome = crowd(url, CLIENTS - 1, each_of(staying))
        for one in leaving:
            one.result()
    return outcome


def latency_rows(part: str, kernels: str, rounds: Sequence[tuple[Outcome, Outcome]]) -> list[dict[str, Any]]:
    """Seconds of answers that were waited for, beside those where nobody left: a ratio for each round."""
    rows = []
    for name, share in (("median", 0.5), ("longest", 1.0)):
        seconds = [
            [percentile([answer.seconds for _, answer in each.answers], share) for each in pair] for pair in rounds
        ]
        ratios = [with_ / without for without, with_ in seconds]
        rows.append(row(part, f"{name} latency, times that without", ratios, kernels, most=SLOWER))
    return rows


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def kept_open(server: ServerProcess) -> int:
    """Threads, files and sockets of a server."""
    process = process_of(server.pid)
    return int(process.num_threads() + process.num_fds())


def busy_share(server: ServerProcess, seconds: float = 2.0) -> float:
    """The share of a core that a server uses."""
    process = process_of(server.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return float((sum(process.cpu_times()[:2]) - before) / seconds)
