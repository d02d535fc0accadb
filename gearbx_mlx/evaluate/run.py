"""Measure what shifting buys, against chance and against the static gears."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.table import Table

from ..cli import terminal
from ..errors import GearbxError
from ..evaluation.report import Columns, Report
from ..files.writing import write_text
from ..telemetry.report import get_pyplot
from . import WRITTEN, EvaluateSettings, answers, pair, text

DATA, PAGE = "evaluation.json", "evaluation.md"
GAP = 2  # characters between columns
MARGIN = 1


def run(settings: EvaluateSettings) -> int:
    out = Path(settings.task.out)
    report, pictures = measured(settings, out)
    width = terminal.messages.width
    terminal.messages.print(report_table(report.rows, report.columns, report.first, width))
    for path in (out / DATA, out / PAGE, *pictures):
        print(path)
    return 0 if report.complete else terminal.INTERRUPTED


def content_of(settings: EvaluateSettings) -> dict[str, Any]:
    """The content of evaluation.json, after writing the files."""
    report, _ = measured(settings, Path(settings.task.out))
    if not report.complete:
        raise KeyboardInterrupt  # what is complete is written
    return report.content


def measured(settings: EvaluateSettings, out: Path) -> tuple[Report, list[Path]]:
    """The report and the pictures of it, after writing them.

    Raises:
        KeyboardInterrupt: before any row of the report was complete.
    """
    task = settings.task
    if task.small_model is not None:
        report = pair.measured(settings, task.small_model, out)
    elif task.task in WRITTEN:
        report = answers.measured(settings, out)
    else:
        report = text.measured(settings, out)
    write_text(out / DATA, report.json)
    write_text(out / PAGE, report.page)
    return report, draw_if_possible(report, out)


def draw_if_possible(report: Report, out: Path) -> list[Path]:
    """Draw the pictures of a report where matplotlib is installed; those that were drawn."""
    if not report.pictures:
        return []
    try:
        get_pyplot()
    except GearbxError as error:
        terminal.note(f"no picture: {error}")
        return []
    for name, draw in report.pictures.items():
        draw(report.content, out / name)
    return [out / name for name in report.pictures]


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
