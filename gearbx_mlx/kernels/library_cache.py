"""Keep compiled libraries from one process to the next, and load none that another user could have written.

A library is code: a user who can write it runs code as the user who loads it. So the cache is used only if it belongs
to this user or to root, and no other user may write to it, nor to a directory above it. Then no other user can exchange
a file between the moment when it is checked and the one when it is loaded, and it can be loaded by its name. A SHA-256
beside each library shows that it is whole: a truncated one may crash the process that maps it.

A process compiles in a directory of its own, which is removed when it ends, or by a later process if it was killed. The
process locks its directory. The system gives the lock up with the process, however that ends, in any container and on
any machine that shares the directory.
"""

import atexit
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ..files import user_cache
from ..files.user_cache import NAME, check_owner
from ..files.writing import lock

BUILDING, PRIVATE = ".building-", f"{NAME}-kernels-"  # how the names of a process's directories begin
BUILDING_LOCK = ".lock"
UNUSED = 30 * 86400  # seconds without a use after which a library goes


@dataclass(frozen=True)
class CachedLibrary:
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
    def building(self, waiting: Callable[[], None]) -> Iterator[Path]:
        """A path for a new library, in a directory beside the cached ones that is removed afterwards.

        One process builds at a time. Those that wait for it should look again whether the library is whole.

        Args:
            waiting: called if another process builds now, before the wait for it.
        """
        lock = FileLock(self.library.with_name(BUILDING_LOCK), mode=0o600)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
        try:
            with process_directory(self.library.parent, BUILDING) as directory:
                yield directory / self.library.name
        finally:
            lock.release()

    def note_use(self) -> None:
        """Note that the library is loaded now: `remove_unused` leaves it."""
        with suppress(OSError):  # a cache that is read-only
            os.utime(self.hash_file)

    def remove_unused(self) -> None:
        """Remove libraries that no process has loaded for some time, such as those of earlier versions."""
        oldest = time.time() - UNUSED
        for file in self.library.parent.glob(f"{self.library.name.partition('-')[0]}-*"):
            entry = CachedLibrary(file.with_name(file.name.removesuffix(".sha256").removesuffix(".why-not")))
            times = [each.stat().st_mtime for each in (entry.hash_file, entry.failure_file, file) if each.exists()]
            if times and max(times) < oldest:
                file.unlink(missing_ok=True)

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


def open_entry(name: str) -> CachedLibrary:
    """The entry for a library with this name. Raises CacheUnusable as `open_cache`."""
    return checked(CachedLibrary(open_cache() / name))


def find_entries(pattern: str) -> list[CachedLibrary]:
    """The entries of libraries whose names match, newest first. Raises CacheUnusable and OSError as `open_cache`."""
    libraries = sorted(open_cache().glob(pattern), key=lambda path: path.lstat().st_mtime, reverse=True)
    return [checked(CachedLibrary(library)) for library in libraries]


def checked(entry: CachedLibrary) -> CachedLibrary:
    for file in (entry.library, entry.hash_file, entry.failure_file):
        check_owner(file)
    return entry


def open_cache() -> Path:
    """Return the user's cache, without what killed compilations left. Raises what `user_cache.open_cache` does."""
    directory = user_cache.open_cache()
    remove_abandoned(directory, BUILDING)
    return directory


@functools.cache
def private_directory() -> Path:
    """A directory for this process alone, removed when the process ends. Raises OSError if there can be none."""
    directory = process_directory(Path(tempfile.gettempdir()), PRIVATE)
    atexit.register(directory.__exit__, None, None, None)
    return directory.__enter__()


def remove_abandoned_private() -> None:
    """Remove the private directories of this user's processes that were killed."""
    with suppress(OSError):  # no directory for temporary files
        remove_abandoned(Path(tempfile.gettempdir()), PRIVATE)


def hash_file(file: Path) -> bytes:
    """The SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()


def replace(source: Path, target: Path) -> None:
    """Move a file to its place, whole: after a crash the place has all of the old file or all of the new one."""
    source.chmod(0o600)  # with any umask: a file that others may write to is never used
    with source.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)


@contextmanager
def process_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory that no other user may read, removed afterwards. Raises OSError if there can be none."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):
            handle = os.open(path, os.O_RDONLY)
            if lock(handle) is not False and path.exists():
                break
            os.close(handle)  # another process found it before it was locked, and removes it
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's directories from `process_directory` whose processes are dead."""
    made = re.compile(re.escape(prefix) + "[a-z0-9_]{8}")  # as tempfile names them
    with suppress(OSError), os.scandir(parent) as entries:
        for path in [entry.path for entry in entries if made.fullmatch(entry.name)]:
            with suppress(OSError):
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
