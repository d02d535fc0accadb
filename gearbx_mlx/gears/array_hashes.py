"""The hash of every array of a geared checkpoint: damage shows when a layer is first read, and not in a text."""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import GearbxError

K = TypeVar("K")

AT_ONCE = 2**22  # bytes that are read and hashed at a time


@dataclass(frozen=True)
class Place:
    """Where an array is: in a file, from byte `begin` to the one before `end`."""

    file: Path
    begin: int
    end: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.end - self.begin


def hash_bytes(data: Any) -> str:
    """The SHA-256 of an array's bytes, in 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def hash_place(place: Place) -> str:
    """The same of an array in a file. Raises OSError where it cannot be read."""
    digest = hashlib.sha256()
    with open(place.file, "rb", buffering=0) as file:
        file.seek(place.begin)
        left = place.size
        while left and (part := file.read(min(left, AT_ONCE))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


def hash_places(places: Mapping[K, Place], remedy: str = "restore it") -> Iterator[tuple[K, str]]:
    """Each key and the hash of its place; on all cores, since hashing is slower than reading.

    Raises:
        GearbxError: a file cannot be read; the message ends with `remedy`.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            yield from zip(places, pool.map(hash_place, places.values()))
        except OSError as error:
            files = ", ".join(sorted({str(place.file) for place in places.values()}))
            raise GearbxError(f"{files}: cannot be read ({error.strerror}); {remedy}") from error
        finally:
            pool.shutdown(cancel_futures=True)


class ArrayHashes:
    """Compares arrays with their hashes, each once. Threads may share it.

    Args:
        places: name of an array to its place.
        expected: name to hash; arrays without one are not compared.

    `pending` are the names that were not compared yet.
    """

    def __init__(self, places: Mapping[str, Place], expected: Mapping[str, str]):
        self.places, self.expected = places, expected
        self.pending = {*expected}
        self._lock = threading.Lock()

    def verify(self, names: Iterable[str], remedy: str) -> None:
        """Compare those arrays that were not compared before.

        Raises:
            GearbxError: an array that cannot be read or has another hash; the message ends with `remedy`.
        """
        with self._lock:
            wanted = sorted(self.pending.intersection(names))
            for name, is_whole in self.compare(wanted, remedy):
                if not is_whole:
                    raise self.damaged(name, remedy)
            self.pending.difference_update(wanted)

    def confirm(self, name: str, found: str, remedy: str) -> None:
        """Take the hash of an array that somebody else has read whole. Raises GearbxError if it is another one."""
        if found != self.expected[name]:
            raise self.damaged(name, remedy)
        with self._lock:
            self.pending.discard(name)

    def damaged(self, name: str, remedy: str) -> GearbxError:
        """The error for an array whose hash is not the expected one."""
        return GearbxError(f"{self.places[name].file}: {name} is damaged, or of another model; {remedy}")

    def compare(self, names: Iterable[str], remedy: str) -> Iterator[tuple[str, bool]]:
        """Each array, and whether its hash is the expected one.

        Raises:
            GearbxError: a file cannot be read; the message ends with `remedy`.
        """
        for name, found in hash_places({name: self.places[name] for name in names}, remedy):
            yield name, found == self.expected[name]
