"""Errors of low gears (GEARBX 13): weights, attention, keys and values, and weights that are quantized twice."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from pages import table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.decoding.rows import linear_layers
from gearbx_mlx.evaluation.predictions import kl_divergence, next_logprobs, read_documents
from gearbx_mlx.formats import rowwise
from gearbx_mlx.gears.ladder import Gear
from gearbx_mlx.gears.sources import looks_quantized
from gearbx_mlx.telemetry.trace import gear_color, gear_marker, get_pyplot, save

from .attention import PARTS, Quantizer, attention_errors
from .studies import OTHER_TALES, Found, read_report, study

BITS = (8, 6, 4, 2)
IDEAL = {bits: (rowwise.Q_MAX[8] / rowwise.Q_MAX[bits]) ** 2 for bits in BITS}  # s^2 over that of 8 bits (13.1)
GROUP = 64


def mean(values: mx.array) -> float:
    return float(np.array(values.mean()))


def mean_square(values: mx.array) -> float:
    return mean(mx.square(values.astype(mx.float32)))


def by_rows(bits: int) -> Quantizer:
    """Quantizes and dequantizes (O, I), with one scale a row (GEARBX 5.1)."""
    return lambda weight: rowwise.dequantize(*rowwise.quantize(weight, bits))


def by_groups(bits: int) -> Quantizer:
    """Quantizes and dequantizes (O, I), as MLX does with groups of 64."""
    return lambda weight: mx.dequantize(*mx.quantize(weight, GROUP, bits), GROUP, bits)


def error_of(weight: mx.array, bits: int) -> tuple[float, float]:
    """Return the MSE of a matrix (O, I) in per-row symmetric codes, and its estimate, the row mean of s^2 / 12."""
    codes, scales = rowwise.quantize(weight, bits)
    error = rowwise.dequantize(codes, scales) - weight.astype(mx.float32)
    return mean_square(error), mean_square(scales) / 12


def layer_errors(model: nn.Module) -> list[dict[str, Any]]:
    """Return the errors of a model's blocks, matrices weighted by their sizes.

    Returns:
        a row for each block and number of bits: `layer`, `bits`, `mse`, `estimate` (mean s^2 / 12), their `quotient`,
        and `ratio` (the MSE over that of 8 bits).
    """
    rows = []
    for number, block in enumerate(model.layers):
        weights = [layer.weight for layer in linear_layers(block)]
        sizes = [weight.size for weight in weights]
        means = {}
        for each in BITS:
            found = [error_of(weight, each) for weight in weights]
            means[each] = np.average(found, axis=0, weights=sizes).tolist()
        for each in BITS:
            mse, estimate = means[each]
            found_row = {"layer": number, "bits": each, "mse": mse, "estimate": estimate}
            rows.append(found_row | {"quotient": mse / estimate, "ratio": mse / means[8][0]})
    return rows


def twice(weight: mx.array, first: Quantizer, second: Quantizer) -> dict[str, float]:
    """Return the parts of the error of a matrix (O, I) that is quantized, widened, and quantized again (GEARBX 13.3).

    Returns:
        mean squares: `total` = `original` (the first error) + `second` (of the widened matrix) + `cross` (twice the
        mean product of both errors); `once`: the error of `second` on the matrix itself.
    """
    exact = weight.astype(mx.float32)
    widened = first(exact)
    errors = widened - exact, second(widened) - widened
    return {
        "original": mean_square(errors[0]),
        "second": mean_square(errors[1]),
        "cross": 2 * mean(errors[0] * errors[1]),
        "total": mean_square(errors[0] + errors[1]),
        "once": mean_square(second(exact) - exact),
    }


WAYS: Mapping[str, Quantizer] = {
    "8 bits, rows": by_rows(8),
    "8 bits, groups of 64": by_groups(8),
    "4 bits, groups of 64": by_groups(4),
    "4 bits, rows": by_rows(4),
}


def twice_in_all_ways(model: nn.Module) -> list[dict[str, Any]]:
    """`twice` for each pair of ways, as means over the matrices of a model's blocks.

    Returns:
        rows that have `first` and `then`, the names, and `flagged`: whether the widened matrices look quantized to
        `looks_quantized`.
    """
    weights = [layer.weight.astype(mx.float32) for block in model.layers for layer in linear_layers(block)]
    total = sum(weight.size for weight in weights)
    rows = []
    for first, widen in WAYS.items():
        flagged = looks_quantized([widen(weight).astype(mx.float16) for weight in weights])
        for then, quantizer in WAYS.items():
            found = [twice(weight, widen, quantizer) for weight in weights]
            means = {k: sum(f[k] * w.size for f, w in zip(found, weights)) / total for k in found[0]}
            rows.append({"first": first, "then": then, "flagged": flagged} | means)
    return rows


BIT = np.log(2.0)  # nats


def runs_of(gears: Sequence[Gear], tokens: int, length: int) -> list[tuple[int, int, Gear]]:
    """Runs of `length` tokens, each in the next of some gears in turn: first token, end, gear."""
    edges = [*range(0, tokens, length), tokens]
    return [(begin, end, gears[i % len(gears)]) for i, (begin, end) in enumerate(pairwise(edges))]


def written(gearbox: Gearbox, tokens: Sequence[int], runs: Sequence[tuple[int, int, Gear]]) -> tuple[Any, np.ndarray]:
    """Return the caches and the log-probabilities (S, V) of a text whose runs are each read in their own gear."""
    cache = make_prompt_cache(gearbox.model)
    found = []
    for begin, end, gear in runs:
        gearbox.shift(gear)
        found.append(next_logprobs(gearbox.model, tokens[begin:end], cache))
    return cache, np.concatenate(found)


def entries(caches: Any) -> tuple[list[mx.array], list[mx.array]]:
    """Keys and values of each layer that keeps those of the whole text, (1, H, S, D) in float32."""
    kept = [c for c in flat(caches) if getattr(c, "keys", None) is not None]
    kept = [c for c in kept if c.offset <= (getattr(c, "max_size", None) or c.offset)]
    keys, values = ([c.state[i][..., : c.offset, :].astype(mx.float32) for c in kept] for i in (0, 1))
    return keys, values


def flat(caches: Any) -> list[Any]:
    """Return the caches, also those within lists of caches."""
    return [each for cache in caches for each in (flat(cache.caches) if hasattr(cache, "caches") else [cache])]


def by_position(layers: Sequence[mx.array]) -> np.ndarray:
    """Return the sum of squares of each position (S,), over layers (1, H, S, D)."""
    return np.sum([np.array(mx.square(each).sum(axis=(0, 1, 3))) for each in layers], axis=0)


def squares(caches: Any, exact: Any) -> np.ndarray:
    """(4, S): squared errors of the keys and of the values of each position, and the squares of the exact ones."""
    pairs = list(zip(entries(caches), entries(exact)))
    errors = [by_position([a - b for a, b in zip(made, true)]) for made, true in pairs]
    return np.stack([*errors, *(by_position(true) for _, true in pairs)])


def kv_errors(
    gearbox: Gearbox, texts: Sequence[Sequence[int]], gears: Sequence[Gear], lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """Read texts in gears that take turns, for several lengths of their runs, and compare with the top gear alone.

    Args:
        texts: tokens. gears: those that take turns. lengths: tokens of a run; each shift begins a run.

    Returns:
        a row for each length and gear: `length`, `gear`, `positions` that the gear wrote, `keys` and `values` (squared
        error over squared size of these positions' entries), and `kl` (mean, bits, of all predictions of this length).
    """
    top = gearbox.ladder[-1]
    exact = [written(gearbox, text, [(0, len(text), top)]) for text in texts]
    rows = []
    for length in lengths:
        found = [np.zeros((len(gears), 4)), np.zeros(len(gears), int)]
        kl = []
        for text, (cache, logprobs) in zip(texts, exact):
            runs = runs_of(gears, len(text), length)
            made, changed = written(gearbox, text, runs)
            kl.append(kl_divergence(logprobs, changed) / BIT)
            columns = squares(made, cache)
            for i, (begin, end, _) in enumerate(runs):
                found[0][i % len(gears)] += columns[:, begin:end].sum(axis=1)
                found[1][i % len(gears)] += end - begin
        for gear, sums, count in zip(gears, *found):
            row: dict[str, Any] = {"length": length, "gear": gear.name, "positions": int(count)}
            errors = {"keys": float(sums[0] / sums[2]), "values": float(sums[1] / sums[3])} if sums[2:].all() else {}
            rows.append(row | errors | {"kl": float(np.concatenate(kl).mean())})
    return rows


CONTEXT = 256  # tokens of each text: every model takes so many
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
Report = dict[str, list[dict[str, Any]]]


def measured(path: str | None, count: int) -> Report:
    """Return all figures of a model, in float32."""
    model, tokenizer = load(path)
    model.set_dtype(mx.float32)
    tokens = tokenizer.encode(read_documents(OTHER_TALES)[0])
    texts = [tokens[i * CONTEXT : (i + 1) * CONTEXT] for i in range(min(count, len(tokens) // CONTEXT))]
    report = {"layers": layer_errors(model), "twice": twice_in_all_ways(model)}
    report["attention"] = attention_errors(model, texts)
    gearbox = Gearbox(model, "4,8,16")
    low, middle, top = gearbox.ladder
    alone = [row for gear in (low, middle) for row in kv_errors(gearbox, texts, [gear], [CONTEXT])]
    return report | {"kv_alone": alone, "kv_turns": kv_errors(gearbox, texts, [low, top], LENGTHS)}


def layers_table(report: Report) -> str:
    rows = [
        [layer, *(f"{row['quotient']:.2f} ({row['ratio']:.4g}x)" for row in rows)]
        for layer, rows in groupby(report["layers"], lambda row: row["layer"])
    ]
    head = ["layer", *(f"{bits} bits" for bits in BITS)]
    return table(head, [*rows, ["in theory", *(f"1 ({IDEAL[bits]:.4g}x)" for bits in BITS)]])


def attention_table(report: Report) -> str:
    rows = []
    samples = [row for row in report["attention"] if row["samples"]]
    for (low, high), found in groupby(sorted(samples, key=bin_of), bin_of):
        parts = {row["part"]: row for row in found}
        cells = [f"{parts[part]['error']:.4f} ({parts[part]['shared']:.4f})" if part in parts else "" for part in PARTS]
        rows.append([f"{low:g} to {high:g}", parts["V"]["samples"], *cells])
    return table(["entropy over its maximum", "samples", *PARTS], rows)


def bin_of(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["low"], row["high"]


def kv_table(report: Report) -> str:
    rows = [
        [
            length,
            row["gear"],
            *(f"{row[name]:.5f}" if name in row else "" for name in ("keys", "values")),
            f"{row['kl']:.4f}",
        ]
        for name in ("kv_alone", "kv_turns")
        for row in report[name]
        for length in ["all" if name == "kv_alone" else row["length"]]
    ]
    return table(["tokens of a run", "gear", "keys", "values", "KL, bits"], rows)


def twice_table(report: Report) -> str:
    rows = [
        [
            row["first"],
            row["then"],
            *(f"{row[name] / row['once']:.3f}" for name in ("original", "second", "cross", "total")),
            "yes" if row["flagged"] else "no",
        ]
        for row in report["twice"]
    ]
    return table(["first", "then", "first error", "second error", "cross term", "total", "flagged"], rows)


TABLES: dict[str, Callable[[Report], str]] = {
    "layer_errors": layers_table,
    "attention_errors": attention_table,
    "kv_errors": kv_table,
    "twice": twice_table,
}


def draw(report: Report, path: Path) -> None:
    """Error of attention by its entropy, and of keys and values by the length of runs."""
    pyplot = get_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for place, part in enumerate(PARTS):
        rows = [row for row in report["attention"] if row["part"] == part and row["samples"]]
        style = {"color": gear_color(place, len(PARTS)), "marker": gear_marker(place), "label": part}
        left.plot([(row["low"] + row["high"]) / 2 for row in rows], [row["error"] for row in rows], **style)
    left.set(xlabel="entropy of attention, of the largest possible", ylabel="squared error / squared output")
    left.set(title="4 bits in one projection", yscale="log", xlim=(0, 1))
    pairs = [(gear, name) for gear in gears_of(report) for name in ("keys", "values")]
    for place, (gear, name) in enumerate(pairs):
        rows = [row for row in report["kv_turns"] if row["gear"] == gear]
        style = {"color": gear_color(place // 2, 2), "marker": gear_marker(place), "label": f"{name}, {gear}"}
        line = "-" if name == "keys" else "--"
        right.plot([row["length"] for row in rows], [row[name] for row in rows], linestyle=line, **style)
    right.set(xlabel="tokens of a run", ylabel="squared error / squared entries", title="two gears take turns")
    right.set(yscale="log")
    right.set_xscale("log", base=2)
    right.set_xticks(LENGTHS, map(str, LENGTHS))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, dpi=120)


def gears_of(report: Report) -> list[str]:
    return list(dict.fromkeys(row["gear"] for row in report["kv_turns"]))


@study("docs/error_analysis.md", writes="images/error_analysis.png", minutes=3)
def errors(model: str | None = None, texts: int = 1, redraw: Path | None = None) -> Found:
    """Measure errors of low gears (GEARBX 13): weights, attention, keys and values, double quantization.

    Args:
        model: Directory or Hub repository; the bundled model if omitted.
        texts: Number of windows of 256 tokens.
        redraw: Use the figures of this file from --json; measure nothing.
    """
    report = read_report(redraw) if redraw else measured(model, texts)
    tables = {name: made(report) for name, made in TABLES.items()}
    return Found(tables, report, {"error_analysis.png": partial(draw, report)})
