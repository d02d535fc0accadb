"""Pictures of the commands: a terminal, a chat, an analysis, the server's page; and the table of models."""

import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import chromium
from rich.console import Console
from rich.text import Text

from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.server import ServerSettings
from gearbx_mlx.server.run import serving
from gearbx_mlx.telemetry.trace import get_pyplot

from . import ROOT
from .studies import HELD_OUT, IMAGES, Found, run_python, study

WIDTH = 96  # characters
CELL = (0.085, 0.17)  # inches
FOREGROUND, BACKGROUND = "#1f2328", "#ffffff"
TERMINAL = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}


def run_command(flags: list[str], **environment: str) -> str:
    """Return the command's output, on one stream in its order, with the escape sequences of colors."""
    command = [sys.executable, "-m", "gearbx_mlx.generate", *flags]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, text=True, check=True, env=os.environ | TERMINAL | environment, **streams).stdout


def terminal_text(flags: list[str], **environment: str) -> Text:
    """Return the command, its notes, its text and its summary, with their colours."""
    typed = " ".join(f'"{flag}"' if " " in flag else flag for flag in flags)
    text = Text(f"$ gearbx_mlx generate {typed}\n\n") + Text.from_ansi(run_command(flags, **environment))
    text.rstrip()
    return text


def draw(text: Text, path: Path) -> None:
    """Write a PNG; every character has its own place, so that columns are columns."""
    console = Console(width=WIDTH)
    lines = [part for line in text.split("\n", allow_blank=True) for part in line.wrap(console, WIDTH)]
    size = (WIDTH * CELL[0] + 0.4, len(lines) * CELL[1] + 0.4)
    figure = get_pyplot().figure(figsize=size, facecolor=BACKGROUND)
    for row, line in enumerate(lines):
        for column, character in enumerate(line.plain):
            place = ((0.2 + column * CELL[0]) / size[0], 1 - (0.2 + (row + 0.8) * CELL[1]) / size[1])
            color = color_at(line, column)
            figure.text(
                *place, character, color=color, family="DejaVu Sans Mono", fontsize=9.8, ha="left", parse_math=False
            )
    figure.savefig(path, dpi=130)


def color_at(line: Text, column: int) -> str:
    styles: list[Any] = [span.style for span in line.spans if span.start <= column < span.end]
    return next((style.color.get_truecolor().hex for style in reversed(styles) if style.color), FOREGROUND)


COMMAND = ["chat", "--mode", "route", "--max-tokens", "48"]
UNTIMED = {"GEARBX_TUNE": "0"}  # drafts save bytes, as many in every run
TYPED = (
    "Tom has 3 apples and buys 4 more. How many has he?",
    "/mode lossless",
    "He eats 2 of them. How many are left?",
    "/gear low",
    "And if he buys 5 more?",
)
LAST = re.compile(r"^\x1b\[2m(?!the answer was cut).*\n", re.MULTILINE)  # of a typed line: a summary, or a word


def recorded() -> Text:
    """Return the chat with its colours; what is typed follows the prompt, as on a terminal."""
    line = [sys.executable, "-m", "gearbx_mlx", *COMMAND]
    typed = "".join(f"{text}\n" for text in TYPED)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(line, input=typed, text=True, check=True, env=os.environ | TERMINAL | UNTIMED, **streams)
    ends = [0, *(found.end() for found in LAST.finditer(done.stdout))]
    if len(ends) != len(TYPED) + 1:
        raise ValueError("the chat says more than its answers: were kernels compiled meanwhile? Run it again")
    text = Text(f"$ gearbx_mlx {' '.join(COMMAND)}\n")
    for asked, begin, end in zip(TYPED, ends, ends[1:]):
        text += Text(f">> {asked}\n") + Text.from_ansi(done.stdout[begin:end])
    text.rstrip()
    return text


def write_both(text: Text, path: Path) -> None:
    """Draw a terminal, and put its text beside the picture: a test compares it with what the command writes."""
    draw(text, path)
    lines = [line.rstrip() for line in text.plain.splitlines()]
    path.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@study(writes="images/generate.png, images/generate.txt")
def terminal() -> Found:
    """Draw the terminal output of `gearbx_mlx generate --mode route`, for the README."""
    flags = ["--mode", "route", "--max-tokens", "200"]
    return Found(pictures={"generate.png": partial(write_both, terminal_text(flags))})


@study(writes="images/smollm2.png, images/smollm2.txt")
def real_model() -> Found:
    """Draw the terminal output of a real model, for the README, without a calibrated base, with reproducible drafts."""
    flags = ["--model", "smollm2", "--prompt", "How do bees find flowers?"]
    with tempfile.TemporaryDirectory() as bases:
        run_command(["--max-tokens", "1"])  # compiles kernels
        text = terminal_text(flags, GEARBX_BASES=bases, **UNTIMED)
    return Found(pictures={"smollm2.png": partial(write_both, text)})


@study(writes="images/chat.png, images/chat.txt for docs/chat.md")
def chat() -> Found:
    """Draw a chat with the demo model."""
    run_command(["--max-tokens", "1"])  # compiles kernels
    return Found(pictures={"chat.png": partial(write_both, recorded())})


@study(writes="images/entropy_trace.png, images/entropy_histogram.png, images/gear_shares.png for docs/usage.md")
def analysis() -> None:
    """Write the pictures of `gearbx_mlx analyze` at once."""
    with tempfile.TemporaryDirectory() as out:
        run_python("-m", "gearbx_mlx.analyze", "--prompts", HELD_OUT, "--num-prompts", "12", "--out", out)
        for picture in Path(out).glob("*.png"):
            (IMAGES / picture.name).write_bytes(picture.read_bytes())


QUESTION = "How do bees find flowers?"
PATIENCE = 60  # seconds


@study(writes="images/page.png for docs/server.md")
def page() -> None:
    """Take a picture of the server's page in Chromium, with an answer of SmolLM2, and write it at once.

    The fonts are this machine's. Needs Chromium, its driver and selenium.
    """
    if why := chromium.why_not():
        raise GearbxError(why)
    os.environ |= UNTIMED
    settings = command_settings(ServerSettings, {"port": 0, "model": "smollm2", "max_tokens": 100})
    with serving(settings) as server, chromium.browser() as driver:
        chromium.show_as(driver, 900, 660, "light", scale=1.5)
        ask(driver, server.url)
        driver.save_screenshot(str(IMAGES / "page.png"))


def ask(driver: Any, url: str) -> None:
    """Open the page, ask, and wait for the whole answer. Raises TimeoutError."""
    driver.get(url)
    driver.find_element("id", "message").send_keys(QUESTION + "\ue007")
    until = time.monotonic() + PATIENCE
    while not driver.execute_script("return answers.at(-1)?.ended"):
        if time.monotonic() > until:
            raise TimeoutError(f"no answer in {PATIENCE} s")
        time.sleep(0.1)


@study(writes="docs/models.md", minutes=3)
def models() -> None:
    """Write the table of gears for each class of mlx_lm.models at once."""
    run_python(ROOT / "scripts" / "describe_models.py")
