"""How a command starts: flags, device, signals, the body; and where the environment says so, as one of several ranks.

A command's flags are parsed before its body is imported: the body needs mlx-lm, whose import takes seconds, and
`--help` or a mistyped flag need not wait for it. Signals are handled while the body runs and not before, since an
interrupted import prints a traceback of its own.

A command that is one of several ranks begins when all are there, rank 0 writes, and all end together.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, cast

from rich.console import Console

from ..compat.import_structure import keep_scan
from ..errors import GearbxError, OutputLost
from ..ranks.place import Place, begin, place_here
from ..ranks.watch import MeetingRefused, RankWatch, RunEnded, meet
from ..telemetry.summary import process_start
from . import signals, terminal
from .flags import choose_device
from .signals import Stderr

TAKE_RANKS = ("generate",)
_entered: list[float] = []


def command(name: str, extra: str = "") -> Callable[[], None]:
    """Return the `main` of a command: gearbx_mlx.NAME has `setup_arg_parser`; gearbx_mlx.NAME.run has `run`.

    Args:
        extra: of the package, which the command needs.
    """

    def parse() -> Any:
        return import_module(f"gearbx_mlx.{name}").setup_arg_parser().settings()

    def body_of(settings: Any) -> Callable[[Any], int | None]:
        with needing(extra, name):
            return cast(Callable[[Any], int | None], import_module(f"gearbx_mlx.{name}.run").run)

    return partial(start, name, parse, body_of)


@contextlib.contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Import inside what an extra brings. Raises GearbxError with what installs it, where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not extra or (error.name or "").startswith("gearbx_mlx"):
            raise
        install = f"pip install 'gearbx-mlx[{extra}]' (in a clone: pip install '.[{extra}]')"
        raise GearbxError(f"{what} needs {error.name}, which is not installed: {install}") from error


def start(name: str, parse: Callable[[], Any], body_of: Callable[[Any], Callable[[Any], int | None]]) -> None:
    """Run a command with its errors, signals and exit status; `body_of` imports what runs with the settings."""

    def run() -> int | None:
        settings = parse()
        choose_device(settings)  # before the body imports mlx-lm, which keeps the device that it finds
        body = body_of(settings)
        import_module("gearbx_mlx.kernels.compiler").instructions()  # refuses a wrong GEARBX_CPU before work begins
        device = import_module("gearbx_mlx.kernels.device")
        try:
            with device.wired_memory():
                return signals.run_to_end(partial(body, settings))
        finally:
            if place_here() is None:  # else a pass may wait for a rank that is gone
                device.finish()

    signals.end_at_once()
    keep_scan()
    _entered.append(time.perf_counter() if _entered else process_start())
    terminal.run(partial(together, name, run))


def entered() -> float:
    """Return when this command was asked for, in seconds of `time.perf_counter`: its process's start, if it is the
    first one in it.
    """
    return _entered[-1] if _entered else process_start()


def call(command: str, function: str, settings: Any) -> Any:
    """Return what a function of a command's body returns for settings that a program made."""
    choose_device(settings)
    body = import_module(f"gearbx_mlx.{command}.run")
    with import_module("gearbx_mlx.kernels.device").wired_memory():
        return getattr(body, function)(settings)


def together(name: str, body: Callable[[], int | None]) -> int | None:
    """Return the exit status of a command's body, which is one of several ranks where the environment says so.

    Raises:
        GearbxError: an environment that contradicts itself, a command that takes no ranks, ranks that do not come.
    """
    place = place_here()
    if place is None:
        return body()
    if name not in TAKE_RANKS:
        return refuse_ranks(name, place)
    try:
        channels = meet(place) if place.addresses else {}
    except MeetingRefused:
        return terminal.USER_ERROR
    except GearbxError as error:
        raise GearbxError(str(error) if place.rank == 0 else f"rank {place.rank}: {error}") from error
    stderr = own_stderr(place)
    show = partial(terminal.show_error, stderr)
    watch = RankWatch(place, channels, show, signals.interrupt, {*signals.ENDING})
    terminal.on_error = watch.fail
    if place.rank == 0 or not channels:
        signals.set_handlers(watch.end_at_once)  # until the command's body has handlers of its own
    else:
        signals.handle(watch.leave_to_first)
    return end(watch, place, body)


def refuse_ranks(name: str, place: Place) -> int:
    """Raises GearbxError on rank 0; the others end without a word."""
    if place.rank == 0:
        takes = " and ".join(f"gearbx_mlx.{each}" for each in TAKE_RANKS)
        raise GearbxError(f"gearbx_mlx.{name} runs as one process, and these are {place.size} ranks; use {takes}")
    return terminal.USER_ERROR


def end(watch: RankWatch, place: Place, body: Callable[[], int | None]) -> NoReturn:
    """Run the body of a command, and end the process with a status that all other ranks hear of."""

    def connected() -> int | None:
        begin(place)
        try:
            return body()
        except SystemExit as ended:  # from argparse; the others would wait for this rank
            if place.rank != 0 and not isinstance(ended.code, str):
                said = "its flags ended it (--help, or one that does not exist); give all ranks the same flags"
                watch.fail(said, ended.code or 0)
            raise

    try:
        status = terminal.status_of(connected)
        sys.stdout.flush()
    except OutputLost as lost:
        status = terminal.output_lost(lost)
    except RunEnded:
        status = 0
    with contextlib.suppress(RunEnded):
        if watch.verdict is None:
            watch.finish(status)
    if watch.verdict is not None:
        status = watch.verdict.status
    sys.stderr.flush()
    os._exit(status)  # a pass that waits for a rank that is gone would keep Python from ending


def own_stderr(place: Place) -> Console:
    """Leave stderr to this package, and on all ranks but 0 stdout and stderr to errors alone, by the console returned.

    MLX's ring writes up to ten lines of its own where a rank is gone; MLX_RING_VERBOSE shows them.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    stream = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    if "MLX_RING_VERBOSE" not in os.environ:
        os.dup2(nowhere, 2)
    if place.rank != 0:
        os.dup2(nowhere, 1)
    else:
        cast(Stderr, sys.stderr).stream = stream
    os.close(nowhere)
    return Console(file=stream, highlight=False)
