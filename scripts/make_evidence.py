"""Measure docs/evidence.md, docs/pair.md and a part of docs/exact.md anew, by one command that takes hours.

    python scripts/make_evidence.py RESULTS --models DIR --data DIR

RESULTS is a directory, made if it is missing. DIR of --models has stories260K and babyllama105; DIR of --data has
GSM8K's texts and those of train_demo_model.py. The commands are those on the pages, in their order, as far as they
write a report into RESULTS. After an interrupt the same command goes on: RESULTS/made.json has what ran, when, where
and with which code. What older code measured is measured again; --keep keeps it. Needs the extras `train` and `plots`.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gearbx_mlx.benchmark.measuring import machine_name
from gearbx_mlx.files.writing import write_text

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/pair.md", "docs/evidence.md")  # the small model is trained on the first
INDENTED = re.compile(r"(?<=\n\n)((?: {4}.*\n)+)")
OUTPUTS = ("--out", "--json", "--mlx-path")
FEWER = ("gsm8k_test_50.jsonl", "gsm8k_test_200.jsonl", 50)  # a text, the one that it begins, its lines
MODULES = {"python": [], "gearbx_mlx": ["-m", "gearbx_mlx"], "mlx_lm.convert": ["-m", "mlx_lm", "convert"]}
VARIABLE = re.compile(r"\w+=\S*")  # set for one command, as in OMP_NUM_THREADS=1


@dataclass(frozen=True)
class Made:
    """How a command ran. code: a digest of the package and the scripts at that time."""

    code: str
    machine: str
    day: str
    minutes: float


def page_commands(page: str) -> Iterator[str]:
    """The commands of a page that write a report into the directory that they run in, each as one line."""
    for match in INDENTED.finditer(page):
        for line in re.sub(r"\\\n\s+", "", match[1]).splitlines():
            words = [word for word in shlex.split(line) if not VARIABLE.fullmatch(word)]
            if words[0] in MODULES and output_of(words) is not None:
                yield line.strip()


def output_of(words: Sequence[str]) -> str | None:
    """The file or directory that a command writes."""
    return next((after for word, after in pairwise(words) if word in OUTPUTS), None)


def runnable(command: str, data: Path) -> list[str]:
    """The command for a process that runs in RESULTS: DIR stands for the texts, scripts are those of the repository."""
    words = [str(data) if word == "DIR" else word for word in shlex.split(command)]
    words = [str(ROOT / word) if word.startswith("scripts/") else word for word in words]
    variables = [word for word in words if VARIABLE.fullmatch(word)]
    program, *arguments = words[len(variables) :]
    return ["env", *variables, sys.executable, *MODULES[program], *arguments]


def code_digest() -> str:
    """A digest of all sources that a figure depends on."""
    digest = hashlib.sha256()
    for folder in ("gearbx_mlx", "scripts"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in {".py", ".cpp", ".h", ".safetensors", ".json"} and file.name != Path(__file__).name:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def lay_out(results: Path, models: Path, data: Path) -> None:
    """Put what the commands read beside what they write: links to models and texts."""
    results.mkdir(parents=True, exist_ok=True)
    whole, name = data / FEWER[1], results / FEWER[0]
    for source in [*models.iterdir(), whole, ROOT / "scripts"]:
        link = results / source.name
        if (source.is_dir() or source == whole) and not link.exists():
            link.symlink_to(source.resolve())
    write_text(name, "".join(whole.read_text(encoding="utf-8").splitlines(keepends=True)[: FEWER[2]]))


def made_so_far(results: Path) -> dict[str, Made]:
    file = results / "made.json"
    return {name: Made(**made) for name, made in json.loads(file.read_text()).items()} if file.exists() else {}


def make(command: str, results: Path, data: Path, code: str) -> Made:
    """Run a command; what it says goes into RESULTS/log.txt. Raises subprocess.CalledProcessError."""
    began = time.monotonic()
    with (results / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"\n$ {command}\n")
        log.flush()
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(runnable(command, data), cwd=results, env=environment, stdout=log, stderr=log, check=True)
    return Made(code, machine_name(), date.today().isoformat(), round((time.monotonic() - began) / 60, 1))


def make_all(commands: Sequence[str], results: Path, data: Path, keep: bool) -> None:
    """Run every command that the present code did not run yet."""
    code, made = code_digest(), made_so_far(results)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(commands))
        for command in commands:
            progress.update(task, description=str(output_of(shlex.split(command))))
            if command not in made or not (keep or made[command].code == code):
                made[command] = make(command, results, data, code)
                lines = {name: asdict(each) for name, each in made.items() if name in commands}
                write_text(results / "made.json", json.dumps(lines, indent=2) + "\n")
            progress.advance(task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", type=Path, required=True, help="Directory of stories260K and babyllama105.")
    parser.add_argument("--data", type=Path, required=True, help="Directory of GSM8K's texts.")
    parser.add_argument("--keep", action="store_true", help="Keep what older code measured.")
    parser.add_argument("--list", action="store_true", help="Show the commands, and run none.")
    args = parser.parse_args()
    commands = [line for page in PAGES for line in page_commands((ROOT / page).read_text(encoding="utf-8"))]
    if args.list:
        print("\n".join(commands))
        return
    for needed in (args.models / "stories260K", args.models / "babyllama105", args.data / FEWER[1]):
        if not needed.exists():
            parser.error(f"{needed} is missing")
    results = args.results.resolve()
    lay_out(results, args.models, args.data)
    try:
        make_all(commands, results, args.data.resolve(), args.keep)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {shlex.join(error.cmd)} failed; {results / 'log.txt'} says why")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on")
    write = [sys.executable, "scripts/pictures.py", "evidence", "exact", "--results", str(results)]
    if subprocess.run(write, cwd=ROOT).returncode:
        sys.exit(f"error: {shlex.join(write)} failed; the reports are in {results}")


if __name__ == "__main__":
    main()
