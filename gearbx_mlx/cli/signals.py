"""Signals that end a run: Ctrl-C, `kill`, a terminal that closes. Each ends it as Ctrl-C does.

While a command's imports run there is nothing to finish, and a signal ends the process at once. Then the signal raises
KeyboardInterrupt, so that files and summary become whole. When the body has ended, the process ends by itself.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from .. import _end_at_once

INTERRUPTED = 130
SOON = 0.01  # seconds
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_running: "Signals | None" = None
_elsewhere = False  # another process decides what signals do to this one


class Interrupted(KeyboardInterrupt):
    """Ctrl-C where it ends less than the run: an answer, or a line that is typed."""


class Signals:
    """`received` is the signal that ended the run, or None."""

    received: int | None = None

    def end(self, number: int, frame: FrameType | None) -> NoReturn:
        self.received = number
        raise KeyboardInterrupt

    def raise_again(self, unraisable: Any) -> None:
        """A signal that came while Python ran a callback, where an exception is lost, is sent again after it."""
        number = signal.SIGINT if issubclass(unraisable.exc_type, Interrupted) else self.received
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and number is not None:
            threading.Timer(SOON, os.kill, (os.getpid(), number)).start()
        else:
            sys.__unraisablehook__(unraisable)


def interrupt(number: int) -> None:
    """Send this process a signal, unless one has ended its work already."""
    if _running is None or _running.received is None:
        os.kill(os.getpid(), number)


def handle(handler: Callable[[int, FrameType | None], None]) -> None:
    """From now on let ending signals call a handler, whatever runs; the process may ignore some."""
    global _elsewhere
    _elsewhere = True
    set_handlers(handler)


def set_handlers(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)


def run_to_end(body: Callable[[], int | None]) -> int:
    """The exit status of a command's body: 128 and the signal's number where a signal ended it."""
    with handled() as signals:
        try:
            status = body() or 0
        except KeyboardInterrupt:
            status = INTERRUPTED
    return 128 + signals.received if status == INTERRUPTED and signals.received else status


@contextlib.contextmanager
def handled() -> Iterator[Signals]:
    """While the context lasts, each ending signal raises KeyboardInterrupt, except those that the process ignores."""
    signals = Signals()
    global _running
    if _elsewhere or threading.current_thread() is not threading.main_thread():  # which alone runs handlers
        yield signals
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    hook, sys.unraisablehook = sys.unraisablehook, signals.raise_again
    set_handlers(signals.end)
    outer, _running = _running, signals
    try:
        yield signals
    finally:
        _running = outer
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if handler is _end_at_once else handler)


class CtrlC:
    """What Ctrl-C means while `caught` lasts. `asked`: an answer is to stop when its next token is there."""

    def __init__(self) -> None:
        self.asked = self._answering = False

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """The first Ctrl-C inside asks the answer to stop; the next one does not wait, and raises Interrupted."""
        self.asked, self._answering = False, True
        try:
            yield
        finally:
            self._answering = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self._answering:
            raise Interrupted
        self.asked = True


@contextlib.contextmanager
def caught() -> Iterator[CtrlC]:
    """While the context lasts, Ctrl-C ends no run, unless the process ignores it; other signals do what they did."""
    ctrl_c, before = CtrlC(), signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield ctrl_c
        return
    signal.signal(signal.SIGINT, ctrl_c.note)
    try:
        yield ctrl_c
    finally:
        signal.signal(signal.SIGINT, before)
