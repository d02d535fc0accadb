"""Stop commands at random moments, and check how they end, and that the same command then completes the same result.

    python scripts/stop_commands.py kill --times 1000      SIGKILL, and then the same command again until it ends
    python scripts/stop_commands.py signal --times 200     SIGINT and SIGTERM: the exit status, and no files left behind
    python scripts/stop_commands.py disk --times 200       a disk that is full, and then has room (mounts: as root)

All commands that write alternate, on tiny models. An uninterrupted run shows the expected files of each.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import running
from fuzzing.inputs import make_inputs
from pages import table
from rich.progress import Progress

# The commands that write, and what each of them writes where it is not stopped

TEXT = "--data {inputs}/text.txt --context 16 --tokens 48"
COMMANDS = {
    "generate": "generate -m 40 --mode route --gears 4,16 --trace out.jsonl",  # lossless drafts by measured time
    "convert": "convert --mlx-path out --gears 4,8,16 --calibrate none",
    "convert a mixture": "convert --model {inputs}/mixture --mlx-path out --gears 4,16 --calibrate none",
    "convert exact": "convert --mlx-path out --gears 4,16 --format exact --calibrate none",
    "restore": "convert --restore {inputs}/exact --mlx-path out",
    "convert by quality": "convert --mlx-path out --format codebook --auto-bits",
    "convert a table": "convert --manifest {inputs}/manifest.json --gears 4 --mlx-path out",
    "calibrate": "calibrate -m 16 --out out.json",
    "calibrate kickdown": "calibrate --mode kickdown --gears 4,16 -m 8 --out out.json",
    "evaluate": f"evaluate {TEXT} --gears 4,16 --out out",
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
    """Return the command and its arguments."""
    command, *arguments = COMMANDS[name].format(inputs=inputs).split()
    if "--model" not in arguments and "--restore" not in arguments:
        arguments += ["--model", str(inputs / "llama")]
    return command, arguments


def process_of(name: str, inputs: Path, directory: Path) -> Any:
    """Return a process that runs the command once it is started."""
    command, arguments = line_of(name, inputs)
    return running.context.Process(target=running.child, args=(command, arguments, str(directory), None))


def shell_of(name: str, inputs: Path) -> list[str]:
    """Return the command as a user types it."""
    command, arguments = line_of(name, inputs)
    return [sys.executable, "-m", f"gearbx_mlx.{command}", *arguments]


def run_to_end(name: str, inputs: Path, directory: Path) -> int:
    """Return the exit status of a command that is not stopped."""
    process = process_of(name, inputs, directory)
    process.start()
    process.join()
    return process.exitcode


def written(directory: Path) -> dict[str, str]:
    """Return the files of a directory, by name, with their hashes; also those that are not whole."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    own = [path for path in files if path.name not in (running.OUT, running.ERR, *INCIDENTAL)]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in own}


def expected_of(name: str, inputs: Path, work: Path) -> Expected:
    """Return a command's files. Raises RuntimeError if it fails, or if a second run writes different ones."""
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
    """Return the files in which two runs differ."""
    return ", ".join(sorted({file for file, _ in expected.items() ^ found.items()}))


# Three ways to stop a command, and what must hold then

STARTED = 0.05  # seconds while Python itself starts and no program can handle a signal
MAX_KILLS = 6
PAGE = 4096
CANNOT = "cannot be written"
DONE = "is there already"  # what a conversion says if it was killed just after it had finished


@dataclass(frozen=True)
class Trial:
    """A command that was stopped some times. problem: what was wrong, if anything."""

    name: str
    stops: int
    problem: str | None


def compared(name: str, stops: int, status: int, expected: Expected, directory: Path) -> Trial:
    """Return the trial of a command that has ended: it has to have written what an uninterrupted run writes."""
    errors = (directory / running.ERR).read_text()
    if status and DONE not in errors:
        return Trial(name, stops, f"status {status} in the end: {errors[-300:]}")
    differing = difference(expected.files, written(directory))
    return Trial(name, stops, f"other files: {differing}" if differing else None)


def killed(name: str, expected: Expected, inputs: Path, directory: Path, chance: Random) -> Trial:
    """Kill a command at random moments, and finally let it end."""
    stops = 0
    for _ in range(chance.randint(1, MAX_KILLS)):
        process = process_of(name, inputs, directory)
        process.start()
        process.join(chance.uniform(0, 1.1 * expected.seconds))
        if not process.is_alive():
            return compared(name, stops, process.exitcode, expected, directory)
        process.kill()
        process.join()
        stops += 1
    return compared(name, stops, run_to_end(name, inputs, directory), expected, directory)


def signalled(name: str, expected: Expected, inputs: Path, directory: Path, chance: Random) -> Trial:
    """Send a signal at a random moment, to the command as a user starts it."""
    number = chance.choice([signal.SIGINT, signal.SIGTERM])
    default: dict[str, Any] = {
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    }  # jobs in the background ignore it
    with (directory / running.OUT).open("w") as out, (directory / running.ERR).open("w") as err:
        process = subprocess.Popen(
            shell_of(name, inputs), cwd=directory, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **default
        )
        early = chance.random() < 0.3
        time.sleep(STARTED + chance.uniform(0, 0.2 if early else 2.5 + expected.seconds))
        ended = process.poll() is not None
        process.send_signal(number)
        status = process.wait()
    problem = None
    errors = (directory / running.ERR).read_text()
    left = [file for file in written(directory) if file.endswith(".part")]
    if status not in ((0,) if ended else (0, 128 + number)):
        problem = f"status {status} after {number.name}: {errors[-300:]}"
    elif "Traceback" in errors or "Error" in errors:
        problem = f"after {number.name}: {errors[-500:]}"
    elif left:
        problem = f"{number.name} left {left}"
    return Trial(name, int(not ended), problem)


def filled(name: str, expected: Expected, inputs: Path, directory: Path, chance: Random) -> Trial:
    """Run a command on a disk that is too small, make room, and run it again."""
    size = PAGE * (1 + chance.randint(0, expected.size // PAGE))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    subprocess.run(mount, check=True)
    try:
        (directory / BALLAST).write_bytes(bytes(PAGE))  # a disk needs some room
        for stream in (running.OUT, running.ERR):  # the command's own output goes to another disk
            (directory / stream).symlink_to(directory.with_name(directory.name + stream))
        status = run_to_end(name, inputs, directory)
        errors = (directory / running.ERR).read_text()
        if status == 0:
            return compared(name, 0, status, expected, directory)
        if status != running.USER_ERROR or errors.count("error: ") != 1 or CANNOT not in errors:
            return Trial(name, 1, f"status {status} on {size} bytes: {errors[-300:]}")
        subprocess.run(["mount", "-o", f"remount,size={2**28}", str(directory)], check=True)
        return compared(name, 1, run_to_end(name, inputs, directory), expected, directory)
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


TRIALS = {"kill": killed, "signal": signalled, "disk": filled}


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=TRIALS)
    parser.add_argument("--times", type=int, default=100, help="Stop so often.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="Commands at a time.")
    parser.add_argument("--only", choices=COMMANDS, metavar="NAME", help=f"One of {', '.join(COMMANDS)}.")
    return parser


def stop_all(args: argparse.Namespace, inputs: Path, work: Path, expected: dict[str, Expected]) -> list[Trial]:
    """Trials of every command in turn, until there are enough stops."""
    stop = TRIALS[args.how]
    trials: list[Trial] = []

    def play(job: int) -> None:
        for number in range(job, 10**9, args.jobs):
            if sum(trial.stops for trial in trials) >= args.times:
                return
            name = list(expected)[number % len(expected)]
            place = work / str(number)
            place.mkdir()
            trials.append(stop(name, expected[name], inputs, place, Random(f"{args.seed} {number}")))

    with Progress() as progress, ThreadPoolExecutor(args.jobs) as pool:
        task = progress.add_task("", total=args.times)
        jobs = [pool.submit(play, job) for job in range(args.jobs)]
        while not all(job.done() for job in jobs):
            time.sleep(0.2)
            problems = sum(trial.problem is not None for trial in trials)
            stops = sum(trial.stops for trial in trials)
            progress.update(task, completed=stops, description=f"{stops} stops, {problems} problems")
    for each in jobs:
        each.result()
    return trials


def main() -> int:
    args = setup_arg_parser().parse_args()
    with tempfile.TemporaryDirectory() as directory:
        inputs, work = Path(directory) / "inputs", Path(directory) / "work"
        inputs.mkdir()
        work.mkdir()
        names = [args.only] if args.only else list(COMMANDS)
        with Progress() as progress:
            for _ in progress.track(make_inputs(inputs), description="making inputs"):
                pass
            expected = {name: expected_of(name, inputs, work) for name in progress.track(names, description="runs")}
        trials = stop_all(args, inputs, work, expected)
    rows = []
    for name in names:
        own = [trial for trial in trials if trial.name == name]
        rows.append([name, len(own), sum(t.stops for t in own), sum(t.problem is not None for t in own)])
    print(table(["command", "runs", "stops", "problems"], rows))
    for trial in trials:
        if trial.problem is not None:
            print(f"{trial.name}: {trial.problem}")
    return int(any(trial.problem for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
