"""The rows of a report in the terminal, in as many columns as it has room for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.table import Table

from ..evaluation.report import Columns

GAP = 2  # characters between columns
MARGIN = 1


def report_table(rows: Sequence[Mapping[str, Any]], columns: Columns, first: Iterable[str], width: int) -> Table:
    """A table in which every header and every value is whole; headers wrap between words.

    Args:
        first: the columns that matter most; the others come where there is room for them.
        width: characters.
    """
    cells = {name: [show(row) for row in rows] for name, show in columns.items()}
    widths = {name: max(map(cell_len, [*cells[name], *name.split()])) for name in columns}
    shown = fitting(widths, [*first, *(name for name in columns if name not in first)], width - 2 * MARGIN)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False)
    for name in columns:
        if name in shown:
            table.add_column(name, width=widths[name], overflow="fold")
    for row in zip(*(cells[name] for name in columns if name in shown)):
        table.add_row(*row)
    return table


def fitting(widths: Mapping[str, int], names: Iterable[str], width: int) -> set[str]:
    """The first of the names, as long as they fit side by side; the first one in any case."""
    shown: set[str] = set()
    for name in names:
        width -= widths[name] + GAP
        if shown and width + GAP < 0:
            break
        shown.add(name)
    return shown
