r"""Answers to problems: the model generates greedily, and its final answer is correct or wrong.

Functions: the answer is Python code, correct if it passes the problem's tests. GSM8K: the number after ####. MATH: the
answer in \boxed{...}, in a form in which equal answers are equal strings. Hendrycks et al., "Measuring Mathematical
Problem Solving With the MATH Dataset" (arXiv:2103.03874): their evaluation takes the last box and compares strings
after the replacements below. So 0.5 and \frac{1}{2} are equal answers, and 0.25 and \frac{1}{4} are not: scores
compare with published ones only under the same rule.

Problems of MATH are read as published: JSON Lines, or a folder of files with one problem each. The fields are
problem, solution (with the answer in \boxed{...}), level and type; of MATH-500, subject instead of type.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from gearbx_mlx.decoding.response import GearResponse
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.evaluation.predictions import PROMPT, read_rows
from gearbx_mlx.files.reading import Count, json_lines, read_json, read_text

from .report import markdown_table
from .sandbox import code_finished, code_in, passes
from .statistics import mcnemar, paired

NEXT_PROMPT = "\nQuestion:"  # of the next problem, where a model goes on after its answer
FINAL = re.compile(r"####\s*\$?\s*([-+]?[\d,]*\.?\d+)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> Decimal | None:
    """Return the number after the first ####, as GSM8K writes its answers, or the last number: "is $1,200." is 1200."""
    text = text.split(NEXT_PROMPT)[0]
    found = [match.group(1) for match in FINAL.finditer(text)][:1] or NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def number_finished(text: str) -> bool:
    """Return whether nothing that follows can change the final number."""
    return NEXT_PROMPT in text or re.search(r"####[^\n]*\d[^\n]*\n", text) is not None


BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
BRACES = re.compile(r"\\[{}]|[{}]")  # an escaped brace is a sign of a set, and closes nothing

# What is replaced, in this order; first in the answer with its spaces, then in the one without.
SPACED = (
    (r"\n|\\!", ""),  # line breaks and negative spaces
    (r"\\\\", r"\\"),
    (r"\\[td]frac", r"\\frac"),
    (r"\\(?:left|right)(?![A-Za-z])", ""),
    (r"\^(?:\{\\circ\}|\\circ)", ""),  # degrees
    (r"\\?\$", ""),  # dollars, and the signs of formulas
    (r"\\(?:text|mbox)\{ .*", ""),  # a unit to the right: in MATH only units have a space there
    (r"\\?%", ""),
    (r"(^|[ {])\.(?=\d)", r"\g<1>0."),
    (r"^[^=]{0,2}=([^=]*)$", r"\1"),  # the name of a variable
)
TIGHT = (
    (r"\\sqrt([A-Za-z0-9])", r"\\sqrt{\1}"),
    (r"\\frac([A-Za-z0-9])([A-Za-z0-9])", r"\\frac{\1}{\2}"),
    (r"\\frac([A-Za-z0-9])\{", r"\\frac{\1}{"),
    (r"^0\.5$", r"\\frac{1}{2}"),
    (r"^(0|-?[1-9]\d*)/([1-9]\d*)$", r"\\frac{\1}{\2}"),
)


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last box before the next problem, normalized; None without a complete box."""
    text = text.split(NEXT_PROMPT)[0]
    boxes = list(BOX.finditer(text))
    content = box_content(text, boxes[-1].end()) if boxes else None
    return None if content is None else normalised(content)


def box_finished(text: str) -> bool:
    """Return whether the line of an answer has ended: a solution ends with its box."""
    if NEXT_PROMPT in text:
        return True
    boxes = list(BOX.finditer(text))
    return bool(boxes) and "\n" in text[boxes[-1].end() :] and box_content(text, boxes[-1].end()) is not None


def box_content(text: str, start: int) -> str | None:
    """Return the content of the braces at `start`, including inner braces; without braces, up to $ or the line end.

    None: the braces do not close, or the box is empty.
    """
    if not text.startswith("{", start):
        return re.split(r"[$\n]", text[start:])[0].strip() or None
    depth = 0
    for brace in BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start + 1 : brace.start()].strip() or None
    return None


def normalised(answer: str) -> str:
    """Return an answer as the public evaluation compares it: without units and spaces, in one form of fractions."""
    for pattern, to in SPACED:
        answer = re.sub(pattern, to, answer)
    answer = re.sub(r"\s", "", answer)
    for pattern, to in TIGHT:
        answer = re.sub(pattern, to, answer)
    return answer


def read_numeric(path: Path) -> list[dict[str, str]]:
    """Return problems with a number as the answer, as in GSM8K. Raises GearbxError for a bad line."""
    rows = read_rows(path, ("question", "answer"))
    for place, row in enumerate(rows, 1):
        if final_number(row["answer"]) is None:
            raise GearbxError(f"{path}, problem {place}: its answer has no number; add it after ####")
    return rows


GIVE_PROBLEMS = "give problems of MATH: JSON Lines, or a folder of JSON files, with problem and solution"


class Problem(Struct, frozen=True):
    """A problem of MATH."""

    problem: str
    solution: str
    level: str | int | None = None
    type: str | None = None
    subject: str | None = None

    def row(self) -> dict[str, str]:
        """Question, answer, and the names of the level and of the subject."""
        level = f"Level {self.level}" if isinstance(self.level, int) else self.level
        return {
            "question": self.problem,
            "answer": self.solution,
            "level": level or "",
            "type": self.type or self.subject or "",
        }


def problem_files(path: Path) -> list[Path]:
    """Return the files of problems, in the order of their folders and numbers: 2.json is before 10.json.

    Raises:
        GearbxError: a folder without any.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*.json"), key=lambda file: (file.parent, len(file.stem), file.stem))
    if not files:
        raise GearbxError(f"{path}: has no .json file; {GIVE_PROBLEMS}")
    return files


def read_problems(path: Path) -> list[dict[str, str]]:
    """Return the problems of a file of JSON Lines, of a file with one problem (.json), or of a folder of these.

    Returns:
        for each a dictionary with question, answer, level and type, all strings.

    Raises:
        GearbxError: a file that cannot be read or has no problems, or a problem without text or without a boxed answer.
    """
    rows = [checked_row(place, problem) for file in problem_files(path) for place, problem in problems_in(file)]
    if not rows:
        raise GearbxError(f"{path}: is empty; {GIVE_PROBLEMS}")
    return rows


def problems_in(file: Path) -> Iterator[tuple[str, Problem]]:
    """Yield the place of each problem of a file, for errors, and the problem."""
    if file.suffix == ".json":
        yield str(file), read_json(file, Problem, "a problem of MATH", GIVE_PROBLEMS)
        return
    for number, problem in json_lines(file, read_text(file, "problems of MATH", GIVE_PROBLEMS), Problem, GIVE_PROBLEMS):
        yield f"{file}, line {number}", problem


def checked_row(place: str, problem: Problem) -> dict[str, str]:
    if not problem.problem.strip():
        raise GearbxError(f"{place}: its problem has no text; {GIVE_PROBLEMS}")
    if boxed_answer(problem.solution) is None:
        raise GearbxError(f"{place}: its solution has no answer in \\boxed{{...}}; add it, or leave the problem out")
    return problem.row()


GIVE_FUNCTIONS = "give JSON Lines with question, tests (lines of assert) and solution"


class Function(Struct, frozen=True):
    """A function to write. solution: code that passes the tests, for examples."""

    question: str
    tests: str
    solution: str


def read_functions(path: Path) -> list[dict[str, str]]:
    """Return the functions of a file: question, tests as the answer, solution. Raises GearbxError for a bad line."""
    lines = json_lines(path, read_text(path, "functions", GIVE_FUNCTIONS), Function, GIVE_FUNCTIONS)
    rows = [{"question": each.question, "answer": each.tests, "solution": each.solution} for _, each in lines]
    if not rows:
        raise GearbxError(f"{path}: is empty; {GIVE_FUNCTIONS}")
    return rows


Prompt = tuple[Sequence[int], int, str]  # tokens, how many may be written after them, the worked answer


@dataclass(frozen=True)
class Task:
    """A kind of problems.

    read: from a path to rows with question and answer. final: the final answer in a text, or None. finished: whether
    what follows a text cannot change that. instruction: what a chat model is asked besides the question. passes:
    whether a final answer is right, where this is not an equal one of the worked answer.
    """

    read: Callable[[Path], list[dict[str, str]]]
    final: Callable[[str], Any]
    finished: Callable[[str], bool]
    instruction: str = ""
    passes: Callable[[Any, str], bool] | None = None

    def solves(self, found: Any, answer: str) -> bool:
        """Return whether a final answer is right."""
        if found is None:
            return False
        return found == self.final(answer) if self.passes is None else self.passes(found, answer)


# Of four wordings, the one with which Qwen2.5-Coder-1.5B in 16 bits solved the most of GSM8K's first 25 test problems:
# 13. It began to write code in answer to others, and was cut off.
STEPS = "\nThink step by step in a few short sentences, without code or lists. Then write #### and the number."
TASKS = {
    "gsm8k": Task(read_numeric, final_number, number_finished, STEPS),
    "math": Task(read_problems, boxed_answer, box_finished, "\nPut the final answer in \\boxed{}."),
    "functions": Task(read_functions, code_in, code_finished, "\nAnswer with the code only.", passes),
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
    """Return the question, after examples with their answers."""
    solved = [f"{PROMPT.format(**example)} {worked(example)}\n\n" for example in examples]
    return "".join(solved) + PROMPT.format(**row)


def worked(row: Mapping[str, str]) -> str:
    """Return the worked answer of an example."""
    return row.get("solution", row["answer"])


def until_finished(task: Task, responses: Iterable[GearResponse]) -> list[GearResponse]:
    """Return the responses up to the one that completes a final answer."""
    taken, text = [], ""
    for response in responses:
        taken.append(response)
        text += response.text
        if task.finished(text):
            break
    return taken


def attempt_of(task: Task, text: str, answer: str, tokens: int, weight_bytes: int) -> Attempt:
    """Return the attempt that a text is, compared with the worked answer."""
    found = task.final(text)
    return Attempt(None if found is None else str(found), task.solves(found, answer), tokens, weight_bytes)


def score(attempts: Mapping[str, Sequence[Attempt]], reference: str) -> list[dict[str, Any]]:
    """Return a row for each policy: accuracy with standard error, bytes per token, and comparison with the reference on
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
                "kept_of_reference": float(right[name][right[reference]].mean()) if right[reference].any() else 1.0,
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
    """Return, for each value of a field of the problems, such as a level: numbers of correct ones and of all."""
    groups: dict[str, list[int]] = {}
    for problem, tried in zip(problems, attempts):
        if problem.get(field):
            right, count = groups.get(problem[field], [0, 0])
            groups[problem[field]] = [right + tried["right"], count + 1]
    return dict(sorted(groups.items()))


def grouped(problems: Sequence[Mapping[str, str]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of `score` with `by_level` and `by_type`, where the problems have them."""
    fields = [field for field in ("level", "type") if any(problem.get(field) for problem in problems)]
    return [row | {f"by_{field}": by_group(problems, row["attempts"], field) for field in fields} for row in rows]


def group_tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a table of right answers for each level, and one for each type of problem, where rows have them."""
    tables = {}
    for field in ("by_level", "by_type"):
        if field in rows[0]:
            groups = {name: partial(group_cell, field, name) for name in rows[0][field]}
            tables[field] = markdown_table({"policy": lambda row: row.get("name", row["policy"]), **groups}, rows)
    return tables


def group_cell(field: str, name: str, row: Mapping[str, Any]) -> str:
    right, count = row[field][name]
    return f"{right} of {count}"
