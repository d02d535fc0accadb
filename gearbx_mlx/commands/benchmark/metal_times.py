"""How long each Metal product and operation takes beside MLX's own, and as a share of the memory limit.

A path runs over so many copies of a matrix that none comes from a cache. Its launches do not depend on each other, and
the GPU may overlap them. The memory limit is the bandwidth of a sum over a large array, timed in the same trials.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ...kernels.tuner import compare
from .machine import GIGABYTE, METAL, MLX
from .metal_checks import path_of, random_matrix, variants_for
from .metal_kernels import Arrays, Kernel
from .metal_operations import HEADS, WIDTH, Operation

LIMIT = "sum"  # among the candidates
COPIES = 64  # of what a launch does not read from memory
BUILDS = 5  # that are timed of a path's graph


@dataclass(frozen=True)
class Path:
    """One way to a result: bytes of weights, or of keys and values, of a launch; what builds one for each copy."""

    size: int
    make: Callable[[], list[mx.array]]


def sum_buffer(size: int) -> mx.array:
    """An array of this many bytes, whose sum shows how fast memory is read."""
    buffer = mx.ones((size // 4,), dtype=mx.float32)
    mx.eval(buffer)
    return buffer


def copies(arrays: Arrays, total: int) -> list[Arrays]:
    """Copies of some arrays at other addresses, which make up `total` bytes together; COPIES of none."""
    size = sum(array.nbytes for array in arrays)
    count = max(1, -(-total // size)) if size else COPIES
    fresh = [[array + mx.zeros((), array.dtype) for array in arrays] for _ in range(count)]
    mx.eval(fresh)
    return fresh


def time_product(
    pair: tuple[Kernel, Kernel],
    shape: tuple[int, int],
    vectors: Sequence[int],
    dtype: mx.Dtype,
    buffer: mx.array,
    trials: int,
) -> Iterator[dict[str, Any]]:
    """Rows of a kernel's variants and of MLX's own, its rival, for each number of vectors."""
    kernel, rival = pair
    rows, columns = shape
    weight = random_matrix(rows, columns, dtype)
    ours, others = (copies(each.pack(weight), buffer.nbytes) for each in pair)
    for count in vectors:
        x = mx.random.normal((count, columns)).astype(dtype)
        names = variants_for(kernel, columns, count, dtype)
        paths = {MLX: path_over(others, launch_of(rival, x, others[0], ""))}
        paths |= {path_of(name): path_over(ours, launch_of(kernel, x, ours[0], name)) for name in names}
        what = {"what": kernel.format, "bits": kernel.bits, "size": f"{rows} x {columns}", "vectors": count}
        yield from time_paths(what, paths, buffer, trials)


def launch_of(kernel: Kernel, x: mx.array, first: Arrays, variant: str) -> Callable[[Arrays], mx.array]:
    """What multiplies x by the first copy or another: as gears do it, by a launch that is prepared once for all."""
    product = kernel.prepare(x, first, variant)
    return lambda arrays: product(x, *arrays)


def path_over(made: list[Arrays], launch: Callable[[Arrays], mx.array]) -> Path:
    """A path of one launch for each of the copies."""
    return Path(sum(array.nbytes for array in made[0]), lambda: [launch(arrays) for arrays in made])


def time_operation(
    operation: Operation, vectors: Sequence[int], dtype: mx.Dtype, buffer: mx.array, trials: int
) -> Iterator[dict[str, Any]]:
    """Rows of ours and MLX's, for each number of tokens."""
    made = copies(operation.arrays(dtype), buffer.nbytes)
    for count in vectors:
        x = mx.random.normal((1, HEADS, count, WIDTH)).astype(dtype)
        paths = {MLX: path_over(made, partial(operation.mlx, x)), METAL: path_over(made, partial(operation.ours, x))}
        what = {"what": operation.name, "bits": str(8 * dtype.size), "size": operation.size, "vectors": count}
        yield from time_paths(what, paths, buffer, trials)


def time_paths(what: dict[str, Any], paths: dict[str, Path], buffer: mx.array, trials: int) -> Iterator[dict[str, Any]]:
    """A row for each path, one of which is MLX: medians over trials, and the spread of `times_mlx`."""
    makes = {name: path.make for name, path in paths.items()}
    times = compare({LIMIT: lambda: [buffer.sum()]} | makes, trials)
    limit = buffer.nbytes / statistics.median(times.pop(LIMIT)) / GIGABYTE
    counts = {name: len(make()) for name, make in makes.items()}
    seconds = {name: [each / counts[name] for each in found] for name, found in times.items()}
    for name, found in seconds.items():
        took = statistics.median(found)
        ratios = [mlx / ours for mlx, ours in zip(seconds[MLX], found)]
        speed = paths[name].size / took / GIGABYTE
        yield what | {
            "path": name,
            "seconds": took,
            "python_seconds": seconds_to_build(makes[name]) / counts[name],
            "gigabytes_per_second": speed,
            "bandwidth_ratio": speed / limit,
            "times_mlx": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "read_bandwidth_gigabytes_per_second": limit,
            "trials": trials,
        }


def seconds_to_build(make: Callable[[], list[mx.array]]) -> float:
    """In which Python and MLX build the graph of some launches, which is not evaluated; the median of some builds."""
    times = []
    for _ in range(BUILDS):
        start = time.perf_counter()
        make()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
