"""The start of a command: flags, device, signals, the body; in a distributed run, as one of several ranks.

Flags are parsed before the body is imported, because the body needs mlx-lm, whose import takes seconds. Signals are
handled only while the body runs, because an interrupted import prints its own traceback.

Ranks start when all have connected, rank 0 writes, and all end together.
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
    """Return the `main` of a command: gearbx_mlx.NAME has `setup_arg_parser`, gearbx_mlx.NAME.run has `run`.

    Args:
        extra: the package's extra that the command needs; "" for none.
    """

    def parse() -> Any:
        return import_module(f"gearbx_mlx.{name}").setup_arg_parser().settings()

    def body_of(settings: Any) -> Callable[[Any], int | None]:
        with needing(extra, name):
            return cast(Callable[[Any], int | None], import_module(f"gearbx_mlx.{name}.run").run)

    return partial(start, name, parse, body_of)


@contextlib.contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Turn a failing import of an extra's module into an error with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not extra or (error.name or "").startswith("gearbx_mlx"):
            raise
        install = f"pip install 'gearbx-mlx[{extra}]' (in a clone: pip install '.[{extra}]')"
        raise GearbxError(f"{what}: {error.name} is not installed; use {install}") from error


def start(name: str, parse: Callable[[], Any], body_of: Callable[[Any], Callable[[Any], int | None]]) -> None:
    """Run a command with its errors, signals and exit status. body_of: imports the function that takes the settings."""

    def run() -> int | None:
        settings = parse()
        choose_device(settings)  # before the body imports mlx-lm, which keeps its first device
        body = body_of(settings)
        import_module("gearbx_mlx.kernels.compiler").instructions()  # refuses a wrong GEARBX_CPU early
        device = import_module("gearbx_mlx.kernels.device")
        try:
            return signals.run_to_end(partial(body, settings))
        finally:
            if place_here() is None:  # a pass of a rank may wait for a missing rank
                device.finish()

    signals.end_at_once()
    keep_scan()
    _entered.append(time.perf_counter() if _entered else process_start())
    terminal.run(partial(together, name, run))


def entered() -> float:
    """Return the time of this command's start (s, `time.perf_counter`); of the process's start for the first one."""
    return _entered[-1] if _entered else process_start()


def call(command: str, function: str, settings: Any) -> Any:
    """Return the result of a function of a command's body, for a program's settings."""
    choose_device(settings)
    body = import_module(f"gearbx_mlx.{command}.run")
    return getattr(body, function)(settings)


def together(name: str, body: Callable[[], int | None]) -> int | None:
    """Run a command's body, in a distributed run as one of its ranks. Return the exit status.

    Raises:
        GearbxError: an inconsistent environment, a command without ranks, or ranks that do not connect.
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
    signals.send_dropped_again(watch.number_of)
    if place.rank == 0 or not channels:
        signals.set_handlers(watch.end_at_once)  # until the body has its own handlers
    else:
        signals.handle(watch.leave_to_first)
    return end(watch, place, body)


def refuse_ranks(name: str, place: Place) -> int:
    """Refuse ranks with an error on rank 0, and silently on others."""
    if place.rank == 0:
        takes = " or ".join(f"gearbx_mlx.{each}" for each in TAKE_RANKS)
        raise GearbxError(f"gearbx_mlx.{name}: runs as one process, got {place.size} ranks; use {takes}")
    return terminal.USER_ERROR


def end(watch: RankWatch, place: Place, body: Callable[[], int | None]) -> NoReturn:
    """Run the body of a command, and end the process with a status that is sent to all other ranks."""

    def connected() -> int | None:
        begin(place)
        try:
            return body()
        except SystemExit as ended:  # by argparse; other ranks would wait for this one
            if place.rank != 0 and not isinstance(ended.code, str):
                reason = "ended by --help or an unknown flag; use the same flags on all ranks"
                watch.fail(reason, ended.code or 0)
            raise

    try:
        status = terminal.status_of(connected)
        sys.stdout.flush()
    except OutputLost as error:
        status = terminal.output_lost(error)
    except RunEnded:
        status = 0
    with contextlib.suppress(RunEnded):
        if watch.verdict is None:
            watch.finish(status)
    if watch.verdict is not None:
        status = watch.verdict.status
    sys.stderr.flush()
    os._exit(status)  # a pass that waits for a missing rank would block Python's exit


def own_stderr(place: Place) -> Console:
    """Return a console on stderr, and silence other output: of MLX's ring, and on other ranks than 0 all of it.

    The ring writes up to ten lines if a rank is missing; MLX_RING_VERBOSE shows them.
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
