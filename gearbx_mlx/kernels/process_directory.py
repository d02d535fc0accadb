"""Directories that belong to one process: removed when it ends, or by a later process if it was killed.

The process locks its directory. The system gives the lock up with the process, however that ends, in any container and
on any machine that shares the directory.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..files.writing import lock


@contextlib.contextmanager
def process_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory that nobody else may read, removed afterwards. Raises OSError if there can be none."""
    path, handle = make_locked(parent, prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new directory, and the open handle that locks it."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(path, os.O_RDONLY)
            if lock(handle) is not False and path.exists():
                return path, handle
            os.close(handle)  # another process found it before it was locked, and removes it


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's directories from `process_directory` whose processes are dead."""
    made = re.compile(re.escape(prefix) + "[a-z0-9_]{8}")  # as tempfile names them
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for path in [entry.path for entry in entries if made.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                remove_if_abandoned(path)


def remove_if_abandoned(path: str) -> None:
    """Remove a directory unless it is locked, is a link, or could be another user's. Raises OSError for these."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid == os.geteuid() and status.st_mode & 0o777 == 0o700 and lock(handle):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
