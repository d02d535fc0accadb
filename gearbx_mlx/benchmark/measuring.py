"""Parts shared by benchmarks: compared paths, read bandwidth, memory checks, tables.

On a GPU, CPU kernels are not compiled, because they would need a C++ compiler.
"""

import contextlib
import io
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ..cli.terminal import show_compiling
from ..errors import GearbxError
from ..kernels import compiler, cpu, metal
from ..kernels.device import available_memory
from ..kernels.dispatch import native_instructions, on_cpu
from ..kernels.tuner import seconds_of
from ..settings import human_bytes

Rows = list[dict[str, Any]]

GIGABYTE, GIBIBYTE = 1e9, 2**30
READ_BYTES = GIBIBYTE  # bytes per measurement of the read bandwidth
SUMS_AT_ONCE = 4  # sums per evaluation, so that waiting for a GPU counts little
# Names of paths. int16, int8: quantized activations, on a CPU only.
NATIVE_PATH, INT16, INT8, METAL_PATH, MLX_PATH = "native", "native int16", "native int8", "metal", "mlx"
ON_CPU = ((NATIVE_PATH, "native", "float"), (INT16, "native", "int16"), (INT8, "native", "int8"))
BY_MLX = ((MLX_PATH, "mlx", "float"),)


class BandwidthMeter:
    """A function that measures the GB/s of a sum over a large buffer, by native kernels on all threads or by MLX.

    Attributes:
        row: fields of every row: read_by (`native`, `mlx cpu` or `mlx gpu`) and threads (None with MLX).
    """

    def __init__(self) -> None:
        module = self._module = cpu_module()
        self._words = mx.ones((READ_BYTES // 4,), mx.float32 if module is None else mx.uint32)
        mx.eval(self._words)
        source = "native" if module is not None else "mlx cpu" if on_cpu() else "mlx gpu"
        self.row: dict[str, Any] = {"read_by": source, "threads": None if module is None else module.threads()}
        self()  # a warm-up

    def __call__(self) -> float:
        if self._module is not None:
            return self._words.nbytes / timed(lambda: self._module.read_sum(self._words)) / GIGABYTE
        return SUMS_AT_ONCE * self._words.nbytes / seconds_of(lambda: [self._words.sum()], SUMS_AT_ONCE) / GIGABYTE


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass
class Reads:
    """Number of arrays read by Python, seconds of waiting for them, and seconds of queueing (`mx.async_eval`)."""

    count: int = 0
    seconds: float = 0.0
    queued: float = 0.0
    nested: bool = False


READERS = ("item", "tolist", "__array__", "__bool__", "__float__", "__int__", "__index__")


@contextlib.contextmanager
def counting_reads() -> Iterator[Reads]:
    """Count how often Python waits for the device, in functions that evaluate or read arrays."""
    reads = Reads()

    def counted(function: Callable[..., Any], always: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if reads.nested or not (always or any(isinstance(each, mx.array) for each in arguments)):
                return function(*arguments, **keywords)
            reads.nested, start = True, time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                reads.nested = False
                reads.count += 1
                reads.seconds += time.perf_counter() - start

        return call

    def queue(*arrays: Any, function: Callable[..., Any] = mx.async_eval) -> None:
        reads.queued += timed(lambda: function(*arrays))

    with contextlib.ExitStack() as stack:
        for owner, names in ((np, ("array", "asarray")), (mx.array, READERS), (mx, ("eval", "synchronize"))):
            for name in names:
                if hasattr(owner, name):
                    stack.callback(setattr, owner, name, getattr(owner, name))
                    setattr(owner, name, counted(getattr(owner, name), owner is mx))
        stack.callback(setattr, mx, "async_eval", mx.async_eval)
        mx.async_eval = queue
        yield reads


def cpu_module() -> Any:
    """Return the native CPU kernels; None on a GPU, or without kernels."""
    if metal.available() or not on_cpu():
        return None
    show_compiling()
    return cpu.native()


def paths_here() -> tuple[tuple[str, str, str], ...]:
    """Return the paths on this machine (name, kernels, activations); the last one is MLX's."""
    if metal.available():
        return ((METAL_PATH, "native", "float"), *BY_MLX)
    return BY_MLX if cpu_module() is None else ON_CPU + BY_MLX


def machine_name() -> str:
    """Return processor, vector instructions, cores and system; on a GPU its name too."""
    processor = compiler.processor_model() or platform.processor() or platform.machine()
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    name = f"{processor} with {native_instructions()}, {os.cpu_count()} cores, {system}"
    return name if on_cpu() else f"{mx.device_info()['device_name']}, {name}"


def check_room(needed: float, flags: str) -> None:
    """Validate that bytes are available. flags: their cause, for the message."""
    available = available_memory()
    if needed > available:
        raise GearbxError(
            f"{flags}: too large for the {human_bytes(available)} of available memory, got at least "
            f"{human_bytes(needed)}; use less"
        )


def spread_of(ratios: Sequence[float]) -> list[float]:
    """Return minimum and maximum."""
    return [min(ratios), max(ratios)]


def print_table(rows: Rows, columns: Sequence[str]) -> None:
    """Print rows as a Markdown table."""
    print(markdown_table(rows, columns), end="")


def markdown_table(rows: Rows, columns: Sequence[str]) -> str:
    """Return rows as a Markdown table, with a line end after each."""
    table, out = Table(*columns, box=box.MARKDOWN), io.StringIO()
    for row in rows:
        table.add_row(*(cell(row[name]) for name in columns))
    Console(file=out, width=200).print(table)
    return "".join(f"{line.strip()}\n" for line in out.getvalue().splitlines() if line.strip())


def cell(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(f"{v:.2f}" for v in value)
    if value is None:
        return "never"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
