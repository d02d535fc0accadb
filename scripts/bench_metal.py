"""Check and time the Metal kernels on a Mac, and print a Markdown table for docs/performance.md.

    python scripts/bench_metal.py
    python scripts/bench_metal.py --check-only
    python scripts/bench_metal.py --shapes 4096x4096,14336x4096 --dtype bfloat16 --vectors 1,4 --json metal.json

First the script compares every kernel with a float32 product of the dequantized weights: every format, variant and
type, whole rows and ragged ones. Then it times every variant and `mx.quantized_matmul` at the same bits. It runs over
so many copies of a matrix that none comes from a cache; the products do not depend on each other, and the GPU may
overlap them. The memory limit is the bandwidth of a sum over a large array, measured between the trials.

Exit status: 0; 1 if a result is wrong or a kernel does not compile; 2 without Metal.
"""

import argparse
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
from metal_kernels import Arrays, Kernel, all_kernels

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.files.writing import check_writable, write_text
from gearbx_mlx.kernels.metal import MAX_VECTORS, available, fits_threadgroup
from gearbx_mlx.telemetry.summary import as_json

# The largest difference from the reference that is allowed, relative to the largest result: some roundings of the type.
TOLERANCE = {mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6, mx.float32: 2.0**-15}
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
CHECKED = ((37, 640), (13, 533))  # rows and columns; 533 is not a multiple of a group
HEAD = ("format", "bits", "rows x columns", "vectors", "kernel", "us", "GB/s", "of memory limit", "times MLX")


def random_matrix(rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    return (mx.random.normal((rows, columns)) * 0.05).astype(dtype)


def variants(kernel: Kernel, columns: int, vectors: int, dtype: mx.Dtype) -> list[str]:
    return [name for name in kernel.variants if name != "threadgroup" or fits_threadgroup(columns, vectors, dtype)]


def error(kernel: Kernel, arrays: Arrays, x: mx.array, variant: str) -> float:
    """The largest difference from a float32 product, relative to the largest result."""
    expected = (
        x.astype(mx.float32) @ kernel.dense([a.astype(mx.float32) if is_scale(a) else a for a in arrays], x.shape[-1]).T
    )
    difference = mx.abs(kernel.product(x, arrays, variant).astype(mx.float32) - expected)
    return (difference.max() / mx.abs(expected).max()).item()


def is_scale(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def check(kernels: list[Kernel], vectors: list[int]) -> Iterator[tuple[Kernel, str]]:
    """What is wrong with every kernel, shape, type, number of vectors and variant; "" if it is right."""
    for kernel, (rows, columns), dtype in itertools.product(kernels, CHECKED, DTYPES):
        if columns % kernel.multiple:
            continue
        arrays = kernel.pack(random_matrix(rows, columns, dtype))
        for count in vectors:
            x = mx.random.normal((count, columns)).astype(dtype)
            for variant in variants(kernel, columns, count, dtype):
                name = f"{kernel.format} {kernel.bits}, {rows}x{columns}, {count} vectors, {dtype}, {variant}"
                try:
                    off = error(kernel, arrays, x, variant)
                except RuntimeError as failure:  # Metal's compiler refuses the text
                    yield kernel, f"{name}: {failure}"
                    continue
                yield kernel, "" if off <= TOLERANCE[dtype] else f"{name}: off by {off:.1e} of the largest result"


def copies(arrays: Arrays, total: int) -> list[Arrays]:
    """Copies of a matrix at other addresses, which make up `total` bytes together."""
    count = max(1, -(-total // sum(array.nbytes for array in arrays)))
    fresh = [[array + mx.zeros((), array.dtype) for array in arrays] for _ in range(count)]
    mx.eval(fresh)
    return fresh


def seconds(work: Callable[[], list[mx.array]]) -> float:
    """The time of one evaluation of everything that `work` returns."""
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(work())
    mx.synchronize()
    return time.perf_counter() - start


def measure(
    kernel: Kernel, rival: Kernel, weight: mx.array, vectors: int, buffer: mx.array, total: int, trials: int
) -> list[dict]:
    """Time every variant and MLX's own kernel on one matrix. Returns a row for each, with medians over the trials."""
    rows, columns = weight.shape
    x = mx.random.normal((vectors, columns)).astype(weight.dtype)
    paths = {"MLX": (rival, "")} | {v: (kernel, v) for v in variants(kernel, columns, vectors, weight.dtype)}
    fresh = {id(each): copies(each.pack(weight), total) for each in (kernel, rival)}
    times: dict[str, list[float]] = {name: [] for name in paths}
    limits = []
    for trial in range(trials + 1):
        for name, (path, variant) in paths.items():
            made = fresh[id(path)]
            took = seconds(lambda: [path.product(x, a, variant) for a in made]) / len(made)  # noqa: B023
            if trial:  # the first one compiles
                times[name].append(took)
        limits.append(buffer.nbytes / seconds(lambda: [buffer.sum()]))
    medians = {name: statistics.median(each) for name, each in times.items()}
    limit = statistics.median(limits[1:])
    read = {name: sum(a.nbytes for a in fresh[id(path)][0]) for name, (path, _) in paths.items()}
    return [
        {
            "format": kernel.format,
            "bits": kernel.bits,
            "path": name,
            "rows": rows,
            "cols": columns,
            "vectors": vectors,
            "seconds": took,
            "gigabytes_per_second": read[name] / took / 1e9,
            "bandwidth_ratio": read[name] / took / limit,
            "times_mlx": medians["MLX"] / took,
            "read_bandwidth_gigabytes_per_second": limit / 1e9,
            "trials": trials,
        }
        for name, took in medians.items()
    ]


def cells(row: dict) -> list[str]:
    return [
        row["format"],
        row["bits"],
        f"{row['rows']} x {row['cols']}",
        str(row["vectors"]),
        row["path"],
        f"{row['seconds'] * 1e6:.1f}",
        f"{row['gigabytes_per_second']:.1f}",
        f"{row['bandwidth_ratio']:.2f}",
        f"{row['times_mlx']:.2f}",
    ]


def machine() -> str:
    """The names of the GPU and of the system."""
    return f"{mx.device_info()['device_name']}, {platform.platform()}"


def shapes(text: str) -> list[tuple[int, int]]:
    """Pairs of rows and columns from text such as "4096x4096,14336x4096"."""
    pairs = [tuple(map(int, each.split("x"))) for each in text.split(",")]
    if not all(len(pair) == 2 and min(pair) > 0 and pair[1] % 128 == 0 for pair in pairs):
        raise argparse.ArgumentTypeError("shapes are ROWSxCOLUMNS, columns a multiple of 128")
    return [(rows, columns) for rows, columns in pairs]


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def vector_counts(text: str) -> list[int]:
    counts = [int(each) for each in text.split(",")]
    if not all(1 <= count <= MAX_VECTORS for count in counts):
        raise argparse.ArgumentTypeError(f"vectors are 1 to {MAX_VECTORS}")
    return counts


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check and time the Metal kernels, as a Markdown table.")
    parser.add_argument("--check-only", action="store_true", help="Only compare every kernel.")
    parser.add_argument(
        "--shapes", type=shapes, default="4096x4096,14336x4096,4096x14336", help="Rows x columns that are timed."
    )
    parser.add_argument("--vectors", type=vector_counts, default="1,2,4,8", help="Vectors in one call.")
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16", "float32"], default="float16", help="Type that is timed."
    )
    parser.add_argument("--group-size", type=int, choices=[32, 64, 128], default=64, help="Of affine and planes.")
    parser.add_argument("--trials", type=positive, default=7)
    parser.add_argument(
        "--megabytes", type=positive, default=512, help="Weights read in one trial; more than the caches hold."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all rows as JSON.")
    return parser


def main() -> int:
    args = setup_arg_parser().parse_args()
    try:
        can = available()
        if not can:
            raise GearbxError(can.reason)
        if args.json:
            check_writable(args.json)
    except GearbxError as error:
        print(f"bench_metal: {error}", file=sys.stderr)
        return 2
    mx.random.seed(0)
    kernels = all_kernels(args.group_size)
    results = list(check([kernel for kernel, _ in kernels], args.vectors))
    for _, problem in results:
        if problem:
            print(f"wrong: {problem}", file=sys.stderr)
    wrong = [kernel for kernel, problem in results if problem]
    print(f"{machine()}, {time.strftime('%Y-%m-%d')}, mlx {mx.__version__}: ", end="")
    print(f"{len(results)} products checked, {len(wrong)} wrong", flush=True)
    status = 1 if wrong else 0
    if args.check_only:
        return status

    kernels = [(kernel, rival) for kernel, rival in kernels if kernel not in wrong]
    total = args.megabytes * 2**20
    buffer = mx.zeros((total // 4,), dtype=mx.float32)
    mx.eval(buffer)
    print(f"\n{args.dtype}, group {args.group_size}, {args.trials} trials, medians\n")
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    rows = []
    for (high, wide), (kernel, rival), count in itertools.product(args.shapes, kernels, args.vectors):
        weight = random_matrix(high, wide, getattr(mx, args.dtype))
        for row in measure(kernel, rival, weight, count, buffer, total, args.trials):
            rows.append(row | {"machine": machine(), "dtype": args.dtype})
            print(f"| {' | '.join(cells(row))} |", flush=True)
    if args.json:
        write_text(args.json, as_json({"rows": rows}))
    return status


if __name__ == "__main__":
    sys.exit(main())
