"""Codebook formats: error, KL, and results of a budget, for docs/codebook.md."""

import inspect
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import mixtral
from mlx_lm.models.switch_layers import SwitchLinear
from pages import table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.bit_selection.codebook_selection import match_of
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
)
from gearbx_mlx.cli.prompt import HARD, TRIVIAL
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.decoding.route import SHORT_PROMPTS
from gearbx_mlx.formats import codebook, codebook_library
from gearbx_mlx.formats.base import Format
from gearbx_mlx.formats.codebook import Codebook, Outliers, nbytes

from .studies import HELD_OUT, Found, read_report, study

FORMATS = {  # module, bits, ladder, and the format, which keeps reconstructed weights
    "codebook": (codebook, (2, 3, 4, 5, 6), "2,3,4,5,6,16", codebook.Codebook(cache=True)),
    "codebook-library": (codebook_library, (2, 3, 4), "2,3,4,16", codebook_library.CodebookLibrary(cache=True)),
}
AFFINE_BITS, GROUP_SIZES = (2, 3, 4, 5, 6), (32, 64, 128)
WIDTH = 4096
H_PROMPTS = 8  # calibration texts of the H-Process on a mixture


def at(curve: dict[float, float], bits: float) -> float:
    """Return the value of the curve at these effective bits, the logarithm interpolated."""
    points = sorted(curve)
    return float(np.exp(np.interp(bits, points, np.log([curve[p] for p in points]))))


def below(value: float, curve: dict[float, float], bits: float) -> str:
    return f"{1 - value / at(curve, bits):.0%}"


def number(value: mx.array) -> float:
    return float(np.array(value))


def squared_error(made: mx.array, weight: mx.array) -> float:
    """Return the sum of squared errors over the sum of squared weights."""
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
    """Return rows of WIDTH numbers without outliers, and with heavy tails."""
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
    return points_table([point.row for point in found.tried])


def points_table(rows: list[dict[str, Any]]) -> str:
    """XFP's table 10."""
    head = ["strict", "lazy", "steady", "reserve", "peak", "bits", "KL, nats", "texts that repeat", ""]
    return table(head, [point_cells(row) for row in rows])


@study("docs/codebook.md", "research/tables.md", minutes=10)
def codebook_formats(
    what: list[Literal["error", "kl", "points"]] = [],  # noqa: B006 - nothing changes it
    rows: int = 1024,
    model: str = "smollm2",
    problems: int = 16,
    target_bpw: float = 6.0,
) -> Found:
    """Measure error, KL and results of a budget for the codebook formats.

    Errors are compared with MLX's affine quantization at the same effective bits: the logarithm of its error is
    interpolated over its widths and group sizes.

    Args:
        what: error (4096-wide matrices, Gaussian and Student t), kl (a model on held-out problems of GSM8K), points
            (the H-Process on the demo model: XFP's table 10); all if omitted.
        rows: For error: rows of the matrices.
        model: Model for kl.
        problems: Problems for kl.
        target_bpw: Bits per weight for points.
    """
    measures: dict[str, Callable[[], str]] = {
        "error": lambda: measure_error(rows),
        "kl": lambda: measure_kl(model, problems),
        "points": lambda: measure_points(target_bpw),
    }
    return Found({name: measures[name]() for name in what or measures})


# The H-Process on a mixture of experts

CUT, PARTS_OF_AN_MLP = "smollm2", 4
STRICT = 0.995  # held, as XFP holds 0.96: in this model 0.98 gives garbage by itself
LAZY_GRID = (0.80, 0.92, 0.96, 0.98, 0.99, 0.995)


def as_mixture(model: Any, parts: int = PARTS_OF_AN_MLP) -> Any:
    """Return a Llama's weights as a mixture of experts, which computes the same: a part of each MLP is an expert.

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
    """Return bytes that a point needs at its peak, as in `OperatingPoint`."""
    return max(row["spike"], row["steady"] + row["reserve"])


def bounded(rows: list[dict[str, Any]], budget: float) -> list[dict[str, Any]]:
    """Return the points that the H-Process tries under a budget; the first one beyond it ends the list, unchecked."""
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
        found = fit_budget(mixture, texts, Codebook(), "all", limits, ends, KL_BOUND, advance, advance, floors)
        return [point.row for point in found.tried]


@study("research/tables.md", minutes=10)
def h_process(
    model: str = CUT,
    megabytes: float | None = None,
    strict: float = STRICT,
    lazy: list[float] = [*LAZY_GRID],  # noqa: B006 - nothing changes it
    redraw: Path | None = None,
) -> Found:
    """Run the H-Process on a mixture of experts, up to both of its limits: garbage and memory (XFP's table 10).

    All points are checked; the table ends at the budget.

    Args:
        model: Mixture of experts, or a Llama whose MLPs are split into experts.
        megabytes: Budget; if omitted, between the memory of the last two points.
        strict: Floor of all layers except routed experts.
        lazy: Floors of the experts, ascending.
        redraw: Use the points of this file from --json; measure nothing.
    """
    rows = read_report(redraw)["rows"] if redraw else mixture_points(model, strict, lazy)
    budget = 1e6 * megabytes if megabytes else sum(map(needed, rows[-2:])) / len(rows[-2:])
    words = f"A budget of {budget / 1e6:.3g} MB.\n\n"
    name = "mixture" if model == CUT else "trained"
    return Found({f"points_{name}": words + points_table(bounded(rows, budget))}, rows)
