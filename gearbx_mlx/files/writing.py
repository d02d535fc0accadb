"""Output files that are complete or absent: written beside their place, then renamed into it.

A lock (flock) on the unfinished file marks it as being written. The lock ends with its process.
"""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..errors import GearbxError, one_line
from .model_directory import check_no_file_of_model

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

_locked_for_good: dict[tuple[int, int], IO[bytes]] = {}  # (device, inode) to open file


def lock(handle: int) -> bool | None:
    """Lock an open file or directory until it is closed; False: a different process has locked it.

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
    """Lock a file or a directory while the block runs; the value is `lock`'s. Raises OSError if it fails."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        yield lock(handle)
    finally:
        os.close(handle)


def lock_for_good(file: Path) -> bool:
    """Lock a file, created if missing, until this process ends; False: a different process has locked it."""
    opened = file.open("ab")
    status = os.fstat(opened.fileno())
    key = status.st_dev, status.st_ino
    if key not in _locked_for_good and lock(opened.fileno()) is not False:
        _locked_for_good[key] = opened
    else:
        opened.close()
    return key in _locked_for_good


PART = ".part"  # suffix of unfinished files and directories
_unfinished: set[Path] = set()
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to: it is renamed to `path` when the block ends, and removed if the block raises.

    A symbolic link stays and its target is replaced; to a device or a pipe the block writes directly. Unfinished files
    of killed processes are removed. Raises GearbxError for a file that cannot be written. Errors of other files pass.
    """
    target = Path(os.path.realpath(path))
    beside: Path | None = None
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        remove_parts(target.parent, re.escape(part_name(target)))
        try:
            handle, beside = open_part(target)
        except OSError as error:  # which names the unfinished file
            raise unwritable(path, error) from error
        _unfinished.add(beside)
        try:
            yield beside
            os.chmod(beside, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~umask())
            os.replace(beside, target)
        finally:
            os.close(handle)
            beside.unlink(missing_ok=True)
            _unfinished.discard(beside)
    except OSError as error:
        if not is_about(error, path, target, beside):
            raise
        raise unwritable(path, error) from error


@contextlib.contextmanager
def replacing_arrays(path: Path) -> Iterator[str]:
    """Like `replacing`, for functions of MLX: they need the suffix .safetensors and raise RuntimeError."""
    with replacing(path) as place:
        beside = arrays_beside(place)
        try:
            yield str(beside)
            beside.replace(place)
        except RuntimeError as error:  # from MLX, for instance on a full disk
            raise GearbxError(f"{path}: cannot be written ({one_line(error)}); choose another place") from error
        finally:
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Make a directory to fill: it gets the name `path` when the block ends, and is removed if the block raises.

    All of its files are on the disk before it has its name. Unfinished directories of killed processes are removed.
    mode: its permissions; None: the default. Raises GearbxError if it cannot be written, exists, or is being written by
    a different process.
    """
    try:
        if remove_parts(path.parent, re.escape(part_name(path))):
            raise GearbxError(f"{path}: another process writes it; wait for it, or end it")
        with work_directory(path) as beside:
            yield beside
            for place in (*beside.rglob("*"), beside):
                sync(place)
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.chmod(beside, 0o777 & ~umask() if mode is None else mode)
            os.replace(beside, path)
            sync(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


@contextlib.contextmanager
def work_directory(path: Path) -> Iterator[Path]:
    """Make a directory beside `path` that is locked, and removed when the block ends; those of killed processes too."""
    remove_parts(path.parent, re.escape(part_name(path)))
    while True:
        beside = Path(tempfile.mkdtemp(prefix=f".{part_name(path)}.", suffix=PART, dir=path.parent))
        with contextlib.suppress(FileNotFoundError):  # removed as stale by a different process before it was locked
            handle = os.open(beside, os.O_RDONLY)
            if lock(handle) is not False and beside.exists():
                break
            os.close(handle)
    _unfinished.add(beside)
    try:
        yield beside
    finally:
        os.close(handle)
        shutil.rmtree(beside, ignore_errors=True)
        _unfinished.discard(beside)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def drop_unfinished() -> None:
    """Remove unfinished outputs of this process: it ends without waiting for its other threads."""
    for path in list(_unfinished):
        with contextlib.suppress(OSError):
            remove_part(path)


def remove_part(part: Path) -> None:
    """Remove an unfinished output, with the arrays beside it."""
    arrays_beside(part).unlink(missing_ok=True)
    remove(part)


def remove(path: Path) -> None:
    """Remove a file, or a directory with everything in it."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def arrays_beside(part: Path) -> Path:
    """Return the file that MLX writes for an unfinished one (`replacing_arrays`)."""
    return part.with_name(f"{part.name}.safetensors")


def is_about(error: OSError, *paths: Path | None) -> bool:
    """Return whether an error concerns these files: it names one of them or, as from `write`, none."""
    return error.filename is None or error.filename in (*map(str, filter(None, paths)), *paths)


def open_part(target: Path) -> tuple[int, Path]:
    """Return the descriptor and path of a new, locked file beside the target."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{part_name(target)}.", suffix=PART, dir=target.parent)
        lock(handle)
        if os.fstat(handle).st_nlink:  # else removed as stale by a different process before it was locked
            return handle, Path(name)
        os.close(handle)


def remove_parts(directory: Path, names: str = ".*") -> list[Path]:
    """Remove unfinished outputs of killed processes whose names match, and return those that are locked."""
    part = re.compile(rf"\.(?:{names})\.[a-z0-9_]{{8}}{re.escape(PART)}")  # as tempfile names them
    found: list[Path] = []
    with contextlib.suppress(OSError):  # a directory that is writable but not readable
        found += (path for path in directory.iterdir() if part.fullmatch(path.name))
    in_work = []
    for path in found:
        with contextlib.suppress(OSError), locked(path) as is_stale:
            if is_stale:
                remove_part(path)
            elif is_stale is False:
                in_work.append(path)
    return in_work


def part_name(target: Path) -> str:
    """Return the stem of an unfinished output's name, short enough for every file system."""
    return shortened(target.name)


def shortened(name: str) -> str:
    """Return the start of a file's name, of at most 100 bytes."""
    return name.encode(errors="surrogateescape")[:100].decode(errors="ignore")


def unwritable(path: Path, error: OSError) -> GearbxError:
    remedy = "make room or choose another place" if error.errno in FULL else "choose another place"
    return GearbxError(f"{path}: cannot be written ({error.strerror or error}); {remedy}")


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def check_writable(path: Path) -> None:
    """Validate an output file before the work. Raises GearbxError if it cannot be written, or is a model's."""
    if "\0" in str(path):
        raise GearbxError(f"{path}: no file can have a null character in its name; choose another one")
    try:
        if path.is_dir():
            raise GearbxError(f"{path}: is a directory; choose a file name")
        if not path.parent.is_dir():
            raise GearbxError(f"{path}: there is no directory {path.parent}; make it first")
        if path.exists() and not os.access(path, os.W_OK):
            raise GearbxError(f"{path}: is write-protected; choose another name")
        check_no_file_of_model(path)
        if path.is_file() or not path.exists():
            with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
                pass
    except OSError as error:
        raise unwritable(path, error) from error


def check_directory(path: Path) -> None:
    """Validate an output directory before the work. Raises GearbxError for a path that cannot be one."""
    try:
        if not path.exists():
            above = next(each for each in path.absolute().parents if each.exists())
            with tempfile.TemporaryDirectory(dir=above):
                pass
        elif not path.is_dir():
            raise GearbxError(f"{path}: is a file; choose the name of a directory")
    except OSError as error:
        raise GearbxError(f"{path}: cannot be made ({error.strerror}); choose another directory") from error


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents. Raises GearbxError if that fails."""
    check_directory(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GearbxError(f"{path}: cannot be made ({error.strerror}); choose another directory") from error


LINE = 64  # bytes of a cache line; mapped arrays are aligned to it


def align_arrays(path: Path) -> None:
    """Align the arrays of a safetensors file by MLX to cache lines. Raises OSError."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        spaces = -(8 + length) % LINE
        if not spaces:
            return
        beside = path.with_name(f"{path.name}{PART}")
        with open(beside, "wb") as out:
            out.write((length + spaces).to_bytes(8, "little") + file.read(length) + b" " * spaces)
            shutil.copyfileobj(file, out, 2**24)
    beside.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file. Raises GearbxError if that fails; a previous file then stays."""
    with replacing(path) as place:
        place.write_text(text, encoding="utf-8")
