"""Time how long the commands take to start: `--help`, and the first token of the demo model beside mlx-lm's import.

    python scripts/time_startup.py [--page docs/performance.md] [--trials 11]

Trials go through everything in turn. A package that is installed has compiled Python files; an editable one may not.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pages import fill, table
from rich.progress import track

from gearbx_mlx.__main__ import COMMANDS

IMPORT = "import mlx_lm"
GENERATE = ("-m", "gearbx_mlx.generate", "--max-tokens", "20")
HELP = [name for name in COMMANDS if name != "lm_eval"]  # whose parser is lm-eval's


def seconds(arguments: Sequence[str], until: int | None = None) -> float:
    """Seconds of a Python program, or until it has written the first `until` bytes."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.read(-1 if until is None else until)
        if until is None:
            process.wait()
        spent = time.perf_counter() - start
        process.stdout.read()
    return spent


def measure(trials: int) -> list[list[str]]:
    """A row for each program: median seconds and their spread, and how many times mlx-lm's import."""
    programs = {IMPORT: (["-c", IMPORT], None), "`generate`, first token": (GENERATE, 1)}
    programs |= {f"`{name} --help`": (["-m", f"gearbx_mlx.{name}", "--help"], None) for name in HELP}
    spent: dict[str, list[float]] = {name: [] for name in programs}
    for number in track(range(trials + 1), "starting"):
        for name, (arguments, until) in programs.items():
            found = seconds(arguments, until)
            if number:  # the first round fills the disk's cache
                spent[name].append(found)
    rows = []
    for name, found in spent.items():
        ratios = [mine / other for mine, other in zip(found, spent[IMPORT])]
        spread = f"{min(found):.2f}-{max(found):.2f}"
        rows.append([name, f"{statistics.median(found):.2f}", spread, f"{statistics.median(ratios):.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="Write the table into this page, after <!-- startup -->.")
    parser.add_argument("--trials", type=int, default=11)
    args = parser.parse_args()
    text = table(["program", "seconds", "spread", "times mlx-lm's import"], measure(args.trials))
    print(text)
    if args.page:
        fill(args.page, {"startup": lambda: text})


if __name__ == "__main__":
    main()
