"""EAD's Table 1 free-running: two models in turns write answers to problems; the control takes turns by a coin."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np

from ..decoding.pair import Pair
from ..decoding.response import GearResponse
from ..decoding.stream import stream_generate
from ..files.reading import Count
from ..routing.gates import Gate
from ..routing.pair import LARGE, NAMES, Coin, first_model, pair_gate, parameter_ratio
from .answers import COLUMNS as SCORES
from .answers import Attempt, Prompt, Task, attempt, group_tables, score
from .pair_scores import table_1
from .tables import INCOMPLETE, Columns, markdown_table, percent

REFERENCE = f"pair-{0:g}"  # the large model alone


@dataclass(frozen=True)
class PairAttempt(Attempt):
    """large: how many tokens the large model computed. caught_up: how many tokens a model read to catch up."""

    large: Count = 0
    caught_up: Count = 0


def solve(
    small: nn.Module,
    large: nn.Module,
    tokenizer: Any,
    task: Task,
    prompts: Sequence[Prompt],
    window: int,
    gate_of: Callable[[int], tuple[Gate, int]],
    number: int,
) -> PairAttempt:
    """The attempt of a gate at the prompt of this number.

    Args:
        gate_of: from a prompt's number to the gate and the model that begins.
    """
    tokens, length, answer = prompts[number]
    gate, first = gate_of(number)
    taken: list[GearResponse] = []
    mode = Pair(small, window=window, gate=gate, initial_gear=NAMES[first])
    responses = stream_generate(large, tokenizer, list(tokens), length, mode=mode)
    tried = attempt(task, noted(responses, taken), answer)
    by_large = sum(response.gear == NAMES[LARGE] for response in taken)
    return PairAttempt(**vars(tried), large=by_large, caught_up=sum(r.caught_up for r in taken))


def noted(responses: Iterable[GearResponse], taken: list[GearResponse]) -> Iterator[GearResponse]:
    """The responses, each added to `taken` as it passes."""
    for response in responses:
        taken.append(response)
        yield response


def by_entropy(threshold: float, min_duration: int) -> Callable[[int], tuple[Gate, int]]:
    return lambda number: (pair_gate(threshold, min_duration), first_model(threshold))


def by_chance(share: float, min_duration: int, seed: int) -> Callable[[int], tuple[Gate, int]]:
    """The control: a coin for each prompt, whose tosses do not depend on the prompts before it."""

    def gate_of(number: int) -> tuple[Gate, int]:
        coin = Coin(share, min_duration, seed=1000 * seed + number)
        return coin, coin.gear

    return gate_of


def share_of(attempts: Sequence[PairAttempt]) -> float:
    """The share of tokens that the large model computed."""
    return sum(a.large for a in attempts) / max(sum(a.tokens for a in attempts), 1)


def rows_of(
    attempts: Mapping[str, Sequence[PairAttempt]], thresholds: Mapping[str, float], parameters: tuple[int, int]
) -> list[dict[str, Any]]:
    """The rows of `answers.score`, with the columns of EAD's Table 1."""
    rows = score(attempts, REFERENCE)
    for row in rows:
        tried = attempts[row["policy"]]
        row |= {
            "name": row["policy"],
            "policy": row["policy"].split("-")[0],
            "threshold": thresholds[row["policy"]],
            "share_top": share_of(tried),
            "parameter_ratio": parameter_ratio(share_of(tried), parameters),
            "caught_up_per_token": float(np.sum([a.caught_up for a in tried]) / max(row["tokens"], 1)),
        }
    return rows


COLUMNS: Columns = {
    **SCORES,
    "policy": lambda row: row["name"],
    "large": lambda row: percent(row["share_top"]),
    "parameters": lambda row: percent(row["parameter_ratio"]),
    "caught up": lambda row: f"{row['caught_up_per_token']:.2f}",
}
FIRST = ("policy", "large", "right", "same answer", "difference", "McNemar p", "kB/token")


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    lines = [
        f"# {report['small_model']} and {report['model']} on {report['data']}: final answers",
        "",
        f"Greedy. Differences and McNemar tests are against {REFERENCE}, the large model alone, on the same problems. "
        "random: a coin with the large model's share of the row above, tossed at the end of every minimum duration.",
        "",
        *markdown_table(COLUMNS, report["policies"]),
        "",
        "As in EAD's Table 1:",
        "",
        *table_1(report),
        "",
        *group_tables(report["policies"]),
        "**caught up**: tokens that a model had missed and read when its turn came, per token written.",
        "",
    ]
    if not report["complete"]:
        lines += [INCOMPLETE, ""]
    return "\n".join(lines)
