"""Coverage of the package by the README's test command, and by all tests: a table by folder.

    .venv/bin/python -m pytest -n logical --cov --cov-branch && mv .coverage .coverage_default
    .venv/bin/python -m pytest -m '' -n logical --cov --cov-branch
    .venv/bin/python scripts/coverage_by_folder.py .coverage_default .coverage

Run it in the checkout that was measured.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from pages import fill, table

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def by_folder(database: Path) -> dict[str, list[int]]:
    """Statements, executed statements, branches and executed branches of each folder of the package, and of all."""
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
    """Shares of lines, of branches, and of both, in percent."""
    lines, covered, branches, taken = row
    pairs = (covered, lines), (taken, branches), (covered + taken, lines + branches)
    return [f"{100 * part / whole:.1f}" if whole else "-" for part, whole in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("default", type=Path, help="The database of the README's command.")
    parser.add_argument("all", type=Path, nargs="?", help="That of all tests.")
    parser.add_argument("--page", type=Path, help="Write the table into this page, too.")
    args = parser.parse_args()
    measured = {"default": by_folder(args.default)} | ({"all": by_folder(args.all)} if args.all else {})
    lines = {name: row[0] for name, row in measured["default"].items()}
    names = [*sorted(lines.keys() - {"all"}), "all"]
    head = ["folder", "lines"]
    head += [name for part in measured for name in (f"{part}: % of lines", "of branches", "of both")]
    cells = {name: [share for each in measured.values() for share in shares(each[name])] for name in names}
    text = table(head, ([name, lines[name], *cells[name]] for name in names))
    print(text)
    if args.page:
        fill(args.page, {"coverage": lambda: text})


if __name__ == "__main__":
    main()
