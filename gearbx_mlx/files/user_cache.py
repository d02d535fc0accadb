"""The user's cache, used only if no other user can write to it.

Its entries are trusted like the weights and the code that they were made of. So one check of owner and mode covers all
of it, and the directories above it.
"""

import functools
import os
import stat
import warnings
from pathlib import Path

import platformdirs

from ..errors import GearbxWarning, one_line
from .writing import FULL, remove_parts

CACHE_NAME = "gearbx-mlx"


class CacheUnusable(Exception):
    """Unusable cache; the message is one line with reason and remedy."""


def unusable(error: OSError) -> CacheUnusable:
    """Return the error for a failed operation in the cache."""
    place = f"{error.filename}: " if error.filename else ""
    remedy = "make room, or set" if error.errno in FULL else "set"
    return CacheUnusable(f"{place}{error.strerror or one_line(error)}; {remedy} XDG_CACHE_HOME to another directory")


def why(error: CacheUnusable | OSError) -> str:
    """Return the reason and the remedy of an unusable entry of the cache."""
    return str(unusable(error) if isinstance(error, OSError) else error)


def warn_of(error: CacheUnusable | OSError) -> None:
    """Warn once of an entry of the cache that is neither read nor written."""
    warn_once(f"{why(error)}; until then it is not used")


@functools.cache  # Python's own "once" forgets at each warnings.catch_warnings
def warn_once(text: str) -> None:
    warnings.warn(text, GearbxWarning, stacklevel=3)


def open_cache() -> Path:
    """Return the user's cache, created if missing and without unfinished entries of killed processes.

    It is `gearbx-mlx` in $XDG_CACHE_HOME, ~/.cache or ~/Library/Caches. Raises CacheUnusable if other users can
    write to it, or if it cannot be created or read.
    """
    try:
        directory = platformdirs.user_cache_path(CACHE_NAME, appauthor=False)
        if not directory.is_absolute():  # earlier versions of platformdirs keep ~ without a home directory
            raise CacheUnusable(f"there is no home directory for {directory}; set XDG_CACHE_HOME to a directory")
        directory = Path(os.path.realpath(directory.parent)) / directory.name
        for each in reversed(directory.parents):
            each.mkdir(mode=0o700, exist_ok=True)
            if each != each.parent:  # / belongs to root, who has a different number in some containers
                check_owner(each, shared=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        check_owner(directory)
        remove_parts(directory)
    except RuntimeError as error:
        raise CacheUnusable("this user has no home directory; set XDG_CACHE_HOME to a directory") from error
    except OSError as error:
        raise unusable(error) from error
    return directory


def chat_history() -> Path:
    """Return the place of chat's input history. Raises RuntimeError if there is no home directory."""
    return platformdirs.user_state_path(CACHE_NAME, appauthor=False) / "chat_history"


def cache_entry(name: str) -> Path:
    """Return a place in the cache; it may be missing. Raises CacheUnusable if other users can write to it."""
    place = open_cache() / name
    try:
        check_owner(place)
    except OSError as error:
        raise unusable(error) from error
    return place


def check_owner(path: Path, shared: bool = False) -> None:
    """Validate that only this user and root can write to a file or directory; a missing one passes.

    shared: others may write to the directory if they cannot replace foreign entries, as in /tmp. Raises CacheUnusable
    if it belongs to someone else, if others can write to it, if it is neither a file nor a directory, and for a file
    with a second hard link in an unchecked place.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise CacheUnusable(f"{path} is neither a file nor a directory; remove it")
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise CacheUnusable(f"{path} has a second name elsewhere, a hard link; remove it")
    if not hasattr(os, "geteuid"):  # Windows has other permissions, and a cache in the user's own folder
        return
    if status.st_uid not in (0, os.geteuid()):
        raise CacheUnusable(f"{path} belongs to another user; set XDG_CACHE_HOME to a directory of yours")
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable and not (shared and status.st_mode & stat.S_ISVTX):
        raise CacheUnusable(f"others may write to {path}; run chmod go-w on it")
