"""Measurements of a long run, kept as soon as they are made, so that a rerun of the same command resumes.

A Journal is a file beside an output, with a line for each finished part. It resumes only with identical inputs, such as
the fingerprint of the model's files.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct

from ..errors import GearbxError
from .reading import json_lines, read_text, shown
from .writing import check_writable, lock_for_good

F = TypeVar("F")
JOURNAL = ".journal"  # suffix of the name of an incomplete output
REMOVE = "remove it, and the same command starts again"


class JournalPart(Struct, Generic[F], frozen=True):
    """A line of the journal; the first line, with the inputs, has a different form."""

    part: str
    found: F


class Journal:
    """A file of measurements that a rerun with the same inputs does not repeat.

    file: is continued; an incomplete last line is cut off. None: no measurement is kept. inputs: all inputs of the
    parts, as JSON. found: the type of a part's value.

    Raises GearbxError for a file that cannot be read or written, has a damaged line, or has different inputs.
    """

    def __init__(self, file: Path | None, inputs: Mapping[str, Any], found: Any = Any):
        self.file = file
        self.parts: dict[str, Any] = {}
        if file is None:
            return
        text = read_text(file, "a journal", REMOVE, newline="") if os.path.exists(file) else ""
        complete = text[: text.rfind("\n") + 1]
        head, _, rest = complete.partition("\n")
        for _, before in json_lines(file, head, dict[str, Any], REMOVE):
            check_inputs(before, inputs, file)
        remedy = "remove this line, and the same command continues"
        for _, part in json_lines(file, rest, JournalPart[found], remedy, first=2):
            self.parts[part.part] = part.found
        self.end = len(complete.encode())
        try:
            is_locked = lock_for_good(file)
        except OSError as error:
            raise GearbxError(f"{file}: cannot be written ({error.strerror}); choose another --out") from error
        if not is_locked or os.path.getsize(file) != len(text.encode()):
            raise GearbxError(f"{file}: another process writes it; wait for it, or end it")
        if not complete:
            self._append(inputs)

    def add(self, part: str, found: Any) -> None:
        """Keep the value of a part."""
        self.parts[part] = found
        self._append({"part": part, "found": found})

    def made(self, part: str, make: Callable[[], Any]) -> Any:
        """Return the value of a part; a missing one is made and kept."""
        if part not in self.parts:
            self.add(part, make())
        return self.parts[part]

    def _append(self, line: Any) -> None:
        """Append a line, and return when it is on the disk. The rest of a failed append is cut off first."""
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
                f"{self.file}: cannot be written ({error.strerror}); make room, and the same command continues"
            ) from error
        self.end += len(data)


def place_beside(out: Path, ending: str) -> Path | None:
    """Return the place of the parts of an incomplete output; None: the output is a device or a pipe.

    Raises GearbxError for a place that cannot be written.
    """
    if out.exists() and not out.is_file():
        return None
    place = Path(f"{os.path.realpath(out) if out.is_symlink() else out}{ending}")
    if not os.path.isdir(place):  # unlike Path.is_dir, it accepts names that are too long
        check_writable(place)
    return place


def check_inputs(before: Mapping[str, Any], inputs: Mapping[str, Any], file: Path) -> None:
    """Validate that inputs equal a journal's. Raises GearbxError with the first different one."""
    now = json.loads(json.dumps(inputs))
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            then, since = (shown(values.get(name)).strip('"') for values in (before, now))
            raise GearbxError(
                f"{file}: holds measurements with {shown(name)[1:-1]} {then}, and now it is {since}; "
                "choose another --out, or remove that file"
            )


def hash_of_tokens(sequences: Sequence[Sequence[int]]) -> str:
    """Return 16 hexadecimal digits of token sequences, such as prompts or windows."""
    return hashlib.sha256(repr([list(tokens) for tokens in sequences]).encode()).hexdigest()[:16]
