"""A directory in which a long run keeps its results, and from which it continues when it is started again."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..files.reading import read_json
from ..files.writing import check_directory, make_directory, remove_parts, replacing, write_text
from .journal import Journal, check_inputs

T = TypeVar("T")


class Saved(Protocol):
    """Results that a file of arrays holds."""

    def save(self, file: Any) -> None: ...


S = TypeVar("S", bound=Saved)

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


class EvaluationSession:
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
        remove_parts(directory / PARTS)

    def path(self, name: str) -> Path:
        return self.directory / PARTS / name

    def file(self, name: str, write: Callable[[Path], object]) -> Path:
        """A file of the session, written by `write` unless it exists."""
        path = self.path(name)
        if not path.exists():
            with replacing(path) as place:
                write(place)
        return path

    def recording(self, name: str, make: Callable[[], S], load: Callable[[Path], S]) -> S:
        """A recording, made unless it exists.

        Args:
            load: reads what `save` wrote. Raises GearbxError where the file is damaged.
        """

        def write(place: Path) -> None:
            recording = make()
            with place.open("wb") as file:
                recording.save(file)

        return load(self.file(f"{name}.npz", write))

    def journal(self, name: str, kind: Any) -> Journal:
        """A file of the session that is written part by part. kind: of a part's value."""
        return Journal(self.path(f"{name}.jsonl"), {"rows": name}, kind)

    def rows(self, name: str, make: Callable[[int], T], kind: type[T], numbers: Iterable[int]) -> list[T]:
        """The values for these numbers: each is made unless it exists, and kept as soon as it is made.

        Args:
            kind: of the values: a dataclass, or what JSON can express.

        Raises:
            GearbxError: the file is damaged.
        """
        journal = self.journal(name, kind)
        return [journal.made(str(number), partial(make, number)) for number in numbers]


def remove_session(directory: Path) -> None:
    """Remove the files of a session, and its directory if nothing else is in it."""
    shutil.rmtree(directory / PARTS, ignore_errors=True)
    with contextlib.suppress(OSError):
        (directory / INPUTS).unlink()
        directory.rmdir()
