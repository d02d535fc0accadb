"""How much of the package the tests of the README's command execute, and how much all of them: a table by folder.

    .venv/bin/python -m pytest -m '' -n logical --cov --cov-branch --cov-context=test
    .venv/bin/python scripts/coverage_by_folder.py .coverage

Run it in the checkout that was measured.
"""

import argparse
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from pages import fill, table

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("num_statements", "covered_lines", "num_branches", "covered_branches")


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


def of_default_tests(database: Path, copy: Path) -> Path:
    """A copy of a database of coverage.py without what only other tests execute. Imports count for both."""
    default = default_tests()
    shutil.copy(database, copy)
    with sqlite3.connect(copy) as connection:
        names = {number: test_of(name) for number, name in connection.execute("select id, context from context")}
        connection.execute("create temporary table others (id integer primary key)")
        others = [(number,) for number, name in names.items() if name and name not in default]
        connection.executemany("insert into others values (?)", others)
        connection.execute("delete from arc where context_id in (select id from others)")
    return copy


def by_folder(database: Path) -> dict[str, list[int]]:
    """Statements, covered ones, branches, covered ones of each folder of the package, and of all."""
    command = [sys.executable, "-m", "coverage", "json", "-q", "--data-file", str(database.resolve()), "-o", "-"]
    command += ["--include", f"{ROOT}/gearbx_mlx/*"]  # not a copy that a test installed
    files = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)["files"]
    rows: dict[str, list[int]] = defaultdict(lambda: [0] * len(SHOWN))
    for name, file in files.items():
        folder = name.split("/")[1] if name.count("/") > 1 else "modules"
        for row in (rows[folder], rows["all"]):
            for column, figure in enumerate(SHOWN):
                row[column] += file["summary"][figure]
    return rows


def shares(row: list[int]) -> list[str]:
    """Of lines, of branches, and of both, in percent."""
    lines, covered, branches, taken = row
    pairs = (covered, lines), (taken, branches), (covered + taken, lines + branches)
    return [f"{100 * part / whole:.1f}" if whole else "-" for part, whole in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("database", type=Path)
    parser.add_argument("--page", type=Path, help="Write the table into this page, too.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        default = by_folder(of_default_tests(args.database, Path(folder) / "default"))
    every = by_folder(args.database)
    names = [*sorted(every.keys() - {"all"}), "all"]
    head = (
        "folder",
        "lines",
        "default: % of lines",
        "of branches",
        "of both",
        "all: % of lines",
        "of branches",
        "of both",
    )
    text = table(head, ([name, every[name][0], *shares(default[name]), *shares(every[name])] for name in names))
    print(text)
    if args.page:
        fill(args.page, {"coverage": lambda: text})


if __name__ == "__main__":
    main()
