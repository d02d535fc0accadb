"""Measure what shifting buys, against chance and against the static gears."""

from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.device import choose_device
from ..cli.parsers.evaluate import WRITTEN, EvaluateSettings
from ..cli.report_table import report_table
from ..cli.settings import command_settings
from ..errors import GearbxError
from ..evaluation.report import Report
from ..files.writing import write_text
from ..kernels.device import wired_memory
from ..telemetry.report import get_pyplot
from . import evaluate_answers, evaluate_pair, evaluate_text

DATA, PAGE = "evaluation.json", "evaluation.md"


def run(settings: EvaluateSettings) -> int:
    out = Path(settings.task.out)
    report, pictures = measured(settings, out)
    width = terminal.messages.width
    terminal.messages.print(report_table(report.rows, report.columns, report.first, width))
    for path in (out / DATA, out / PAGE, *pictures):
        print(path)
    return 0 if report.complete else terminal.INTERRUPTED


@wired_memory()
def evaluate(data: str | Path, **keywords: Any) -> dict[str, Any]:
    """The report of `python -m gearbx_mlx.evaluate`, after writing its files into the directory `out`.

    Args:
        data: a text, or JSON Lines with text, or question and answer (GSM8K); of MATH also a folder.
        keywords: named like the command's flags, with their defaults: model=..., gears="4,16", policy=["kickdown"].

    Returns:
        the content of evaluation.json: a row for each policy in "policies".

    Raises:
        GearbxError: a keyword that does not exist, or settings, a model or data that cannot be evaluated.
    """
    settings = command_settings(EvaluateSettings, {"data": data, **keywords})
    choose_device(settings)
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
        report = evaluate_pair.measured(settings, task.small_model, out)
    elif task.task in WRITTEN:
        report = evaluate_answers.measured(settings, out)
    else:
        report = evaluate_text.measured(settings, out)
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
