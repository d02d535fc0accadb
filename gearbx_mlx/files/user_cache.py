"""The user's cache: kept only where no other user could have written to it.

What is read from it is as good as the weights and the code that it was made of, so one check of owner and mode is for
all of it, and for the directories above it.
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
    """The cache cannot be used; the message says why, and what to do, in one line."""


def unusable(error: OSError) -> CacheUnusable:
    """Return the error for what the system refuses in the cache."""
    place = f"{error.filename}: " if error.filename else ""
    remedy = "make room, or set" if error.errno in FULL else "set"
    return CacheUnusable(f"{place}{error.strerror or one_line(error)}; {remedy} XDG_CACHE_HOME to another directory")


def why(error: CacheUnusable | OSError) -> str:
    """Return why something in the cache cannot be used, and what to do."""
    return str(unusable(error) if isinstance(error, OSError) else error)


def warn_of(error: CacheUnusable | OSError) -> None:
    """Say once why something in the cache is neither read nor written."""
    say_once(f"{why(error)}; until then it is not used")


@functools.cache  # Python's own "once" forgets at each warnings.catch_warnings
def say_once(text: str) -> None:
    warnings.warn(text, GearbxWarning, stacklevel=3)


def open_cache() -> Path:
    """Return the user's cache, which is created if it is missing, without what killed processes left there.

    It is `gearbx-mlx` in $XDG_CACHE_HOME, ~/.cache or ~/Library/Caches. Raises CacheUnusable for one that another user
    could have written to, or that cannot be created or read.
    """
    try:
        directory = platformdirs.user_cache_path(CACHE_NAME, appauthor=False)
        if not directory.is_absolute():  # an earlier platformdirs leaves ~ as it is where there is no home directory
            raise CacheUnusable(f"there is no home directory for {directory}; set XDG_CACHE_HOME to a directory")
        directory = Path(os.path.realpath(directory.parent)) / directory.name
        for each in reversed(directory.parents):
            each.mkdir(mode=0o700, exist_ok=True)
            if each != each.parent:  # the root is root's, who has another number in some containers
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
    """Return the place of the lines that were typed in chat. Raises RuntimeError where there is no home directory."""
    return platformdirs.user_state_path(CACHE_NAME, appauthor=False) / "chat_history"


def cache_entry(name: str) -> Path:
    """Return a place in the cache, which may be missing. Raises CacheUnusable if another user could have written it."""
    place = open_cache() / name
    try:
        check_owner(place)
    except OSError as error:
        raise unusable(error) from error
    return place


def check_owner(path: Path, shared: bool = False) -> None:
    """Make sure that only this user and root can have written a file or directory; a missing one passes.

    shared: others may write to the directory if they cannot replace what is not theirs, as in /tmp. Raises
    CacheUnusable for what belongs to another user, or others may write to, for neither file nor directory, and for a
    file with a second name, in a place that was not checked.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise CacheUnusable(f"{path} is neither a file nor a directory; remove it")
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise CacheUnusable(f"{path} has a second name elsewhere, a hard link; remove it")
    if not hasattr(os, "geteuid"):  # Windows has other rights, and a cache in the user's own folder
        return
    if status.st_uid not in (0, os.geteuid()):
        raise CacheUnusable(f"{path} belongs to another user; set XDG_CACHE_HOME to a directory of yours")
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable and not (shared and status.st_mode & stat.S_ISVTX):
        raise CacheUnusable(f"others may write to {path}; run chmod go-w on it")
