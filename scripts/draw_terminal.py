"""Draw what `python -m gearbx_mlx.generate` shows in a terminal, for the README.

python scripts/draw_terminal.py docs/images/generate.png --max-tokens 200
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.text import Text

WIDTH = 96  # characters
CELL = (0.085, 0.17)  # inches
FOREGROUND, BACKGROUND = "#d8d8d8", "#1e1e1e"


def terminal_text(flags: list[str]) -> Text:
    """The command, its text and its summary, with their colours."""
    command = [sys.executable, "-m", "gearbx_mlx.generate", "--color", "always", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": str(WIDTH)}
    )
    prompt = Text(" ".join(["$ python -m gearbx_mlx.generate", *flags]) + "\n\n")
    return prompt + Text.from_ansi(done.stdout) + Text("\n") + Text.from_ansi(done.stderr.rstrip())


def draw(text: Text, path: Path) -> None:
    lines = text.split("\n", allow_blank=True)
    size = (WIDTH * CELL[0] + 0.4, len(lines) * CELL[1] + 0.4)
    figure = pyplot.figure(figsize=size, facecolor=BACKGROUND)
    for row, line in enumerate(lines):
        for column, character in enumerate(line.plain):
            colors = [
                span.style.color.name for span in line.spans if span.start <= column < span.end and span.style.color
            ]
            place = ((0.2 + column * CELL[0]) / size[0], 1 - (0.2 + (row + 0.8) * CELL[1]) / size[1])
            color = colors[-1] if colors else FOREGROUND
            figure.text(
                *place, character, color=color, family="DejaVu Sans Mono", fontsize=9.8, ha="left", parse_math=False
            )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="The picture to write.")
    args, flags = parser.parse_known_args()
    draw(terminal_text(flags), args.out)


if __name__ == "__main__":
    main()
