"""Measure where low gears err (GEARBX 13): weights, attention, keys and values, weights that are quantized twice.

    python scripts/measure_errors.py errors.json [--model MODEL] [--texts 1]
    python scripts/measure_errors.py errors.json --page docs/error_analysis.md --picture docs/images/error_analysis.png

The first line measures and writes the file; the second makes tables and picture from the file that is there.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
from pages import fill, table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.evaluation.error_analysis.attention import PARTS, attention_errors
from gearbx_mlx.evaluation.error_analysis.kv import kv_errors
from gearbx_mlx.evaluation.error_analysis.weights import BITS, IDEAL, layer_errors, twice_in_all_ways
from gearbx_mlx.evaluation.text import read_documents
from gearbx_mlx.files.writing import replacing
from gearbx_mlx.telemetry.report import get_pyplot
from gearbx_mlx.telemetry.trace import gear_color, gear_marker

TALES = Path(__file__).with_name("tales_calibrate.txt")
CONTEXT = 256  # tokens of each text: all models know so many
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
Report = dict[str, list[dict[str, Any]]]


def measured(path: str | None, count: int) -> Report:
    """All figures of a model, in float32."""
    model, tokenizer = load(path)
    model.set_dtype(mx.float32)
    tokens = tokenizer.encode(read_documents(TALES)[0])
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
        by_part = {row["part"]: row for row in found}
        cells = [f"{by_part[part]['error']:.4f} ({by_part[part]['shared']:.4f})" for part in PARTS]
        rows.append([f"{low:g} to {high:g}", by_part["V"]["samples"], *cells])
    return table(["entropy, of the largest", "samples", *PARTS], rows)


def bin_of(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["low"], row["high"]


def kv_table(report: Report) -> str:
    rows = [
        [length, row["gear"], f"{row['keys']:.5f}", f"{row['values']:.5f}", f"{row['kl']:.4f}"]
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
    with replacing(path) as beside:
        figure.savefig(beside, dpi=120, format="png")
    pyplot.close(figure)


def gears_of(report: Report) -> list[str]:
    return list(dict.fromkeys(row["gear"] for row in report["kv_turns"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the file of figures")
    parser.add_argument("--model", help="the demo model if not given")
    parser.add_argument("--texts", type=int, default=1, help="of 256 tokens")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if args.page is None and args.picture is None:
        with replacing(args.results) as beside:
            beside.write_text(json.dumps(measured(args.model, args.texts), indent=1) + "\n", encoding="utf-8")
    report = json.loads(args.results.read_text(encoding="utf-8"))
    for name, made in TABLES.items():
        print(f"{name}\n{made(report)}")
    if args.page:
        fill(args.page, {name: lambda *_, made=made: made(report) for name, made in TABLES.items()})
    if args.picture:
        draw(report, args.picture)


if __name__ == "__main__":
    main()
