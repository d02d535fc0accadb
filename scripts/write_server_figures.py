"""Write the figures of `benchmark server` into a page, between <!-- server --> and <!-- end -->.

    python scripts/write_server_figures.py soak.json rates.json [--page docs/performance.md]

The files are those of its --json. Dates and machines are theirs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from pages import fill, table

HEAD = ["part", "kernels", "measure", "value", "spread", "aim", "count"]


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def aim(row: dict[str, Any]) -> str:
    """At least, at most, or nothing; and whether it was missed."""
    bounds = [f"{sign} {row[name]:g}" for sign, name in (("≥", "least"), ("≤", "most")) if row[name] is not None]
    return " ".join(bounds) + ("" if row["reached"] else ", missed")


def lines(row: dict[str, Any]) -> list[str]:
    spread = "-".join(figure(value) for value in row["spread"] or [])
    value = f"{row['value']:.0f}" if row["value"] >= 1000 else figure(row["value"])
    return [row["part"], row["kernels"], row["measure"], value, spread, aim(row), str(row["count"])]


def server(files: list[Path]) -> str:
    """The table, and where and when its rows were measured."""
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    places = sorted({f"{row['machine']}, {row['date']}" for row in rows})
    return table(HEAD, map(lines, rows)) + f"\n{'; '.join(places)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="Of `benchmark server --json`.")
    parser.add_argument("--page", type=Path, default=Path("docs/performance.md"))
    args = parser.parse_args()
    fill(args.page, {"server": lambda: server(args.files)})


if __name__ == "__main__":
    main()
