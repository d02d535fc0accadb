"""Plant defects in the package and in its C++ core, one at a time, and check whether the tests find them.

    .venv/bin/python -m pytest -n logical --dist worksteal --cov --cov-context=test
    .venv/bin/python scripts/plant_defects.py defects.jsonl
    .venv/bin/python scripts/plant_defects.py defects.jsonl --survivors

The first command records which test executes which line. A defect is a changed operator, constant or condition, drawn
at random with a seed. For each defect, tests that execute its line run until one fails; the whole default suite runs
for defects that survive. Tests behind markers do not run.

Every result is a line of the file, and a second start resumes there; `--report` prints a table by folder.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coverage
from pages import table

from gearbx_mlx.kernels.compiler import AVX2, NATIVE_CPU, PORTABLE

ROOT = Path(__file__).resolve().parents[1]
CORE = "gearbx_mlx/kernels/cpu/"
CALLS_KERNELS = "gearbx_mlx/kernels/products.py"
MOST = 300  # tests that run for a defect, before the whole suite does
NOT_HERE = ("neon", "primitive")  # code of another processor; bindings, which a wrong name keeps from compiling
INSTRUCTIONS = (NATIVE_CPU, AVX2, PORTABLE)  # of GEARBX_CPU: the first for which a line is compiled
OTHER = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"},
    **{"in": "not in", "not in": "in", "and": "or", "or": "and", "&&": "||", "||": "&&"},
    **{"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "*", "**": "*", "<<": ">>", ">>": "<<"},
    **{"+=": "-=", "-=": "+="},
}
SYMBOLS = "|".join(sorted(map(re.escape, OTHER), key=len, reverse=True))
FOUND, SURVIVED, LATE = "found", "survived", "too slow"
NO_PROGRAM, ELSEWHERE = "does not compile", "code of another processor"
UNCOUNTED = NO_PROGRAM, ELSEWHERE


@dataclass(frozen=True)
class Defect:
    """What stands at a place of a file, and what is put there. `start`: in characters from the file's beginning."""

    file: str
    line: int
    start: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old} -> {self.new}"

    def planted(self, text: str) -> str:
        end = self.start + len(self.old)
        assert text[self.start : end] == self.old, f"{self.file} has changed; begin a new file of results"
        return text[: self.start] + self.new + text[end:]


def python_defects(file: str, text: str) -> Iterator[Defect]:
    """Every operator, number and condition of a module, outside of annotations and docstrings."""
    begins = [0]
    for line in text.encode().splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    in_bytes = text.encode()

    def place(line: int | None, column: int | None) -> int:
        assert line is not None
        assert column is not None
        return len(in_bytes[: begins[line - 1] + column].decode())

    def between(left: ast.expr, right: ast.expr) -> Iterator[Defect]:
        first, last = place(left.end_lineno, left.end_col_offset), place(right.lineno, right.col_offset)
        found = re.search(rf"(?<![\w])(?:{SYMBOLS})(?![\w])|{SYMBOLS}", text[first:last])
        if found:
            yield Defect(file, left.end_lineno or left.lineno, first + found.start(), found[0], OTHER[found[0]])

    tree = ast.parse(text)
    skipped = {id(each) for node in ast.walk(tree) for part in annotations(node) for each in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators):
                yield from between(left, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:]):
                yield from between(left, right)
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right)
        elif isinstance(node, ast.AugAssign):
            yield from between(node.target, node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            old = text[(start := place(node.lineno, node.col_offset)) : place(node.end_lineno, node.end_col_offset)]
            new = str(not node.value) if isinstance(node.value, bool) else f"({old} + 1)"
            yield Defect(file, node.lineno, start, old, new)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            test = node.test
            old = text[(start := place(test.lineno, test.col_offset)) : place(test.end_lineno, test.end_col_offset)]
            yield Defect(file, test.lineno, start, old, f"(not ({old}))")


def annotations(node: ast.AST) -> list[ast.AST]:
    """Parts that are not executed for their value: types, and the indices of types."""
    found = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [each for each in found if each is not None]


def core_defects(file: str, text: str) -> Iterator[Defect]:
    """Operators between spaces and whole numbers of C++, except in comments, strings and preprocessor lines."""
    hidden = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*|template <[^\n]*', re.M | re.S)
    code = hidden.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in re.finditer(
        r"(?<= )(?:<=|>=|==|!=|&&|\|\||<<|>>|\+=|-=|[<>+\-*/%])(?= )|(?<![\w.])\d+(?![\w.])", code
    ):
        old = match[0]
        new = OTHER.get(old) or f"({old} + 1)"
        yield Defect(file, text.count("\n", 0, match.start()) + 1, match.start(), old, new)


class Reached:
    """The tests that reach a line, by a database of `pytest --cov --cov-context=test`."""

    def __init__(self, database: Path):
        self.data = coverage.CoverageData(str(database))
        self.data.read()

    def tests(self, defect: Defect, most: int) -> list[str]:
        """Return one case of each test function that executes the line, then their other cases; `most` of them at most.

        What runs on import counts for all tests of the file, and C++ for those that reach the products which call it.
        """
        if defect.file.startswith(CORE):
            lines, own = self._lines(CALLS_KERNELS), []
        else:
            lines = self._lines(defect.file)
            own = lines.get(defect.line, [])
        contexts = [*filter(None, own)] or [context for each in lines.values() for context in filter(None, each)]
        cases: dict[str, list[str]] = {}
        for test in sorted({context.rpartition("|")[0] for context in contexts}):
            cases.setdefault(test.partition("[")[0], []).append(test)
        choose = random.Random(str(defect))
        functions = choose.sample([*cases.values()], len(cases))
        firsts, others = [choose.choice(each) for each in functions], [test for each in functions for test in each]
        return [*dict.fromkeys([*firsts, *others])][:most]

    def _lines(self, file: str) -> dict[int, list[str]]:
        return self.data.contexts_by_lineno(str(ROOT / file))


def draw(seed: int, count: int, of_core: int) -> list[Defect]:
    """Defects of the package and of the core."""
    choose = random.Random(seed)
    package: list[Defect] = []
    core: list[Defect] = []
    for path in sorted((ROOT / "gearbx_mlx").rglob("*")):
        file = path.relative_to(ROOT).as_posix()
        if file.startswith(CORE) and path.suffix in (".cpp", ".h") and not any(name in path.stem for name in NOT_HERE):
            core += core_defects(file, path.read_text(encoding="utf-8"))
        elif path.suffix == ".py":
            package += python_defects(file, path.read_text(encoding="utf-8"))
    drawn = choose.sample(package, count - of_core) + choose.sample(core, of_core)
    choose.shuffle(drawn)
    return drawn


def try_one(defect: Defect, tests: list[str] | None, checkout: Path, seconds: float) -> dict[str, Any]:
    """Run tests in a copy of the checkout that has the defect, until one fails; the record for the file.

    Args:
        tests: None for the whole suite.
    """
    file = checkout / defect.file
    whole, began = file.read_text(encoding="utf-8"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="defect_") as cache:
        environment = os.environ | {"PYTHONPATH": str(checkout), "HYPOTHESIS_STORAGE_DIRECTORY": cache}
        try:
            if defect.file.startswith(CORE):
                environment["XDG_CACHE_HOME"] = cache
                environment["GEARBX_CPU"] = compiled_for(defect, file, checkout, environment)
            file.write_text(defect.planted(whole), encoding="utf-8")
            outcome, by = outcome_of(defect, tests, checkout, environment, seconds)
        finally:
            file.write_text(whole, encoding="utf-8")
    took = round(time.monotonic() - began, 1)
    ran = None if tests is None else len(tests)
    return asdict(defect) | {"tests": ran, "outcome": outcome, "by": by, "seconds": took}


def outcome_of(
    defect: Defect, tests: list[str] | None, checkout: Path, environment: dict[str, str], seconds: float
) -> tuple[str, str]:
    """Return whether a planted defect is found, and by which test, or why it says nothing."""
    if defect.file.startswith(CORE):
        if not environment["GEARBX_CPU"]:
            return ELSEWHERE, ""
        if reason := why_no_kernels(checkout, environment):
            return NO_PROGRAM if "could not compile" in reason else FOUND, reason
    if tests == []:
        return SURVIVED, ""
    which = ["-n", "logical", "--dist", "worksteal"]
    if tests is not None:
        which = [test.replace(str(ROOT), str(checkout)) for test in tests]  # a parameter may be a path
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", *which]
    try:
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return LATE, ""
    if done.returncode in (0, 5):
        return SURVIVED, ""
    if "ERROR: not found" in done.stderr:
        raise RuntimeError(done.stderr)  # else a name that changed since the coverage would count as a test that fails
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return FOUND, failed[1] if failed else "collection"


def compiled_for(defect: Defect, file: Path, checkout: Path, environment: dict[str, str]) -> str:
    """Return the instructions for which this machine compiles a defect's line; empty if an error there goes unseen."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join([*lines[: defect.line - 1], "#error here\n", *lines[defect.line - 1 :]]), encoding="utf-8")
    for instructions in INSTRUCTIONS:
        if "could not compile" in why_no_kernels(checkout, environment | {"GEARBX_CPU": instructions}):
            return instructions
    return ""


def why_no_kernels(checkout: Path, environment: dict[str, str]) -> str:
    """Return the report of the kernels' own test once they are compiled; empty if it finds no fault.

    Raises RuntimeError where they did not compile in time: the machine is too busy to say what the tests find.
    """
    program = "from gearbx_mlx.kernels import cpu; print(cpu.why_not() or '')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout, env=environment, capture_output=True, text=True
    )
    reason = done.stdout.strip() if done.returncode == 0 else "it crashes"
    if "did not compile" in reason:
        raise RuntimeError(reason)
    return reason


def report(records: Iterable[dict]) -> str:
    """Return a table by folder: defects, and those that were found."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in records:
        if record["outcome"] in UNCOUNTED:
            continue
        parts = record["file"].split("/")
        folder = CORE.rstrip("/") if record["file"].startswith(CORE) else "/".join(parts[: min(2, len(parts) - 1)])
        for name in (folder, "all"):
            rows[name][0] += 1
            rows[name][1] += record["outcome"] != SURVIVED
    last = rows.pop("all", [0, 0])
    return table(("folder", "planted", "found"), [[name, *row] for name, row in [*sorted(rows.items()), ("all", last)]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path, help="A line of JSON for each defect; an existing file is gone on with.")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--core", type=int, default=20, help="How many of them are in C++.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=900, help="For one defect; one that takes longer counts as found."
    )
    parser.add_argument("--part", default="0/1", help="I/N: every Nth defect from the Ith on, for several processes.")
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="What the tests executed.")
    parser.add_argument("--survivors", action="store_true", help="Run the whole suite for what survived.")
    parser.add_argument("--report", action="store_true", help="Show the table of what is there, and end.")
    args = parser.parse_args()
    if not args.report:
        go_on(args)
    print(report(read(args.results).values()))


def read(results: Path) -> dict[tuple[str, int], dict]:
    """Return the last record of each defect, by its place."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {(record["file"], record["start"]): record for record in map(json.loads, lines)}


def go_on(args: argparse.Namespace) -> None:
    """Try the defects that were not tried yet, or those that survived with the whole suite."""
    known, first, step = read(args.results), *map(int, args.part.split("/"))
    reached = None if args.survivors else Reached(args.coverage)
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(
            ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*cache")
        )
        for defect in draw(args.seed, args.count, args.core)[first::step]:
            record = known.get((defect.file, defect.start))
            survived = record is not None and record["outcome"] == SURVIVED and record["tests"] is not None
            if not (survived if args.survivors else record is None):
                continue
            tests = None if reached is None else reached.tests(defect, MOST)
            record = try_one(defect, tests, checkout, args.seconds)
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{record['outcome']:>9} {record['seconds']:6.1f} s  {defect}  {record['by']}", flush=True)


if __name__ == "__main__":
    main()
