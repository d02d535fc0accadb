"""Cache directories of GGUF files, and kept hashes of files of any size.

An entry is named by a hash of its source. The hash is computed again if inode, size or times of the source change. A
record has the hashes of the source and of each file. Damaged entries are made again; entries that other users can
write are refused.
"""

import contextlib
import errno
import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import GearbxError, GearbxWarning
from .reading import unreadable
from .user_cache import CacheUnusable, cache_entry, check_owner, open_cache
from .writing import FULL, new_directory, remove, shortened, write_text

FORM = 6  # version of the entries, part of their names
RECORD = "unpacked.json"
HASHES = "hashes"  # directory of the cache
PART_BYTES = 2**22  # hashed by one thread at a time
SETTLED_NS = 2 * 10**9  # the coarsest clock of a file system

State = tuple[Any, ...]

_hashed: dict[Path, tuple[State, str]] = {}  # hashes of this process
_seen: dict[Path, list[Any]] = {}  # states of entries that this process validated


def contents(file: Path) -> str:
    """Return a hash of all bytes of a file. Raises GearbxError as `state_and_contents`."""
    return state_and_contents(file)[1]


def state_and_contents(file: Path) -> tuple[State, str]:
    """Return a file's state and a hash of all its bytes: the kept one if the state is the same.

    Raises GearbxError for a file that cannot be read, or that changes meanwhile.
    """
    try:
        state = state_of(file)
        known = _hashed.get(file) or kept_hash(file)
        if known is None or known[0] != state:
            known = state, hash_of(file)
            if state_of(file) != state:
                raise GearbxError(f"{file}: changes while it is read; wait until it is complete, and start again")
            keep_hash(file, *known)
    except OSError as error:
        raise unreadable(file, error) from error
    _hashed[file] = known
    return known


def is_in_state(file: Path, state: State) -> bool:
    """Return whether a file exists and has the same state as before."""
    try:
        return state_of(file) == state
    except OSError:
        return False


def hash_of(file: Path) -> str:
    """Return a SHA-256 of the hashes of a file's parts.

    All cores compute them, unless this is a thread beside the work of the model, or the process ends.
    """

    def part(place: int) -> bytes:
        return hashlib.sha256(os.pread(opened.fileno(), PART_BYTES, place)).digest()

    in_background = threading.current_thread() is not threading.main_thread()
    with open(file, "rb") as opened, ThreadPoolExecutor(os.cpu_count()) as pool:
        places = range(0, os.fstat(opened.fileno()).st_size, PART_BYTES)
        hashes = map(part, places) if in_background else pool.map(part, places)
        return hashlib.sha256(b"".join(hashes)).hexdigest()


def kept_hash(file: Path) -> tuple[State, str] | None:
    """Return the state and hash that an earlier process kept for a file; None: missing or damaged."""
    try:
        path, state, known = json.loads(hash_place(file).read_bytes())
        return (tuple(state), known) if path == os.path.abspath(file) else None
    except (CacheUnusable, OSError, ValueError, TypeError):
        return None


def keep_hash(file: Path, state: State, known: str) -> None:
    """Keep a file's hash for later processes, if the cache is writable.

    A file that was written a moment ago could change again within the same tick of the file system's clock.
    """
    if time.time_ns() - max(state[-2:]) < SETTLED_NS:
        return
    with contextlib.suppress(CacheUnusable, GearbxError, OSError):  # the next start computes it again
        place = hash_place(file)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        write_text(place, json.dumps([os.path.abspath(file), state, known]))
        place.chmod(0o600)


def hash_place(file: Path) -> Path:
    """Return the place of a file's hash in the cache. Raises CacheUnusable if other users can write to it."""
    check_owner(open_cache() / HASHES)
    return cache_entry(
        f"{HASHES}/{hashlib.sha256(f'{PART_BYTES} {os.path.abspath(file)}'.encode()).hexdigest()[:16]}.json"
    )


def unpacked(stem: str, source: str, write: Callable[[Path], None]) -> Path:
    """Return a directory of the cache; a missing or damaged one is written.

    stem: start of its name. source: hash of its source. write: fills an empty directory; its errors pass.
    Raises GearbxError for a cache that cannot be written, or that other users can write to.
    """
    name = f"{shortened(stem)}-{hashlib.sha256(f'{FORM} {source}'.encode()).hexdigest()[:16]}"
    try:
        directory = open_cache() / name
        if is_as_written(directory, source):
            return directory
        with FileLock(directory.parent / ".unpacking.lock", mode=0o600):  # one process unpacks at a time
            if not is_as_written(directory, source):  # else a different process was faster
                remove_damaged(directory)
                make(directory, source, write)
    except CacheUnusable as error:
        raise GearbxError(f"{stem}: its tokenizer cannot be kept in the cache: {error}") from error
    except OSError as error:
        raise no_room(name, error) from error
    return directory


def make(directory: Path, source: str, write: Callable[[Path], None]) -> None:
    """Fill an entry beside its place, and rename it when all of it is on the disk."""
    try:
        with new_directory(directory, mode=0o700) as work:
            write(work)
            for file in work.iterdir():
                file.chmod(0o600)  # with any umask: entries that others can write are never used
            (work / RECORD).write_text(json.dumps(record_of(work, source)))
            (work / RECORD).chmod(0o600)
    except GearbxError as error:
        if isinstance(error.__cause__, OSError) and str(directory) in str(error):
            raise error.__cause__ from error
        raise


def remove_damaged(directory: Path) -> None:
    if os.path.lexists(directory):
        message = f"{directory}: is damaged or was changed; it is made again"
        warnings.warn(message, GearbxWarning, stacklevel=2)
        remove(directory)


def is_as_written(directory: Path, source: str) -> bool:
    """Return whether an entry exists as written. Raises CacheUnusable if other users can write to it."""
    check_owner(directory)
    if not directory.is_dir():
        return False
    files = sorted(directory.iterdir())
    for file in files:
        check_owner(file)
    state = [source, *map(state_of, files)]
    if _seen.get(directory) == state:
        return True
    try:
        whole = bool(json.loads((directory / RECORD).read_bytes()) == record_of(directory, source))
    except (FileNotFoundError, ValueError):
        return False
    if whole:
        _seen[directory] = state
    return whole


def state_of(file: Path) -> State:
    """Return the fields of a file's status that change with its contents; the times come last."""
    status = file.stat()
    return file.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def record_of(directory: Path, source: str) -> dict[str, Any]:
    """Return the source of an entry, and a hash of each of its files."""
    files = sorted(file for file in directory.iterdir() if file.name != RECORD)
    return {"source": source, "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}}


def no_room(name: str, error: OSError) -> GearbxError:
    remedy = "make room" if error.errno in (*FULL, None) else "make the cache writable"
    reason = error.strerror or str(error)
    where = error.filename if error.errno in (errno.EACCES, errno.EROFS) and error.filename else f"{name} in the cache"
    return GearbxError(f"{where}: cannot be written ({reason}); {remedy}, or set XDG_CACHE_HOME to another directory")
