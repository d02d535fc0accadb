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


class Signals:
    """`received` is the signal that ended the run, or None."""

    received: int | None = None

    def end(self, number: int, frame: FrameType | None) -> NoReturn:
        self.received = number
        raise KeyboardInterrupt

    def raise_again(self, unraisable: Any) -> None:
        """A signal that came while Python ran a callback, where an exception is lost, is sent again after it."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and self.received is not None:
            threading.Timer(SOON, os.kill, (os.getpid(), self.received)).start()
        else:
            sys.__unraisablehook__(unraisable)


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
    if threading.current_thread() is not threading.main_thread():  # the only one in which Python runs handlers
        yield signals
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    hook, sys.unraisablehook = sys.unraisablehook, signals.raise_again
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signals.end)
    try:
        yield signals
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if handler is _end_at_once else handler)
