"""Rows as a Markdown table."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table


def table_of(rows: list[dict[str, Any]], columns: Sequence[str]) -> Table:
    table = Table(*columns, box=box.MARKDOWN)
    for row in rows:
        table.add_row(*(cell(row[name]) for name in columns))
    return table


def cell(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(f"{v:.2f}" for v in value)
    if value is None:
        return "never"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
