"""What computes here: the paths that a benchmark compares, and what measures the read bandwidth.

On a GPU nothing asks for the CPU's kernels, which would need a C++ compiler.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...cli.terminal import show_compiling
from ...errors import GearbxError
from ...kernels import cpu, metal
from ...kernels.compiler import processor_model
from ...kernels.dispatch import on_cpu
from ...kernels.tuner import seconds_of

GIGABYTE, GIBIBYTE = 1e9, 2**30
READ = GIBIBYTE  # in a measurement of the read bandwidth
SUMS = 4  # of an evaluation, so that waiting for a GPU counts little
# Names of paths. int16, int8: activations that are rounded, which only kernels of a CPU do.
NATIVE, INT16, INT8, METAL, MLX = "native", "native int16", "native int8", "metal", "mlx"
ON_CPU = ((NATIVE, "native", "float"), (INT16, "native", "int16"), (INT8, "native", "int8"))
ON_METAL = ((METAL, "native", "float"),)
BY_MLX = ((MLX, "mlx", "float"),)


@dataclass(frozen=True)
class Meter:
    """Measures GB/s of a sum over a large buffer when called.

    source: who sums: `native`, `mlx cpu` or `mlx gpu`. threads: of the native kernels; None where MLX sums.
    """

    source: str
    threads: int | None
    read: Callable[[], float]

    def __call__(self) -> float:
        return self.read()

    @property
    def row(self) -> dict[str, Any]:
        """What every row says of it."""
        return {"read_by": self.source, "threads": self.threads}


def cpu_module() -> Any:
    """The native kernels of the CPU, or None: on a GPU, or where there are none."""
    if metal.available() or not on_cpu():
        return None
    show_compiling()
    return cpu.native()


def native_module() -> Any:
    """As `cpu_module`. Raises GearbxError where there are none."""
    if not on_cpu():
        raise GearbxError("MLX computes on a GPU, and this benchmark times kernels of the CPU; give --device cpu")
    module = cpu_module()
    if module is None:
        raise GearbxError(f"there are no native kernels to compare with: {cpu.why_not()}")
    return module


def paths_here() -> tuple[tuple[str, str, str], ...]:
    """The paths of a gearbox on this machine: name, `kernels` and `activations`; the last one is MLX's."""
    if metal.available():
        return ON_METAL + BY_MLX
    return BY_MLX if cpu_module() is None else ON_CPU + BY_MLX


def kernels_here() -> str:
    """`kernels` of a gearbox: ours where there are some."""
    return paths_here()[0][1]


def bandwidth_meter(size: int | None = None) -> Meter:
    """Sums `size` bytes, READ if None, on all threads by the native kernels, or by MLX on its default device."""
    module, size = cpu_module(), READ if size is None else size
    if module is None:
        values = mx.ones((size // 4,), dtype=mx.float32)
        mx.eval(values)
        meter = Meter("mlx cpu" if on_cpu() else "mlx gpu", None, lambda: mlx_speed(values))
    else:
        words = mx.full((size // 4,), 1, dtype=mx.uint32)
        mx.eval(words)
        meter = Meter("native", module.threads(), lambda: native_speed(module, words))
    meter()  # a warm-up
    return meter


def mlx_speed(values: mx.array) -> float:
    """GB/s of MLX's sum."""
    return SUMS * values.nbytes / seconds_of(lambda: [values.sum()], SUMS) / GIGABYTE


def native_speed(module: Any, words: mx.array) -> float:
    """GB/s of the native sum, on all threads."""
    return words.nbytes / timed(lambda: module.read_sum(words)) / GIGABYTE


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def machine_name() -> str:
    """System and processor; on a GPU its name too."""
    name = f"{platform.platform()}, {processor_model() or platform.processor() or platform.machine()}"
    return name if on_cpu() else f"{mx.device_info()['device_name']}, {name}"
