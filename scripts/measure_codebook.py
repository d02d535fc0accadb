"""Measure the codebook formats for docs/codebook.md: error, KL, points of a budget, and speed.

    python scripts/measure_codebook.py error     # 4096-wide matrices, Gaussian and Student t with 4 degrees of freedom
    python scripts/measure_codebook.py kl        # the demo model on held-out problems
    python scripts/measure_codebook.py points    # the H-Process on the demo model: XFP's table 10
    python scripts/measure_codebook.py speed     # products with one vector, beside the affine kernel of 4 bits

With --page docs/codebook.md the table is written there as well.

Errors are compared with MLX's affine quantization at the same effective bits: with a curve through its widths and group
sizes, on which the logarithm of the error is interpolated.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from pages import fill, table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.bit_selection.h_process import GarbageCheck, fit_floors, point_cells, point_rows
from gearbx_mlx.cli.prompts import HARD, MIXED, TRIVIAL
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.formats import codebook, codebook_library
from gearbx_mlx.formats.base import Format
from gearbx_mlx.formats.codebook import nbytes
from gearbx_mlx.formats.codebook_fitting import Outliers
from gearbx_mlx.kernels import cpu

FORMATS = {  # module, bits, ladder, and the format, which keeps reconstructed weights
    "codebook": (codebook, (2, 3, 4, 5, 6), "2,3,4,5,6,16", codebook.Codebook(cache=True)),
    "codebook-library": (codebook_library, (2, 3, 4), "2,3,4,16", codebook_library.CodebookLibrary(cache=True)),
}
AFFINE_BITS, GROUP_SIZES = (2, 3, 4, 5, 6), (32, 64, 128)
WIDTH = 4096
HELD_OUT = Path(__file__).parent.parent / "tests" / "data" / "gsm8k_held_out.jsonl"


def at(curve: dict[float, float], bits: float) -> float:
    """The value of the curve at these effective bits, the logarithm interpolated."""
    points = sorted(curve)
    return float(np.exp(np.interp(bits, points, np.log([curve[p] for p in points]))))


def below(value: float, curve: dict[float, float], bits: float) -> str:
    return f"{1 - value / at(curve, bits):.0%}"


def squared_error(made: mx.array, weight: mx.array) -> float:
    """The sum of squared errors over the sum of squared weights."""
    return (mx.square(made - weight).sum() / mx.square(weight).sum()).item()


def affine_curve(weight: mx.array) -> dict[float, float]:
    """Effective bits to squared error of MLX's affine quantization, with scales and biases in fp16."""
    curve = {}
    for bits in AFFINE_BITS:
        for group in GROUP_SIZES:
            words, scales, biases = mx.quantize(weight.astype(mx.float16), group, bits)
            made = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group, bits)
            curve[bits + 32 / group] = squared_error(made, weight)
    return curve


def median_cosine(made: mx.array, weight: mx.array) -> float:
    norms = mx.sqrt(mx.square(made).sum(-1) * mx.square(weight).sum(-1))
    return float(np.median(np.array((made * weight).sum(-1) / norms)))


def measure_error(rows: int) -> str:
    random = np.random.default_rng(0)
    matrices = {
        "Gaussian": random.standard_normal((rows, WIDTH)),
        "Student t, 4": random.standard_t(4, (rows, WIDTH)),
    }
    found = []
    for name, values in matrices.items():
        weight = mx.array((values * 0.02).astype(np.float32))
        curve = affine_curve(weight)
        roots = {bits: error**0.5 for bits, error in curve.items()}
        for format, (module, widths, *_) in FORMATS.items():
            for bits in widths:
                start = time.perf_counter()
                arrays = module.encode(weight, bits)
                seconds = time.perf_counter() - start
                made = codebook.decode(arrays, bits, WIDTH)
                error, effective = squared_error(made, weight), 8 * nbytes(arrays) / weight.size
                share = Outliers.of(arrays).count() / weight.size
                lower = below(error, curve, effective), below(error**0.5, roots, effective)
                size = f"{effective:.3f}", f"{share:.2%}"
                quality = f"{median_cosine(made, weight):.4f}", f"{error:.5f}"
                found.append([name, format, bits, *size, *quality, *lower, f"{seconds:.1f}"])
    head = ["matrix", "format", "bits", "effective bits", "outliers", "cosine"]
    return table([*head, "squared error", "below affine", "its root below", "seconds"], found)


def measure_kl(problems: int) -> str:
    stored = HELD_OUT.read_text(encoding="utf-8").splitlines()[:problems]
    model, tokenizer = load()
    texts = [f"Question: {p['question']}\nAnswer: {p['answer']}" for p in map(json.loads, stored)]
    check = GarbageCheck(model, [tokenizer.encode(text) for text in texts], written=0)

    def found(format: str | Format, ladder: str, group_size: int = 64) -> list[tuple[int, float, float]]:
        gearbox = Gearbox(model, ladder, format=format, group_size=group_size)
        rows = []
        for gear in list(gearbox.ladder)[:-1]:
            gearbox.shift(gear)
            rows.append((gear.bits, gearbox.bits_per_weight(gear), check.divergence(model)))
        gearbox.shift(gearbox.ladder.top)
        return rows

    affine = [row for group in (32, 64) for row in found("affine", "2,3,4,5,6,16", group)]
    curve = {effective: kl for _, effective, kl in affine}
    lines = [["affine", bits, f"{effective:.3f}", f"{kl:.5f}", ""] for bits, effective, kl in affine]
    for name, (_, _, ladder, format) in FORMATS.items():
        for bits, effective, kl in found(format, ladder):
            lines.append([name, bits, f"{effective:.3f}", f"{kl:.5f}", below(kl, curve, effective)])
    return table(["format", "bits", "effective bits", "KL, nats", "below affine"], lines)


def measure_points(target_bpw: float) -> str:
    model, tokenizer = load()
    with progress_bar() as progress:
        found = fit_floors(
            model, tokenizer, "codebook", "all", MIXED + TRIVIAL + HARD, None, target_bpw, progress=progress
        )
    head = ["strict", "lazy", "steady", "peak", "bits", "KL, nats", "texts that repeat", ""]
    return table(head, [point_cells(row) for row in point_rows(found)])


def measure_speed(megabytes: int, trials: int) -> str:
    native = cpu.native()
    if native is None:
        raise SystemExit(f"no native kernels: {cpu.why_not()}")
    side = 2048
    weight, x = mx.random.normal((side, side)) * 0.02, mx.random.normal((1, side))
    words, scales, biases = mx.quantize(weight.astype(mx.bfloat16), 64, 4)
    cases = {"affine 4": (lambda w, s, b: native.stack_matvec(x, [w], s, [b], [4], 64), [words, scales, biases])}
    for format, (module, widths, *_) in FORMATS.items():
        kernel = native.codebook_matvec if module is codebook else native.library_matvec
        for bits in widths:
            arrays = module.encode(weight, bits)

            def product(*values, kernel=kernel, names=tuple(arrays), bits=bits):
                return kernel(x, **dict(zip(names, values)), bits=bits)

            cases[f"{format} {bits}"] = (product, list(arrays.values()))
    memory = mx.ones((megabytes * 2**18,), mx.uint32)
    copies = {}
    for name, (_, arrays) in cases.items():
        size = sum(a.nbytes for a in arrays)
        copies[name] = [[a + 0 for a in arrays] for _ in range(max(1, megabytes * 2**20 // size))]
        mx.eval(copies[name], memory)
    speeds: dict[str, list[float]] = {"memory read": [], **{name: [] for name in cases}}
    for _ in range(trials + 1):
        start = time.perf_counter()
        native.read_sum(memory)
        speeds["memory read"].append(memory.nbytes / (time.perf_counter() - start) / 1e9)
        for name, (work, arrays) in cases.items():
            size = sum(a.nbytes for a in arrays) * len(copies[name])
            start = time.perf_counter()
            mx.eval([work(*values) for values in copies[name]])
            speeds[name].append(size / (time.perf_counter() - start) / 1e9)
    whole = statistics.median(speeds["affine 4"][1:])
    rows = []
    for name, values in speeds.items():
        counted = values[1:]
        median = statistics.median(counted)
        rows.append([name, f"{median:.1f}", f"{min(counted):.1f} to {max(counted):.1f}", f"{median / whole:.2f}"])
    return table(["product of a vector", "GB/s", "least to most", "against affine 4"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["error", "kl", "points", "speed"])
    parser.add_argument("--rows", type=int, default=1024, help="For `error`: rows of the matrices. Default: 1024")
    parser.add_argument("--problems", type=int, default=16, help="For `kl`: held-out problems. Default: 16")
    parser.add_argument("--target-bpw", type=float, default=6.0, help="For `points`. Default: 6")
    parser.add_argument("--megabytes", type=int, default=96, help="For `speed`: read in a trial. Default: 96")
    parser.add_argument("--trials", type=int, default=5, help="For `speed`. Default: 5")
    parser.add_argument("--page", type=Path, help="Page whose table is written as well.")
    args = parser.parse_args()
    measures = {
        "error": lambda: measure_error(args.rows),
        "kl": lambda: measure_kl(args.problems),
        "points": lambda: measure_points(args.target_bpw),
        "speed": lambda: measure_speed(args.megabytes, args.trials),
    }
    found = measures[args.what]()
    print(found)
    if args.page:
        fill(args.page, {args.what: lambda: found})


if __name__ == "__main__":
    main()
