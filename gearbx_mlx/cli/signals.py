"""Signals that end a run: Ctrl-C, `kill`, a closed terminal. Each acts as Ctrl-C does.

During a command's imports a signal ends the process at once. Later it raises KeyboardInterrupt, so that files and
summary are completed.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TextIO, TypeVar, cast

from ..errors import OutputLost

T = TypeVar("T")


class Stdout:
    """Standard output that raises OutputLost if it cannot be written."""

    def __init__(self, stream: TextIO | None):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def write(self, text: str) -> int:
        try:
            if self.stream is None:
                raise OSError(errno.EBADF, "it is closed")
            self.stream.write(text)
        except OSError as error:
            self.fail(error)
        return len(text)

    def flush(self) -> None:
        try:
            if self.stream is not None:
                self.stream.flush()
        except OSError as error:
            self.fail(error)

    def fail(self, error: OSError) -> None:
        discard(self.stream)
        raise OutputLost(str(error.strerror), isinstance(error, BrokenPipeError)) from error


class Stderr(Stdout):
    """Standard error that drops messages it cannot write. `lost` is then True."""

    lost = False

    def fail(self, error: OSError) -> None:
        self.lost = self.stream is not None  # a closed stderr requests no messages
        discard(self.stream)


def discard(stream: TextIO | None) -> None:
    """Point a stream to the null device, so that its buffer cannot fail again when Python exits."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def guarded_streams() -> Iterator[Stderr]:
    """Guard stdout and stderr while the context lasts.

    A failing stdout raises OutputLost; a failing stderr loses messages. Characters outside of an encoding such as ASCII
    become question marks.
    """
    occupy_closed_descriptors()
    before = sys.stdout, sys.stderr
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    errors = Stderr(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, Stdout(sys.stdout)), cast(TextIO, errors)
    try:
        yield errors
    finally:
        sys.stdout, sys.stderr = before


def occupy_closed_descriptors() -> None:
    """Open the null device in place of closed standard streams.

    Otherwise the next opened file would get such a stream's number, and a library's output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


INTERRUPTED = 130
SOON = 0.01  # seconds
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_running: "Signals | None" = None
_elsewhere = False  # True if a distributed run handles signals


class Interrupted(KeyboardInterrupt):
    """Ctrl-C that ends less than the run: an answer, or a typed line."""


class Signals:
    """Handlers of ending signals.

    received: the latest signal, or None.
    holding: True while the first signal waits for an item (`in_whole`).
    """

    received: int | None = None
    holding = False

    def end(self, number: int, frame: FrameType | None) -> None:
        waits = self.holding and self.received is None
        self.received = number
        if not waits:
            raise KeyboardInterrupt

    def number_of(self, raised: type[BaseException]) -> int | None:
        """Return the signal whose handler raised an exception, or None."""
        if issubclass(raised, Interrupted):
            return signal.SIGINT
        return self.received if issubclass(raised, KeyboardInterrupt) else None


def send_dropped_again(number_of: Callable[[type[BaseException]], int | None]) -> Callable[[Any], Any]:
    """Send signals again whose exceptions arise in callbacks, where Python drops them. Return the hook before.

    number_of: from a dropped exception to the signal whose handler raised it, or to None.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        number = number_of(unraisable.exc_type)
        if number is None:
            before(unraisable)
        else:
            threading.Timer(SOON, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = hook
    return before


def end_at_once() -> None:
    """Let ending signals end the process silently from now on, unless a program handles or ignores them.

    This holds during the imports of a command: they leave no files incomplete.
    """
    for number in ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, exit_at_once)


def exit_at_once(number: int, frame: object) -> None:
    os._exit(128 + number)


def interrupt(number: int) -> None:
    """Send this process a signal, unless its work has ended already."""
    if _running is None or _running.received is None:
        os.kill(os.getpid(), number)


def handle(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let ending signals call a handler from now on, except ignored ones."""
    global _elsewhere
    _elsewhere = True
    set_handlers(handler)


def set_handlers(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)


def run_to_end(body: Callable[[], int | None]) -> int:
    """Run a command's body. Return its exit status, or 128 plus the number of the signal that ended it."""
    with handled() as signals:
        try:
            status = body() or 0
        except KeyboardInterrupt:
            status = INTERRUPTED
    return 128 + signals.received if status == INTERRUPTED and signals.received else status


@contextlib.contextmanager
def handled() -> Iterator[Signals]:
    """Let ending signals raise KeyboardInterrupt inside the context, except ignored ones."""
    signals = Signals()
    global _running
    if _elsewhere or threading.current_thread() is not threading.main_thread():  # only it runs handlers
        yield signals
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    hook = send_dropped_again(signals.number_of)
    set_handlers(signals.end)
    outer, _running = _running, signals
    try:
        yield signals
    finally:
        _running = outer
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if handler is exit_at_once else handler)


def in_whole(items: Iterable[T]) -> Iterator[T]:
    """Yield items so that an ending signal leaves none half-used, such as counted but not written.

    From the first item on, the first signal waits until the loop's body has used its item; a second one does not wait.
    """
    signals = _running or Signals()
    try:
        for item in items:
            signals.holding = True
            yield item
            if signals.received:
                raise KeyboardInterrupt
    finally:
        signals.holding = False
    if signals.received:
        raise KeyboardInterrupt


class CtrlC:
    """State of Ctrl-C inside `caught`. asked: True if an answer should stop at its next token."""

    def __init__(self) -> None:
        self.asked = self._answering = False

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Let the first Ctrl-C inside stop the answer at its next token, and the second one raise Interrupted."""
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
    """Let Ctrl-C not end the run inside the context, unless it is ignored. Other signals are unchanged."""
    ctrl_c, before = CtrlC(), signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield ctrl_c
        return
    signal.signal(signal.SIGINT, ctrl_c.note)
    try:
        yield ctrl_c
    finally:
        signal.signal(signal.SIGINT, before)
