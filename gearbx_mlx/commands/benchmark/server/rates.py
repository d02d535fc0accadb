"""One client that alternates between our server and mlx_lm.server: tokens per second, and time to the first token."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from .client import Answer, Asked, Client, prompts
from .crowd import process_of
from .process import MLX_LM, OURS, ServerProcess, started
from .rows import row

LEAST_RATE, MOST_WAIT = 0.97, 1.05  # times mlx_lm.server's
WORDS = 60  # of a prompt
LEAST_TOKENS = 8  # of an answer; one that ends sooner says nothing of the speed
Rows = list[dict[str, Any]]

Trial = Callable[[Client, str, int], Answer]


def whole(client: Client, prompt: str, tokens: int) -> Answer:
    return client.ask(Asked(prompt, tokens))


def stream(client: Client, prompt: str, tokens: int) -> Answer:
    return client.ask(Asked(prompt, tokens, stream=True))


def going_on(client: Client, prompt: str, tokens: int) -> Answer:
    """A stream whose prompt goes on from an answer, so that its KV cache is used."""
    before = client.ask(Asked(prompt, 4))
    return client.ask(Asked(prompt + before.text + " And then?", tokens, stream=True))


@dataclass(frozen=True)
class Timed:
    """An answer, and the processor seconds that the server took for it, the asking before it included."""

    answer: Answer
    processor: float


class Side:
    """One of the two servers, with its client."""

    def __init__(self, server: ServerProcess, client: Client):
        self.client, self.process = client, process_of(server.pid)

    def run(self, trial: Trial, prompt: str, tokens: int) -> Timed:
        before = sum(self.process.cpu_times()[:2])
        answer = trial(self.client, prompt, tokens)
        return Timed(answer, sum(self.process.cpu_times()[:2]) - before)


PARTS: dict[str, Trial] = {"whole": whole, "stream": stream, "stream, cached prompt": going_on}


def measure_rates(
    model: str, ours: tuple[object, ...], kernels: str, words: list[str], tokens: int, trials: int
) -> Iterator[Rows]:
    """A list of rows for each trial at its end, the last with all of them: ratios to mlx_lm.server.

    Args:
        ours: flags of our server.
        words: of the prompts.
    """
    found: dict[str, list[tuple[Timed, Timed]]] = {part: [] for part in PARTS}
    texts = prompts(words, [WORDS] * (trials + 1) * len(PARTS))
    with ExitStack() as stack:
        sides = []
        for server in (started(OURS, "--model", model, *ours), started(MLX_LM, "--model", model)):
            process = stack.enter_context(server)
            sides.append(Side(process, stack.enter_context(Client(process.url))))
        for trial in range(trials + 1):
            for part, run in PARTS.items():
                prompt = texts.pop()
                order = sides if trial % 2 else sides[::-1]
                answers = {side: side.run(run, prompt, tokens) for side in order}
                long_enough = all(timed.answer.tokens >= LEAST_TOKENS for timed in answers.values())
                if trial and long_enough:  # the first one is a warm-up
                    found[part].append((answers[sides[0]], answers[sides[1]]))
            yield rows_of(found, kernels) if trial else []


def rows_of(found: dict[str, list[tuple[Timed, Timed]]], kernels: str) -> Rows:
    rows = []
    for part, timed in found.items():
        if not timed:
            continue
        pairs = [(mine.answer, other.answer) for mine, other in timed]
        rates = [mine.tokens_per_second / other.tokens_per_second for mine, other in pairs]
        rows.append(row(part, "tokens/s, times mlx_lm.server's", rates, kernels, least=LEAST_RATE))
        rows.append(row(part, "tokens/s", [mine.tokens_per_second for mine, _ in pairs], kernels))
        waits = [mine.first / other.first for mine, other in pairs if mine.first and other.first]
        if waits:
            rows.append(row(part, "time to first token, times mlx_lm.server's", waits, kernels, most=MOST_WAIT))
            rows.append(row(part, "time to first token, s", [mine.first or 0.0 for mine, _ in pairs], kernels))
        spent, others = (sum(each.processor for each in side) for side in zip(*timed))
        if others:  # the system counts in hundredths of a second
            rows.append(row(part, "processor time, times mlx_lm.server's", [spent / others], kernels, count=len(pairs)))
        same = sum(mine.text == other.text for mine, other in pairs)
        rows.append(row(part, "texts equal to mlx_lm.server's", [same / len(pairs)], kernels, count=len(pairs)))
    return rows
