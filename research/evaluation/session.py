"""Results of a long run that are kept as soon as they are made, so that the same command goes on where it ended.

An EvaluationSession is a directory of recordings, a Journal a file beside an output with a line for each part that is
done. Both continue only with the same inputs, such as the fingerprint of the model's files.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct

from ..errors import GearbxError
from ..files.reading import json_lines, read_json, read_text, shown
from ..files.writing import (
    check_directory,
    check_writable,
    lock_for_good,
    make_directory,
    remove_parts,
    replacing,
    write_text,
)

F = TypeVar("F")
T = TypeVar("T")
INPUTS, PARTS = "inputs.json", "recordings"
JOURNAL = ".journal"  # behind the name of an output that is not complete yet
REMOVE = "remove it, and the same command starts again"
REMOVE_LINE = "remove this line, and the same command goes on"


class JournalPart(Struct, Generic[F], frozen=True):
    """A line of the journal after the first, which has the inputs."""

    part: str
    found: F


class Journal:
    """Keeps what was measured, so that a rerun with the same inputs does not measure it again.

    Args:
        file: the journal continues where it ends; a line that is not complete is cut off. None: nothing is kept.
        inputs: all that the parts depend on, as JSON can express it.
        found: the type of the value of a part: a dataclass, or what JSON can express.

    Raises:
        GearbxError: the file cannot be read or written, has a damaged line, or belongs to other inputs: the message
            names the first one that changed.
    """

    def __init__(self, file: Path | None, inputs: Mapping[str, Any], found: Any = Any):
        self.file = file
        self.parts: dict[str, Any] = {}
        if file is None:
            return
        text = read_text(file, "a journal", REMOVE) if os.path.exists(file) else ""
        complete = text[: text.rfind("\n") + 1]
        head, _, rest = complete.partition("\n")
        for _, before in json_lines(file, head, dict[str, Any], REMOVE):
            check_inputs(before, inputs, f"{file}: holds measurements", "that file")
        for _, part in json_lines(file, rest, JournalPart[found], REMOVE_LINE, first=2):
            self.parts[part.part] = part.found
        self.end = len(complete.encode())
        try:
            alone = lock_for_good(file)
        except OSError as error:
            raise GearbxError(f"{file}: cannot be written ({error.strerror}); choose another --out") from error
        if not alone or os.path.getsize(file) != len(text.encode()):
            raise GearbxError(f"{file}: another process writes it; wait for it, or end it")
        if not complete:
            self._append(inputs)

    def add(self, part: str, found: Any) -> None:
        """Keep a part for good."""
        self.parts[part] = found
        self._append({"part": part, "found": found})

    def made(self, part: str, make: Callable[[], Any]) -> Any:
        """The value of a part, which is made and kept unless it exists."""
        if part not in self.parts:
            self.add(part, make())
        return self.parts[part]

    def _append(self, line: Any) -> None:
        """Return when the line is on the disk. What a killed or failed append left behind is cut off first."""
        if self.file is None:
            return
        try:
            data = json.dumps(line, default=dataclasses.asdict, allow_nan=False).encode() + b"\n"
        except ValueError as error:
            raise GearbxError(f"{self.file}: {line.get('part')} is not finite; check the checkpoint") from error
        try:
            with self.file.open("ab") as opened:
                opened.truncate(self.end)
                opened.write(data)
                opened.flush()
                os.fsync(opened.fileno())
        except OSError as error:
            raise GearbxError(
                f"{self.file}: cannot be written ({error.strerror}); make room, and the same command goes on"
            ) from error
        self.end += len(data)


def beside(out: Path, ending: str) -> Path | None:
    """Where the parts of an output are kept until it is complete; None for a device or a pipe, which keeps nothing.

    Raises:
        GearbxError: a place that cannot be written to.
    """
    if out.exists() and not out.is_file():
        return None
    place = Path(f"{os.path.realpath(out) if out.is_symlink() else out}{ending}")
    if not os.path.isdir(place):  # unlike Path.is_dir, also for a name that is too long
        check_writable(place)
    return place


def check_inputs(before: Mapping[str, Any], inputs: Mapping[str, Any], holder: str, outdated: str) -> None:
    """Raises GearbxError if results were made from other inputs; the message names the first one that changed.

    Args:
        before: as read from JSON.
        inputs: of now, as JSON can express them: a tuple is the same as a list.
        holder: of the results, with a verb: "out: holds results".
        outdated: the thing to be removed.
    """
    now = json.loads(json.dumps(inputs))
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            then, since = (shown(values.get(name)).strip('"') for values in (before, now))
            raise GearbxError(
                f"{holder} with {shown(name)[1:-1]} {then}, and now it is {since}; "
                f"choose another --out, or remove {outdated}"
            )


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

    def file(self, name: str, write: Callable[[Path], object]) -> Path:
        """A file of the session, written by `write` unless it exists."""
        path = self.directory / PARTS / name
        if not path.exists():
            with replacing(path) as place:
                write(place)
        return path

    def recording(self, name: str, make: Callable[[], Any], load: Callable[[Path], T]) -> T:
        """A recording, made unless it exists.

        Args:
            make: returns what has a method `save`, from a file.
            load: reads what `save` wrote. Raises GearbxError where the file is damaged.
        """

        def write(place: Path) -> None:
            recording = make()
            with place.open("wb") as file:
                recording.save(file)

        return load(self.file(f"{name}.npz", write))

    def journal(self, name: str, kind: Any) -> Journal:
        """A file of the session that is written part by part. kind: of a part's value."""
        return Journal(self.directory / PARTS / f"{name}.jsonl", {"rows": name}, kind)

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


def hash_of_tokens(sequences: Sequence[Sequence[int]]) -> str:
    """16 hexadecimal digits of sequences of tokens, such as prompts or the windows of a text."""
    return hashlib.sha256(repr([list(tokens) for tokens in sequences]).encode()).hexdigest()[:16]
