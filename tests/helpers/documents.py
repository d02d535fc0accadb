"""The command lines and Python blocks of README and docs, and a directory to run those of a page in.

The lines of a page run in their order, because one writes what the next one reads. Short flags after a line make it
quick.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gearbx_mlx.loading import DEMO_MODEL

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "research")
FOUND = (ROOT / "README.md", *(page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))))
PAGES = {page.relative_to(ROOT).as_posix(): page for page in FOUND}
INLINE = "inline"
# The tests only parse the lines of these pages. To run, they need files that do not ship, a Mac, hours, or a person.
PARSED_ONLY = {"docs/codebook.md", "docs/evidence.md", "docs/chat.md", "docs/mac.md", "docs/performance.md"}
PARSED_ONLY |= {"docs/server.md", "research/evidence.md"}
# The demo model replaces what has to be downloaded.
STANDS_FOR_DEMO = (
    "mlx-community/Llama-3.2-1B-Instruct-bf16",
    "mlx-community/Llama-3.2-1B-Instruct-8bit",
    "--model smollm2",
    "--model Qwen3-0.6B-Q8_0.gguf",
    "mlx-community/Qwen2.5-14B-Instruct-4bit",
    "mlx-community/Qwen2.5-14B-Instruct-8bit",
    "mlx-community/Qwen2.5-0.5B-Instruct-8bit",
    "--small-model small",
)
# By the words in a command; if several fit, the longest counts.
SHORTER = {
    "generate": "--max-tokens 6",
    "generate --base": "--max-tokens 6 --base text.txt",
    "generate --base manifest.json": "--max-tokens 6",
    "chat": "--max-tokens 6",
    "analyze": "--max-tokens 6",
    "analyze --reference": "--max-tokens 6 --tokens 24",
    "calibrate": "--max-tokens 24 --num-prompts 1",
    "evaluate": "--tokens 24 --context 12",
    "convert --gears": "--calibrate none",
    "convert codebook": "--manage attention",
    "convert --calibrate": "--manage attention --calibrate text.txt",
    "sensitivity": "--num-samples 1 --sequence-length 12 --manage attention",
    "allocate": "--num-samples 1 --sequence-length 12 --exchanges 0",
    "draft_head": "--minutes 0.01 --num-prompts 25 --max-tokens 8",
    "benchmark decode": "--shape 256x2 --tokens 2 --trials 1",
}
PROBLEMS = (ROOT / "tests" / "data" / "gsm8k_held_out.jsonl").read_text(encoding="utf-8").splitlines()
FILES = {
    "prompts.txt": "Tom has 5 apples and buys 7 more. How many does he have?\nOnce upon a time there was a king.\n",
    "prompts.jsonl": "\n".join(PROBLEMS[:2]) + "\n",
    "gsm8k.jsonl": "\n".join(PROBLEMS[:3]) + "\n",
    "math.jsonl": (ROOT / "tests" / "data" / "math_sample.jsonl").read_text(encoding="utf-8"),
    "text.txt": "Once upon a time there was a king who had three sons. The eldest was proud, the second was clever.\n"
    * 24,
    "machine.jsonl": '{"seconds": 0, "thermal": "nominal"}\n{"tokens": 3, "thermal": "serious"}\n',
}
PROGRAMS = {
    "python": '"{python}" "$@"',
    "gearbx_mlx": '"{python}" -m gearbx_mlx "$@"',
    "mlx_lm.generate": '"{python}" -m mlx_lm generate "$@"',
    "mlx_lm.convert": '"{python}" -m mlx_lm convert "$@"',
}


JOINTS = re.compile(r"( && | \| )")


@dataclass(frozen=True)
class Block:
    """Code in a page: its language, the number of its first line, its text; whether CI runs it itself."""

    page: str
    number: int
    language: str
    text: str
    marked: bool = False


@dataclass(frozen=True)
class Line:
    """One command or Python block of a page. `inline`: within a sentence."""

    page: str
    number: int
    text: str
    python: bool = False
    inline: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.text.splitlines()[0][:60]}"


@functools.cache
def blocks(page: str) -> tuple[Block, ...]:
    """Fenced and indented code, and commands within a sentence."""
    text = PAGES[page].read_text(encoding="utf-8")
    fenced = re.compile(r"(<!-- command: \w+ -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    indented = re.compile(r"(?<=\n\n)((?: {4}.*\n)+)")
    inline = re.compile(r"`((?:gearbx_mlx |python -m gearbx_mlx\.)[a-z][^`]* -[^`]*)`")

    def block(place: int, *rest: Any) -> Block:
        return Block(page, text.count("\n", 0, place) + 1, *rest)

    def blank(match: re.Match[str]) -> str:
        """Another text of the same length and lines, so that places stay what they are."""
        return re.sub(r"[^\n]", "~", match[0])

    found = [block(m.start(3), m[2], m[3], m[1] is not None) for m in fenced.finditer(text)]
    outside = fenced.sub(blank, text)
    typed = [m for m in indented.finditer(outside) if re.match(r" +(python|gearbx_mlx|\w+=)", m[0])]
    found += [block(m.start(), "bash", textwrap.dedent(m[0])) for m in typed]
    mentioned = inline.finditer(indented.sub(blank, outside))
    found += [block(m.start(), INLINE, m[1].replace("\n", " ")) for m in mentioned]
    return tuple(sorted(found, key=lambda block: block.number))


def lines(page: str) -> Iterator[Line]:
    for block in blocks(page):
        if block.language == "python":
            yield Line(page, block.number, block.text, python=True)
        elif block.language in ("bash", INLINE) and not block.marked:
            joined = block.text.replace("\\\n", "\\\0")
            for offset, line in enumerate(joined.split("\n")):
                number = block.number + offset + "\n".join(joined.split("\n")[:offset]).count("\0")
                typed = re.sub(r"\s+# .*$", "", line.replace("\\\0", " ")).strip()
                if typed and not typed.startswith("#"):
                    yield Line(page, number, re.sub(r"\s+", " ", typed), inline=block.language == INLINE)


ALL = [line for page in PAGES for line in lines(page)]


def parts(line: Line) -> list[str]:
    """The commands of a line, without what joins them."""
    return [piece for piece in JOINTS.split(line.text) if not JOINTS.fullmatch(piece)]


def command_of(part: str) -> tuple[str, str] | None:
    """A command of this package and its arguments; None for another program."""
    match = re.match(r"(?:gearbx_mlx |python -m gearbx_mlx[. ])(\w[\w-]*)\s*(.*)", part)
    return None if match is None else (match[1].replace("-", "_"), match[2])


def only_parsed(line: Line) -> bool:
    """Return whether a line is not run: it may lack files, downloads something, or serves until it is stopped."""
    commands = {(command_of(part) or ("",))[0] for part in parts(line)}
    needs = "from mlx_vlm import" in line.text or {"lm_eval", "server"} & commands
    return line.inline or line.page in PARSED_ONLY or bool(needs)


def on_the_demo_model(text: str) -> str:
    for name in STANDS_FOR_DEMO:
        flag, _, _ = name.rpartition(" ")
        text = re.sub(rf"(?<![\w/-]){re.escape(name)}(?![\w/-])", f"{flag} {DEMO_MODEL}".strip(), text)
    return text


def shortened(part: str) -> str:
    name, arguments = command_of(part) or ("", "")
    words = {*arguments.split()}
    fitting = [key for key in SHORTER if key.split()[0] == name and words.issuperset(key.split()[1:])]
    return f"{part} {SHORTER[max(fitting, key=len)]}" if fitting else part


Command = Callable[..., Any]
"""The fixture `command`."""


@dataclass
class Directory:
    """A directory in which a page's lines run: commands of this package in this process, the rest in programs."""

    path: Path
    command: Command

    def __post_init__(self) -> None:
        for name, text in FILES.items():
            (self.path / name).write_text(text, encoding="utf-8")
        (self.path / "bin").mkdir()
        for name, body in PROGRAMS.items():
            program = self.path / "bin" / name
            program.write_text(f"#!/bin/sh\nexec {body.format(python=sys.executable)}\n")
            program.chmod(0o755)

    def run(self, line: Line) -> tuple[int, str]:
        """The exit status, and what it wrote to stderr."""
        if line.python:
            (self.path / "block.py").write_text(on_the_demo_model(line.text), encoding="utf-8")
            return self._typed("python block.py")
        pieces = JOINTS.split(line.text)
        typed = [piece if JOINTS.fullmatch(piece) else shortened(on_the_demo_model(piece)) for piece in pieces]
        own = command_of(typed[0]) if len(typed) == 1 else None
        if own is None:
            return self._typed("".join(typed))
        done = self.command(own[0], *shlex.split(own[1]))
        return done.status, done.err

    def _typed(self, line: str) -> tuple[int, str]:
        path = f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        how = {"cwd": self.path, "env": os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"}, "timeout": 300}
        shell = ["bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(shell, **how, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.returncode, done.stderr


def is_run(line: Line) -> bool:
    return line.python or any(command_of(part) or part.startswith("mlx_lm.") for part in parts(line))


RUN = [line for line in ALL if is_run(line) and not only_parsed(line)]
PARSED = [line for line in ALL if is_run(line) and only_parsed(line)]
OTHER = [line for line in ALL if not is_run(line)]
