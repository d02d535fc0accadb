"""The commands that write, and what each of them writes when nobody stops it."""

import hashlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing import running

PAIR = "--small-model {inputs}/small --thresholds 3,5"
NUMBERS = "--data {inputs}/gsm8k.jsonl --task gsm8k --num-problems 2 -m 8"
TEXT = "--data {inputs}/text.txt --context 16 --tokens 48"
COMMANDS = {
    "generate": "generate -m 40 --trace out.jsonl",
    "convert": "convert --mlx-path out --gears 4,8,16",
    "convert a mixture": "convert --model {inputs}/mixture --mlx-path out --gears 4,16",
    "convert exact": "convert --mlx-path out --gears 4,16 --format exact",
    "restore": "convert --restore {inputs}/exact --mlx-path out",
    "convert by quality": "convert --mlx-path out --format codebook --auto-bits",
    "convert a table": "convert --manifest {inputs}/manifest.json --gears 4 --mlx-path out",
    "calibrate": "calibrate -m 16 --out out.json",
    "calibrate kickdown": "calibrate --mode kickdown --gears 4,16 -m 8 --out out.json",
    "calibrate lossless": "calibrate --mode lossless --gears 4,16 -m 8 --out out.json",
    "calibrate a target": "calibrate --target-kl 0.01 --gears 4,16 -m 8 --out out.json",
    "evaluate": f"evaluate {TEXT} --policy kickdown lossless --share 0.5 --out out",
    "evaluate answers": f"evaluate {NUMBERS} --policy kickdown --out out",
    "evaluate a pair": f"evaluate {TEXT} {PAIR} --out out",
    "evaluate a pair's answers": f"evaluate {NUMBERS} {PAIR} --out out",
    "sensitivity": "sensitivity --bits 4,8 --num-samples 2 --sequence-length 16 --out out.json",
    "allocate": "allocate --manifest {inputs}/manifest.json --num-samples 1 --sequence-length 8 --gears 4 --out o.json",
    "analyze": "analyze --prompts {inputs}/prompts.txt -m 8 --out out",
}
BALLAST = ".ballast"
INCIDENTAL = ("summary.json", "report.html", BALLAST)  # two of them with measured speeds


@dataclass(frozen=True)
class Expected:
    """What an uninterrupted run takes and writes. files: name to hash; seconds; size: bytes."""

    files: dict[str, str]
    seconds: float
    size: int


def line_of(name: str, inputs: Path) -> tuple[str, list[str]]:
    """The command and its arguments."""
    command, *arguments = COMMANDS[name].format(inputs=inputs).split()
    if "--model" not in arguments and "--restore" not in arguments:
        arguments += ["--model", str(inputs / "llama")]
    return command, arguments


def process_of(name: str, inputs: Path, directory: Path) -> Any:
    """A process that runs the command once it is started."""
    command, arguments = line_of(name, inputs)
    return running.context.Process(target=running.child, args=(command, arguments, str(directory), None))


def shell_of(name: str, inputs: Path) -> list[str]:
    """The command as a user types it."""
    command, arguments = line_of(name, inputs)
    return [sys.executable, "-m", f"gearbx_mlx.{command}", *arguments]


def run_to_end(name: str, inputs: Path, directory: Path) -> int:
    """The exit status of a command that nobody stops."""
    process = process_of(name, inputs, directory)
    process.start()
    process.join()
    return process.exitcode


def written(directory: Path) -> dict[str, str]:
    """The files of a directory, by name, with their hashes; also those that are not whole."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    own = [path for path in files if path.name not in (running.OUT, running.ERR, *INCIDENTAL)]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in own}


def expected_of(name: str, inputs: Path, work: Path) -> Expected:
    """What a command writes. Raises RuntimeError if it fails, or writes something else when it runs again."""
    found = []
    for _ in range(2):
        directory = work / name
        directory.mkdir()
        begin = time.monotonic()
        status = run_to_end(name, inputs, directory)
        seconds = time.monotonic() - begin
        if status:
            raise RuntimeError(f"{name}: status {status}: {(directory / running.ERR).read_text()}")
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        found.append(Expected(written(directory), seconds, size))
        shutil.rmtree(directory)
    if found[0].files != found[1].files:
        raise RuntimeError(f"{name}: two runs write different files: {difference(found[0].files, found[1].files)}")
    return found[1]


def difference(expected: dict[str, str], found: dict[str, str]) -> str:
    """The files in which two runs differ."""
    return ", ".join(sorted({file for file, _ in expected.items() ^ found.items()}))
