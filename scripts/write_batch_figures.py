"""Write the figures of `research.decoding_costs batch` into a page, between <!-- beside --> and <!-- end -->.

    python scripts/write_batch_figures.py batch.json [--page docs/batches.md]

The file is that of its --json, and the machine is the file's. The date is that of the file.
"""

import argparse
import json
import time
from pathlib import Path

from pages import fill, table

HEAD = ["texts", "bits", "tokens/s", "tokens/s of mlx-lm", "ratio", "spread"]


def beside(file: Path) -> str:
    """The table, and where and when its rows were measured."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    lines = [
        [
            row["batch_size"],
            row["bits"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_second_of_mlx_lm']:.0f}",
            f"{row['ratio']:.2f}",
            "-".join(f"{value:.2f}" for value in row["spread"]),
        ]
        for row in rows
    ]
    date = time.strftime("%Y-%m-%d", time.localtime(file.stat().st_mtime))
    return table(HEAD, lines) + f"\n{rows[0]['machine']}, {date}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="Of `research.decoding_costs batch --json`.")
    parser.add_argument("--page", type=Path, default=Path("docs/batches.md"))
    args = parser.parse_args()
    fill(args.page, {"beside": lambda: beside(args.file)})


if __name__ == "__main__":
    main()
