"""Measure what shifting buys, against chance and against the static gears."""

from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.tables import report_table
from ..errors import GearbxError
from ..evaluation.report import Report
from ..files.writing import write_text
from ..telemetry.report import get_pyplot
from . import WRITTEN, EvaluateSettings, answers, pair, text

DATA, PAGE = "evaluation.json", "evaluation.md"


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
