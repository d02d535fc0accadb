"""The body of `benchmark`: kernels against the read bandwidth, gears against MLX, routing against none.

A trial goes through everything that is compared in turn, and the first trial is not counted: other work on the machine
then slows all of it alike. Compare ratios within a run; times of different runs are not comparable.
"""

import platform
import statistics
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...cli.output import output_path
from ...cli.parsers.benchmark import Benchmark, DecodeBenchmark, KernelBenchmark
from ...files.writing import write_text
from ...telemetry.summary import as_json
from .decode import benchmark_decode
from .kernels import benchmark_kernels
from .routing import benchmark_routing

COLUMNS = {
    "kernels": ("format", "bits", "path", "seconds", "gigabytes_per_second", "bandwidth_ratio", "spread"),
    "decode": (
        *("gear", "bits", "path", "tokens_per_second", "ratio", "spread", "weight_bytes_per_token"),
        *("speedup", "predicted_speedup", "roofline_share", "break_even_tokens"),
    ),
    "routing": ("gear", "bits", "seconds", "seconds_of_mlx_lm", "ratio", "spread"),
}


def run(settings: Benchmark) -> int:
    out = None if settings.json is None else output_path(settings.json)
    machine = f"{platform.platform()}, {platform.processor() or platform.machine()}"
    rows = [row | {"machine": machine} for row in measure(settings)]
    Console(width=160).print(table_of(rows, COLUMNS[settings.what]))
    bandwidth = statistics.median(row["read_bandwidth_gigabytes_per_second"] for row in rows)
    print(f"read bandwidth {bandwidth:.1f} GB/s, {rows[0]['threads']} threads, {machine}")
    if out is not None:
        write_text(out, as_json({"rows": rows}))
    return 0


def measure(settings: Benchmark) -> list[dict[str, Any]]:
    """The rows of a benchmark."""
    if isinstance(settings, KernelBenchmark):
        return benchmark_kernels(settings)
    if isinstance(settings, DecodeBenchmark):
        return benchmark_decode(settings)
    return benchmark_routing(settings)


def table_of(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> Table:
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
