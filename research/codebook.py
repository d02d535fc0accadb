"""The codebook formats: error, KL, points of a budget, and XFP's tables, for docs/codebook.md."""

import ctypes
import inspect
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import mixtral
from mlx_lm.models.switch_layers import SwitchLinear
from pages import table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.bit_selection.codebook_selection import Quality, component_kind, match_of, qualities
from gearbx_mlx.bit_selection.h_process import (
    KL_BOUND,
    OVER,
    GarbageCheck,
    Limits,
    continuation,
    fast_gearbox,
    fit_budget,
    fit_floors,
    measure_reserve,
    point_cells,
    point_rows,
)
from gearbx_mlx.cli.prompt import HARD, TRIVIAL
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.decoding.route import SHORT_PROMPTS
from gearbx_mlx.formats import CodebookOptions, codebook, codebook_library, get_format
from gearbx_mlx.formats.base import Format
from gearbx_mlx.formats.codebook import DEFAULT_OPTIONS, OUTLIER_SIZE, Codebook, Outliers, nbytes
from gearbx_mlx.formats.native import with_kernels
from gearbx_mlx.gears.discovery import discover
from gearbx_mlx.loading import model_name

from .conservation import compiled
from .studies import HELD_OUT, Found, in_turn, native_kernels, ratios, read_report, spread, study, table_here

FORMATS = {  # module, bits, ladder, and the format, which keeps reconstructed weights
    "codebook": (codebook, (2, 3, 4, 5, 6), "2,3,4,5,6,16", codebook.Codebook(cache=True)),
    "codebook-library": (codebook_library, (2, 3, 4), "2,3,4,16", codebook_library.CodebookLibrary(cache=True)),
}
AFFINE_BITS, GROUP_SIZES = (2, 3, 4, 5, 6), (32, 64, 128)
WIDTH = 4096
H_PROMPTS = 8  # calibration texts of the H-Process on a mixture


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


def random_matrices(rows: int) -> dict[str, np.ndarray]:
    """Rows of WIDTH numbers without outliers, and with heavy tails."""
    random = np.random.default_rng(0)
    return {"Gaussian": random.standard_normal((rows, WIDTH)), "Student t, 4": random.standard_t(4, (rows, WIDTH))}


def measure_error(rows: int) -> str:
    found = []
    for name, values in random_matrices(rows).items():
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
                quality = f"{match_of(weight, made).cosine():.4f}", f"{error:.5f}"
                found.append([name, format, bits, *size, *quality, *lower, f"{seconds:.1f}"])
    head = ["matrix", "format", "bits", "effective bits", "outliers", "cosine"]
    return table([*head, "squared error", "below affine", "its root below", "seconds"], found)


def measure_kl(name: str, problems: int) -> str:
    stored = HELD_OUT.read_text(encoding="utf-8").splitlines()[:problems]
    model, tokenizer = load(name)
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
    for title, (_, _, ladder, format) in FORMATS.items():
        for bits, effective, kl in found(format, ladder):
            lines.append([title, bits, f"{effective:.3f}", f"{kl:.5f}", below(kl, curve, effective)])
    return table([f"{name}, format", "bits", "effective bits", "KL, nats", "below affine"], lines)


def measure_points(target_bpw: float) -> str:
    model, tokenizer = load()
    with progress_bar() as progress:
        prompts, limits = SHORT_PROMPTS + TRIVIAL + HARD, Limits(target_bpw=target_bpw)
        found = fit_floors(model, tokenizer, "codebook", "all", prompts, limits, progress)
    return points_table(point_rows(found))


def points_table(rows: list[dict[str, Any]]) -> str:
    """XFP's table 10."""
    head = ["strict", "lazy", "steady", "reserve", "peak", "bits", "KL, nats", "texts that repeat", ""]
    return table(head, [point_cells(row) for row in rows])


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
    return DEFAULT_OPTIONS.cap + (bits_high - bits_low) / (8 * outlier)


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
        for bits, options in ((4, DEFAULT_OPTIONS), (3, DEFAULT_OPTIONS), (3, CodebookOptions(sigma=1.0, cap=share))):
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
        cosines.append(match_of(whole, made).cosine())
    found = {"effective_bits": 8 * size / counted, "squared_error": off / square}
    return {"format": format.name, "bits": bits} | found | {"cosine": float(np.median(cosines))}


def measure_tables(name: str | None) -> dict[str, Any]:
    model, _ = load(name) if name else load()
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    layers, _ = discover(model, format=Codebook())
    for layer in layers:
        parts[f"{component_kind(layer.path, layer.module)} {layer.path.split('.')[-1]}"].append(
            measured(layer.module.weight)
        )
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


# The H-Process on a mixture of experts

CUT, PARTS_OF_AN_MLP = "smollm2", 4
STRICT = 0.995  # held, as XFP holds 0.96: in this model 0.98 gives garbage by itself
LAZY_GRID = (0.80, 0.92, 0.96, 0.98, 0.99, 0.995)


def as_mixture(model: Any, parts: int = PARTS_OF_AN_MLP) -> Any:
    """A Llama's weights as a mixture of experts, which computes the same: a part of each MLP is an expert.

    The router has zeros, and every token goes through all experts; each has an equal share, which `down_proj` makes up
    for. So the experts are real weights, and need no training.
    """
    args = vars(model.args)
    names = inspect.signature(mixtral.ModelArgs).parameters
    width = args["intermediate_size"] // parts
    given = {name: args[name] for name in names if args.get(name) is not None}
    given |= {"intermediate_size": width, "num_local_experts": parts, "num_experts_per_tok": parts}
    made = mixtral.Model(mixtral.ModelArgs(**given | {"model_type": "mixtral"}))
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        layer, _, projection = name.partition(".mlp.")
        if not projection:
            weights[name] = array
            continue
        cut = mx.stack(array.split(parts, axis=-1 if projection.startswith("down") else 0))
        weights[f"{layer}.block_sparse_moe.switch_mlp.{projection}"] = cut * parts if "down" in projection else cut
    for i in range(len(model.layers)):
        gate = mx.zeros((parts, args["hidden_size"]), model.layers[i].input_layernorm.weight.dtype)
        weights[f"model.layers.{i}.block_sparse_moe.gate.weight"] = gate
    made.load_weights(list(weights.items()))
    return made


def needed(row: dict[str, Any]) -> float:
    """Bytes that a point needs at its peak, as in `OperatingPoint`."""
    return max(row["spike"], row["steady"] + row["reserve"])


def bounded(rows: list[dict[str, Any]], budget: float) -> list[dict[str, Any]]:
    """The points that the H-Process tries under a budget: the first that needs more ends it, and is not judged."""
    over = next((i for i, row in enumerate(rows) if needed(row) > budget), None)
    if over is None:
        return rows
    return [*rows[:over], rows[over] | {"kl": None, "looped": None, "outcome": OVER}]


def has_experts(model: Any) -> bool:
    return any(isinstance(module, SwitchLinear) for module in model.modules())


def mixture_points(name: str, strict: float, grid: Iterable[float]) -> list[dict[str, Any]]:
    """Points of a mixture of experts, all judged: the strict floor is held, the lazy one goes up."""
    original, tokenizer = load(name)
    if has_experts(original):
        original.set_dtype(mx.float32)  # the only type in which MLX multiplies experts on a CPU
    mixture = original if has_experts(original) else as_mixture(original)
    starts = [tokenizer.encode(prompt) for prompt in (SHORT_PROMPTS + TRIVIAL + HARD)[:H_PROMPTS]]
    ends = tokenizer.eos_token_ids
    texts = [start + continuation(original, start, 48, ends) for start in starts]
    del original
    fast_gearbox(mixture, Codebook(), "all")  # from here on the mixture computes in its type
    limits = Limits(reserve=measure_reserve(mixture).bytes)
    with progress_bar() as progress:
        task = progress.add_task("judging and trying", total=None)

        def advance(_: object) -> None:
            progress.advance(task)

        floors = [(strict, lazy) for lazy in grid]
        return point_rows(
            fit_budget(mixture, texts, Codebook(), "all", limits, ends, KL_BOUND, advance, advance, floors)
        )


@study("research/tables.md", minutes=10)
def h_process(
    model: str = CUT,
    megabytes: float | None = None,
    strict: float = STRICT,
    lazy: list[float] = [*LAZY_GRID],  # noqa: B006 - nothing changes it
    redraw: Path | None = None,
) -> Found:
    """The H-Process on a mixture of experts, with both of its boundaries: garbage and memory (XFP's table 10).

    All points are judged; the table ends where the budget does.

    Args:
        model: A mixture of experts, or a Llama, which becomes one by cutting its MLPs into experts.
        megabytes: The budget; if not given, between what the last two points need.
        strict: Floor of all layers but the routed experts.
        lazy: Floors of the experts, ascending.
        redraw: Measure nothing; take the points of this file, which --json wrote.
    """
    rows = read_report(redraw)["rows"] if redraw else mixture_points(model, strict, lazy)
    budget = 1e6 * megabytes if megabytes else sum(map(needed, rows[-2:])) / len(rows[-2:])
    words = f"A budget of {budget / 1e6:.3g} MB.\n\n"
    name = "mixture" if model == CUT else "trained"
    return Found({f"points_{name}": words + points_table(bounded(rows, budget))}, rows)


# A codebook per row, or per group of a row (XFP's abstract and 6.3)

CODEBOOK_GROUP, GROUPED_BITS, MOST_MATRICES = 128, (2, 3, 4), 8


def grouped_error(weight: mx.array, bits: int) -> tuple[float, float]:
    """Effective bits and squared error of a codebook of its own for each 128 weights of a row.

    The offsets of a group's outliers are not counted: they need not be stored for each group.
    """
    groups = weight.reshape(-1, CODEBOOK_GROUP)
    arrays = codebook.encode(groups, bits)
    made = codebook.decode(arrays, bits, CODEBOOK_GROUP).reshape(weight.shape)
    size = nbytes(arrays) - arrays["outlier_offsets"].nbytes
    return 8 * size / weight.size, squared_error(made, weight)


def row_curve(weight: mx.array) -> dict[float, float]:
    """Effective bits to squared error of a codebook per row."""
    curve = {}
    for bits in codebook.WORD_CODES:
        arrays = codebook.encode(weight, bits)
        curve[8 * nbytes(arrays) / weight.size] = squared_error(codebook.decode(arrays, bits, weight.shape[1]), weight)
    return curve


def wide_matrices(name: str | None) -> list[mx.array]:
    """Matrices of a model whose rows have several groups, at most 2^21 weights of each."""
    layers, _ = discover(load(name)[0] if name else load()[0], format=Codebook())
    weights = [layer.module.weight for layer in layers]
    weights = [each for each in weights if each.shape[-1] > CODEBOOK_GROUP and each.shape[-1] % CODEBOOK_GROUP == 0]
    some = [weights[i].astype(mx.float32) for i in evenly(len(weights))]
    return [weight[: 2**21 // weight.shape[1]] for weight in some]


@study("research/tables.md", minutes=5)
def codebook_groups(models: list[str] = ["smollm2"]) -> Found:  # noqa: B006
    """Codebooks of groups of 128 weights beside codebooks of rows (V2), at equal effective bits.

    Args:
        models: Beside the one that ships, and random matrices: directories or Hub repositories of originals.
    """
    of_model = {model_name(name): wide_matrices(name) for name in (None, *models)}
    drawn = {name: [mx.array((values * 0.02).astype(np.float32))] for name, values in random_matrices(256).items()}
    rows = []
    for name, weights in (of_model | drawn).items():
        curves = [row_curve(weight) for weight in weights]
        for bits in GROUPED_BITS:
            found = [grouped_error(weight, bits) for weight in weights]
            errors = [error / at(curve, size) for (size, error), curve in zip(found, curves)]
            size = float(np.mean([each for each, _ in found]))
            rows.append([name, len(weights), bits, f"{size:.2f}", spread(errors)])
    head = ["weights", "matrices", "bits", "effective bits of groups", "squared error over that of rows at equal bits"]
    return Found({"codebook_groups": table(head, rows)}, rows)


def evenly(count: int) -> list[int]:
    """MOST_MATRICES items of a list at most, spread evenly."""
    return sorted({round(i * (count - 1) / (MOST_MATRICES - 1)) for i in range(MOST_MATRICES)})


# Activations of 8 bits

BYTES_SIZE, BYTES_COPIES = 2048, 24  # of a matrix, and as many as do not fit a cache


def bytes_call(library: Any, arrays: dict[str, mx.array], x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    """The product of x (V, I) with a matrix of 4-bit codes, into y (V, O), by codebook_bytes.cpp."""
    names = ("weight", "codebook", "outlier_offsets", "outliers", "outlier_columns")
    given = [np.array(arrays[n].view(mx.uint16) if arrays[n].dtype == mx.float16 else arrays[n]) for n in names]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*given, x, y)]
    sizes = [ctypes.c_int64(size) for size in (*x.shape, y.shape[1])]

    def call(kept: object = given) -> None:
        library.codebook_bytes(*pointers[:6], *sizes, pointers[6])

    return call


def bytes_row(library: Any, matrices: list[dict[str, mx.array]], vectors: int, trials: int) -> list[object]:
    """Vectors, time of floats over time of bytes, and how far bytes are from floats."""
    native, x = native_kernels(), mx.random.normal((vectors, BYTES_SIZE))
    given, y = np.array(x), np.zeros((vectors, BYTES_SIZE), np.float32)
    calls = [bytes_call(library, arrays, given, y) for arrays in matrices]
    wanted: list[mx.array] = []

    def by_floats() -> None:
        wanted[:] = [native.codebook_matvec(x, **arrays, bits=4) for arrays in matrices]
        mx.eval(wanted)

    def by_bytes() -> None:
        for call in calls:
            call()

    floats, quick = in_turn({"floats": by_floats, "bytes": by_bytes}, trials).values()
    last = np.array(wanted[-1])
    error = np.sqrt(np.mean((y - last) ** 2) / np.mean(last**2))
    return [vectors, spread(ratios(floats, quick), quartiles=True), f"{error:.2%}"]


@study("research/tables.md", minutes=1)
def codebook_bytes(trials: int = 15) -> Found:
    """What activations of 8 bits would gain for codebooks of 4 bits: entries of int8, beside the kernel of floats.

    One thread: GEARBX_THREADS=1.
    """
    native_kernels()
    weight = mx.random.normal((BYTES_SIZE, BYTES_SIZE), key=mx.random.key(0))
    base = codebook.encode(weight, 4)
    matrices = [{name: mx.array(np.array(array)) for name, array in base.items()} for _ in range(BYTES_COPIES)]
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder), Path(__file__).with_name("codebook_bytes.cpp"))
        rows = [bytes_row(library, matrices, count, trials) for count in (1, 4, 8)]
    return Found({"bytes": table_here(["vectors", "times as fast", "difference, of the result's size"], rows)}, rows)


EXPERTS, CHOSEN, OUTPUTS, INPUTS = 64, 4, 1024, 512
CASES = [("codebook", 2), ("codebook", 4), ("codebook", 6), ("codebook-library", 4)]
TOKEN_COUNTS = (1, 4, 16)


def next_product(module: SwitchLinear, x: mx.array, chosen: Iterator[mx.array]) -> None:
    mx.eval(module(x, next(chosen)))


def expert_ratios(format: str, bits: int, trials: int) -> list[list[float]]:
    """Seconds of the reconstruction over those of the kernel, for each number of tokens."""
    dense = SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=False)
    made: Any = get_format(format)
    arrays = made.encode(dense.weight, bits)
    bases = {"reconstruction": dense, "kernel": with_kernels(dense, native=True)}
    modules = {name: made.module(base, bits, arrays, (bits,), 64) for name, base in bases.items()}
    found = []
    for tokens in TOKEN_COUNTS:
        x = mx.random.normal((tokens, 1, 1, INPUTS))
        chosen = [mx.argsort(mx.random.uniform(shape=(tokens, EXPERTS)))[:, :CHOSEN] for _ in range(trials + 1)]
        mx.eval(x, chosen)
        works = {name: partial(next_product, module, x, iter(chosen)) for name, module in modules.items()}
        found.append(ratios(*in_turn(works, trials).values()))
    return found


@study("docs/codebook.md", "research/tables.md", minutes=10)
def codebook_formats(
    what: list[Literal["error", "kl", "points"]] = [],  # noqa: B006 - nothing changes it
    rows: int = 1024,
    model: str = "smollm2",
    problems: int = 16,
    target_bpw: float = 6.0,
) -> Found:
    """Error, KL and points of a budget of the codebook formats.

    Errors are compared with MLX's affine quantization at the same effective bits: with a curve through its widths and
    group sizes, on which the logarithm of the error is interpolated.

    Args:
        what: error (4096-wide matrices, Gaussian and Student t), kl (a model on held-out problems of GSM8K), points
            (the H-Process on the demo model: XFP's table 10); all if not given.
        rows: For error: rows of the matrices.
        model: For kl.
        problems: For kl.
        target_bpw: For points.
    """
    measures: dict[str, Callable[[], str]] = {
        "error": lambda: measure_error(rows),
        "kl": lambda: measure_kl(model, problems),
        "points": lambda: measure_points(target_bpw),
    }
    return Found({name: measures[name]() for name in what or measures})


@study("research/tables.md", minutes=5)
def codebook_tables(model: str | None = None) -> Found:
    """XFP's tables of weights on a model: A.1, B.1 and the break-even of 7.2.

    Args:
        model: A directory; the model that ships if not given.
    """
    found = measure_tables(model)
    return Found(tables(found), found)


@study("research/tables.md", minutes=1)
def codebook_experts(trials: int = 15) -> Found:
    """Mixtures of experts over codebooks: the native CPU kernel against reconstructing the experts in use."""
    native_kernels()
    lines = [
        [f"{name}, {bits} bits", *(spread(each, 1, quartiles=True) for each in expert_ratios(name, bits, trials))]
        for name, bits in CASES
    ]
    heads = [f"{tokens} token{'s' * (tokens > 1)}" for tokens in TOKEN_COUNTS]
    return Found({"experts": table_here(["times as fast as reconstructing", *heads], lines)})
