"""Matrix times vector in every format and on each path, against the read bandwidth of the machine."""

from gearbx_mlx.benchmark import KernelBenchmark
from gearbx_mlx.benchmark.kernels import COLUMNS, benchmark_kernels

from .decoding_costs import as_table
from .studies import Found, study


@study(minutes=4)
def kernels(
    rows: int = 4096,
    cols: int = 4096,
    megabytes: int = 256,
    vectors: int = 1,
    trials: int = 5,
    native_only: bool = False,
) -> Found:
    """A matrix times one vector or several, in each format and on each path, as a share of the read bandwidth.

    Args:
        megabytes: Of weights, read in a trial: more than the last-level cache.
        vectors: In one call.
        native_only: Leave MLX's own kernels out.
    """
    settings = KernelBenchmark(trials, None, None, rows, cols, megabytes, vectors, native_only)
    found = benchmark_kernels(settings)
    return Found({"kernels": as_table(COLUMNS, found)}, found)
