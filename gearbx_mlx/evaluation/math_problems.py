r"""Problems of MATH as they are published: JSON Lines, or a folder of files with one problem each.

The fields are problem, solution (with the answer in \boxed{...}), level and type; of MATH-500, subject instead of type.
"""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from ..errors import GearbxError
from ..files.reading import json_lines, read_json, read_text
from .boxed import final_answer

GIVE = "give problems of MATH: JSON Lines, or a folder of JSON files, with problem and solution"


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
    """The files of problems, in the order of their folders and numbers: 2.json is before 10.json.

    Raises:
        GearbxError: a folder without any.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*.json"), key=lambda file: (file.parent, len(file.stem), file.stem))
    if not files:
        raise GearbxError(f"{path}: has no .json file; {GIVE}")
    return files


def read_problems(path: Path) -> list[dict[str, str]]:
    """The problems of a file of JSON Lines, of a file with one problem (.json), or of a folder of these.

    Returns:
        for each a dictionary with question, answer, level and type, all strings.

    Raises:
        GearbxError: a file that cannot be read or has no problems, or a problem without text or without a boxed answer.
    """
    rows = [checked(place, problem) for file in problem_files(path) for place, problem in problems_in(file)]
    if not rows:
        raise GearbxError(f"{path}: is empty; {GIVE}")
    return rows


def problems_in(file: Path) -> Iterator[tuple[str, Problem]]:
    """Where each problem of a file stands, for errors, and the problem."""
    if file.suffix == ".json":
        yield str(file), read_json(file, Problem, "a problem of MATH", GIVE)
        return
    for number, problem in json_lines(file, read_text(file, "problems of MATH", GIVE), Problem, GIVE):
        yield f"{file}, line {number}", problem


def checked(place: str, problem: Problem) -> dict[str, str]:
    if not problem.problem.strip():
        raise GearbxError(f"{place}: its problem has no text; {GIVE}")
    if final_answer(problem.solution) is None:
        raise GearbxError(f"{place}: its solution has no answer in \\boxed{{...}}; add it, or leave the problem out")
    return problem.row()
