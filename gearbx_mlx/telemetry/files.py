"""Output files that are whole or not there: written beside their place, then renamed into it."""

import os
from pathlib import Path

from ..errors import GearbxError


def beside(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def check_writable(path: Path) -> None:
    """Raises GearbxError for a path that a file cannot be written to; before the work, not after it."""
    if path.is_dir():
        raise GearbxError(f"{path}: is a directory; give a file name")
    if not path.parent.is_dir():
        raise GearbxError(f"{path}: there is no directory {path.parent}; make it first")
    try:
        beside(path).touch()
        beside(path).unlink()
    except OSError as error:
        raise GearbxError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    if path.exists() and not os.access(path, os.W_OK):
        raise GearbxError(f"{path}: is write-protected; choose another name")


def write_text(path: Path, text: str) -> None:
    """Raises GearbxError if the file cannot be written; what was there before is then still there."""
    try:
        beside(path).write_text(text, encoding="utf-8")
        os.replace(beside(path), path)
    except OSError as error:
        beside(path).unlink(missing_ok=True)
        raise GearbxError(f"{path}: cannot be written ({error.strerror})") from error
