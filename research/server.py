"""Comparison of this package's server with mlx_lm.server: one client alternates between both, for speed and latency.

Needs psutil. With kernels mlx, both compute the same, and outputs are equal.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from asked_servers import Client, ClientAnswer, ClientRequest, started
from rich.progress import track

from gearbx_mlx.benchmark.measuring import Rows, spread_of
from gearbx_mlx.bit_selection.sensitivity import CALIBRATION
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.evaluation.predictions import read_documents
from gearbx_mlx.loading import DEMO_MODEL

from .studies import Found, study, table_here

OURS = ("gearbx_mlx.server",)
MLX_LM = ("mlx_lm", "server")


def prompts(words: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """Unlike prompts, one for each number of words, none of which begins as another; the same in every run."""
    place, found = 0, []
    for number, length in enumerate(lengths):
        picked = [words[(place + step) % len(words)] for step in range(length)]
        found.append(" ".join([f"{number}.", *picked]))
        place += length + 1
    return found


def row(
    part: str,
    measure: str,
    values: Sequence[float],
    least: float | None = None,
    most: float | None = None,
    count: int | None = None,
) -> dict[str, Any]:
    """Return the median of some values and their spread; least, most: what is aimed at. count: of what was measured."""
    value = statistics.median(values)
    reached = (least is None or value >= least) and (most is None or value <= most)
    return {
        **{"part": part, "measure": measure, "value": value, "spread": spread_of(values) if len(values) > 1 else None},
        **{"least": least, "most": most, "reached": reached},
        "count": len(values) if count is None else count,
    }


MIN_RATE, MAX_WAIT = 0.97, 1.05  # times mlx_lm.server's
RATE_WORDS = 60  # of a prompt
MIN_TOKENS = 8  # of an answer; one that ends sooner says nothing of the speed


def going_on(client: Client, prompt: str, tokens: int) -> ClientAnswer:
    """Return a stream whose prompt goes on from an answer, so that its KV cache is used."""
    before = client.ask(ClientRequest(prompt, 4))
    return client.ask(ClientRequest(prompt + before.text + " And then?", tokens, stream=True))


PARTS: dict[str, Callable[[Client, str, int], ClientAnswer]] = {
    "whole": lambda client, prompt, tokens: client.ask(ClientRequest(prompt, tokens)),
    "stream": lambda client, prompt, tokens: client.ask(ClientRequest(prompt, tokens, stream=True)),
    "stream, cached prompt": going_on,
}


Pair = tuple[ClientAnswer, ClientAnswer]  # ours, and mlx_lm.server's


@study("docs/performance.md", minutes=5)
def server(
    model: str | None = None,
    gears: str = "16",
    kernels: list[Literal["native", "mlx", "auto"]] = ["native", "mlx"],  # noqa: B006
    tokens: int = 64,
    trials: int = 9,
) -> Found:
    """Compare this package's server in one gear, with each kind of kernels, with mlx_lm.server.

    Args:
        model: Model; the bundled one if omitted.
        tokens: Tokens of an answer, at least 8.
    """
    words, rows = " ".join(read_documents(Path(CALIBRATION))).split(), Rows()
    for kind in kernels:
        flags = "--model", model or str(DEMO_MODEL)
        rows += [{"kernels": kind} | row for row in rate_rows(measured(flags, gears, kind, tokens, trials, words))]
    if not rows:
        raise GearbxError("nothing was measured: answers were too short; give more --tokens or --trials")
    return Found({"server": table_here(HEAD, map(cells, rows))}, rows)


def measured(
    model: tuple[str, str], gears: str, kernels: str, tokens: int, trials: int, words: Sequence[str]
) -> dict[str, list[Pair]]:
    """Return the answers of both servers by part, a pair for each trial. model: the flag. words: of the prompts."""
    found: dict[str, list[Pair]] = {part: [] for part in PARTS}
    texts = prompts(words, [RATE_WORDS] * (trials + 1) * len(PARTS))
    ours = started(OURS, *model, "--gears", gears, "--mode", "static", "--kernels", kernels)
    with ours as own, started(MLX_LM, *model) as beside:
        sides = own, beside
        for trial in track(range(trials + 1), f"trials, {kernels}"):
            for part, ask in PARTS.items():
                prompt = texts.pop()
                answers = {}
                for client, process in sides if trial % 2 else sides[::-1]:
                    before = processor_seconds(process)
                    answer = ask(client, prompt, tokens)
                    answers[client] = replace(answer, processor=processor_seconds(process) - before)
                long_enough = all(answer.tokens >= MIN_TOKENS for answer in answers.values())
                if trial and long_enough:  # the first one is a warm-up
                    found[part].append((answers[own[0]], answers[beside[0]]))
    return found


def rate_rows(found: dict[str, list[Pair]]) -> Rows:
    rows = []
    for part, pairs in found.items():
        if not pairs:
            continue
        rates = [mine.tokens_per_second / other.tokens_per_second for mine, other in pairs]
        rows.append(row(part, "tokens/s, times mlx_lm.server's", rates, least=MIN_RATE))
        rows.append(row(part, "tokens/s", [mine.tokens_per_second for mine, _ in pairs]))
        waits = [mine.first / other.first for mine, other in pairs if mine.first and other.first]
        if waits:
            rows.append(row(part, "time to first token, times mlx_lm.server's", waits, most=MAX_WAIT))
            rows.append(row(part, "time to first token, s", [mine.first or 0.0 for mine, _ in pairs]))
        spent, others = (sum(each.processor for each in side) for side in zip(*pairs))
        if others:  # the system counts in hundredths of a second
            rows.append(row(part, "processor time, times mlx_lm.server's", [spent / others], count=len(pairs)))
        same = sum(mine.text == other.text for mine, other in pairs)
        rows.append(row(part, "outputs equal to mlx_lm.server's", [same / len(pairs)], count=len(pairs)))
    return rows


def processor_seconds(process: Any) -> float:
    """Return processor seconds of a process until now."""
    return float(sum(process.cpu_times()[:2]))


HEAD = ["part", "kernels", "measure", "value", "spread", "aim", "count"]


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def aim(row: dict[str, Any]) -> str:
    """At least, at most, or nothing; and whether it was missed."""
    bounds = [f"{sign} {row[name]:g}" for sign, name in (("≥", "least"), ("≤", "most")) if row[name] is not None]
    return " ".join(bounds) + ("" if row["reached"] else ", missed")


def cells(row: dict[str, Any]) -> list[str]:
    spread = "-".join(figure(value) for value in row["spread"] or [])
    value = f"{row['value']:.0f}" if row["value"] >= 1000 else figure(row["value"])
    return [row["part"], row["kernels"], row["measure"], value, spread, aim(row), str(row["count"])]
