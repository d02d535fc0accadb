"""The codebook formats: error, KL, points of a budget, and XFP's tables, for docs/codebook.md."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear
from pages import table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.bit_selection.codebook_selection import Quality, compare, kind_of, qualities
from gearbx_mlx.bit_selection.h_process import GarbageCheck, Limits, fit_floors, point_cells, point_rows
from gearbx_mlx.cli.prompt import HARD, TRIVIAL
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.decoding.route import SHORT_PROMPTS
from gearbx_mlx.formats import CodebookOptions, codebook, codebook_library, get_format
from gearbx_mlx.formats.base import Format
from gearbx_mlx.formats.codebook import Codebook, nbytes
from gearbx_mlx.formats.codebook_fitting import DEFAULTS, OUTLIER_SIZE, Outliers
from gearbx_mlx.formats.native import with_kernels
from gearbx_mlx.gears.discovery import discover

from .studies import HELD_OUT, Found, native_kernels, spread, study, table_here

FORMATS = {  # module, bits, ladder, and the format, which keeps reconstructed weights
    "codebook": (codebook, (2, 3, 4, 5, 6), "2,3,4,5,6,16", codebook.Codebook(cache=True)),
    "codebook-library": (codebook_library, (2, 3, 4), "2,3,4,16", codebook_library.CodebookLibrary(cache=True)),
}
AFFINE_BITS, GROUP_SIZES = (2, 3, 4, 5, 6), (32, 64, 128)
WIDTH = 4096


def at(curve: dict[float, float], bits: float) -> float:
    """The value of the curve at these effective bits, the logarithm interpolated."""
    points = sorted(curve)
    return float(np.exp(np.interp(bits, points, np.log([curve[p] for p in points]))))


def below(value: float, curve: dict[float, float], bits: float) -> str:
    return f"{1 - value / at(curve, bits):.0%}"


def number(value: mx.array) -> float:
    return float(np.array(value))


def squared_error(made: mx.array, weight: mx.array) -> float:
    """The sum of squared errors over the sum of squared weights."""
    return number(mx.square(made - weight).sum() / mx.square(weight).sum())


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
        prompts, limits = SHORT_PROMPTS + TRIVIAL + HARD, Limits(target_bpw=target_bpw)
        found = fit_floors(model, tokenizer, "codebook", "all", prompts, limits, progress)
    head = ["strict", "lazy", "steady", "peak", "bits", "KL, nats", "texts that repeat", ""]
    return table(head, [point_cells(row) for row in point_rows(found)])


XFP_WIDTH = 3  # XFP's tables have 3 bits
XFP_OUTLIER = 18  # bytes
XFP_BITS = {3: 32 / 10, 4: 32 / 8}  # per weight: codes in words of table 3.3


def measured(weight: mx.array) -> dict[str, float]:
    """A matrix (O, I): its quality at 3 bits with and without outliers, and its tails."""
    found: Quality = next(q for q in qualities(Codebook(), weight) if q.bits == XFP_WIDTH)
    far = mx.abs(weight.astype(mx.float32) - weight.astype(mx.float32).mean())
    sigma = number(mx.sqrt(mx.square(far).mean()))
    return {
        "bulk": found.bulk_cosine,
        "cosine": found.cosine,
        "ratio": found.bulk_error / max(found.error, 1e-12),
        "beyond": number((far > 3 * sigma).mean()),
        "max": number(far.max()),
        "max_sigmas": number(far.max()) / sigma,
    }


def component_row(name: str, found: list[dict[str, float]]) -> dict[str, Any]:
    """A row of tables A.1 and B.1, over the layers of a component."""
    gains = [one["cosine"] - one["bulk"] for one in found]
    ratios = [one["ratio"] for one in found]
    return {
        "type": name,
        "layers": len(found),
        "cos_bulk": float(np.mean([one["bulk"] for one in found])),
        "cos_outlier": float(np.mean([one["cosine"] for one in found])),
        "gain_mean": float(np.mean(gains)),
        "gain_max": float(np.max(gains)),
        "ratio_p50": float(np.percentile(ratios, 50)),
        "ratio_p90": float(np.percentile(ratios, 90)),
        "beyond": float(np.mean([one["beyond"] for one in found])),
        "max": max(one["max"] for one in found),
        "max_sigmas": max(one["max_sigmas"] for one in found),
    }


def break_even(bits_low: float, bits_high: float, outlier: int) -> float:
    """The share of outliers at which fewer bits are as large as more bits with a share of 2 % (XFP 7.2)."""
    return DEFAULTS.cap + (bits_high - bits_low) / (8 * outlier)


def break_even_rows(weights: Iterable[mx.array]) -> list[dict[str, Any]]:
    """At the break-even of this format: 3 bits with more outliers beside 4 bits, over all matrices."""
    weights = list(weights)
    wide = sum(weight.shape[0] for weight in weights) / sum(weight.size for weight in weights)  # rows per weight
    sizes = {bits: XFP_BITS[bits] + 16 * 2**bits * wide for bits in XFP_BITS}
    rows = []
    for format in ("codebook", "codebook-library"):
        module: Any = get_format(format)
        low, high = (sizes[3], sizes[4]) if format == "codebook" else (3.0, 4.0)
        share = break_even(low, high, OUTLIER_SIZE)
        for bits, options in ((4, DEFAULTS), (3, DEFAULTS), (3, CodebookOptions(sigma=1.0, cap=share))):
            rows.append(whole_row(type(module)(options=options), bits, weights))
    return rows


def whole_row(format: Any, bits: int, weights: list[mx.array]) -> dict[str, Any]:
    """Bits per weight, squared error and median cosine of a format over matrices."""
    size = off = square = 0.0
    cosines, counted = [], sum(weight.size for weight in weights)
    for weight in weights:
        arrays = format.encode(weight, bits)
        made = codebook.decode(arrays, bits, weight.shape[-1])
        whole = weight.astype(mx.float32)
        size, off = size + nbytes(arrays), off + number(mx.square(made - whole).sum())
        square += number(mx.square(whole).sum())
        cosines.append(compare(whole, made).cosine())
    found = {"effective_bits": 8 * size / counted, "squared_error": off / square}
    return {"format": format.name, "bits": bits} | found | {"cosine": float(np.median(cosines))}


def measure_tables(name: str | None) -> dict[str, Any]:
    model, _ = load(name) if name else load()
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    layers, _ = discover(model, format=Codebook())
    for layer in layers:
        parts[f"{kind_of(layer.path, layer.module)} {layer.path.split('.')[-1]}"].append(measured(layer.module.weight))
    components = [component_row(part, found) for part, found in parts.items()]
    return {
        "components": sorted(components, key=lambda row: -row["gain_mean"]),
        "xfp_break_even": break_even(XFP_BITS[3], XFP_BITS[4], XFP_OUTLIER),
        "break_even": break_even_rows(layer.module.weight for layer in layers if layer.module.weight.ndim == 2),
    }


def tables(found: dict[str, Any]) -> dict[str, str]:
    quality = [
        [
            *(row["type"], row["layers"], f"{row['cos_bulk']:.5f}", f"{row['cos_outlier']:.5f}"),
            *(
                f"{row['gain_mean']:+.5f}",
                f"{row['gain_max']:+.5f}",
                f"{row['ratio_p50']:.2f}",
                f"{row['ratio_p90']:.2f}",
            ),
        ]
        for row in found["components"]
    ]
    tails = [
        [row["type"], f"{row['beyond']:.2%}", f"{row['max']:.2f} ({row['max_sigmas']:.0f} sigma)"]
        for row in found["components"]
    ]
    even = [
        [f"`{r['format']}`", r["bits"], f"{r['effective_bits']:.3f}", f"{r['squared_error']:.5f}", f"{r['cosine']:.4f}"]
        for r in found["break_even"]
    ]
    head = ["type", "layers", "cos bulk", "cos outlier", "gain mean", "gain max", "MSE p50", "MSE p90"]
    share = f"With 18 bytes for an outlier, as in XFP: {found['xfp_break_even']:.2%} outliers.\n\n"
    return {
        "table_a1": table(head, quality),
        "table_b1": table(["component", "beyond 3 sigma", "max"], tails),
        "break_even": share + table(["format", "bits", "effective bits", "squared error", "cosine"], even),
    }


EXPERTS, CHOSEN, OUTPUTS, INPUTS = 64, 4, 1024, 512
CASES = [("codebook", 2), ("codebook", 4), ("codebook", 6), ("codebook-library", 4)]
TOKEN_COUNTS = (1, 4, 16)


def seconds(module: SwitchLinear, x: mx.array, indices: mx.array) -> float:
    start = time.perf_counter()
    mx.eval(module(x, indices))
    return time.perf_counter() - start


def expert_ratios(format: str, bits: int, trials: int) -> list[list[float]]:
    """Seconds of the reconstruction over those of the kernel, for each number of tokens."""
    dense = SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=False)
    made: Any = get_format(format)
    arrays = made.encode(dense.weight, bits)
    stock, native = (made.module(d, bits, arrays, (bits,), 64) for d in (dense, with_kernels(dense, native=True)))
    found = []
    for tokens in TOKEN_COUNTS:
        x = mx.random.normal((tokens, 1, 1, INPUTS))
        each = []
        for _ in range(trials + 1):
            indices = mx.argsort(mx.random.uniform(shape=(tokens, EXPERTS)))[:, :CHOSEN]
            mx.eval(x, indices)
            ours = seconds(native, x, indices)
            each.append(seconds(stock, x, indices) / ours)
        found.append(each[1:])
    return found


@study("docs/codebook.md", minutes=10)
def codebook_formats(
    what: list[Literal["error", "kl", "points"]] = [],  # noqa: B006 - nothing changes it
    rows: int = 1024,
    problems: int = 16,
    target_bpw: float = 6.0,
) -> Found:
    """Error, KL and points of a budget of the codebook formats.

    Errors are compared with MLX's affine quantization at the same effective bits: with a curve through its widths and
    group sizes, on which the logarithm of the error is interpolated.

    Args:
        what: error (4096-wide matrices, Gaussian and Student t), kl (the demo model on held-out problems), points (the
            H-Process on the demo model: XFP's table 10); all if not given.
        rows: For error: rows of the matrices.
        problems: For kl: held-out problems.
        target_bpw: For points.
    """
    measures: dict[str, Callable[[], str]] = {
        "error": lambda: measure_error(rows),
        "kl": lambda: measure_kl(problems),
        "points": lambda: measure_points(target_bpw),
    }
    return Found({name: measures[name]() for name in what or measures})


@study("docs/codebook.md", minutes=5)
def codebook_tables(model: str | None = None) -> Found:
    """XFP's tables of weights on a model: A.1, B.1 and the break-even of 7.2.

    Args:
        model: A directory; the model that ships if not given.
    """
    found = measure_tables(model)
    return Found(tables(found), found)


@study("docs/codebook.md", minutes=1)
def codebook_experts(trials: int = 15) -> Found:
    """Mixtures of experts over codebooks: the native CPU kernel against reconstructing the experts in use."""
    native_kernels()
    lines = [
        [f"{name}, {bits} bits", *(spread(each, 1, quartiles=True) for each in expert_ratios(name, bits, trials))]
        for name, bits in CASES
    ]
    heads = [f"{tokens} token{'s' * (tokens > 1)}" for tokens in TOKEN_COUNTS]
    return Found({"experts": table_here(["times as fast as reconstructing", *heads], lines)})
