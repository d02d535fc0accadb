"""Flags of what a run writes, and the check of a path before the work."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..errors import GearbxError
from ..files.writing import check_writable
from .settings import Settings, flag


def str2bool(text: str) -> bool:
    return text.lower() not in ("false", "f")


@dataclass(frozen=True)
class OutputSettings(Settings):
    """What a run writes besides the text."""

    title: ClassVar[str] = "output"

    verbose: bool = flag(True, "False: the text alone, when it is complete. Default: True", type=str2bool)
    trace: str | None = flag(None, "Write one JSON object per token.", metavar="FILE.jsonl", named=True)
    summary: str | None = flag(None, "Write the summary as JSON.", metavar="FILE.json", named=True)
    describe: bool = flag(
        False,
        "Before the text, each layer's bits and kernels, and why; after it, which kernels were fastest; on stderr.",
        rare=True,
    )
    color: str = flag("auto", "Tint tokens by gear.", choices=("auto", "always", "never"), rare=True)

    def paths(self) -> tuple[Path | None, Path | None]:
        """Where trace and summary go. Raises GearbxError for places that cannot be written to."""
        trace, summary = (output_path(file) if file else None for file in (self.trace, self.summary))
        if trace and summary and trace.resolve() == summary.resolve() and not trace.is_char_device():
            raise GearbxError(f"{trace}: both --trace and --summary; give two files")
        return trace, summary


def output_path(text: str | Path) -> Path:
    """Raises GearbxError for a place that cannot be written to."""
    path = Path(text)
    check_writable(path)
    return path


def check_distinct(files: Mapping[str, str | None]) -> None:
    """Raises GearbxError where two flags name the same file. files: flag to file; None: the flag was not given."""
    places: dict[str, str] = {}
    for name, file in files.items():
        if file is None:
            continue
        other = places.setdefault(os.path.realpath(file), name)
        if other != name:
            raise GearbxError(f"{file}: both {other} and {name}; give two files")
