"""Output files that are complete or absent: written beside their place, then renamed into it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import GearbxError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to: it is renamed to `path` when the block ends, and removed if the block raises.

    A symbolic link stays and its target is replaced; to a device or a pipe the block writes directly.

    Raises:
        GearbxError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise unwritable(path, error) from error
    beside = Path(name)
    try:
        yield beside
        os.chmod(beside, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~umask())
        os.replace(beside, target)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        beside.unlink(missing_ok=True)


def unwritable(path: Path, error: OSError) -> GearbxError:
    return GearbxError(f"{path}: cannot be written ({error.strerror}); choose another place")


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def check_writable(path: Path) -> None:
    """Raises GearbxError for a path that no file can be written to; before the work, not after it."""
    try:
        if path.is_dir():
            raise GearbxError(f"{path}: is a directory; give a file name")
        if not path.parent.is_dir():
            raise GearbxError(f"{path}: there is no directory {path.parent}; make it first")
        if path.exists() and not os.access(path, os.W_OK):
            raise GearbxError(f"{path}: is write-protected; choose another name")
        if path.is_file() or not path.exists():
            with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
                pass
    except OSError as error:
        raise unwritable(path, error) from error


def check_directory(path: Path) -> None:
    """Raises GearbxError for a path that cannot be a directory; before the work, not after it."""
    try:
        if path.exists() and not path.is_dir():
            raise GearbxError(f"{path}: is a file; give the name of a directory")
    except OSError as error:
        raise GearbxError(f"{path}: cannot be made ({error.strerror}); choose another directory") from error


def make_directory(path: Path) -> None:
    """Make a directory and those above it, where they do not exist. Raises GearbxError if that fails."""
    check_directory(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GearbxError(f"{path}: cannot be made ({error.strerror}); choose another directory") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file. Raises GearbxError if that fails; the file that was there before then stays."""
    with replacing(path) as place:
        place.write_text(text, encoding="utf-8")
