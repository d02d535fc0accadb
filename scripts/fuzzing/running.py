"""A command in a process of its own, which starts at once: it is forked from one that has imported everything.

That process has evaluated nothing, so that MLX and the native kernels start in the fork as they do in a new process.
"""

import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import psutil

from gearbx_mlx.__main__ import COMMANDS
from gearbx_mlx.cli.signals import INTERRUPTED
from gearbx_mlx.cli.terminal import BROKEN_PIPE, TRACEBACK, USER_ERROR

STATUSES = (0, 1, USER_ERROR, INTERRUPTED, BROKEN_PIPE)
MEMORY = 6 * 2**30  # bytes of addresses beyond those of the process that is forked
LARGEST_FILE = 2**30
PATIENCE = 20  # seconds in which an interrupted command ends
IDLE, IDLE_SECONDS = 0.02, 4  # of a processor, and how long: a command that uses less waits for something
REST = (".part", ".incomplete")  # ends of names that are not whole yet
OUT, ERR = ".stdout", ".stderr"
ERROR = re.compile(r"(gearbx_mlx\S*: )?error: ")  # a flag's error begins with the command's name

LOST = 255  # what multiprocessing says if its fork server lost a process: nothing about the command
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["__main__", "matplotlib.pyplot", "mlx_lm.tuner", "gearbx_mlx.benchmark.decode"]
    + [f"gearbx_mlx.{name}" for name in COMMANDS]
    + [f"gearbx_mlx.{name}.run" for name in COMMANDS if name != "benchmark"]
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended. status: negative for a signal. late: it was interrupted; waiting: it did nothing then."""

    status: int
    err: str
    seconds: float
    late: bool = False
    waiting: bool = False
    left: Sequence[str] = ()

    @property
    def problem(self) -> str | None:
        """What is wrong, in one line that is the same for the same cause; None if nothing is."""
        if self.waiting:
            return "waits for ever"
        if self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}{', late' if self.late else ''}"
        lines = [line for line in self.err.splitlines() if line.strip()]
        unforeseen = [line for line in lines if line.startswith("error: ") and TRACEBACK in line]
        if unforeseen:
            return f"unforeseen {generic(unforeseen[0])}"
        if "Traceback" in self.err:
            return f"Traceback: {generic(lines[-1])}"
        if self.status not in STATUSES:
            return f"status {self.status}"
        if self.left and self.status != INTERRUPTED:
            return f"left behind: {generic(' '.join(self.left))}"
        if self.status == USER_ERROR:
            return problem_of_refusal(lines)
        return None if self.status != 1 or lines else "status 1 without a word"


def problem_of_refusal(lines: Sequence[str]) -> str | None:
    """What is wrong with the answer to a user's mistake: it should be one line of error, after notes and progress."""
    if not lines or not ERROR.match(lines[-1]):
        return f"the error is not one line: {generic(lines[-1]) if lines else ''}"
    if lines[0].startswith("usage: "):
        return "the usage before the error"
    if sum(ERROR.match(line) is not None for line in lines) > 1:
        return f"several errors: {generic(lines[-1])}"
    return None


def generic(text: str) -> str:
    """A message without file names and numbers."""
    return re.sub(r"\d+", "N", re.sub(r"\S*[/\\]\S*", "PATH", text))[:120]


def run(
    name: str, arguments: Sequence[str], directory: Path, limit: float = 20, stop: tuple[str, int] | None = None
) -> Outcome:
    """Run a command in a directory, and interrupt it if it takes longer than `limit` seconds.

    Args:
        stop: a function of the package, as "module:name", and the number of the call to it that Ctrl-C interrupts.
    """
    before = {path for path in directory.rglob("*") if path.name.endswith(REST)}
    start = time.monotonic()
    (directory / ERR).touch()
    process = context.Process(target=child, args=(name, list(arguments), str(directory), stop))
    process.start()
    idle = 0
    while process.is_alive() and idle < IDLE_SECONDS and time.monotonic() < start + limit:
        process.join(0 if idle else min(limit, 3))
        idle = idle + 1 if is_idle(process.pid) else 0
    late = process.is_alive()
    waiting = late and idle == IDLE_SECONDS
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.is_alive() and process.pid:
            os.kill(process.pid, number)
            process.join(PATIENCE)
    if process.exitcode == LOST:
        return run(name, arguments, directory, limit, stop)
    left = sorted(path.name for path in {path for path in directory.rglob("*") if path.name.endswith(REST)} - before)
    err = (directory / ERR).read_text(encoding="utf-8", errors="replace")
    status = -signal.SIGKILL if process.exitcode is None else process.exitcode  # None: it does not even die
    return Outcome(status, err, time.monotonic() - start, late, waiting, left)


def is_idle(process: int | None) -> bool:
    """Whether a process does nothing for a second; not if it has ended, or a compiler that it started runs."""
    try:
        seen = psutil.Process(process)
        return seen.cpu_percent(1) < 100 * IDLE and not seen.children()
    except psutil.Error:
        return False


def child(name: str, arguments: list[str], directory: str, stop: tuple[str, int] | None) -> None:
    """The forked process: it shares no streams, directory or limits with its parent."""
    os.chdir(directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), os.open(OUT, flags), os.open(ERR, flags))):
        os.dup2(file, number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    if sys.platform == "linux":  # where addresses are few enough to be limited
        limit = psutil.Process().memory_info().vms + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [f"gearbx_mlx.{name}", *arguments]
    main = import_module(f"gearbx_mlx.{name}").main
    if stop is None:
        main()
    else:
        with interrupting(*stop):
            main()


def interrupting(place: str, call: int):
    """A context in which the n-th call of a function raises KeyboardInterrupt instead."""
    module, _, path = place.partition(":")
    owner = import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    original, count = getattr(owner, name), iter(range(1, call))

    def counted(*arguments, **keywords):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    return patch.object(owner, name, counted)
