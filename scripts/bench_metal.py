"""Check and time the Metal kernels. To be run on a Mac; prints a Markdown table.

    python scripts/bench_metal.py
    python scripts/bench_metal.py --shapes 4096x4096,14336x4096 --dtype bfloat16 --vectors 1,4

Each kernel is compared with MLX's own quantized matmul on the same codes, then every variant is timed beside it. So
many copies of a matrix are read in turn that none comes out of a cache. The memory limit is the bandwidth of a sum over
a large array, measured between the trials. Exit status: 0, 1 if a result is wrong, 2 without Metal.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels.metal import VARIANTS, available, fits_threadgroup, planes_matvec
from gearbx_mlx.kernels.reference import planes_matmul

# What may differ from the reference, relative to the largest result: some roundings of the type.
TOLERANCE = {mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6, mx.float32: 2.0**-15}
STACKS = [(2,), (3,), (4,), (5,), (6,), (8,), (4, 4), (4, 1, 1, 2)]


@dataclass
class Weights:
    """One matrix as bit planes, as planes_matvec takes it."""

    weights: list[mx.array]
    scales: mx.array
    biases: list[mx.array]
    widths: tuple[int, ...]
    group_size: int

    def arguments(self) -> tuple:
        return self.weights, self.scales, self.biases, self.widths, self.group_size

    @property
    def bytes(self) -> int:
        """What one pass has to read: a bias that planes share is counted for each."""
        return sum(array.nbytes for array in [*self.weights, self.scales, *self.biases])


def random_weights(widths: tuple[int, ...], rows: int, columns: int, group_size: int, dtype: mx.Dtype) -> Weights:
    weight = (mx.random.normal((rows, columns)) * 0.05).astype(dtype)
    if len(widths) == 1:
        words, scales, biases = mx.quantize(weight, group_size=group_size, bits=widths[0])
        made = Weights([words], scales, [biases], widths, group_size)
    else:
        planes = split(weight, widths, group_size)
        made = Weights(planes.weights, planes.scales, planes.biases, widths, group_size)
    mx.eval(made.weights, made.scales, made.biases)
    return made


def copies(made: Weights, total: int) -> list[Weights]:
    """As many copies of a matrix as make up `total` bytes, at other addresses."""

    def copy(array: mx.array) -> mx.array:
        return array + mx.zeros((), array.dtype)

    count = max(1, -(-total // made.bytes))
    fresh = [
        Weights(
            [copy(w) for w in made.weights], copy(made.scales), [copy(b) for b in made.biases], *made.arguments()[3:]
        )
        for _ in range(count)
    ]
    mx.eval([array for each in fresh for array in (*each.weights, each.scales, *each.biases)])
    return fresh


def seconds(work: Callable[[], list[mx.array]]) -> float:
    """Of one evaluation of all that `work` returns."""
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(work())
    mx.synchronize()
    return time.perf_counter() - start


def read_bandwidth(buffer: mx.array) -> float:
    """Bytes per second of a sum over an array larger than any cache."""
    return buffer.nbytes / seconds(lambda: [buffer.sum()])


def relative_error(result: mx.array, reference: mx.array) -> float:
    difference = mx.abs(result.astype(mx.float32) - reference)
    return (difference.max() / mx.abs(reference).max()).item()


@dataclass
class Row:
    """One line of the table: medians over the trials."""

    widths: tuple[int, ...]
    shape: tuple[int, int]
    vectors: int
    path: str
    error: float
    microseconds: float
    gigabytes_per_second: float
    share: float
    against_mlx: float
    right: bool

    def cells(self) -> list[str]:
        verdict = "" if self.right else " **wrong**"
        return [
            "+".join(map(str, self.widths)),
            "{} x {}".format(*self.shape),
            str(self.vectors),
            self.path,
            f"{self.error:.1e}{verdict}",
            f"{self.microseconds:.1f}",
            f"{self.gigabytes_per_second:.1f}",
            f"{self.share:.2f}",
            f"{self.against_mlx:.2f}",
        ]


HEAD = ["bits", "rows x columns", "vectors", "kernel", "error", "us", "GB/s", "of memory limit", "times MLX"]


def measure(made: Weights, vectors: int, dtype: mx.Dtype, buffer: mx.array, total: int, trials: int) -> list[Row]:
    """Every variant and MLX's own kernels on one matrix."""
    rows, columns = made.scales.shape[0], made.scales.shape[1] * made.group_size
    x = mx.random.normal((vectors, columns)).astype(dtype)
    wide = [array.astype(mx.float32) for array in (made.scales, *made.biases)]
    reference = planes_matmul(x.astype(mx.float32), made.weights, wide[0], wide[1:], made.widths, made.group_size)
    paths: dict[str, Callable[[Weights], mx.array]] = {"MLX": lambda w: planes_matmul(x, *w.arguments())}
    for name in VARIANTS:
        if name != "threadgroup" or fits_threadgroup(columns, vectors, dtype):
            paths[name] = lambda w, name=name: planes_matvec(x, *w.arguments(), variant=name)  # type: ignore[misc]

    errors = {name: relative_error(path(made), reference) for name, path in paths.items()}
    fresh = copies(made, total)
    times: dict[str, list[float]] = {name: [] for name in paths}
    limits = []
    for trial in range(trials + 1):
        for name, path in paths.items():
            took = seconds(lambda path=path: [path(w) for w in fresh]) / len(fresh)  # type: ignore[misc]
            if trial:  # the first one compiles
                times[name].append(took)
        limits.append(read_bandwidth(buffer))

    medians = {name: statistics.median(each) for name, each in times.items()}
    limit = statistics.median(limits[1:])
    return [
        Row(
            made.widths,
            (rows, columns),
            vectors,
            name,
            errors[name],
            took * 1e6,
            made.bytes / took / 1e9,
            made.bytes / took / limit,
            medians["MLX"] / took,
            errors[name] <= TOLERANCE[dtype],
        )
        for name, took in medians.items()
    ]


def shapes(text: str) -> list[tuple[int, int]]:
    """'4096x4096,...' to pairs of rows and columns."""
    pairs = [tuple(map(int, each.split("x"))) for each in text.split(",")]
    if not all(len(pair) == 2 and pair[0] > 0 and pair[1] > 0 and pair[1] % 32 == 0 for pair in pairs):
        raise argparse.ArgumentTypeError("shapes are ROWSxCOLUMNS, columns a multiple of the group size")
    return [(pair[0], pair[1]) for pair in pairs]


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check and time the Metal kernels, as a Markdown table.")
    parser.add_argument("--shapes", type=shapes, default="4096x4096,14336x4096,4096x14336", help="rows x columns")
    parser.add_argument("--vectors", type=numbers, default="1,2,4,8", help="how many vectors in one call")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--group-size", type=int, choices=[32, 64, 128], default=64)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument(
        "--megabytes", type=int, default=512, help="weights read in one trial; more than the caches hold"
    )
    return parser


def main() -> int:
    args = setup_arg_parser().parse_args()
    can = available()
    if not can:
        print(f"bench_metal: {can.reason}", file=sys.stderr)
        return 2
    mx.random.seed(0)
    dtype, total = getattr(mx, args.dtype), args.megabytes * 2**20
    buffer = mx.zeros((total // 4,), dtype=mx.float32)
    mx.eval(buffer)
    print(f"{platform.platform()}, {time.strftime('%Y-%m-%d')}, mlx {mx.__version__}, {args.dtype}", end=", ")
    print(f"group {args.group_size}, {args.trials} trials, medians\n")
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    right = True
    for rows, columns in args.shapes:
        for widths in STACKS:
            made = random_weights(widths, rows, columns, args.group_size, dtype)
            for vectors in args.vectors:
                for row in measure(made, vectors, dtype, buffer, total, args.trials):
                    right &= row.right
                    print(f"| {' | '.join(row.cells())} |", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
