"""Run what `benchmark server` was asked for, print it and write it."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ....bit_selection.sensitivity import CALIBRATION
from ....cli.output import output_path
from ....cli.parsers.benchmark import ServerBenchmark
from ....cli.terminal import progress_bar, spinner
from ....errors import GearbxError
from ....evaluation.text import read_documents
from ....files.writing import write_text
from ....loading import DEMO_MODEL
from ....telemetry.summary import as_json
from ..machine import machine_name
from ..tables import table_of
from .cancelled import measure_cancelled
from .modes import measure_modes
from .rates import measure_rates
from .rows import COLUMNS
from .soak import soak

Rows = list[dict[str, Any]]
BY_SPEED = ("tokens/s", "time", "median latency", "longest latency", "share of a core")
"""What other programs on the machine change as well."""


def run_server(settings: ServerBenchmark) -> int:
    """Measure, print and write. Returns 1 where something came that must not: an error, another text, more memory.

    Raises:
        GearbxError: a server that does not start, a file that cannot be written.
    """
    out = None if settings.json is None else output_path(settings.json)
    shared = {"machine": machine_name(), "date": time.strftime("%Y-%m-%d")}
    rows = [row | shared for row in measure(settings)]
    if not rows:
        raise GearbxError("nothing was measured: answers were too short; give more --tokens or --trials")
    shown = [{name: "" if value is None else value for name, value in row.items()} for row in rows]
    Console(width=160).print(table_of(shown, COLUMNS))
    if out is not None:
        write_text(out, as_json({"rows": rows}))
    return 0 if all(row["reached"] for row in rows if not row["measure"].startswith(BY_SPEED)) else 1


def measure(settings: ServerBenchmark) -> Rows:
    """The rows of all parts that were asked for."""
    model, rows = settings.model or str(DEMO_MODEL), Rows()
    words = " ".join(read_documents(Path(CALIBRATION))).split()
    for kernels in settings.kernels.split(","):
        ours = "--gears", settings.gears, "--mode", "static", "--kernels", kernels
        if settings.trials:
            rows += rates(model, ours, kernels, words, settings)
        if settings.soak:
            with spinner(f"{settings.clients} clients for {settings.soak} seconds"):
                rows += soak(model, ours, kernels, words, settings.clients, settings.soak)
        if settings.cancel:
            with spinner(f"{settings.cancel} requests, a fifth cancelled"):
                rows += measure_cancelled(model, ours, kernels, words, settings.cancel)
        if settings.modes:
            with spinner("every mode"):
                rows += measure_modes(model, kernels, words)
    return rows


def rates(model: str, ours: tuple[object, ...], kernels: str, words: list[str], settings: ServerBenchmark) -> Rows:
    with progress_bar() as progress:
        trials = measure_rates(model, ours, kernels, words, settings.tokens, settings.trials)
        return list(progress.track(trials, total=settings.trials + 1, description=f"trials, {kernels}"))[-1]
