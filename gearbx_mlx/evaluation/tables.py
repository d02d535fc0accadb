"""What an evaluation hands back: a report as data, as a Markdown page, and as columns for the terminal."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..telemetry.summary import as_json

Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]  # header to the cell of a row
Draw = Callable[[Mapping[str, Any], Path], None]  # draws the content of a report into a file

INCOMPLETE = "Not complete: the run was interrupted. Give the same command again, and it continues."


@dataclass(frozen=True)
class Report:
    """The report of an evaluation.

    content: plain values, one row for each policy in `policies`. page: Markdown. columns: of the rows.
    first: the columns that matter most, for a narrow terminal. pictures: name of a file to what draws it.
    """

    content: dict[str, Any]
    page: str
    columns: Columns
    first: Sequence[str]
    pictures: Mapping[str, Draw] = field(default_factory=dict)

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return self.content["policies"]

    @property
    def complete(self) -> bool:
        return self.content["complete"]

    @property
    def json(self) -> str:
        return as_json(finite(self.content))


def finite(value: Any) -> Any:
    """Plain values without the numbers that JSON does not have: infinity becomes "inf", NaN becomes null."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def markdown_table(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(show(row) for show in columns.values())} |" for row in rows),
    ]


def three_digits(value: float) -> str:
    """Three significant digits; "0" for what is below the resolution of float32."""
    return "0" if value < 1e-9 else f"{value:.3g}"


def percent(part: float, digits: int = 1) -> str:
    """0.25 -> "25.0 %"."""
    return f"{100 * part:.{digits}f} %"


def kilobytes(row: Mapping[str, Any]) -> str:
    """Weight bytes per token in kB."""
    return f"{row['weight_bytes_per_token'] / 1000:.0f}"


def change_of_kl(control: Mapping[str, Any] | None) -> str:
    """By how much mean KL differs from a control's, such as "-35 ± 2 %"; empty where there is no control."""
    if not control or control["kl_mean_change"] is None:
        return ""
    error = control["kl_mean_change_error"]
    shown = "" if math.isnan(error) else f" ± {100 * error:.0f}"
    return f"{100 * control['kl_mean_change']:+.0f}{shown} %"
