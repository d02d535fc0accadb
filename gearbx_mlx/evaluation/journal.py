"""A file beside an output that is long in the making: a line for each part that is done."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import GearbxError


class Journal:
    """What was measured from the same inputs is not measured again.

    Args:
        file: goes on where it ends; a line that is not whole is cut off.
        inputs: all that the parts depend on, as JSON can hold it.

    Raises:
        GearbxError: it holds parts of other inputs, the first of which that changed is named, or cannot be written.
    """

    def __init__(self, file: Path, inputs: Mapping[str, Any]):
        self.file = file
        inputs = json.loads(json.dumps(inputs))
        try:
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
            rows = [json.loads(line) for line in whole]
            if rows:
                self._check(rows[0], inputs)
                os.truncate(file, len("".join(whole).encode()))
            else:
                file.write_text(json.dumps(inputs) + "\n", encoding="utf-8")
            self.parts = {row["part"]: row["found"] for row in rows[1:]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, GearbxError):
                raise
            raise GearbxError(f"{file}: cannot be gone on with ({error}); remove it") from error

    def _check(self, before: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        changed = [name for name in {**before, **inputs} if before.get(name) != inputs.get(name)]
        if changed:
            name = changed[0]
            raise GearbxError(
                f"{self.file}: holds measurements with {name} {before.get(name)}, and now it is {inputs.get(name)}; "
                "choose another --out, or remove that file"
            )

    def add(self, part: str, found: Any) -> None:
        """Keep a part for good."""
        self.parts[part] = found
        try:
            with self.file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps({"part": part, "found": found}) + "\n")
        except OSError as error:
            raise GearbxError(f"{self.file}: cannot be written ({error.strerror}); make room") from error

    def remove(self) -> None:
        """When the output is whole."""
        self.file.unlink(missing_ok=True)
