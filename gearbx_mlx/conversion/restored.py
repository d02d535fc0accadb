"""A directory with the files of an original; a restoration that was stopped goes on where it was."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ..errors import GearbxError
from ..files.reading import shown
from ..files.writing import remove_parts, write_bytes
from ..gears.array_hashes import Place, hash_places
from ..gears.tensor_entries import LENGTH
from .original import Header, Key, places_in
from .restoring import Restorer


def write_original(restorer: Restorer, work: Path, progress: Callable[[int], None]) -> None:
    """Fill the directory `work` with the files of an original.

    What an earlier run wrote is known by its hash, and stays.

    Args:
        progress: called with the bytes of every tensor that is there.

    Raises:
        GearbxError: files in the directory that are not the original's, a disk without room, a small file that cannot
            be written, or a damaged checkpoint.
        OSError: the directory cannot be written.
    """
    remove_parts(work)
    check_directory(restorer, work)
    places = places_in(restorer.headers, work)
    with contextlib.ExitStack() as stack:
        done = written(restorer, places)
        files = {name: stack.enter_context(begun(work / name, header)) for name, header in restorer.headers.items()}
        for key in done:
            progress(places[key].size)
        for parameters, keys in restorer.groups:
            left = [key for key in keys if key not in done]
            for key, data in restorer.tensors(parameters, left) if left else ():
                files[key[0]].seek(places[key].begin)
                files[key[0]].write(data)
                progress(places[key].size)
    for name, content in restorer.files():
        write_bytes(work / name, content)


def is_restoring(work: Path) -> bool:
    """Whether a directory has something that another run need not do again."""
    return any(work.glob("*.safetensors"))


def check_directory(restorer: Restorer, work: Path) -> None:
    """Raises GearbxError for a directory with other files, or on a disk without room for what is missing."""
    own = {*restorer.headers, *restorer.original.files}
    others = sorted(file.name for file in work.iterdir() if file.name not in own)
    if others:
        raise GearbxError(f"{work}: has {shown(others[0])}, which is not of this original; remove the directory")
    needed = sum(header.size for header in restorer.headers.values())
    there = sum(getattr(file.stat(), "st_blocks", 0) * 512 for file in work.iterdir())  # files may have holes
    free = shutil.disk_usage(work).free
    if needed > there + free:
        raise GearbxError(f"{work}: needs {needed} bytes, and the disk has {free} left; make room, or choose another")


def written(restorer: Restorer, places: dict[Key, Place]) -> set[Key]:
    """The tensors that an earlier run wrote."""
    there = {place.file for place in places.values() if place.file.is_file()}
    found = hash_places({key: place for key, place in places.items() if place.file in there})
    return {key for key, hash in found if hash == restorer.tensor(key).hash}


@contextlib.contextmanager
def begun(path: Path, header: Header) -> Iterator[IO[bytes]]:
    """A file of the original's size with its header, to write tensors to; on the disk when the block ends."""
    with open(path, "r+b" if path.exists() else "w+b") as file:
        file.truncate(header.size)
        file.write(LENGTH.pack(len(header.data)) + header.data)
        yield file
        file.flush()
        os.fsync(file.fileno())
