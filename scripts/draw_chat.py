"""Record a chat with the demo model and draw it, for docs/chat.md.

    python scripts/draw_chat.py docs/images/chat.png

The text goes beside the picture (chat.txt): a test compares it with what the command writes.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from draw_terminal import TERMINAL, draw
from rich.text import Text

COMMAND = ["gearbx_mlx.chat", "--max-tokens", "48"]
TYPED = (
    "Tom has 3 apples and buys 4 more. How many has he?",
    "/mode lossless",
    "He eats 2 of them. How many are left?",
    "/gear low",
    "And if he buys 5 more?",
)
LAST = re.compile(r"^\x1b\[2m.*\n", re.MULTILINE)  # each line that is typed ends in a dim one: a summary, or a word


def recorded() -> Text:
    """The chat with its colours; what is typed stands behind the prompt, as on a terminal."""
    line = [sys.executable, "-m", *COMMAND, "--color", "always"]
    typed = "".join(f"{text}\n" for text in TYPED)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(line, input=typed, text=True, check=True, env=os.environ | TERMINAL, **streams)
    ends = [0, *(found.end() for found in LAST.finditer(done.stdout))]
    text = Text(f"$ python -m {' '.join(COMMAND)}\n")
    for asked, begin, end in zip(TYPED, ends, ends[1:]):
        text += Text(f">> {asked}\n") + Text.from_ansi(done.stdout[begin:end])
    text.rstrip()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="The picture to write, and the text with the suffix .txt.")
    out = parser.parse_args().out
    text = recorded()
    draw(text, out)
    lines = [line.rstrip() for line in text.plain.splitlines()]
    out.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
