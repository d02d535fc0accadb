"""Many clients at once for some minutes: no error, memory that stays, and each answer the one that is given alone."""

import random
import statistics
from collections.abc import Sequence
from typing import Any

from .client import Answer, Asked, Client, prompts
from .crowd import MemoryLog, Outcome, any_of, crowd
from .process import OURS, started
from .rows import row

REQUESTS = 48  # unlike ones
SHARED = 3  # every third prompt begins as another does
LONGEST, SHORTEST = 150, 4  # words of a prompt
MOST_TOKENS = 96
WARM_UP = 0.2  # share of the time
FLAT = 0.02  # growth of memory after it, as a share
SEED = 17


def requests_of(words: Sequence[str], count: int = REQUESTS) -> list[Asked]:
    """Requests of many lengths, whole and streamed; some begin with the words of the one before."""
    drawn = random.Random(SEED)
    lengths = [drawn.randint(SHORTEST, LONGEST) for _ in range(count)]
    texts = prompts(words, lengths)
    for number in range(SHARED, count, SHARED):
        begin = texts[number - 1].split()[: lengths[number] * 2 // 3]
        texts[number] = " ".join(begin + texts[number].split()[len(begin) :])
    return [Asked(text, drawn.randint(4, MOST_TOKENS), drawn.random() < 0.5) for text in texts]


def soak(
    model: str, ours: tuple[object, ...], kernels: str, words: Sequence[str], clients: int, seconds: float
) -> list[dict[str, Any]]:
    """Rows of one soak. The answers that are given alone come from a server of their own."""
    requests = requests_of(words)
    with started(OURS, "--model", model, *ours) as server, Client(server.url) as client:
        alone = {asked: client.ask(asked) for asked in requests}
    with started(OURS, "--model", model, *ours) as server, MemoryLog(server.pid) as memory:
        outcome = crowd(server.url, clients, any_of(requests, seconds, SEED))
    part = f"soak, {clients} clients, {seconds:.0f} s"
    return [
        row(part, "answers", [len(outcome.answers)], kernels),
        row(part, "errors", [len(outcome.errors)], kernels, most=0, count=len(outcome.answers)),
        unlike_row(part, kernels, outcome, alone),
        *memory_rows(part, kernels, memory.samples),
    ]


def unlike_row(part: str, kernels: str, outcome: Outcome, alone: dict[Asked, Answer]) -> dict[str, Any]:
    """How many texts are others than those given alone."""
    unlike = outcome.unlike(alone)
    found = row(part, "answers unlike the one alone", [len(unlike)], kernels, most=0, count=len(outcome.answers))
    examples = {asked.prompt: (alone[asked].text, answer.text) for asked, answer in unlike}
    return found | {"examples": [[prompt, *texts] for prompt, texts in list(examples.items())[:8]]}


def memory_rows(part: str, kernels: str, samples: Sequence[tuple[float, int]]) -> list[dict[str, Any]]:
    """Growth and range of the memory after the warm-up, as shares of its median."""
    settled = samples[round(len(samples) * WARM_UP) :]
    if len(settled) < 3:
        return []
    seconds, sizes = zip(*settled)
    middle = statistics.median(sizes)
    growth = statistics.linear_regression(seconds, sizes).slope * (seconds[-1] - seconds[0]) / middle
    return [
        row(part, "memory of the process, MB", [middle / 1e6], kernels, count=len(settled)),
        row(part, "growth of memory, share", [growth], kernels, most=FLAT, count=len(settled)),
        row(part, "range of memory, share", [(max(sizes) - min(sizes)) / middle], kernels, count=len(settled)),
    ]
