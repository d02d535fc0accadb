"""One trial of `benchmark threads`, in a process of its own: the number of threads is fixed when a process begins."""

import json
import sys
from typing import Any

import mlx.core as mx

from .kernels import cases_of_stack, dense_cases, time_case
from .machine import INT16, NATIVE, bandwidth_meter, native_module

FIELDS = "bits", "seconds", "bandwidth_ratio", "read_bandwidth_gigabytes_per_second"


def measure(rows: int, cols: int, megabytes: int) -> list[dict[str, Any]]:
    """FIELDS and `threads` of a product with one vector, in 4, 8 and 16 bits; GEARBX_THREADS is their number."""
    module, total = native_module(), megabytes * 2**20
    weight = mx.random.normal((rows, cols), key=mx.random.key(0)) * 0.02
    x = mx.random.normal((1, cols), key=mx.random.key(1))
    mx.eval(weight, x)
    read_bandwidth = bandwidth_meter(total)
    found = []
    for make in (
        lambda: cases_of_stack(weight, (4,), total, [INT16]),
        lambda: cases_of_stack(weight, (8,), total, [INT16]),
        lambda: dense_cases(weight, total, [NATIVE]),  # bfloat16 first
    ):
        row = time_case(next(make()), x, 1, read_bandwidth)
        found.append({name: row[name] for name in FIELDS} | {"threads": module.threads()})
    return found


if __name__ == "__main__":
    mx.set_default_device(mx.Device(mx.cpu))
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
