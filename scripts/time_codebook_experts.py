"""Time mixtures of experts over codebooks: the native CPU kernel against reconstructing the experts in use.

    python scripts/time_codebook_experts.py [--page docs/codebook.md] [--trials 15]

Both read the same packed arrays. Trials of the two alternate, so that other work on the machine meets both.
"""

import argparse
import statistics
import time
from datetime import date
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchLinear
from pages import fill, table

from gearbx_mlx.benchmark.measuring import machine_name
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.native import with_kernels
from gearbx_mlx.kernels import cpu

EXPERTS, CHOSEN, OUTPUTS, INPUTS = 64, 4, 1024, 512
CASES = [("codebook", 2), ("codebook", 4), ("codebook", 6), ("codebook-library", 4)]
TOKENS = (1, 4, 16)


def seconds(module: SwitchLinear, x: mx.array, indices: mx.array) -> float:
    start = time.perf_counter()
    mx.eval(module(x, indices))
    return time.perf_counter() - start


def ratios(format: str, bits: int, trials: int) -> list[list[float]]:
    """Seconds of the reconstruction over those of the kernel, for each number of tokens."""
    dense = SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=False)
    made = get_format(format)
    arrays = made.encode(dense.weight, bits)
    stock, native = (made.module(d, bits, arrays, (bits,), 64) for d in (dense, with_kernels(dense, native=True)))
    found = []
    for tokens in TOKENS:
        x = mx.random.normal((tokens, 1, 1, INPUTS))
        each = []
        for _ in range(trials + 1):
            indices = mx.argsort(mx.random.uniform(shape=(tokens, EXPERTS)))[:, :CHOSEN]
            mx.eval(x, indices)
            ours = seconds(native, x, indices)
            each.append(seconds(stock, x, indices) / ours)
        found.append(each[1:])
    return found


def cell(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=15, help="Default: 15")
    parser.add_argument("--page", type=Path, help="Page whose table is written as well.")
    args = parser.parse_args()
    if cpu.native() is None:
        raise SystemExit(f"no native kernels: {cpu.why_not()}")
    lines = [[f"{name}, {bits} bits", *map(cell, ratios(name, bits, args.trials))] for name, bits in CASES]
    heads = [f"{tokens} token{'s' * (tokens > 1)}" for tokens in TOKENS]
    found = f"{date.today()}, {machine_name()}.\n\n" + table(["times as fast as reconstructing", *heads], lines)
    print(found)
    if args.page:
        fill(args.page, {"experts": lambda: found})


if __name__ == "__main__":
    main()
