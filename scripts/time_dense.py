"""Time products over dense bfloat16 weights for docs/performance.md: what more vectors cost, beside reading them.

    GEARBX_THREADS=1 python scripts/time_dense.py --page docs/performance.md

Matrices that are larger together than the caches are multiplied by 1 to 512 vectors. Each trial times every number of
vectors once, and a ratio is that of two times within one trial. CPU time is counted, so that other work on the machine
counts less; with GEARBX_THREADS=1 it is the time of one thread.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from pages import fill, table

from gearbx_mlx.kernels import cpu

ROWS, WIDTHS, BYTES = 1024, (1024, 4096), 160 << 20
VECTORS = (1, 2, 4, 8, 12, 16, 64, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    module = cpu.native()
    if module is None:
        raise SystemExit(f"there are no native kernels: {cpu.why_not()}")
    columns = [time_width(module, width, args.trials) for width in WIDTHS]
    head = ["vectors", *(f"width {width}: {what}" for width in WIDTHS for what in ("times reading", "GFlop/s"))]
    text = table(head, [[name, *(cell for found in columns for cell in found[name])] for name in columns[0]])
    print(text)
    if args.page:
        fill(args.page, {"vectors": lambda: text})


def time_width(module: object, width: int, trials: int) -> dict[str, list[str]]:
    """Cells for each number of vectors: time over that of reading the weights, and operations per second."""
    count = BYTES // (ROWS * width * 2)
    words = mx.zeros((BYTES // 4,), mx.uint32) + 0x3C003C00
    dense = mx.contiguous(words.view(mx.bfloat16)[: count * ROWS * width].reshape(count, ROWS, width))
    matrices = [mx.array(np.array(dense[i].view(mx.uint16))).view(mx.bfloat16) for i in range(count)]
    wide = matrices[0].astype(mx.float32)
    mx.eval(words, matrices, wide)
    inputs = {vectors: mx.random.normal((vectors, width)) for vectors in VECTORS}
    mx.eval(inputs)
    works: dict[str, tuple[int, Callable[[], object]]] = {"": (0, lambda: module.read_sum(words))}
    for vectors, x in inputs.items():
        some = matrices[: max(2, count * 16 // max(vectors, 16))]  # enough of them for a long time
        works[str(vectors)] = (
            vectors * len(some),
            lambda x=x, some=some: [mx.eval(module.dense_matvec(x, matrix)) for matrix in some],
        )
    last = VECTORS[-1]
    works[f"{last}, MLX, float32"] = (last, lambda: mx.eval(inputs[last] @ wide.T))
    seconds = np.array([[cpu_seconds(work) for _, work in works.values()] for _ in range(trials + 1)])[1:]
    found = {}
    for (name, (products, _)), times in list(zip(works.items(), seconds.T))[1:]:
        vectors = int(name.split(",")[0])
        ratios = times / seconds[:, 0] * (count * vectors / products)
        low, middle, high = np.quantile(ratios, (0, 0.5, 1))
        speed = 2 * products * ROWS * width / np.median(times) / 1e9
        found[name] = [f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{speed:.0f}"]
    return found


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
