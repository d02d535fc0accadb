"""GSM8K, free-running: the model writes, greedily, and its final number is right or wrong."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from ..decoding.response import GearResponse
from ..decoding.stream import KICKDOWN, LOSSLESS, ROUTE, stream_generate
from ..files.reading import Count
from ..gears.gearbox import Gearbox
from ..gears.ladder import Ladder
from ..routing.gates import Held
from .metrics import mcnemar, paired
from .text import PROMPT

FINAL = re.compile(r"####\s*\$?\s*([-+]?[\d,]*\.?\d+)")
NEXT_PROBLEM = "\nQuestion:"


@dataclass(frozen=True)
class Attempt:
    """A problem under a policy: what was found, whether it is right, and what it took."""

    found: str | None
    right: bool
    tokens: Count
    weight_bytes: Count


def final_number(text: str) -> Decimal | None:
    """The number after the first ####, as GSM8K writes its answers: "#### 1,200" is 1200."""
    match = FINAL.search(text.split(NEXT_PROBLEM)[0])
    try:
        return Decimal(match.group(1).replace(",", "")) if match else None
    except InvalidOperation:
        return None


def finished(text: str) -> bool:
    """Whether nothing that follows can change the final number."""
    return NEXT_PROBLEM in text or re.search(r"####[^\n]*\d[^\n]*\n", text) is not None


def prompt_of(row: Mapping[str, str], examples: Sequence[Mapping[str, str]]) -> str:
    """The question, after examples with their answers."""
    solved = [f"{PROMPT.format(**example)} {example['answer']}\n\n" for example in examples]
    return "".join(solved) + PROMPT.format(**row)


def ways_to_write(policies: Sequence[str], ladder: Ladder, routing: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name to keywords of stream_generate; every static gear is always among them, the top one first."""
    ways: dict[str, dict[str, Any]] = {
        f"static-{gear.bits}": {"gate": Held(), "initial_gear": gear.name} for gear in reversed(ladder)
    }
    if ROUTE in policies:
        ways[ROUTE] = dict(routing)
    if KICKDOWN in policies:
        ways[KICKDOWN] = {"mode": KICKDOWN, "thresholds": routing["thresholds"]}
    if LOSSLESS in policies and len(ladder) > 1:
        ways[LOSSLESS] = {"mode": LOSSLESS}
    return ways


def attempt(gearbox: Gearbox, tokenizer: Any, tokens: Sequence[int], answer: str, **keywords: Any) -> Attempt:
    """Let the model write after the tokens of a prompt, and judge it by the answer's final number."""
    responses = stream_generate(gearbox.model, tokenizer, list(tokens), gearbox=gearbox, **keywords)
    return judged(responses, answer)


def judged(responses: Iterable[GearResponse], answer: str) -> Attempt:
    """Take responses until the final number is there."""
    text, count, read = "", 0, 0
    for response in responses:
        text += response.text
        count += 1
        read += response.weight_bytes
        if finished(text):
            break
    found = final_number(text)
    return Attempt(None if found is None else str(found), found == final_number(answer), count, read)


def solve(
    gearbox: Gearbox, tokenizer: Any, prompts: Iterable[tuple[Sequence[int], int, str]], **keywords: Any
) -> list[Attempt]:
    """An attempt for each prompt: its tokens, how many to write, the worked answer."""
    return [
        attempt(gearbox, tokenizer, tokens, answer, max_tokens=length, **keywords) for tokens, length, answer in prompts
    ]


def score(attempts: Mapping[str, Sequence[Attempt]], reference: str) -> list[dict[str, Any]]:
    """A row for each policy: accuracy and its standard error, bytes per token, and how it compares with the reference
    on the same problems (difference with standard error, exact McNemar test)."""
    right = {name: np.array([a.right for a in tried]) for name, tried in attempts.items()}
    rows = []
    for name, tried in attempts.items():
        n, tokens = len(tried), sum(a.tokens for a in tried)
        accuracy = float(right[name].mean())
        rows.append(
            {
                "policy": name,
                "problems": n,
                "accuracy": accuracy,
                "standard_error": float(np.sqrt(accuracy * (1 - accuracy) / n)),
                "answered": sum(a.found is not None for a in tried) / n,
                "same_answer_as_reference": float(
                    np.mean([a.found == b.found for a, b in zip(tried, attempts[reference])])
                ),
                "tokens": tokens,
                "weight_bytes_per_token": sum(a.weight_bytes for a in tried) / tokens if tokens else 0.0,
                "against_reference": paired(right[name].astype(float), right[reference].astype(float), np.arange(n))
                | mcnemar(right[reference], right[name]),
                "attempts": [asdict(a) for a in tried],
            }
        )
    return rows


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    lines = [
        f"# {report['model']} on {report['data']}: final numbers",
        "",
        f"Greedy. Differences and McNemar tests are against {report['reference']}, on the same problems.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(cells(row))} |" for row in report["policies"]),
        "",
    ]
    if not report["complete"]:
        lines += ["Not complete: the run was interrupted. The same command goes on with it.", ""]
    return "\n".join(lines)


COLUMNS = {
    "policy": lambda row: row["policy"],
    "problems": lambda row: str(row["problems"]),
    "right": lambda row: f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f} %",
    "same answer": lambda row: f"{100 * row['same_answer_as_reference']:.1f} %",
    "difference": lambda row: f"{100 * row['against_reference']['difference']:+.1f} %",
    "McNemar p": lambda row: f"{row['against_reference']['p_value']:.2f}",
    "kB/token": lambda row: f"{row['weight_bytes_per_token'] / 1000:.0f}",
}


def cells(row: Mapping[str, Any]) -> Iterable[str]:
    return [show(row) for show in COLUMNS.values()]
