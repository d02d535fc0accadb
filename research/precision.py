"""Quality of a manifest's tables, for docs/sensitivity.md."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.quant.dynamic_quant import estimate_threshold
from pages import table

from gearbx_mlx import load
from gearbx_mlx.bit_selection.precision import read_precision
from gearbx_mlx.bit_selection.sensitivity import CALIBRATION, ExactSensitivity, first_order
from gearbx_mlx.cli.flags import CalibrationTextSettings
from gearbx_mlx.evaluation.predictions import read_documents, windows_of
from gearbx_mlx.formats.planes import Affine
from gearbx_mlx.gears.discovery import discover
from gearbx_mlx.gears.gearbox import Gearbox

from .studies import HELD_OUT, Found, named, read_report, run_python, study

TEXT = CalibrationTextSettings()
PAIRS = {4.5: ((4, 5), (3, 5), (3, 6)), 5.5: ((5, 6), (4, 6), (4, 8))}


def dynamic_table(model, sensitivities, target, low, high):
    """Path to bits, as mlx_lm.dynamic_quant chooses them."""
    threshold = estimate_threshold(model, sensitivities, target, low, 64, high, 64)
    return {path: high if value > threshold else low for path, value in sensitivities.items()}


@dataclass(frozen=True)
class Subject:
    """A model, the directory for what is measured, the held-out text, and how much of both texts is read."""

    results: Path
    model: str | None
    held_out: Path
    samples: int
    length: int
    tokens: int

    def opened(self):
        """Return the manifest, the model, and windows of the calibration text and of the held-out text."""
        model, tokenizer = load(self.model)
        read, most = read_documents(CALIBRATION)[: self.samples], self.samples * self.length
        texts = {
            "calibration": windows_of(tokenizer, read, self.length, most, ""),
            "held_out": windows_of(tokenizer, read_documents(self.held_out), self.length, self.tokens, ""),
        }
        return read_precision(self.results / "manifest.json"), model, texts

    def command(self, name, *flags):
        """Run a command of the package on the model and the calibration text."""
        text = ["--num-samples", self.samples, "--sequence-length", self.length]
        named = [] if self.model is None else ["--model", self.model]
        run_python("-m", f"gearbx_mlx.{name}", *named, *text, *flags)


def dynamic_tables(results, model, calibration):
    """Return the tables of mlx-lm's dynamic quantization, by target, low and high width."""
    tables = {}
    for target, pairs in PAIRS.items():
        for low, high in pairs:
            file = results / f"sensitivities_{low}_{high}.json"
            if not file.exists():
                file.write_text(json.dumps(list(first_order(model, calibration, low, high, 64).items())))
            tables[target, low, high] = dynamic_table(model, dict(json.loads(file.read_text())), target, low, high)
    return tables


def measured_tables(model, texts, tables):
    """Return a row for each table.

    Args:
        tables: (name, target) to the bits of each path, or to one number of bits for all layers.
    """
    gearbox = Gearbox(model, "3,4,5,6,8,16", format="affine", kernels="auto", activations="float")
    exact = {name: ExactSensitivity(gearbox, windows) for name, windows in texts.items()}
    weights = sum(layer.module.weight.size for layer in gearbox.layers)
    rows = []
    for (name, target), chosen in tables.items():
        bits = {e.path: chosen if isinstance(chosen, int) else chosen[e.path] for e in gearbox.layers}
        read = sum(gearbox.layer_bytes(e, gearbox.ladder.find(bits[e.path])) for e in gearbox.layers)
        found = {"name": name, "target": target, "bits_per_weight": 8 * read / weights}
        rows.append(found | {text: vars(there.measure_caps(bits)) for text, there in exact.items()})
    return rows


def measure(subject):
    """Return the content of allocation.json: tables at the same bits per weight, compared with their uniform gear."""
    manifest, model, texts = subject.opened()
    dynamic = dynamic_tables(subject.results, model, texts["calibration"])
    tables: dict[tuple[str, float | None], Any] = {}
    for gear in (4, 5):
        target = gear + 0.5
        tables[f"uniform {gear} bits", target] = gear
        tables["manifest", target] = manifest.gears[gear].bits
        for (there, low, high), bits in dynamic.items():
            if there == target:
                tables[f"mlx-lm dynamic, {low} and {high} bits", target] = bits
    rows = measured_tables(model, texts, tables)
    for row in rows:
        uniform = next(other for other in rows if other["target"] == row["target"])
        row["of_uniform"] = {text: row[text]["kl"] / uniform[text]["kl"] for text in texts}
    return {"rows": rows, "tokens": {name: sum(len(w) - 1 for w in windows) for name, windows in texts.items()}}


def measure_least(subject):
    """Return the content of least.json: every layer at its min_bits."""
    manifest, model, texts = subject.opened()
    least = {path: layer.min_bits for path, layer in manifest.layers.items()}
    return measured_tables(model, texts, {("every layer at its min_bits", None): least})[0]


def allocation_table(found):
    head = ["", "bits per weight", "KL, calibration text", "of uniform", "KL, held out", "of uniform", "perplexity"]
    rows = [
        [
            row["name"],
            f"{row['bits_per_weight']:.3f}",
            f"{row['calibration']['kl']:.5f}",
            f"{row['of_uniform']['calibration']:.2f}",
            f"{row['held_out']['kl']:.5f}",
            f"**{row['of_uniform']['held_out']:.2f}**",
            f"{row['held_out']['perplexity_change']:+.2f} %",
        ]
        for row in found["rows"]
    ]
    return table(head, rows)


def classes_table(manifest):
    rows = []
    for kind in dict.fromkeys(layer.kind for layer in manifest.layers.values()):
        members = [layer for layer in manifest.layers.values() if layer.kind == kind]
        least = [layer.min_bits for layer in members]
        counted = ", ".join(f"{least.count(bits)} at {bits}" for bits in sorted({*least}))
        kls = (f"{sum(layer.kl[bits] for layer in members):.2g}" for bits in manifest.bits)
        rows.append([kind, len(members), counted, *kls])
    return table(["class", "layers", "min_bits", *(f"KL at {bits}" for bits in manifest.bits)], rows)


def least_table(results):
    row = read_report(results / "least.json")
    head = ["", "bits per weight", "KL, calibration text", "perplexity", "KL, held out", "perplexity"]
    kls = [
        figure
        for text in ("calibration", "held_out")
        for figure in (f"{row[text]['kl']:.4f}", f"{row[text]['perplexity_change']:+.2f} %")
    ]
    return table(head, [[row["name"], f"{row['bits_per_weight']:.3f}", *kls]])


GAUSSIAN, CLAMP = 3.2905, 3.0  # sigmas: the 99.9th percentile of |w| of a Gaussian; weights are cut there


class Cut(Affine):
    """The format of weights that are cut at 3 sigma before they are quantized."""

    def modules(self, dense, *settings):
        most = CLAMP * mx.sqrt(mx.square(dense.weight.astype(mx.float32)).mean())
        dense.weight = mx.clip(dense.weight, -most, most)
        return super().modules(dense, *settings)


def has_heavy_tails(weight):
    """Return whether the 99.9th percentile is larger than a Gaussian's."""
    values = np.abs(np.array(weight.astype(mx.float32)))
    return np.quantile(values, 0.999) > GAUSSIAN * np.sqrt(np.mean(np.square(values, dtype=np.float64)))


def measure_clamps(subject):
    """Return the content of clamps.json: for layers with heavy tails, the KL at each width, unchanged and clamped."""
    manifest, model, texts = subject.opened()
    bits, ladder = manifest.bits, ",".join(map(str, (*manifest.bits, 16)))
    heavy = [layer.path for layer in discover(model)[0] if has_heavy_tails(layer.module.weight)]
    found = {}
    for name, format in (("plain", "affine"), ("cut", Cut())):
        gearbox = Gearbox(load(subject.model)[0], ladder, format=format, kernels="auto", activations="float")
        exact = ExactSensitivity(gearbox, texts["calibration"])
        layers = [layer for layer in exact.in_order() if layer.path in heavy]
        found[name] = {layer.path: [exact.measure(layer, width).kl for width in bits] for layer in layers}
    return found | {"layers": len(exact.layers)}


def clamps_table(results):
    found = read_report(results / "clamps.json")
    lower = [[a < b for a, b in zip(found["cut"][path], kls)] for path, kls in found["plain"].items()]
    rows = [[found["layers"], len(lower), sum(each[0] for each in lower), sum(map(all, lower))]]
    return table(["layers", "heavier tails", "lower KL at the fewest bits", "at every width"], rows)


def cost_table(manifest):
    shares = [f"{manifest.cost[name]:.3f}" for name in ("blocks", "layer_calls", "multiplications")]
    return table(["blocks", "calls of managed layers", "multiplications of managed layers"], [shares])


def spearman(a, b):
    """Return the correlation of ranks, of values without ties."""
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


def ranks_table(manifest, results):
    fast = read_precision(results / "fast.json").layers
    kls = {
        bits: [[layer.kl[bits], fast[path].kl[bits]] for path, layer in manifest.layers.items()]
        for bits in manifest.bits
    }
    return table([f"{bits} bits" for bits in kls], [[f"{spearman(*zip(*pairs)):.2f}" for pairs in kls.values()]])


def tables_of(results):
    """Name of a table to its text."""
    found = read_report(results / "allocation.json")
    manifest = read_precision(results / "manifest.json")
    return {
        "allocation": lambda: allocation_table(found),
        "classes": lambda: classes_table(manifest),
        "least": lambda: least_table(results),
        "clamps": lambda: clamps_table(results),
        "cost": lambda: cost_table(manifest),
        "ranks": lambda: ranks_table(manifest, results),
    }


@study("docs/sensitivity.md", "research/tables.md", minutes=30)
def sensitivity(
    results: Path,
    model: str | None = None,
    held_out: Path = HELD_OUT,
    samples: int = TEXT.num_samples,
    length: int = TEXT.sequence_length,
    tokens: int = 10**6,
    keep: bool = False,
) -> Found:
    """Compare a manifest's tables on held-out text with uniform gears and mlx-lm's dynamic quantization.

    First, `gearbx_mlx sensitivity` and `allocate` make the manifest. All are compared at the same bits per weight, with
    several pairs of widths for mlx-lm. Only the tables are compared for models other than the bundled one.

    Args:
        results: Directory for the manifest and the measurements.
        model: Directory or Hub repository; the bundled model if omitted.
        held_out: Text or JSON Lines.
        samples: Windows of the calibration text.
        length: Tokens of a window.
        tokens: Maximum number of tokens of the held-out text.
        keep: Use the measurements of an earlier run.
    """
    subject = Subject(results, model, held_out, samples, length, tokens)
    measures = {"clamps": measure_clamps, "least": measure_least, "allocation": measure}
    if not keep:
        results.mkdir(parents=True, exist_ok=True)
        manifest = results / "manifest.json"
        subject.command("sensitivity", "--format", "affine", "--out", manifest)
        subject.command("sensitivity", "--format", "affine", "--fast", "--out", results / "fast.json")
        subject.command("allocate", "--manifest", manifest, "--gears", "4,5,16")
        for name in measures if model is None else ["allocation"]:
            (results / f"{name}.json").write_text(json.dumps(measures[name](subject), indent=1))
    if model is not None:
        found = read_report(results / "allocation.json")
        return Found({f"allocation_{named(model)}": allocation_table(found)}, found)
    return Found(tables_of(results))
