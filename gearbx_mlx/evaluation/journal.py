"""A file beside an output that takes long to make: a line for each part that is done."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct

from ..errors import GearbxError
from ..files.problems import shown
from ..files.reading import json_lines, read_text

F = TypeVar("F")
REMOVE = "remove it, and the same command begins anew"


class Part(Struct, Generic[F], frozen=True):
    """A line of the journal after the first, which has the inputs."""

    part: str
    found: F


class Journal:
    """Keeps what was measured, so that a rerun with the same inputs does not measure it again.

    Args:
        file: the journal continues where it ends; a line that is not complete is cut off.
        inputs: all that the parts depend on, as JSON can express it.
        found: the type of the value of a part.

    Raises:
        GearbxError: the file cannot be read or written, has a damaged line, or is of other inputs: the message names
            the first one that changed.
    """

    def __init__(self, file: Path, inputs: Mapping[str, Any], found: Any = Any):
        self.file = file
        self.parts: dict[str, Any] = {}
        text = read_text(file, "a journal", REMOVE) if os.path.exists(file) else ""
        complete = text[: text.rfind("\n") + 1]
        head, _, rest = complete.partition("\n")
        for _, before in json_lines(file, head, dict[str, Any], REMOVE):
            check_inputs(before, inputs, f"{file}: holds measurements", "that file")
        for _, part in json_lines(file, rest, Part[found], REMOVE, first=2):
            self.parts[part.part] = part.found
        try:
            file.open("a").close()
            os.truncate(file, len(complete.encode()))
        except OSError as error:
            raise GearbxError(f"{file}: cannot be written ({error.strerror}); choose another --out") from error
        if not complete:
            self._append(inputs)

    def add(self, part: str, found: Any) -> None:
        """Keep a part for good."""
        self.parts[part] = found
        self._append({"part": part, "found": found})

    def _append(self, line: Any) -> None:
        try:
            with self.file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(line) + "\n")
        except OSError as error:
            raise GearbxError(f"{self.file}: cannot be written ({error.strerror}); make room") from error


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
