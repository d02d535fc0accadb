"""Plant defects in the package and in its C++ core, one at a time, and see which of them the tests find.

    .venv/bin/python -m pytest -m '' -n logical --cov --cov-context=test --junitxml junit.xml
    .venv/bin/python scripts/plant_defects.py defects.jsonl

A defect is an operator, a constant or a condition that is changed. They are drawn at random, with a seed, from the
lines that some test executes. For each defect, the tests that execute its line run until one fails: first those of
the README's test command, then those behind markers. The others cannot find it. Of C++, whose lines no coverage
knows, the tests run that compute with native kernels.

Every result is a line of the file, which a second start goes on with; `--report` prints a table by folder.

Coverage of the whole suite takes an hour. `--by-import` needs none: the default tests run in the files that import the
defect's module, then in those that import a module which imports it. What they find is what the suite finds at least.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from pages import fill, table

ROOT = Path(__file__).resolve().parents[1]
CORE = "gearbx_mlx/kernels/cpu/"
LOADS_KERNELS = "gearbx_mlx/kernels/products.py"  # tests that execute its functions compute natively
NOT_HERE = ("neon", "primitive")  # code of another processor; bindings, which a wrong name keeps from compiling
OTHER = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"},
    **{"in": "not in", "not in": "in", "and": "or", "or": "and", "&&": "||", "||": "&&"},
    **{
        "+": "-",
        "-": "+",
        "*": "+",
        "/": "*",
        "//": "*",
        "%": "*",
        "**": "*",
        "<<": ">>",
        ">>": "<<",
        "+=": "-=",
        "-=": "+=",
    },
}
SYMBOLS = "|".join(sorted(map(re.escape, OTHER), key=len, reverse=True))
BATCH = 400  # node ids on one command line
FOUND, SURVIVED, LATE, NO_PROGRAM = "found", "survived", "too slow", "does not compile"


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
    """What is not executed for its value: types, and the indices of types."""
    found = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [each for each in found if each is not None]


def core_defects(file: str, text: str) -> Iterator[Defect]:
    """Operators between spaces and whole numbers of C++, outside of comments, strings and the preprocessor's lines."""
    hidden = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*|template <[^\n]*', re.M | re.S)
    code = hidden.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in re.finditer(
        r"(?<= )(?:<=|>=|==|!=|&&|\|\||<<|>>|\+=|-=|[<>+\-*/%])(?= )|(?<![\w.])\d+(?![\w.])", code
    ):
        old = match[0]
        new = OTHER.get(old) or f"({old} + 1)"
        yield Defect(file, text.count("\n", 0, match.start()) + 1, match.start(), old, new)


class Tests:
    """Which tests execute a line, and how long each takes.

    Args:
        database: of coverage.py, with contexts and branches, of a run of all tests.
        junit: the report of that run.
    """

    def __init__(self, database: Path, junit: Path):
        self.connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        self.files = defaultdict(list)
        for number, name in self.connection.execute("select id, path from file"):
            self.files[within_root(name)].append(number)
        self.by_default = default_tests()
        cases = ElementTree.parse(junit).iter("testcase")
        self.seconds = {(case.get("classname"), case.get("name")): float(case.get("time", "0")) for case in cases}

    def executed(self, file: str) -> set[int]:
        """The lines of a file that some test executes."""
        return {line for line, name in self._lines(file) if name}

    def reaching(self, defect: Defect) -> list[str]:
        """The tests that execute the defect's line, quick ones first; all of the default command before the others."""
        native = defect.file.startswith(CORE)
        executing = self._lines(LOADS_KERNELS if native else defect.file)
        names = {name for line, name in executing if name and (native or line == defect.line)}
        return sorted(names, key=lambda name: (name not in self.by_default, self.seconds.get(junit_name(name), 0.0)))

    def _lines(self, file: str) -> Iterator[tuple[int, str]]:
        for number in self.files[file]:
            query = "select distinct tono, context from arc join context on context_id = context.id where file_id = ?"
            for line, context in self.connection.execute(query, (number,)):
                yield line, test_of(context)


class TestsByImport:
    """Stands for `Tests` without coverage: the files of tests near a module, and every line of it."""

    def __init__(self) -> None:
        self.package = {path: path.read_text(encoding="utf-8") for path in (ROOT / "gearbx_mlx").rglob("*.py")}
        self.tests = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").glob("test_*.py"))}
        self.by_default = {within_tests(path) for path in self.tests}

    def executed(self, file: str) -> set[int]:
        return {*range(1, (ROOT / file).read_text(encoding="utf-8").count("\n") + 2)}

    def reaching(self, defect: Defect) -> list[str]:
        """The files of tests that import the module; then those that import one which imports it."""
        near = [ROOT / defect.file]
        users = [path for path, text in self.package.items() if imports(text, near[0]) and path.stem != "__init__"]
        direct = [path for path, text in self.tests.items() if imports(text, near[0])]
        others = [path for path, text in self.tests.items() if any(imports(text, user) for user in users)]
        return [within_tests(path) for path in dict.fromkeys([*direct, *others])]


def imports(text: str, module: Path) -> bool:
    """Whether a text imports a module by its name and, where that could be another one, its folder's."""
    folder, name = re.escape(module.parent.name), re.escape(module.stem)
    found = rf"^\s*(?:from|import) [\w.]*\b{folder}(?:\.{name}\b| import [^\n]*\b{name}\b)|^\s*from \.+{name} import"
    return re.search(found, text, re.MULTILINE) is not None


def within_tests(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def default_tests() -> set[str]:
    """The tests that the README's command runs."""
    command = [sys.executable, "-m", "pytest", "--collect-only"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return {line for line in listed.stdout.splitlines() if "::" in line}


def test_of(context: str) -> str:
    """The node id in a context: `ID|run` of a test, `ID (call)` of a process that a test started; else empty."""
    for name in context.split("|"):
        if "::" in name:
            return re.sub(r" \((setup|call|teardown)\)$", "", name)
    return ""


def junit_name(test: str) -> tuple[str, str]:
    """How a report names a test."""
    file, *inner = test.split("::")
    return ".".join([file.removesuffix(".py").replace("/", "."), *inner[:-1]]), inner[-1]


def within_root(name: str) -> str:
    """gearbx_mlx/..., wherever the checkout was."""
    return name[name.rfind("gearbx_mlx/") :]


def draw(tests: Tests | TestsByImport, seed: int, count: int, of_core: int) -> list[Defect]:
    """Defects of the package, in lines that a test executes, and of the core."""
    choose = random.Random(seed)
    package: list[Defect] = []
    core: list[Defect] = []
    for path in sorted((ROOT / "gearbx_mlx").rglob("*")):
        file = path.relative_to(ROOT).as_posix()
        if file.startswith(CORE) and path.suffix in (".cpp", ".h") and not any(name in path.stem for name in NOT_HERE):
            core += core_defects(file, path.read_text(encoding="utf-8"))
        elif path.suffix == ".py":
            executed = tests.executed(file)
            package += [d for d in python_defects(file, path.read_text(encoding="utf-8")) if d.line in executed]
    drawn = choose.sample(package, count - of_core) + choose.sample(core, of_core)
    choose.shuffle(drawn)
    return drawn


def try_one(defect: Defect, tests: Tests | TestsByImport, checkout: Path, seconds: float) -> dict[str, object]:
    """Run the tests that reach a defect in a copy of the checkout until one fails; its record for the file."""
    file = checkout / defect.file
    whole = file.read_text(encoding="utf-8")
    names, began = tests.reaching(defect), time.monotonic()
    record = asdict(defect) | {"tests": len(names), "outcome": SURVIVED, "by": ""}
    with tempfile.TemporaryDirectory(prefix="defect_") as cache:
        environment = os.environ | {"PYTHONPATH": str(checkout), "HYPOTHESIS_STORAGE_DIRECTORY": cache}
        if defect.file.startswith(CORE):
            environment["XDG_CACHE_HOME"] = cache
        try:
            file.write_text(defect.planted(whole), encoding="utf-8")
            if defect.file.startswith(CORE) and (reason := why_no_kernels(checkout, environment)):
                outcome = NO_PROGRAM if "could not compile" in reason else FOUND
                return record | {"outcome": outcome, "by": reason, "default": outcome == FOUND, "seconds": 0.0}
            for some in in_batches(names, tests.by_default):
                left = seconds - (time.monotonic() - began)
                which = ["-m", ""] if isinstance(tests, Tests) else []
                command = [sys.executable, "-m", "pytest", "-x", *which, "-p", "no:cacheprovider", "--tb=no", *some]
                try:
                    done = subprocess.run(
                        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=left
                    )
                except subprocess.TimeoutExpired:
                    record["outcome"] = LATE
                    break
                if done.returncode not in (0, 5):
                    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                    name = failed[1] if failed else "collection"
                    by_default = not failed or name in tests.by_default or isinstance(tests, TestsByImport)
                    record |= {"outcome": FOUND, "by": name, "default": by_default}
                    break
        finally:
            file.write_text(whole, encoding="utf-8")
    return record | {"seconds": round(time.monotonic() - began, 1)}


def why_no_kernels(checkout: Path, environment: dict[str, str]) -> str:
    """What the kernels' own test says of them when they have been compiled; empty if nothing."""
    program = "from gearbx_mlx.kernels import cpu; print(cpu.why_not() or '')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout, env=environment, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else "it crashes"


def in_batches(names: list[str], by_default: set[str]) -> Iterator[list[str]]:
    """Few quick ones first, since most defects are found at once; never default tests together with others."""
    for part in ([n for n in names if n in by_default], [n for n in names if n not in by_default]):
        at, size = 0, 20
        while at < len(part):
            yield part[at : at + size]
            at, size = at + size, BATCH


def report(records: Iterable[dict]) -> str:
    """A table by folder: defects, those that the default tests found, and those that any test found."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for record in records:
        if record["outcome"] == NO_PROGRAM:
            continue
        parts = record["file"].split("/")
        folder = CORE.rstrip("/") if record["file"].startswith(CORE) else "/".join(parts[: min(2, len(parts) - 1)])
        for name in (folder, "all"):
            rows[name][0] += 1
            rows[name][1] += bool(record.get("default"))
            rows[name][2] += record["outcome"] != SURVIVED
    last = rows.pop("all", [0, 0, 0])
    return table(
        ("folder", "planted", "found by default", "found by all"),
        [*map(as_row, sorted(rows.items())), as_row(("all", last))],
    )


def as_row(item: tuple[str, list[int]]) -> list[object]:
    return [item[0], *item[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path, help="A line of JSON for each defect; an existing file is gone on with.")
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="With contexts, of the whole suite.")
    parser.add_argument("--junit", type=Path, default=ROOT / "junit.xml", help="Of the same run.")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--core", type=int, default=20, help="How many of them are in C++.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=900, help="For one defect; one that takes longer counts as found."
    )
    parser.add_argument("--part", default="0/1", help="I/N: every Nth defect from the Ith on, for several processes.")
    parser.add_argument("--by-import", action="store_true", help="Without coverage: tests near the defect's module.")
    parser.add_argument("--report", action="store_true", help="Show the table of what is there, and end.")
    parser.add_argument("--page", type=Path, help="Write the table into this page, too.")
    args = parser.parse_args()
    known = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    if not args.report:
        known = go_on(args, known)
    print(report(known))
    if args.page:
        fill(args.page, {"defects": lambda: report(known)})


def go_on(args: argparse.Namespace, known: list[dict]) -> list[dict]:
    """Try the defects that were not tried yet; all records."""
    tests = TestsByImport() if args.by_import else Tests(args.coverage, args.junit)
    done = {(record["file"], record["start"]) for record in known}
    first, step = map(int, args.part.split("/"))
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(
            ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*cache")
        )
        for defect in draw(tests, args.seed, args.count, args.core)[first::step]:
            if (defect.file, defect.start) not in done:
                record = try_one(defect, tests, checkout, args.seconds)
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(f"{record['outcome']:>9} {record['seconds']:6.1f} s  {defect}  {record['by']}", flush=True)
    return [json.loads(line) for line in args.results.read_text().splitlines()]


if __name__ == "__main__":
    main()
