"""Keep compiled libraries from one process to the next, and load none that somebody else could have written.

A library is code, and whoever can write it runs code as its user. So the cache is used only if it belongs to this user
or to root, and nobody else may write to it. A SHA-256 beside each library shows that it is whole: a truncated one may
crash the process that maps it.
"""

import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

NAME = "gearbx-mlx"


class CacheUnusable(Exception):
    """The cache cannot be used; the message says why, and what to do, in one line."""


@dataclass(frozen=True)
class Entry:
    """One library of the cache, with its hash beside it; or, if it does not work, with the reason."""

    library: Path

    @property
    def hash_file(self) -> Path:
        return self.library.with_name(f"{self.library.name}.sha256")

    @property
    def failure_file(self) -> Path:
        return self.library.with_name(f"{self.library.name}.why-not")

    def is_whole(self) -> bool:
        """Whether the library is there and is what was stored."""
        try:
            return self.hash_file.read_bytes().strip() == hash_file(self.library)
        except OSError:
            return False

    def read_failure(self) -> str | None:
        """Why this library does not work, as `store_failure` wrote it; None if that is unknown or unreadable."""
        try:
            reason = self.failure_file.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            return None
        return reason if reason and reason.isprintable() else None

    @contextmanager
    def building(self) -> Iterator[Path]:
        """A path for a new library, in a directory beside the cached ones that is removed afterwards."""
        with tempfile.TemporaryDirectory(dir=self.library.parent, prefix=".building-") as directory:
            yield Path(directory) / self.library.name

    def store(self, unfinished: Path) -> None:
        """Move a library from `building` to its place, and its hash beside it."""
        hashed = unfinished.with_name(self.hash_file.name)
        hashed.write_bytes(hash_file(unfinished))
        replace(unfinished, self.library)
        replace(hashed, self.hash_file)

    def store_failure(self, unfinished: Path, reason: str) -> None:
        """Keep the reason why a library from `building` does not work."""
        written = unfinished.with_name(self.failure_file.name)
        written.write_text(reason, encoding="utf-8", errors="backslashreplace")
        replace(written, self.failure_file)


def open_entry(name: str) -> Entry:
    """The entry for a library with this name, in the user's cache, which is created if it is missing.

    The cache is `gearbx-mlx` in $XDG_CACHE_HOME, ~/.cache or ~/Library/Caches.

    Raises:
        CacheUnusable: somebody else could have written to the cache.
        OSError: it cannot be created or read.
    """
    directory = platformdirs.user_cache_path(NAME, appauthor=False)
    if not directory.is_absolute():  # platformdirs leaves ~ as it is where there is no home directory
        raise CacheUnusable(f"there is no home directory for {directory}; set XDG_CACHE_HOME to a directory")
    directory = Path(os.path.realpath(directory.parent)) / NAME
    for each in (*reversed(directory.parents), directory):
        each.mkdir(mode=0o700, exist_ok=True)
    entry = Entry(directory / name)
    check_owner(directory.parent, shared=True)
    check_owner(directory)
    for file in (entry.library, entry.hash_file, entry.failure_file):
        check_owner(file)
    return entry


def check_owner(path: Path, shared: bool = False) -> None:
    """Make sure that only this user and root can have written a file or directory; a missing one passes.

    Args:
        shared: others may write to the directory if they cannot replace what is not theirs, as in /tmp.

    Raises:
        CacheUnusable: it belongs to another user, others may write to it, or it is neither file nor directory.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise CacheUnusable(f"{path} is neither a file nor a directory; remove it")
    if status.st_uid not in (0, os.geteuid()):
        raise CacheUnusable(f"{path} belongs to another user; set XDG_CACHE_HOME to a directory of yours")
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable and not (shared and status.st_mode & stat.S_ISVTX):
        raise CacheUnusable(f"others may write to {path}; run chmod go-w on it")


@functools.cache
def private_directory() -> tempfile.TemporaryDirectory:
    """A directory for this process alone, removed when the process ends. Raises OSError if there can be none."""
    return tempfile.TemporaryDirectory(prefix=f"{NAME}-", ignore_cleanup_errors=True)


def hash_file(file: Path) -> bytes:
    """The SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()


def replace(source: Path, target: Path) -> None:
    """Move a file to its place, whole: after a crash the place has all of the old file or all of the new one."""
    source.chmod(0o600)  # with any umask: a file that others may write to is never used
    with source.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
