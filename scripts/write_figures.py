"""Write the tables of docs/figures.md from what `gearbx_mlx.figures` wrote, and copy its pictures to the page's images.

python -m gearbx_mlx.figures --out RESULTS
python scripts/write_figures.py RESULTS --page docs/figures.md
"""

import argparse
import json
from pathlib import Path

from pages import fill, table

from gearbx_mlx.evaluation.figures import PICTURES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="Directory with the files of the command.")
    parser.add_argument("--page", type=Path, required=True, help="Page to write the tables into.")
    args = parser.parse_args()
    images = args.page.parent / "images" / "figures"
    images.mkdir(parents=True, exist_ok=True)

    def measured(name: str) -> str:
        content = json.loads((args.results / f"{name}.json").read_text(encoding="utf-8"))
        module = next(picture.module for picture in PICTURES if picture.name == name)
        return table(*module.table(content["data"]))

    fill(args.page, {"figure": measured})
    for picture in PICTURES:
        source = args.results / f"{picture.name}.svg"
        if source.exists():
            (images / source.name).write_bytes(source.read_bytes())


if __name__ == "__main__":
    main()
