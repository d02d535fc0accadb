"""Three ways to stop a command, and what must hold then."""

import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import running

from .commands import BALLAST, Expected, difference, process_of, run_to_end, shell_of, written

STARTED = 0.05  # seconds in which Python itself starts, and no program can answer for it
MOST_KILLS = 6
PAGE = 4096
CANNOT = "cannot be written"
DONE = "is there already"  # what a conversion says that was killed when it had just finished


@dataclass(frozen=True)
class Trial:
    """A command that was stopped some times. problem: what was wrong, if anything."""

    name: str
    stops: int
    problem: str | None


def compared(name: str, stops: int, status: int, expected: Expected, directory: Path) -> Trial:
    """The trial of a command that has ended: it has to have written what an uninterrupted run writes."""
    errors = (directory / running.ERR).read_text()
    if status and DONE not in errors:
        return Trial(name, stops, f"status {status} in the end: {errors[-300:]}")
    differing = difference(expected.files, written(directory))
    return Trial(name, stops, f"other files: {differing}" if differing else None)


def killed(name: str, expected: Expected, inputs: Path, directory: Path, chance: Random) -> Trial:
    """Kill a command at random moments, and let it end at last."""
    stops = 0
    for _ in range(chance.randint(1, MOST_KILLS)):
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
        (directory / BALLAST).write_bytes(bytes(PAGE))  # a disk cannot have no room at all
        for stream in (running.OUT, running.ERR):  # what the command says is not on the disk that is full
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
