"""What an analysis of a model, here or behind a server, writes: trace, summary and pictures in one directory."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cli.flags import output_path
from ..errors import GearbxError
from ..files.writing import write_text
from ..telemetry.report import PICTURES, draw_report, get_pyplot
from ..telemetry.summary import as_json

TRACE, SUMMARY = "trace.jsonl", "summary.json"


@dataclass(frozen=True)
class Analysis:
    """What an analysis found and wrote; `error` ended it early."""

    summary: dict[str, Any]
    files: Sequence[Path]
    complete: bool
    error: GearbxError | None = None

    def checked(self) -> "Analysis":
        """Itself. Raises what ended it, if something did; what was recorded is written."""
        if self.error is not None:
            raise self.error
        if not self.complete:
            raise KeyboardInterrupt
        return self


def check_output(out: Path) -> None:
    """Raises GearbxError for a directory that the report cannot be written to, or without matplotlib."""
    get_pyplot()
    with directory_errors(out):
        if out.exists() and not out.is_dir():
            raise GearbxError(f"{out}: is a file; --out names a directory")
        if out.is_dir():
            for name in (TRACE, SUMMARY, *PICTURES):
                output_path(out / name)


@contextlib.contextmanager
def directory_errors(out: Path) -> Iterator[None]:
    """Turns what the system says of a directory into a GearbxError."""
    try:
        yield
    except OSError as error:
        raise GearbxError(f"{out}: cannot be made ({error.strerror}); choose another directory") from error


def make_output(out: Path) -> Path:
    """Make the directory, without pictures of an earlier run. Returns where the trace goes. Raises GearbxError."""
    with directory_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        for name in PICTURES:
            (out / name).unlink(missing_ok=True)
    return output_path(out / TRACE)


def write_report(
    out: Path,
    summary: dict[str, Any],
    records: Sequence[dict[str, Any]],
    gears: Sequence[str],
    thresholds: Sequence[float],
) -> list[Path]:
    """Write summary and pictures beside the trace, if there are records. Returns the paths of all files."""
    write_text(out / SUMMARY, as_json(summary))
    pictures = draw_report(records, gears, thresholds, out) if records else []
    return [out / TRACE, out / SUMMARY, *pictures]
