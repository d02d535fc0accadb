"""Everything that a Mac can say of the Metal kernels, in one run: are they right, how fast are they, what do they give.

Each section prints its table when it ends, and what there is of it when it is interrupted; the file has all rows that
were measured by then.
"""

import contextlib
import itertools
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console

from ... import __version__
from ...cli.gearbox import settle_gears
from ...cli.gears import LayoutSettings
from ...cli.output import output_path
from ...cli.parsers.benchmark import DecodeBenchmark, MetalBenchmark, parse_shapes, parse_vectors
from ...cli.terminal import progress_bar
from ...errors import GearbxError, one_line
from ...files.writing import write_text
from ...kernels import metal
from ...loading import DEMO_MODEL, model_name
from ...telemetry.summary import as_json
from .decode import benchmark_decode
from .machine import GIBIBYTE, machine_name
from .memory import check_memory
from .metal_checks import examine, product_checks
from .metal_kernels import all_kernels
from .metal_modes import row_of, runs_of, time_runs
from .metal_operations import all_operations, operation_checks
from .metal_times import sum_buffer, time_operation, time_product
from .tables import table_of

Rows = list[dict[str, Any]]
Report = dict[str, Any]
COLUMNS = {
    "checks": ("what", "checked", "largest_error", "faults"),
    "kernels": (
        *("what", "bits", "size", "vectors", "path", "us", "us_of_python", "gigabytes_per_second"),
        *("bandwidth_ratio", "times_mlx", "spread"),
    ),
    "gears": ("gear", "bits", "path", "tokens_per_second", "ratio", "spread", "shift_seconds", "peak_memory_bytes"),
    "modes": (
        *("mode", "path", "format", "gears", "tokens_per_second", "ratio", "spread"),
        *("identical", "peak_memory_bytes"),
    ),
}


def run_metal(settings: MetalBenchmark) -> int:
    """Check, time, print and write. Returns 1 where a kernel is wrong or something cannot be run, else 0.

    Raises:
        GearbxError: there is no Metal here, the file cannot be written, more than memory allows, or the model.
    """
    can = metal.available()
    if not can:
        raise GearbxError(can.reason)
    out = output_path(settings.json)
    check_memory(bytes_needed(settings), "these shapes")
    settle_gears(settings.model, LayoutSettings(gears=settings.gears))  # a wrong model is said before the work
    mx.random.seed(0)
    report = new_report(settings)
    print(f"{report['machine']}, mlx {report['mlx']}, gearbx-mlx {report['gearbx_mlx']}, {report['date']}", flush=True)
    with section(report, "checks", out):
        add_checks(settings, report)
    if not settings.check_only:
        with section(report, "kernels", out):
            add_times(settings, report)
        with section(report, "gears", out):
            add_gears(settings, report)
        with section(report, "modes", out):
            add_modes(settings, report)
    report["complete"] = True
    write_text(out, as_json(report))
    return 1 if report["failed"] or any(row["wrong"] for row in report["checks"]) else 0


def new_report(settings: MetalBenchmark) -> Report:
    """What a reader has to know of the machine and the run, and no rows."""
    memory = mx.device_info().get("memory_size")
    return {
        "machine": machine_name(),
        "device": mx.device_info(),
        "os": platform.mac_ver()[0] or platform.platform(),
        "memory_bytes": memory,
        "mlx": version("mlx"),
        "gearbx_mlx": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "model": model_name(settings.model),
        "settings": vars(settings),
        "complete": False,
        **{name: [] for name in COLUMNS},
        "failed": [],
    }


def bytes_needed(settings: MetalBenchmark) -> float:
    """Ours, MLX's and the summed buffer, and a matrix of float32 that is packed."""
    matrix = max(4 * rows * columns for rows, columns in parse_shapes(settings.shapes))
    return 3 * max(settings.megabytes * 2**20, matrix) + 4 * matrix + GIBIBYTE


@contextlib.contextmanager
def section(report: Report, name: str, out: Path) -> Iterator[None]:
    """However a section ends, its rows are printed and the file is written; an error of MLX ends no more than it."""
    try:
        with noting_failures(report, name):
            yield
    finally:
        if report[name]:
            print_section(name, report[name])
        if report[name] or report["failed"]:
            write_text(out, as_json(report))


@contextlib.contextmanager
def noting_failures(report: Report, what: str) -> Iterator[None]:
    """An error of MLX becomes a sentence in the report, and a line on stdout."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        report["failed"].append(f"{what}: {one_line(error)}")
        print(f"failed: {report['failed'][-1]}", flush=True)


def right_kernels(report: Report) -> set[str]:
    """Names of kernels that were checked to the end, and are not wrong."""
    return {row["what"] for row in report["checks"] if row["checked"] and not row["wrong"]}


def print_section(name: str, rows: Rows) -> None:
    """The table, and below that of the checks what is wrong."""
    print(f"\n{name}\n")
    shown = [row | derived(row) for row in rows]
    Console(width=160).print(table_of(shown, COLUMNS[name]))
    if name == "checks":
        wrong = [text for row in rows for text in row["wrong"]]
        print(f"\n{sum(row['checked'] for row in rows)} comparisons, {len(wrong)} wrong")
        for text in wrong:
            print(f"wrong: {text}")


def derived(row: dict[str, Any]) -> dict[str, Any]:
    """Columns of a table that only say anew what a row has."""
    if "wrong" in row:
        return {"faults": len(row["wrong"])}
    if "python_seconds" in row:
        return {"us": f"{row['seconds'] * 1e6:.1f}", "us_of_python": f"{row['python_seconds'] * 1e6:.1f}"}
    return {}


def add_checks(settings: MetalBenchmark, report: Report) -> None:
    """A row for each kernel; none for one whose checks an error ends, which the report names as failed."""
    vectors = parse_vectors(settings.vectors)
    products = {kernel.name: product_checks(kernel, vectors) for kernel, _ in all_kernels(settings.group_size)}
    checks = [*(products | operation_checks(vectors)).items()]
    with progress_bar() as progress:
        for name, some in progress.track(checks, description="kernels checked"):
            with noting_failures(report, name):
                report["checks"].append(examine(name, some))


def add_times(settings: MetalBenchmark, report: Report) -> None:
    """Rows of every kernel that is right, with each shape and number of vectors."""
    buffer = sum_buffer(settings.megabytes * 2**20)
    with progress_bar() as progress:
        jobs = timing_jobs(settings, right_kernels(report), buffer)
        for name, rows in progress.track(jobs, description="kernels timed"):
            with noting_failures(report, name):
                report["kernels"].extend(row | {"dtype": settings.dtype} for row in rows)


def timing_jobs(
    settings: MetalBenchmark, right: set[str], buffer: mx.array
) -> list[tuple[str, Iterator[dict[str, Any]]]]:
    """Names of what is timed, and its rows, each of which is timed when it is asked for."""
    how = parse_vectors(settings.vectors), getattr(mx, settings.dtype), buffer, settings.trials
    pairs = [pair for pair in all_kernels(settings.group_size) if pair[0].name in right]
    products = itertools.product(parse_shapes(settings.shapes), pairs)
    operations = [each for each in all_operations() if each.name in right]
    return [
        *(
            (f"{pair[0].name}, {'x'.join(map(str, shape))}", time_product(pair, shape, *how))
            for shape, pair in products
        ),
        *((f"{each.name}, {each.size}", time_operation(each, *how)) for each in operations),
    ]


def add_gears(settings: MetalBenchmark, report: Report) -> None:
    """The rows of `benchmark decode`."""
    model = settings.model or str(DEMO_MODEL)
    decode = DecodeBenchmark(model=model, gears=settings.gears, tokens=settings.tokens, trials=settings.trials)
    report["gears"].extend(benchmark_decode(decode))


def add_modes(settings: MetalBenchmark, report: Report) -> None:
    """A row for each mode on each path; after an interruption, of the trials that were complete."""
    runs = list(runs_of(settings.model, settings.gears, settings.tokens))
    with progress_bar() as progress:
        for _ in progress.track(range(settings.trials), description="texts timed"):
            time_runs(runs, settings.tokens)
            report["modes"][:] = [row_of(run, runs) for run in runs]
