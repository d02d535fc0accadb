"""A directory in which a long run keeps its results, and from which it continues when it is started again."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ..files.reading import read_json
from ..files.writing import check_directory, make_directory, replacing, write_text
from .journal import check_inputs
from .replay import REMAKE, Recording

T = TypeVar("T")

INPUTS, PARTS = "inputs.json", "recordings"
SAMPLE = 2**20  # bytes of a file's beginning and end that stand for it


def fingerprint(*files: Path) -> str:
    """A hash of contents: names, sizes, the first and the last MiB of each. Weights are too large to be read twice."""
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(SAMPLE))
            opened.seek(max(size - SAMPLE, 0))
            digest.update(opened.read(SAMPLE))
    return digest.hexdigest()[:16]


class Session:
    """Keeps what was computed, so that a rerun with the same inputs does not compute it again.

    Args:
        directory: is made if it does not exist.
        inputs: all that the results depend on, as JSON can express it.

    Raises:
        GearbxError: the directory cannot be made, or holds results of other inputs: the message names the first one
            that changed.
    """

    def __init__(self, directory: Path, inputs: Mapping[str, Any]):
        self.directory = directory
        check_directory(directory)
        make_directory(directory / PARTS)
        file = directory / INPUTS
        if file.exists():
            before = read_json(
                file, dict[str, Any], "the inputs of earlier results", "remove it, or choose another --out"
            )
            check_inputs(before, inputs, f"{directory}: holds results", "that directory")
        else:
            write_text(file, json.dumps(inputs, indent=2) + "\n")

    def path(self, name: str) -> Path:
        return self.directory / PARTS / name

    def file(self, name: str, write: Callable[[Path], object]) -> Path:
        """A file of the session, written by `write` unless it exists."""
        path = self.path(name)
        if not path.exists():
            with replacing(path) as place:
                write(place)
        return path

    def recording(self, name: str, make: Callable[[], Recording], tokens: int, gears: int) -> Recording:
        """A recording with this number of predictions and of gears, made unless it exists.

        Raises:
            GearbxError: the file is damaged.
        """

        def write(place: Path) -> None:
            recording = make()
            with place.open("wb") as file:
                recording.save(file)

        return Recording.load(self.file(f"{name}.npz", write), tokens, gears)

    def rows(self, name: str, make: Callable[[], Sequence[T]], kind: type[T], count: int) -> list[T]:
        """`count` values of a type, made unless they exist.

        Args:
            kind: a dataclass.

        Raises:
            GearbxError: the file is damaged.
        """
        path = self.file(f"{name}.json", lambda place: place.write_bytes(msgspec.json.encode(make())))
        exactly = Annotated[list[kind], msgspec.Meta(min_length=count, max_length=count)]  # type: ignore[valid-type]
        return read_json(path, exactly, "results", REMAKE)
