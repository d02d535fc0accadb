"""Locks that end with the process that took them, however it ends (flock)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..errors import GearbxError

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

_locked_for_good: dict[tuple[int, int], IO[bytes]] = {}  # device and number of a file to its open handle


def lock(handle: int) -> bool | None:
    """Lock an open file or directory until it is closed: False if somebody else has it locked.

    None: there are no locks, as on Windows and on some network file systems.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool | None]:
    """A file or a directory that is locked while the block runs, if that is possible; the value is that of `lock`.

    Raises:
        OSError: it cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        yield lock(handle)
    finally:
        os.close(handle)


def lock_for_good(file: Path) -> bool:
    """Lock a file, which is made if it is missing, until this process ends; False: another process has it locked.

    Raises:
        OSError: it cannot be opened for writing.
    """
    opened = file.open("ab")
    status = os.fstat(opened.fileno())
    key = status.st_dev, status.st_ino
    if key not in _locked_for_good and lock(opened.fileno()) is not False:
        _locked_for_good[key] = opened
    else:
        opened.close()
    return key in _locked_for_good


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
    with locked(directory) as alone:
        if alone is False:
            raise GearbxError(f"{directory}: another process works on {work} there; wait for it, or end it")
        yield
