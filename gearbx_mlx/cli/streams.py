"""Standard streams that are closed, full, or cannot write every character."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from ..errors import OutputLost


class Stdout:
    """Standard output, of which every failure is an OutputLost."""

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
    """Standard error, whose failures end no work: `lost` says that messages were lost."""

    lost = False

    def fail(self, error: OSError) -> None:
        self.lost = self.stream is not None  # who closes it wants no messages
        discard(self.stream)


def discard(stream: TextIO | None) -> None:
    """Send what a stream holds, and what is written to it later, to nowhere, so that no further flush of it fails."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def guarded() -> Iterator[Stderr]:
    """While the context lasts, a failing stdout raises OutputLost, and a failing stderr loses its messages alone.

    Characters that an encoding such as ASCII does not have are written as question marks.
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
    """Open the null device on each closed standard descriptor: the next file to be opened would take its number, and
    what a library prints would end in that file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
