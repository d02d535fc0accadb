"""Write the figures of `research.products_on_threads` into the blocks of these names of a page.

    python scripts/write_thread_figures.py RESULTS [--page docs/performance.md]

RESULTS has threads.json and w4a8.json, of --json. The machine is the files', and so are the dates.
"""

import argparse
import functools
import json
import time
from pathlib import Path

from pages import fill, table


def read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def measured(file: Path, machine: str) -> str:
    date = time.strftime("%Y-%m-%d", time.localtime(file.stat().st_mtime))
    return f"\n{machine}, {date}\n"


def span(values: list[float]) -> str:
    return " to ".join(f"{value:.2f}" for value in values)


def threads(results: Path) -> str:
    rows = read(results / "threads.json")["rows"]
    lines = [
        [
            row["bits"],
            row["threads"],
            f"{row['products_per_second']:.0f}",
            f"{row['speedup']:.2f}",
            span(row["spread"]),
            f"{row['bandwidth_ratio']:.2f}",
        ]
        for row in rows
    ]
    head = ["bits", "threads", "products/s", "speedup", "spread", "of the read bandwidth"]
    return table(head, lines) + measured(results / "threads.json", rows[0]["machine"])


def w4a8(results: Path) -> str:
    found = read(results / "w4a8.json")
    lines = [
        [
            row["implementation"],
            row["threads"],
            f"{row['products_per_second']:.0f}",
            f"{row['times_float32']:.2f}",
            span(row["spread"]),
        ]
        for row in found["rows"]
    ]
    head = ["implementation", "threads", "products/s", "times float32", "spread"]
    return table(head, lines) + measured(results / "w4a8.json", found["machine"])


def terms(results: Path) -> str:
    lines = [
        [row["term"], row["meaning"], f"{row['picoseconds_per_weight']:.1f}", span(row["spread"])]
        for row in read(results / "w4a8.json")["terms"]
    ]
    return table(["term", "meaning", "ps a weight", "spread"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, default=Path("docs/performance.md"))
    args = parser.parse_args()
    fill(args.page, {made.__name__: functools.partial(made, args.results) for made in (threads, w4a8, terms)})


if __name__ == "__main__":
    main()
