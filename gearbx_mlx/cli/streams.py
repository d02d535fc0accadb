"""Standard streams that are closed, that are full, or that cannot write every character."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from ..errors import OutputLost


class Stdout:
    """Standard output; it raises OutputLost where it cannot be written."""

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
    """Standard error; a message that cannot be written is lost, and the work goes on. `lost` remembers it."""

    lost = False

    def fail(self, error: OSError) -> None:
        self.lost = self.stream is not None  # a closed stderr means that no messages are asked for
        discard(self.stream)


def discard(stream: TextIO | None) -> None:
    """Point a stream to the null device, so that what is left in its buffer cannot fail again when Python exits."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def guarded() -> Iterator[Stderr]:
    """Guard stdout and stderr while the context lasts.

    A stdout that fails raises OutputLost; a stderr that fails only loses messages. Characters that an encoding such as
    ASCII does not have are written as question marks.
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

    Otherwise the next file that is opened gets the number of such a stream, and what a library prints goes into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
