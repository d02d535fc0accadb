"""A JSON file of the user's cache with what was measured, by machine; several processes may write it.

Anything wrong with the file costs a measurement, and one line that says so.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from filelock import FileLock

from ..errors import GearbxError, GearbxWarning
from ..files.reading import read_json
from ..files.user_cache import CacheUnusable, cache_entry, warn_of
from ..files.writing import write_text

MAX_MACHINES = 16  # a new version of MLX makes another one

T = TypeVar("T")
E = TypeVar("E")


class MeasuredFile(Generic[T]):
    """A file of the user's cache.

    Args:
        name: of the file, or its path in another place.
        kind: a Struct with defaults, whose fields are dictionaries by machine.
        what: the file has, in the plural.
        remedy: for one that cannot be read.
        unwritten: what follows if it cannot be written.
    """

    def __init__(self, name: str | Path, kind: type[T], what: str, remedy: str, unwritten: str):
        self.name, self.kind, self.what, self.remedy, self.unwritten = name, kind, what, remedy, unwritten

    def place(self) -> Path | None:
        """Return where it is; None, said once, where another user could have written it or there is no cache."""
        if isinstance(self.name, Path):
            return self.name
        try:
            return cache_entry(self.name)
        except CacheUnusable as error:
            warn_of(error)
            return None

    def read(self, quietly: bool = False) -> T:
        """Return the content; nothing, with a warning unless `quietly`, where it is not what `change` wrote."""
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
        """Change the content; what other processes wrote meanwhile stays."""
        place = self.place()
        if place is None:
            return
        try:
            with FileLock(place.with_name(f".{place.name}.lock"), mode=0o600):
                content = self.read(quietly=True)
                change(content)
                write_text(place, msgspec.json.format(msgspec.json.encode(content), indent=1).decode())
                place.chmod(0o600)  # with any umask: what others may write to is never used
        except (GearbxError, OSError, NotImplementedError) as error:  # the last one where files cannot be locked
            warnings.warn(f"{error}; {self.unwritten}", GearbxWarning, stacklevel=4)


def become_newest(machines: dict[str, dict[str, E]], machine: str, found: dict[str, E]) -> None:
    """Add what was found on a machine, which becomes the last one; the oldest machines are left out."""
    if found:
        machines[machine] = machines.pop(machine, {}) | found
    for oldest in list(machines)[:-MAX_MACHINES]:
        del machines[oldest]
