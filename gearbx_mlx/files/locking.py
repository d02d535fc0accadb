"""Locks that end with the process that took them, however it ends (flock)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import GearbxError

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]


def lock(handle: int) -> bool:
    """Lock an open file or directory, and say whether nobody else has it locked.

    Some network file systems have no locks; there nobody is kept out.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def lock_if_free(path: Path) -> Iterator[bool]:
    """Lock a file or a directory while the block runs; False: somebody else has it locked.

    Raises:
        OSError: it cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        yield lock(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def alone_in(directory: Path, work: str) -> Iterator[None]:
    """Keep other processes out of a directory while the block runs.

    Args:
        directory: it exists.
        work: what is done there, for the message: "a conversion".

    Raises:
        GearbxError: another process does the same there.
        OSError: the directory cannot be opened.
    """
    with lock_if_free(directory) as free:
        if not free:
            raise GearbxError(f"{directory}: another process works on {work} there; wait for it, or end it")
        yield
