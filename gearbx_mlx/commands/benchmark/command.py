"""The body of `benchmark`: kernels against the read bandwidth, threads against one, gears against MLX, the parts of a
token against all of it, routing against none, batches against mlx-lm's.

A trial goes through everything that is compared in turn, and the first trial is not counted: other work on the machine
then slows all of it alike. Compare ratios within a run; times of different runs are not comparable.
"""

import statistics
from typing import Any

from rich.console import Console

from ...cli.output import output_path
from ...cli.parsers.benchmark import (
    BatchBenchmark,
    Benchmark,
    DecodeBenchmark,
    KernelBenchmark,
    MetalBenchmark,
    MixtureBenchmark,
    RoutingBenchmark,
    ServerBenchmark,
    ThreadBenchmark,
    TokenBenchmark,
    W4A8Benchmark,
)
from ...files.writing import write_text
from ...telemetry.summary import as_json
from .batch import benchmark_batch
from .decode import benchmark_decode
from .kernels import benchmark_kernels
from .machine import machine_name
from .metal import run_metal
from .mixture import benchmark_mixture
from .pictures import draw_threads, draw_token, picture_path
from .routing import benchmark_routing
from .server.command import run_server
from .tables import table_of
from .threads import benchmark_threads
from .token import benchmark_token
from .w4a8 import run_w4a8

COLUMNS = {
    "kernels": ("format", "bits", "path", "seconds", "gigabytes_per_second", "bandwidth_ratio", "spread"),
    "decode": (
        *("gear", "bits", "path", "tokens_per_second", "ratio", "spread", "weight_bytes_per_token"),
        *("speedup", "predicted_speedup", "roofline_share", "break_even_tokens"),
    ),
    "threads": ("bits", "threads", "products_per_second", "speedup", "spread", "bandwidth_ratio"),
    "token": ("gear", "bits", "part", "seconds", "share", "spread", "seconds_per_token", "operations_per_layer"),
    "batch": (*("gear", "bits", "batch_size", "tokens_per_second", "tokens_per_second_of_mlx_lm", "ratio", "spread"),),
    "mixture": (
        *("tokens", "shifts", "milliseconds_of_a_shift", "speedup", "spread", "predicted_speedup", "of_bytes"),
    ),
    "routing": ("gear", "bits", "seconds", "seconds_of_mlx_lm", "ratio", "spread"),
}


Decoding = DecodeBenchmark | TokenBenchmark | RoutingBenchmark | BatchBenchmark | MixtureBenchmark
Rows = KernelBenchmark | ThreadBenchmark | Decoding
SUMMED_BY = {"mlx cpu": "MLX's sum on the CPU", "mlx gpu": "MLX's sum on the GPU"}
PICTURES = {"threads": draw_threads, "token": draw_token}


def run(settings: Benchmark) -> int:
    if isinstance(settings, MetalBenchmark):
        return run_metal(settings)
    if isinstance(settings, ServerBenchmark):
        return run_server(settings)
    if isinstance(settings, W4A8Benchmark):
        return run_w4a8(settings)
    out = None if settings.json is None else output_path(settings.json)
    picture = None
    if isinstance(settings, ThreadBenchmark | TokenBenchmark):
        picture = picture_path(settings.json, settings.picture)
    machine = machine_name()
    rows = [row | {"machine": machine} for row in measure(settings)]
    Console(width=160).print(table_of(rows, COLUMNS[settings.what]))
    print(f"read bandwidth {bandwidth_text(rows)}, {machine}")
    if out is not None:
        write_text(out, as_json({"rows": rows}))
    if picture is not None:
        PICTURES[settings.what](rows, picture)
    return 0


def bandwidth_text(rows: list[dict[str, Any]]) -> str:
    """The median of what was measured, and what measured it; on as many threads as there were."""
    threads = max((row["threads"] for row in rows if row["threads"] is not None), default=None)
    bandwidths = (row["read_bandwidth_gigabytes_per_second"] for row in rows if row["threads"] == threads)
    read_by = SUMMED_BY[rows[0]["read_by"]] if threads is None else f"{threads} threads"
    return f"{statistics.median(bandwidths):.1f} GB/s, {read_by}"


def measure(settings: Rows) -> list[dict[str, Any]]:
    """The rows of a benchmark."""
    if isinstance(settings, KernelBenchmark):
        return benchmark_kernels(settings)
    if isinstance(settings, ThreadBenchmark):
        return benchmark_threads(settings)
    if isinstance(settings, DecodeBenchmark):
        return benchmark_decode(settings)
    if isinstance(settings, TokenBenchmark):
        return benchmark_token(settings)
    if isinstance(settings, BatchBenchmark):
        return benchmark_batch(settings)
    if isinstance(settings, MixtureBenchmark):
        return benchmark_mixture(settings)
    return benchmark_routing(settings)
