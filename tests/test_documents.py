"""README and docs keep their word: every command line and every Python block runs as typed, every link leads somewhere.

The lines of a page run in their order, in a directory of the page's own, because one writes what the next one reads.
Short flags behind a line make it quick. A line that cannot run without a network or for hours is parsed.
"""

import dataclasses
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from mlx_lm.generate import GenerationResponse

from gearbx_mlx import GearResponse
from gearbx_mlx.__main__ import COMMANDS
from gearbx_mlx.bit_selection.precision import PrecisionManifest
from gearbx_mlx.decoding.modes import MODES
from gearbx_mlx.gears.manifest import Manifest
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.routing.draft_file import DraftFile
from gearbx_mlx.routing.thresholds import ThresholdFile

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/gearbx/gearbx-mlx"
PAGES = {
    page.relative_to(ROOT).as_posix(): page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
TASKS = "lm-eval downloads its tasks"
PARSED_ONLY = {  # pages that say how their figures were measured
    "docs/codebook.md": "models and texts that do not ship",
    "docs/evidence.md": "models and texts that do not ship, and hours",
    "docs/performance.md": "minutes of timing",
    "docs/sensitivity.md": "minutes of measuring",
}
# The demo model in the place of what has to be downloaded.
STANDS_FOR_DEMO = (
    "mlx-community/Llama-3.2-1B-Instruct-bf16",
    "mlx-community/Qwen2.5-14B-Instruct-8bit",
    "mlx-community/Qwen2.5-0.5B-Instruct-8bit",
    "--small-model small",
)
SHORTER = {
    "generate": "--max-tokens 6",
    "analyze": "--max-tokens 6",
    "calibrate": "--max-tokens 24 --num-prompts 1",
    "evaluate": "--tokens 24 --context 12 --max-tokens 8",
    "evaluate --small-model": "--tokens 300 --context 256 --max-tokens 8",
    "sensitivity": "--num-samples 1 --sequence-length 12 --manage attention",
    "allocate": "--num-samples 1 --sequence-length 12 --exchanges 0",
    "benchmark kernels": "--rows 256 --cols 256 --megabytes 1 --trials 1 --native-only",
    "benchmark decode": "--shape 256x2 --tokens 2 --trials 1",
    "benchmark routing": "--shape 256x2 --tokens 2 --trials 1",
}
PROBLEMS = (ROOT / "tests" / "data" / "gsm8k_held_out.jsonl").read_text(encoding="utf-8").splitlines()
FILES = {
    "prompts.txt": "Tom has 5 apples and buys 7 more. How many does he have?\nOnce upon a time there was a king.\n",
    "prompts.jsonl": "\n".join(PROBLEMS[:2]) + "\n",
    "gsm8k.jsonl": "\n".join(PROBLEMS[:3]) + "\n",
    "text.txt": "Once upon a time there was a king who had three sons. The eldest was proud, the second was clever.\n"
    * 3,
    "machine.jsonl": '{"seconds": 0, "thermal": "nominal"}\n{"tokens": 3, "thermal": "serious"}\n',
}
PROGRAMS = {
    "python": '"{python}" "$@"',
    "gearbx_mlx": '"{python}" -m gearbx_mlx "$@"',
    "mlx_lm.generate": '"{python}" -m mlx_lm generate "$@"',
    "mlx_lm.convert": '"{python}" -m mlx_lm convert "$@"',
}
OTHERS_FLAGS = {"--force-reinstall", "--no-deps", "--tasks", "--model_args"}  # pip's and lm-eval's


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
    """One command, or a Python block, of a page."""

    page: str
    number: int
    text: str
    python: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.text.splitlines()[0][:60]}"


@functools.cache
def blocks(page: str) -> tuple[Block, ...]:
    """Fenced and indented code."""
    text = PAGES[page].read_text(encoding="utf-8")
    fenced = re.compile(r"(<!-- command: \w+ -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    indented = re.compile(r"(?<=\n\n)((?: {4}.*\n)+)")
    found = [
        Block(page, text.count("\n", 0, match.start(3)) + 1, match[2], match[3], match[1] is not None)
        for match in fenced.finditer(text)
    ]
    outside = fenced.sub(lambda match: "\n" * match[0].count("\n"), text)
    found += [
        Block(page, outside.count("\n", 0, match.start()) + 1, "bash", textwrap.dedent(match[0]))
        for match in indented.finditer(outside)
        if re.match(r" +(python|gearbx_mlx|\w+=)", match[0])
    ]
    return tuple(sorted(found, key=lambda block: block.number))


def lines(page: str) -> Iterator[Line]:
    for block in blocks(page):
        if block.language == "python":
            yield Line(page, block.number, block.text, python=True)
        elif block.language == "bash" and not block.marked:
            joined = block.text.replace("\\\n", "\\\0")
            for offset, line in enumerate(joined.split("\n")):
                number = block.number + offset + "\n".join(joined.split("\n")[:offset]).count("\0")
                typed = re.sub(r"\s+# .*$", "", line.replace("\\\0", " ")).strip()
                if typed and not typed.startswith("#"):
                    yield Line(page, number, re.sub(r"\s+", " ", typed))


ALL = [line for page in PAGES for line in lines(page)]


def parts(line: Line) -> list[str]:
    """The commands of a line, without what joins them."""
    return re.split(r" && | \| ", line.text)


def command_of(part: str) -> tuple[str, str] | None:
    """A command of this package, and its arguments; None for another program."""
    match = re.match(r"(?:gearbx_mlx |python -m gearbx_mlx[. ])(\w+)\s*(.*)", part)
    return None if match is None else (match[1], match[2])


def why_not_run(line: Line) -> str | None:
    if line.page in PARSED_ONLY:
        return PARSED_ONLY[line.page]
    if any((command_of(part) or ("",))[0] == "lm_eval" for part in parts(line)):
        return TASKS
    return None


def on_the_demo_model(text: str) -> str:
    for name in STANDS_FOR_DEMO:
        flag, _, _ = name.rpartition(" ")
        text = re.sub(rf"(?<![\w/-]){re.escape(name)}(?![\w/-])", f"{flag} {DEMO_MODEL}".strip(), text)
    return text


def shortened(part: str) -> str:
    name, arguments = command_of(part) or ("", "")
    shorter = SHORTER.get(f"{name} {arguments.split(' ')[0]}") or SHORTER.get(name, "")
    return f"{part} {shorter}".strip()


@dataclass
class Directory:
    """Where a page's lines run, and what came of each."""

    page: str
    path: Path
    done: dict[Line, subprocess.CompletedProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, text in FILES.items():
            (self.path / name).write_text(text, encoding="utf-8")
        (self.path / "bin").mkdir()
        for name, body in PROGRAMS.items():
            program = self.path / "bin" / name
            program.write_text(f"#!/bin/sh\nexec {body.format(python=sys.executable)}\n")
            program.chmod(0o755)

    def result(self, line: Line) -> subprocess.CompletedProcess:
        """What a line came to, after those before it on its page."""
        for each in lines(self.page):
            if each not in self.done and why_not_run(each) is None and is_run(each):
                self.done[each] = self.run(each)
            if each == line:
                break
        return self.done[line]

    def run(self, line: Line) -> subprocess.CompletedProcess:
        if line.python:
            (self.path / "block.py").write_text(on_the_demo_model(line.text), encoding="utf-8")
            typed = "python block.py"
        else:
            text = line.text
            for part in parts(line):
                text = text.replace(part, shortened(on_the_demo_model(part)))
            typed = text
        environment = os.environ | {
            "PATH": f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
        }
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", typed],
            cwd=self.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )


def is_run(line: Line) -> bool:
    return line.python or any(command_of(part) or part.startswith("mlx_lm.") for part in parts(line))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """page -> its Directory."""
    return functools.cache(lambda page: Directory(page, tmp_path_factory.mktemp("page")))


RUN = [line for line in ALL if is_run(line) and why_not_run(line) is None]
PARSED = [line for line in ALL if is_run(line) and why_not_run(line) is not None]
OTHER = [line for line in ALL if not is_run(line)]


@pytest.mark.parametrize("line", RUN, ids=str)
def test_a_line_runs_as_typed(line, directory):
    result = directory(line.page).result(line)
    assert result.returncode == 0, f"{line}\n{result.stderr[-2000:]}"
    assert "warning" not in result.stderr.lower(), result.stderr


@pytest.mark.parametrize("line", [line for line in PARSED if not line.python], ids=str)
def test_a_line_that_is_not_run_parses(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in parts(line):
        name, arguments = command_of(part)
        if name == "lm_eval":
            check_lm_eval(arguments)
            continue
        monkeypatch.setattr(sys, "argv", [name, *shlex.split(arguments)])
        import_module(f"gearbx_mlx.cli.parsers.{name}").parse()


def check_lm_eval(arguments: str) -> None:
    """The arguments of lm-eval's model are those of ours."""
    source = (ROOT / "gearbx_mlx" / "commands" / "lm_eval.py").read_text(encoding="utf-8")
    assert "--model gearbx " in arguments
    for pair in ",".join(re.findall(r"--model_args (\S+)", arguments)).split(","):
        assert not pair or re.search(rf"^        {pair.split('=')[0]}:", source, re.MULTILINE), pair


@pytest.mark.parametrize("line", OTHER, ids=str)
def test_other_programs_are_installers_and_scripts_that_exist(line):
    for part in parts(line):
        words = shlex.split(part)
        while re.fullmatch(r"\w+=\S*", words[0]):
            words = words[1:]
        if words[0] == "pip":
            continue
        assert words[0] == "python", f"{line}: teach this test what it is"
        script = ROOT / words[1]
        assert script.is_file()
        text = script.read_text(encoding="utf-8")
        for word in words[2:]:
            assert not word.startswith("--") or f'"{word}"' in text, f"{words[1]} has no {word}"


def test_both_marked_commands_are_where_ci_looks_for_them():
    marked = [block for block in blocks("README.md") if block.marked]
    assert len(marked) == 2
    for block in marked:
        assert block.text.startswith("python3 -m venv .venv && .venv/bin/pip install -q ")
    text = PAGES["README.md"].read_text(encoding="utf-8")
    assert "\n<!-- command: main -->\n```" in text
    assert "\n<!-- command: test -->\n```" in text


LINKED = {**PAGES, "gearbx_mlx/demo_model/README.md": DEMO_MODEL / "README.md"}


@functools.cache
def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_somewhere(name):
    for link in links(LINKED[name]):
        own = re.match(rf"{REPOSITORY}/(?:blob|raw|tree)/main/(.*)", link)
        if link.startswith(("http:", "https:")) and not own:
            continue
        target, _, anchor = (own[1] if own else link).partition("#")
        path = ROOT / target if own else (LINKED[name].parent / target if target else LINKED[name])
        assert path.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(path), f"{name}: {link}"


def test_the_readme_is_whole_on_pypi():
    """Where it has no directory around it."""
    for link in links(PAGES["README.md"]):
        assert link.startswith("https://"), link


@functools.cache
def known_flags() -> set[str]:
    found: set[str] = set()
    for command in set(COMMANDS) - {"lm_eval"}:
        parsers = [import_module(f"gearbx_mlx.cli.parsers.{command}").setup_arg_parser()]
        while parsers:
            for action in parsers.pop()._actions:
                found.update(action.option_strings)
                if isinstance(action.choices, dict):
                    parsers += action.choices.values()
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_that_a_page_names_exists(name):
    text = re.sub(r"^```.*?^```$", "", PAGES[name].read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = {flag for code in re.findall(r"`([^`]+)`", text) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)}
    families = {flag.rstrip("-") for flag in named if flag.endswith("-")}  # --xtc-*
    unknown = {flag for flag in named - known_flags() - OTHERS_FLAGS if flag.rstrip("-") not in families}
    assert not unknown


def described_fields(heading: str, table: int = 0) -> set[str]:
    """The names in the first column of a table under a heading of docs/files.md."""
    text = PAGES["docs/files.md"].read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
    rows = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[table].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The summary and the trace of a run in every mode."""
    modes = dict.fromkeys(MODES, ()) | {"route": ("--target-tps", "5"), "pair": ("--small-model", DEMO_MODEL)}
    found = []
    for mode, flags in modes.items():
        path = tmp_path_factory.mktemp(mode)
        command = [sys.executable, "-m", "gearbx_mlx", "generate", "--mode", mode, "--max-tokens", "12", *flags]
        command += ["--trace", path / "t.jsonl", "--summary", path / "s.json"]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        records = [json.loads(line) for line in (path / "t.jsonl").read_text(encoding="utf-8").splitlines()]
        found.append(SimpleNamespace(summary=json.loads((path / "s.json").read_text()), records=records))
    return found


def test_every_field_of_the_summary_is_described(runs):
    assert {name for run in runs for name in run.summary} == described_fields("The summary")


def test_every_field_of_the_trace_is_described(runs):
    written = {name for run in runs for record in run.records for name in record}
    assert written | {"prompt"} == described_fields("The trace")  # analyze adds the prompt


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Thresholds", ThresholdFile),
        ("Drafting", DraftFile),
        ("gears.json", Manifest),
        ("The precision manifest", PrecisionManifest),
    ],
)
def test_every_field_of_a_file_is_described(heading, kind):
    assert {item.encode_name for item in msgspec.structs.fields(kind)} == described_fields(heading)


def test_every_field_of_an_evaluation_is_described(directory):
    line = next(line for line in RUN if line.page == "docs/evaluate.md")
    directory(line.page).result(line)
    report = json.loads((directory(line.page).path / "evaluation" / "evaluation.json").read_text(encoding="utf-8"))
    assert report.keys() == described_fields("Evaluations")
    assert {name for row in report["policies"] for name in row} == described_fields("Evaluations", table=1)


def test_the_readme_counts_the_fields_of_a_response():
    own = {item.name for item in dataclasses.fields(GearResponse)} - {
        item.name for item in dataclasses.fields(GenerationResponse)
    }
    numbers = {"ten": 10, "eleven": 11, "twelve": 12}
    for page in ("README.md", "docs/python.md"):
        counted = re.search(r"with (\w+) fields more", PAGES[page].read_text(encoding="utf-8"))
        assert numbers[counted[1]] == len(own)
    section = PAGES["docs/python.md"].read_text(encoding="utf-8").split("## Responses")[1].split("## Gears")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert own == set(re.findall(r"`(\w+)`", " ".join(cells)))
