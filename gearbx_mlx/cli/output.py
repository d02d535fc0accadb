"""Flags of what a run writes, and the check of a path before the work."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import GearbxError
from ..files.writing import check_writable
from .settings import Settings, name


@dataclass(frozen=True)
class OutputSettings(Settings):
    """What a run writes besides the text."""

    verbose: bool = True
    trace: str | None = name()
    summary: str | None = name()
    describe: bool = False
    color: str = "auto"

    def paths(self) -> tuple[Path | None, Path | None]:
        """Where trace and summary go. Raises GearbxError for places that cannot be written to."""
        trace, summary = (output_path(file) if file else None for file in (self.trace, self.summary))
        if trace and summary and trace.resolve() == summary.resolve() and not trace.is_char_device():
            raise GearbxError(f"{trace}: both --trace and --summary; give two files")
        return trace, summary


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--verbose", type=str2bool, help="False: the text alone, when it is complete")
    output.add_argument("--trace", metavar="FILE.jsonl", help="Write one JSON object per token.")
    output.add_argument("--summary", metavar="FILE.json", help="Write the summary as JSON.")
    output.add_argument(
        "--describe", action="store_true", help="Before the text: each layer's bits and kernels, and why, on stderr."
    )
    output.add_argument("--color", choices=["auto", "always", "never"], help="Tint tokens by gear. Default: auto")


def str2bool(text: str) -> bool:
    return text.lower() not in ("false", "f")


def output_path(text: str | Path) -> Path:
    """Raises GearbxError for a place that cannot be written to."""
    path = Path(text)
    check_writable(path)
    return path


def check_distinct(files: Mapping[str, str | None]) -> None:
    """Raises GearbxError where two flags name the same file. files: flag to file; None: the flag was not given."""
    places: dict[str, str] = {}
    for flag, file in files.items():
        if file is None:
            continue
        other = places.setdefault(os.path.realpath(file), flag)
        if other != flag:
            raise GearbxError(f"{file}: both {other} and {flag}; give two files")
