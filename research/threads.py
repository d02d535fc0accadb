"""Products on 1, 2, ... all cores, and AION's Table 2 and its Figure 2.

threads: a product with one vector in 4, 8 and 16 bits, against one thread and the read bandwidth of as many threads.
w4a8: are products of integers faster than those of widened weights? Every implementation multiplies the same matrix,
all but float32 in format `groupwise` (AION 3.2: 4 bits, a scale for 32 inputs).

Each number of threads is a process of its own in each trial: their number is fixed when a process begins.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from rich.progress import track

from gearbx_mlx.benchmark.measuring import (
    GIBIBYTE,
    INT8,
    INT16,
    NATIVE_PATH,
    BandwidthMeter,
    Rows,
    check_room,
    cpu_module,
    spread_of,
    timed,
)
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.formats import groupwise, rowwise
from gearbx_mlx.formats.groupwise import GROUP_BYTES, GROUP_INPUTS, SCALE_SIZE
from gearbx_mlx.kernels import cpu
from gearbx_mlx.kernels.products import dense_product
from gearbx_mlx.telemetry.trace import LEGEND_OUTSIDE, gear_color, get_pyplot, save

from . import ROOT
from .conservation import compiled
from .kernels import MatrixSizes, cases_of, cases_of_stack, dense_cases, groupwise_cases, time_case
from .studies import Found, study, table_here

Trial = dict[str, Any]

# On 1, 2, ... threads


@study("research/tables.md", minutes=4)
def threads(
    rows: int = 4096, cols: int = 4096, megabytes: int = 256, trials: int = 7, most: int | None = None
) -> Found:
    """Products with one vector on 1, 2, ... threads, in 4, 8 and 16 bits; a trial goes through all numbers in turn.

    Args:
        megabytes: of weights, read in a trial.
        most: threads. If not given, one for each core.
    """
    measured = trials_on_threads("threads", MatrixSizes(trials, rows, cols, megabytes), most)
    by_bits = {count: [{row["bits"]: row for row in trial} for trial in found] for count, found in measured.items()}
    found = [
        thread_row(count, bits, trials_of, by_bits[1]) for bits in by_bits[1][0] for count, trials_of in by_bits.items()
    ]
    lines = [
        [
            *(row["bits"], row["threads"], f"{row['products_per_second']:.0f}", f"{row['speedup']:.2f}"),
            *(span(row["spread"]), f"{row['bandwidth_ratio']:.2f}"),
        ]
        for row in found
    ]
    head = ["bits", "threads", "products/s", "speedup", "spread", "of the read bandwidth"]
    return Found({"threads": table_here(head, lines)}, found)


def span(values: list[float]) -> str:
    return " to ".join(f"{value:.2f}" for value in values)


def trials_on_threads(what: str, sizes: MatrixSizes, most: int | None) -> dict[int, list[Any]]:
    """Number of threads to what was measured in each trial, each in a process of its own.

    Raises:
        GearbxError: no native kernels, more than memory allows, or a trial that fails.
    """
    mx.set_default_device(mx.cpu)
    matrix = 4 * sizes.rows * sizes.cols
    check_room(2 * matrix + 2 * max(sizes.megabytes * 2**20, matrix) + GIBIBYTE, "a matrix of this size")
    native_module()  # compiled before anything is timed
    trials: dict[int, list[Any]] = {threads: [] for threads in counts(most or os.cpu_count() or 1)}
    for _ in track(range(sizes.trials), "trials"):
        for threads, found in trials.items():
            found.append(trial_of(what, sizes, threads))
    return trials


def native_module() -> Any:
    """The native kernels of the CPU. Raises GearbxError where there are none."""
    module = cpu_module()
    if module is None:
        raise GearbxError(f"there are no native kernels to compare with: {cpu.why_not()}")
    return module


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`; each number up to 4."""
    return sorted({n for n in (1, 2, 3, *(2**i for i in range(2, 9)), most) if n <= most})


def trial_of(what: str, sizes: MatrixSizes, threads: int) -> Any:
    """What one trial measures: this module in a process with this number of threads, and one for numpy."""
    command = [sys.executable, "-m", __name__, what, *map(str, (sizes.rows, sizes.cols, sizes.megabytes))]
    environment = os.environ | {"GEARBX_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise GearbxError(f"a trial with {threads} threads failed: {reason}")
    return json.loads(done.stdout)


def thread_row(threads: int, bits: int, found: list[dict[int, Trial]], alone: list[dict[int, Trial]]) -> dict[str, Any]:
    """Medians over trials. Speedups are over one thread in the same trial; `spread` is theirs."""
    speedups = [one[bits]["seconds"] / many[bits]["seconds"] for one, many in zip(alone, found)]
    seconds, shares, bandwidths = (
        statistics.median(trial[bits][name] for trial in found)
        for name in ("seconds", "bandwidth_ratio", "read_bandwidth_gigabytes_per_second")
    )
    return {
        "threads": threads,
        "bits": bits,
        "products_per_second": 1 / seconds,
        "speedup": statistics.median(speedups),
        "spread": spread_of(speedups),
        "bandwidth_ratio": shares,
        "read_bandwidth_gigabytes_per_second": bandwidths,
        "read_by": "native",
    }


def random_product(rows: int, cols: int) -> tuple[mx.array, mx.array]:
    """A matrix, and a vector of activations."""
    weight = mx.random.normal((rows, cols), key=mx.random.key(0)) * 0.02
    x = mx.random.normal((1, cols), key=mx.random.key(1))
    mx.eval(weight, x)
    return weight, x


FIELDS = "bits", "seconds", "bandwidth_ratio", "read_bandwidth_gigabytes_per_second"


def measure_threads(rows: int, cols: int, megabytes: int) -> Rows:
    """One trial: FIELDS and `threads` of a product with one vector, in 4, 8 and 16 bits."""
    module, total = native_module(), megabytes * 2**20
    (weight, x), read_bandwidth = random_product(rows, cols), BandwidthMeter(total)
    found = []
    for make in (
        lambda: cases_of_stack(weight, (4,), total, [INT16]),
        lambda: cases_of_stack(weight, (8,), total, [INT16]),
        lambda: dense_cases(weight, total, [NATIVE_PATH]),  # bfloat16 first
    ):
        row = time_case(next(make()), x, 1, read_bandwidth)
        found.append({name: row[name] for name in FIELDS} | {"threads": module.threads()})
    return found


# AION's Table 2

FLOAT32, WEIGHT_ONLY, W4A16, W4A8 = "float32", "4 bits, weight-only", "W4A16", "W4A8"
EMULATED, SCALAR = "4 bits, numpy", "4 bits, scalar"  # on one thread alone
SCALAR_SOURCE = Path(__file__).with_name("scalar.cpp")
NAMES = {NATIVE_PATH: WEIGHT_ONLY, INT16: W4A16, INT8: W4A8}
REPEATS = 3  # of products from memory
W4A8_LINES = {FLOAT32: "o", WEIGHT_ONLY: "s", W4A16: "^", W4A8: "D"}  # of the picture, with their markers


@study("docs/performance.md", writes="images/w4a8.png", minutes=4)
def w4a8(rows: int = 4096, cols: int = 4096, megabytes: int = 256, trials: int = 7, most: int | None = None) -> Found:
    """AION's Table 2: products of 4-bit weights by floats, integers, one by one and by numpy.

    Args:
        megabytes: of weights, read in a trial.
        most: threads. If not given, one for each core.
    """
    sizes = MatrixSizes(trials, rows, cols, megabytes)
    measured = trials_on_threads("w4a8", sizes, most)
    found = w4a8_rows(measured, sizes)
    lines = [
        [
            *(row["implementation"], row["threads"], f"{row['products_per_second']:.0f}"),
            *(f"{row['times_float32']:.2f}", span(row["spread"])),
        ]
        for row in found
    ]
    head = ["implementation", "threads", "products/s", "times float32", "spread"]
    return Found({"w4a8": table_here(head, lines)}, found, {"w4a8.png": partial(draw_w4a8, found)})


def w4a8_rows(trials: dict[int, list[Trial]], sizes: MatrixSizes) -> Rows:
    """A row for each implementation and number of threads: medians over trials.

    `times_float32`: over float32 on as many threads, in the same trial, with its `spread`. `bytes`: of the matrix.
    """
    bytes_of = {FLOAT32: 4 * sizes.rows * sizes.cols}
    packed = sizes.rows * -(-sizes.cols // GROUP_INPUTS) * (GROUP_BYTES + SCALE_SIZE)
    names = [EMULATED, SCALAR, *(name for name in trials[1][0]["seconds"] if name not in (EMULATED, SCALAR))]
    rows = []
    for name in names:
        for threads, found in trials.items():
            if name in found[0]["seconds"]:
                ratios = [one["seconds"][FLOAT32] / one["seconds"][name] for one in found]
                rows.append(
                    {
                        "implementation": name,
                        "threads": threads,
                        "bytes": bytes_of.get(name, packed),
                        "products_per_second": 1 / statistics.median(one["seconds"][name] for one in found),
                        "times_float32": statistics.median(ratios),
                        "spread": spread_of(ratios),
                        "read_bandwidth_gigabytes_per_second": statistics.median(one["bandwidth"] for one in found),
                    }
                )
    return rows


def measure_w4a8(rows: int, cols: int, megabytes: int) -> dict[str, Any]:
    """Seconds of a product with one vector for each implementation, threads and GB/s of memory.

    On one thread also those of the baselines.
    """
    module, total = native_module(), megabytes * 2**20
    (weight, x), read_bandwidth = random_product(rows, cols), BandwidthMeter(total)
    seconds, bandwidths = {}, []
    dense = cases_of(FLOAT32, 32, weight, total, {NATIVE_PATH: dense_product}, [NATIVE_PATH])
    for case in chain(dense, groupwise_cases(weight, total, list(NAMES))):
        row = time_case(case, x, REPEATS, read_bandwidth)
        seconds[FLOAT32 if row["bits"] == 32 else NAMES[row["path"]]] = row["seconds"]
        bandwidths.append(row["read_bandwidth_gigabytes_per_second"])
    found = {"threads": module.threads(), "seconds": seconds, "bandwidth": float(np.median(bandwidths))}
    if module.threads() == 1:
        seconds |= baselines(weight, x)
    return found


def baselines(weight: mx.array, x: mx.array) -> dict[str, float]:
    """Seconds of a product by one weight after the other, and by numpy, which makes all weights float32 first."""
    codes, scales = groupwise.quantize(weight)
    packed = rowwise.pack_symmetric_codes(codes, groupwise.GROUP_BITS)
    vector = mx.pad(x[0], (0, codes.shape[1] - x.shape[1]))
    mx.eval(packed, scales, vector)
    arrays = [np.array(packed), np.array(scales), np.array(vector)]
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder), SCALAR_SOURCE)
        ways: dict[str, Callable[[], Any]] = {
            SCALAR: lambda: scalar(library, *arrays),
            EMULATED: lambda: emulated(*arrays),
        }
        return {name: min(timed(way) for _ in range(2)) for name, way in ways.items()}


def scalar(library: Any, packed: np.ndarray, scales: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The product (O,) of groupwise codes (O, I / 2) and x (I,), one weight after the other (scalar.cpp)."""
    y = np.zeros(len(packed), np.float32)
    codes, steps, inputs, result = (ctypes.c_void_p(array.ctypes.data) for array in (packed, scales, x, y))
    library.scalar_groupwise(codes, steps, *map(ctypes.c_int64, scales.shape), inputs, result)
    return y


def emulated(packed: np.ndarray, scales: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The product (O,) of groupwise codes (O, I / 2) and x (I,), as array operations on whole matrices."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scales.shape, groupwise.GROUP_INPUTS)
    weights = (codes.astype(np.float32) - 8) * scales[..., None]
    return weights.reshape(len(packed), -1) @ x


def draw_w4a8(rows: Rows, path: Path) -> None:
    """AION's Figure 2: products per second over threads, and how many the read bandwidth allows, dashed."""
    figure, axes = get_pyplot().subplots(figsize=(6.5, 4.4), layout="constrained")
    for index, (name, marker) in enumerate(W4A8_LINES.items()):
        some = [row for row in rows if row["implementation"] == name]
        threads, color = [row["threads"] for row in some], gear_color(index, len(W4A8_LINES))
        axes.plot(threads, [row["products_per_second"] for row in some], color=color, marker=marker, label=name)
        if name in ("float32", "W4A8"):
            most = [1e9 * row["read_bandwidth_gigabytes_per_second"] / row["bytes"] for row in some]
            axes.plot(threads, most, color=color, linestyle="--", linewidth=1, label=f"{name} at the read bandwidth")
    axes.set(xlabel="threads", ylabel="products per second")
    axes.set_xticks(sorted({row["threads"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(**LEGEND_OUTSIDE)
    save(figure, path)


MEASURES: dict[str, Callable[[int, int, int], Any]] = {"threads": measure_threads, "w4a8": measure_w4a8}


if __name__ == "__main__":  # what it measures, rows, columns, megabytes: one trial, as JSON on stdout
    mx.set_default_device(mx.cpu)
    print(json.dumps(MEASURES[sys.argv[1]](*map(int, sys.argv[2:]))))
