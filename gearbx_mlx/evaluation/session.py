"""A directory in which a long run keeps what it has computed, and goes on when it is started again."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import GearbxError
from ..files.writing import replacing, write_text
from .replay import Recording

INPUTS, PARTS = "inputs.json", "recordings"
SAMPLE = 2**20  # bytes of a file's beginning and end that stand for it


def fingerprint(*files: Path) -> str:
    """Of contents: names, sizes, the first and the last MiB of each. Weights are too large to be read twice."""
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
    """What was computed from the same inputs is not computed again.

    Args:
        directory: is made if it is not there.
        inputs: all that the results depend on, as JSON can hold it.

    Raises:
        GearbxError: the directory holds results of other inputs; the first one that changed is named.
    """

    def __init__(self, directory: Path, inputs: Mapping[str, Any]):
        self.directory = directory
        if directory.exists() and not directory.is_dir():
            raise GearbxError(f"{directory}: is a file; --out names a directory")
        try:
            (directory / PARTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GearbxError(f"{directory}: cannot be made ({error.strerror}); choose another directory") from error
        self._check(dict(inputs))

    def _check(self, inputs: dict[str, Any]) -> None:
        file = self.directory / INPUTS
        if not file.exists():
            write_text(file, json.dumps(inputs, indent=2) + "\n")
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
            changed = [name for name in {**before, **inputs} if before.get(name) != inputs.get(name)]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise GearbxError(f"{file}: cannot be read ({error}); choose another --out, or remove it") from error
        if changed:
            name = changed[0]
            raise GearbxError(
                f"{self.directory}: holds results with {name} {before.get(name)}, and now it is {inputs.get(name)}; "
                "choose another --out, or remove that directory"
            )

    def path(self, name: str) -> Path:
        return self.directory / PARTS / name

    def file(self, name: str, write: Callable[[Path], object]) -> Path:
        """A file of the session, written by `write` unless it is there already."""
        path = self.path(name)
        if not path.exists():
            with replacing(path) as place:
                write(place)
        return path

    def recording(self, name: str, make: Callable[[], Recording]) -> Recording:
        """A recording, made unless it is there already."""

        def write(place: Path) -> None:
            recording = make()
            with place.open("wb") as file:
                recording.save(file)

        return Recording.load(self.file(f"{name}.npz", write))

    def rows(self, name: str, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Rows of plain values, made unless they are there already."""
        path = self.file(f"{name}.json", lambda place: place.write_text(json.dumps(make()), encoding="utf-8"))
        return json.loads(path.read_text(encoding="utf-8"))
