"""Draw what `python -m gearbx_mlx.generate` shows in a terminal, for the README.

    python scripts/draw_terminal.py docs/images/generate.png --max-tokens 200

The text goes beside the picture (generate.txt): a test compares it with what the command writes.
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
TERMINAL = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}


def run_command(flags: list[str]) -> tuple[str, str]:
    """What the command writes on stdout and on stderr, with the escape sequences of colours."""
    command = [sys.executable, "-m", "gearbx_mlx.generate", "--color", "always", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | TERMINAL)
    return done.stdout, done.stderr


def terminal_text(flags: list[str]) -> Text:
    """The command, its text and its summary, with their colours."""
    out, err = map(Text.from_ansi, run_command(flags))
    text = Text(" ".join(["$ python -m gearbx_mlx.generate", *flags]) + "\n\n") + out + Text("\n") + err
    text.rstrip()
    return text


def draw(text: Text, path: Path) -> None:
    """Write a PNG; every character has its own place, so that columns are columns."""
    lines = text.split("\n", allow_blank=True)
    size = (WIDTH * CELL[0] + 0.4, len(lines) * CELL[1] + 0.4)
    figure = pyplot.figure(figsize=size, facecolor=BACKGROUND)
    for row, line in enumerate(lines):
        for column, character in enumerate(line.plain):
            place = ((0.2 + column * CELL[0]) / size[0], 1 - (0.2 + (row + 0.8) * CELL[1]) / size[1])
            color = color_at(line, column)
            figure.text(
                *place, character, color=color, family="DejaVu Sans Mono", fontsize=9.8, ha="left", parse_math=False
            )
    figure.savefig(path, dpi=130)


def color_at(line: Text, column: int) -> str:
    styles = [span.style for span in line.spans if span.start <= column < span.end]
    return next((style.color.name for style in reversed(styles) if style.color), FOREGROUND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="The picture to write, and the text with the suffix .txt.")
    args, flags = parser.parse_known_args()
    text = terminal_text(flags)
    draw(text, args.out)
    lines = [line.rstrip() for line in text.plain.splitlines()]
    args.out.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
