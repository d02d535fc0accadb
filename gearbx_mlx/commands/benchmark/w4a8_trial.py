"""One trial of `benchmark w4a8`, in a process of its own: the number of threads is fixed when a process begins."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np

from ...formats import groupwise, rowwise
from ...kernels.products import SymmetricCodes, dense_product, symmetric_product
from ...kernels.tuner import enough_calls
from .kernels import cases_of, groupwise_cases, time_case
from .machine import INT8, INT16, NATIVE, bandwidth_meter, native_module, timed
from .w4a8 import EMULATED, FLOAT32, SCALAR, W4A8, W4A16, W8A8, WEIGHT_ONLY

NAMES = {NATIVE: WEIGHT_ONLY, INT16: W4A16, INT8: W4A8}
FEW, MANY = 16, 64  # rows whose weights a cache has room for; more of them cost the weights alone
ROUNDS, REPEATS = 15, 3  # of products in the cache, and from memory


def measure(rows: int, cols: int, megabytes: int) -> dict[str, Any]:
    """Seconds of a product with one vector for each implementation, threads and GB/s of memory.

    On one thread also those of the baselines, and `cached`: for each way to multiply, seconds of processor time of a
    weight in the cache, and of a call without rows.
    """
    module, total = native_module(), megabytes * 2**20
    weight = mx.random.normal((rows, cols), key=mx.random.key(0)) * 0.02
    x = mx.random.normal((1, cols), key=mx.random.key(1))
    mx.eval(weight, x)
    read_bandwidth = bandwidth_meter(total)
    seconds, bandwidths = {}, []
    dense = cases_of(FLOAT32, 32, [weight], total, {NATIVE: dense_product}, [NATIVE])
    for case in chain(dense, groupwise_cases(weight, total, list(NAMES))):
        row = time_case(case, x, REPEATS, read_bandwidth)
        seconds[FLOAT32 if row["bits"] == 32 else NAMES[row["path"]]] = row["seconds"]
        bandwidths.append(row["read_bandwidth_gigabytes_per_second"])
    found = {"threads": module.threads(), "seconds": seconds, "bandwidth": float(np.median(bandwidths))}
    if module.threads() == 1:
        seconds |= baselines(module, weight, x)
        found["cached"] = in_cache(x)
    return found


def baselines(module: Any, weight: mx.array, x: mx.array) -> dict[str, float]:
    """Seconds of a product by one weight after the other, and by numpy, which makes all weights float32 first."""
    codes, scales = groupwise.quantize(weight)
    packed = rowwise.pack_symmetric_codes(codes, groupwise.BITS)
    vector = mx.pad(x[0], (0, codes.shape[1] - x.shape[1]))
    mx.eval(packed, scales, vector)
    arrays = [np.array(packed), np.array(scales), np.array(vector)]
    ways: dict[str, Callable[[], Any]] = {
        SCALAR: lambda: module.scalar_groupwise(vector, packed, scales),
        EMULATED: lambda: emulated(*arrays),
    }
    return {name: min(timed(way) for _ in range(2)) for name, way in ways.items()}


def emulated(packed: np.ndarray, scales: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The product (O,) of groupwise codes (O, I / 2) and x (I,), as array operations on whole matrices."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scales.shape, groupwise.GROUP)
    weights = (codes.astype(np.float32) - 8) * scales[..., None]
    return weights.reshape(len(packed), -1) @ x


def in_cache(x: mx.array) -> dict[str, list[float]]:
    """Way to multiply to seconds per weight and seconds of a call without rows, by a line through two sizes."""
    weight = mx.random.normal((MANY, x.shape[1]), key=mx.random.key(2)) * 0.02
    ways = {(name, rows): make for rows in (FEW, MANY) for name, make in ways_of(weight[:rows], x)}
    calls = {key: enough_calls(make) for key, make in ways.items()}
    rounds = [{key: processor_seconds(make, calls[key]) for key, make in ways.items()} for _ in range(ROUNDS)]
    times = {key: min(found[key] for found in rounds) for key in ways}
    lines = {}
    for name in dict.fromkeys(name for name, _ in ways):
        per_row = (times[name, MANY] - times[name, FEW]) / (MANY - FEW)
        lines[name] = [per_row / weight.shape[1], times[name, FEW] - FEW * per_row]
    return lines


def processor_seconds(make: Callable[[], list[Any]], calls: int) -> float:
    """Processor time of one call on one thread: other programs on the machine add nothing to it."""
    built = [array for _ in range(calls) for array in make()]
    mx.synchronize()
    start = time.process_time()
    mx.eval(built)
    return (time.process_time() - start) / calls


def ways_of(weight: mx.array, x: mx.array) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """The products with a small matrix: as floats, as codes with floats, as codes with integers, as plain bytes."""
    width = weight.shape[1]
    codes, scales = groupwise.quantize(weight)
    groups = SymmetricCodes(rowwise.pack_symmetric_codes(codes, groupwise.BITS), scales, groupwise.BITS, width)
    whole, row_scales = rowwise.quantize(weight, 8)
    rows = SymmetricCodes(rowwise.pack_symmetric_codes(whole, 8), row_scales, 8, width)
    copy = weight + 0
    mx.eval(groups.weight, scales, rows.weight, row_scales, copy)
    yield FLOAT32, lambda: [dense_product(x, copy)]
    yield WEIGHT_ONLY, lambda: [symmetric_product(x, groups)]
    yield W4A8, lambda: [symmetric_product(x, groups, x_bits=8)]
    yield W8A8, lambda: [symmetric_product(x, rows, x_bits=8)]


if __name__ == "__main__":
    mx.set_default_device(mx.Device(mx.cpu))
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
