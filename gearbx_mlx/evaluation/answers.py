"""Problems, free-running: the model writes greedily, and its final answer is right or wrong."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
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
from . import boxed, gsm8k
from .math_problems import read_problems
from .metrics import mcnemar, paired
from .tables import INCOMPLETE, Columns, kilobytes, markdown_table, percent
from .text import PROMPT, read_rows

DRAFTS = Lossless(
    cost="bytes", lookup_tokens=0, draft_ahead=0
)  # what it reads is compared, and is the same in every run

Prompt = tuple[Sequence[int], int, str]  # tokens, how many may be written after them, the worked answer


@dataclass(frozen=True)
class Task:
    """A kind of problems.

    read: from a path to rows with question and answer. final: the final answer in a text, or None. finished: whether
    what follows a text cannot change that. instruction: what a chat model is asked besides the question.
    """

    read: Callable[[Path], list[dict[str, str]]]
    final: Callable[[str], Any]
    finished: Callable[[str], bool]
    instruction: str = ""


TASKS = {
    "gsm8k": Task(lambda path: read_rows(path, ("question", "answer")), gsm8k.final_number, gsm8k.finished),
    "math": Task(read_problems, boxed.final_answer, boxed.finished, "\nPut the final answer in \\boxed{}."),
}


@dataclass(frozen=True)
class Attempt:
    """The model's answer to a problem under a policy.

    found: the final answer. right: whether it is the problem's. tokens: written. weight_bytes: read, in all.
    """

    found: str | None
    right: bool
    tokens: Count
    weight_bytes: Count


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


def attempt(task: Task, responses: Iterable[GearResponse], answer: str) -> Attempt:
    """Take responses until they have a final answer, and compare it with the worked one's."""
    text, count, read = "", 0, 0
    for response in responses:
        text += response.text
        count += 1
        read += response.weight_bytes
        if task.finished(text):
            break
    found = task.final(text)
    if found is None:
        return Attempt(None, False, count, read)
    return Attempt(str(found), found == task.final(answer), count, read)


def solve(gearbox: Gearbox, tokenizer: Any, task: Task, prompts: Sequence[Prompt], mode: Mode, number: int) -> Attempt:
    """The attempt of a mode at the prompt of this number."""
    tokens, length, answer = prompts[number]
    responses = stream_generate(gearbox.model, tokenizer, list(tokens), length, mode=mode, gearbox=gearbox)
    return attempt(task, responses, answer)


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


def by_group(
    problems: Sequence[Mapping[str, str]], attempts: Sequence[Mapping[str, Any]], field: str
) -> dict[str, list[int]]:
    """For each value of a field of the problems, such as a level: how many are right, and how many there are."""
    groups: dict[str, list[int]] = {}
    for problem, tried in zip(problems, attempts):
        if problem.get(field):
            right, count = groups.get(problem[field], [0, 0])
            groups[problem[field]] = [right + tried["right"], count + 1]
    return dict(sorted(groups.items()))


def grouped(problems: Sequence[Mapping[str, str]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `score` with `by_level` and `by_type`, where the problems have them."""
    fields = [field for field in ("level", "type") if any(problem.get(field) for problem in problems)]
    return [row | {f"by_{field}": by_group(problems, row["attempts"], field) for field in fields} for row in rows]


def group_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table of right answers for each level, and one for each type of problem, where rows have them."""
    lines: list[str] = []
    for field in ("by_level", "by_type"):
        if field in rows[0]:
            groups = {name: partial(group_cell, field, name) for name in rows[0][field]}
            lines += [*markdown_table({"policy": lambda row: row.get("name", row["policy"]), **groups}, rows), ""]
    return lines


def group_cell(field: str, name: str, row: Mapping[str, Any]) -> str:
    right, count = row[field][name]
    return f"{right} of {count}"


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    lines = [
        f"# {report['model']} on {report['data']}: final answers",
        "",
        f"Greedy. Differences and McNemar tests are against {report['reference']}, on the same problems.",
        "",
        *markdown_table(COLUMNS, report["policies"]),
        "",
        *group_tables(report["policies"]),
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
