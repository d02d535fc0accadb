"""A JSON file of measurements in the user's cache, by machine, for several concurrent processes.

A damaged file costs a measurement and a one-line warning.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from filelock import FileLock

from ..errors import GearbxError, GearbxWarning
from .reading import read_json
from .user_cache import CacheUnusable, cache_entry, warn_of
from .writing import write_text

MAX_MACHINES = 16  # each version of MLX counts as a machine

T = TypeVar("T")
E = TypeVar("E")


class MeasuredFile(Generic[T]):
    """A file of the user's cache.

    Args:
        name: of the file in the cache, or a path.
        kind: a Struct with defaults, whose fields are dictionaries by machine.
        what: plural noun for the content.
        remedy: part of the warning if it cannot be read.
        unwritten: effect if it cannot be written, for the warning.
    """

    def __init__(self, name: str | Path, kind: type[T], what: str, remedy: str, unwritten: str):
        self.name, self.kind, self.what, self.remedy, self.unwritten = name, kind, what, remedy, unwritten

    def place(self) -> Path | None:
        """Return its path; None, with one warning, without a cache or if other users could have written it."""
        if isinstance(self.name, Path):
            return self.name
        try:
            return cache_entry(self.name)
        except CacheUnusable as error:
            warn_of(error)
            return None

    def read(self, quietly: bool = False) -> T:
        """Return the content; empty, with a warning unless `quietly`, if the file is damaged."""
        place = self.place()
        if place is None or not place.is_file():
            return self.kind()
        try:
            return read_json(place, self.kind, self.what, self.remedy)
        except GearbxError as error:
            if not quietly:
                warnings.warn(str(error), GearbxWarning, stacklevel=4)
            return self.kind()

    def change(self, change: Callable[[T], None]) -> None:
        """Change the content, and keep concurrent changes by other processes."""
        place = self.place()
        if place is None:
            return
        try:
            with FileLock(place.with_name(f".{place.name}.lock"), mode=0o600):
                content = self.read(quietly=True)
                change(content)
                write_text(place, msgspec.json.format(msgspec.json.encode(content), indent=1).decode())
                place.chmod(0o600)  # for any umask, because files that others may write to are never used
        except (GearbxError, OSError, NotImplementedError) as error:  # NotImplementedError if files cannot be locked
            warnings.warn(f"{error}; {self.unwritten}", GearbxWarning, stacklevel=4)


def become_newest(machines: dict[str, dict[str, E]], machine: str, found: dict[str, E]) -> None:
    """Add measurements of a machine, move it to the end, and delete the oldest machines."""
    if found:
        machines[machine] = machines.pop(machine, {}) | found
    for oldest in list(machines)[:-MAX_MACHINES]:
        del machines[oldest]
