"""GSM8K, free-running: the model writes greedily, and its final number is right or wrong."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from ..decoding.kickdown import Kickdown
from ..decoding.lossless import Lossless
from ..decoding.mode import Mode
from ..decoding.response import GearResponse
from ..decoding.route import Route
from ..decoding.static import Static
from ..decoding.stream import stream_generate
from ..files.reading import Count
from ..gears.gearbox import Gearbox
from ..gears.ladder import Ladder
from .metrics import mcnemar, paired
from .tables import INCOMPLETE, Columns, kilobytes, markdown_table, percent
from .text import PROMPT

FINAL = re.compile(r"####\s*\$?\s*([-+]?[\d,]*\.?\d+)")
NEXT_PROBLEM = "\nQuestion:"
DRAFTS = Lossless(
    cost="bytes", lookup_tokens=0, draft_ahead=0
)  # what it reads is compared, and is the same in every run

Prompt = tuple[Sequence[int], int, str]  # tokens, how many may be written after them, the worked answer


@dataclass(frozen=True)
class Attempt:
    """The model's answer to a problem under a policy.

    found: the final number. right: whether it is the problem's. tokens: written. weight_bytes: read, in all.
    """

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


def modes_of(policies: Sequence[str], ladder: Ladder, route: Route) -> dict[str, Mode]:
    """Name to mode of each policy; every static gear is always among them, the top one first."""
    modes: dict[str, Mode] = {f"static-{gear.bits}": Static(gear.name) for gear in reversed(ladder)}
    bits = None if isinstance(route.thresholds, str) else route.thresholds  # "auto" is found for mode route alone
    shifting = {"route": route, "kickdown": Kickdown(bits), "lossless": DRAFTS}
    if len(ladder) < 2:
        del shifting["lossless"]
    return modes | {name: mode for name, mode in shifting.items() if name in policies}


def attempt(responses: Iterable[GearResponse], answer: str) -> Attempt:
    """Take responses until they have a final number, and compare it with the worked answer's."""
    text, count, read = "", 0, 0
    for response in responses:
        text += response.text
        count += 1
        read += response.weight_bytes
        if finished(text):
            break
    found = final_number(text)
    return Attempt(None if found is None else str(found), found == final_number(answer), count, read)


def solve(gearbox: Gearbox, tokenizer: Any, prompts: Sequence[Prompt], mode: Mode, number: int) -> Attempt:
    """The attempt of a mode at the prompt of this number."""
    tokens, length, answer = prompts[number]
    responses = stream_generate(gearbox.model, tokenizer, list(tokens), length, mode=mode, gearbox=gearbox)
    return attempt(responses, answer)


def score(attempts: Mapping[str, Sequence[Attempt]], reference: str) -> list[dict[str, Any]]:
    """A row for each policy: accuracy with its standard error, bytes per token, and a comparison with the reference on
    the same problems (difference with standard error, exact McNemar test)."""
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
        *markdown_table(COLUMNS, report["policies"]),
        "",
    ]
    if not report["complete"]:
        lines += [INCOMPLETE, ""]
    return "\n".join(lines)


COLUMNS: Columns = {
    "policy": lambda row: row["policy"],
    "problems": lambda row: str(row["problems"]),
    "right": lambda row: f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f} %",
    "same answer": lambda row: percent(row["same_answer_as_reference"]),
    "difference": lambda row: f"{100 * row['against_reference']['difference']:+.1f} %",
    "McNemar p": lambda row: f"{row['against_reference']['p_value']:.2f}",
    "kB/token": kilobytes,
}
