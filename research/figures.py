"""Figures of GEARBX section 17, each measured, drawn and tabulated; suitable for print, and readable in gray.

A figure has three functions: one measures a `Subject` and returns data for JSON, one draws the data, one tabulates
them. Figures 4 and 6 are elsewhere: docs/figures.md has the places.
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from pages import table
from rich.progress import track

from gearbx_mlx import load
from gearbx_mlx.decoding.sampling import entropy_bits
from gearbx_mlx.errors import GearbxError, choose
from gearbx_mlx.files.model_directory import context_length
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.rowwise import Rowwise
from gearbx_mlx.gears.discovery import discover, vocabulary
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.kernels import cpu
from gearbx_mlx.loading import DEMO_MODEL, find, model_name
from gearbx_mlx.routing.gates import (
    HIGH_BITS,
    LOW_BITS,
    REFERENCE_VOCABULARY,
    Monitor,
    ThresholdGate,
    default_thresholds,
)
from gearbx_mlx.telemetry.trace import BLACK, BLUE, GREEN, ORANGE, VERMILION, gear_color, get_pyplot, save

from .decoding_costs import dynamic_speedup, engaged, plan_of, seconds_of
from .studies import Found, results_in_turn, spread, study

SETTINGS = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gearbx-mlx",  # the same data make the same file
}

GEARS = (4, 8, 16)  # bits of low, mid and high: GEARBX 2
NAMES = ("low", "mid", "high")
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "\\\\", "xx")
GUIDE: dict[str, Any] = {"color": "0.35", "linestyle": "--", "linewidth": 0.8}


@dataclass
class Subject:
    """A model and its tokenizer.

    Attributes:
        load: returns a new copy of the dense model, for a picture that changes it.
        directory: of its checkpoint.
        max_tokens: of a text, how many are read.
        shape: width by layers of the random Llama that stands for a model whose time is spent on weights.
    """

    name: str
    load: Callable[[], nn.Module]
    directory: Path
    tokenizer: Any
    max_tokens: int
    shape: str = "1024x8"

    @cached_property
    def model(self) -> nn.Module:
        """One copy, which no picture may change."""
        return self.load()

    @cached_property
    def vocab_size(self) -> int:
        return vocabulary(self.model)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The paper's 1.8 and 3.5 bits, scaled to this vocabulary (GEARBX 3.4)."""
        return default_thresholds(len(GEARS), self.vocab_size)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))[: self.max_tokens]

    def entropies(self, tokens: list[int]) -> list[float]:
        """Bits of the distribution after each token, teacher-forced, at full precision."""
        found: list[float] = entropy_bits(self.model(mx.array(tokens)[None])[0]).tolist()  # type: ignore[assignment]
        return found


def matrices(subject: Subject) -> dict[str, nn.Linear]:
    """Path to layer, of every dense linear layer that all formats can store. Raises GearbxError if there is none."""
    managed, _ = discover(subject.model, "all", format="affine")
    found = {layer.path: layer.module for layer in managed if isinstance(layer.module, nn.Linear)}
    if not found:
        raise GearbxError(f"{subject.name}: has no dense linear layer to quantize; choose an original model")
    return found


# Texts that ship: written for this package, under its licence. The first one is easy for the model that ships, which
# learned from worked sums.
EASY = (
    "Question: Tom has 5 apples and buys 7 more. He gives 3 to his sister. How many apples does he have?\n"
    "Answer: Tom has 5 + 7 = <<5+7=12>>12 apples.\nHe has 12 - 3 = <<12-3=9>>9 apples left.\n#### 9\n\n"
    "Question: A pen costs 4 dollars. How much do 6 pens cost?\n"
    "Answer: The pens cost 6 * 4 = $<<6*4=24>>24.\n#### 24\n"
)
HARD = (
    "Quarterly turbine audits exposed zinc fatigue; Ngozi blamed humid valves, not Lisbon's ledger. Why purple "
    "algebra hums beneath frozen kiosks remains, per clause 9b, unsettled: 47 lynx, 3.2 ohms, velvet, Kyoto, brine. "
    "Xylophones audit dusk; guava tariffs pivot; syntax molts."
)
CHAT = (
    "Good morning! How are you today? I am very well, thank you. What would you like to do? I would like to go for a "
    "walk in the garden. That is a good idea. The sun is shining, and it is warm. Shall we take the dog with us? Yes, "
    "he will like that very much. Then we can go to the shop and buy some bread. Thank you, you are very kind."
)
MATHEMATICS = (
    "Tom has 5 apples and buys 7 more. He gives 3 to his sister. How many apples does he have? He has 5 + 7 = 12 "
    "apples. He gives away 3, so he has 12 - 3 = 9 apples left. A pen costs 4 dollars. What do 6 pens cost? They cost "
    "6 * 4 = 24 dollars. If 2x + 6 = 20, then 2x = 20 - 6 = 14 and x = 14 / 2 = 7."
)
CODE = (
    "def largest(values):\n    best = values[0]\n    for value in values[1:]:\n        if value > best:\n"
    "            best = value\n    return best\n\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n"
    "        return self.items.pop()\n"
)


def halves(text: str) -> list[str]:
    """Return the text in two parts, cut at a space."""
    middle = text.index(" ", len(text) // 2)
    return [text[:middle], text[middle:]]


MIXED = "\n".join(part for parts in zip(halves(CHAT), halves(MATHEMATICS), halves(CODE)) for part in parts)
WORKLOADS = {"chat": CHAT, "mathematics": MATHEMATICS, "code": CODE, "mixed": MIXED}


# Picture 1: the entropy of peaked, moderate and flat logits, and of easy and hard texts (GEARBX 17, figure 1).

SAMPLES = 64
# How many logits are raised, and by how much, over standard normal noise.
REGIMES = {"peaked": (1, 20.0), "moderate": (8, 12.0), "flat": (0, 0.0)}
COLORS = (BLUE, GREEN, VERMILION)


def synthetic_bits(raised: int, height: float) -> list[float]:
    """Bits of SAMPLES vectors of REFERENCE_VOCABULARY logits."""
    logits = np.random.default_rng(0).standard_normal((SAMPLES, REFERENCE_VOCABULARY)).astype(np.float32)
    logits[:, :raised] += height
    return entropy_bits(mx.array(logits)).tolist()  # type: ignore[return-value]


def measure_entropy_signal(subject: Subject) -> dict[str, Any]:
    """Bits of each sample of each regime, and after each token of each text."""
    texts = {"easy text": EASY, "hard text": HARD}
    return {
        "synthetic": {
            "vocabulary": REFERENCE_VOCABULARY,
            "thresholds": [LOW_BITS, HIGH_BITS],
            "bits": {name: synthetic_bits(*regime) for name, regime in REGIMES.items()},
        },
        "model": {
            "vocabulary": subject.vocab_size,
            "thresholds": list(subject.thresholds),
            "bits": {name: subject.entropies(subject.tokens(text)) for name, text in texts.items()},
        },
    }


def draw_entropy_signal(data: Mapping[str, Any], figure: Any) -> None:
    """Cumulative shares over bits: left the synthetic logits, right the model's; dashed: the thresholds."""
    for axes, (name, part) in zip(figure.subplots(1, 2, sharey=True), data.items()):
        for (label, bits), line, color in zip(part["bits"].items(), LINES, COLORS):
            axes.ecdf(bits, label=label, linestyle=line, color=color)
        for threshold in part["thresholds"]:
            axes.axvline(threshold, **GUIDE)
        axes.set(xlabel="entropy, bits", title=f"{name}: {part['vocabulary']} tokens")
        axes.set_xlim(-0.3, np.log2(part["vocabulary"]))
        axes.legend(loc="lower right" if name == "model" else "center")
    figure.axes[0].set_ylabel("share at or below")


def table_entropy_signal(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return, for each kind of logits: median and deciles in bits, and the shares between the thresholds."""
    head = ["logits", "vocabulary", "samples", "10 %", "median, bits", "90 %", "low", "mid", "high"]
    rows = []
    for part in data.values():
        for name, bits in part["bits"].items():
            low, high = part["thresholds"]
            values = np.array(bits)
            bands = [(values <= low).mean(), ((values > low) & (values < high)).mean(), (values >= high).mean()]
            deciles = [f"{value:.2f}" for value in np.quantile(values, (0.1, 0.5, 0.9))]
            rows.append([name, str(part["vocabulary"]), str(len(bits)), *deciles, *(f"{b:.0%}" for b in bands)])
    return head, rows


# Picture 5: the gears over a text that goes from easy to hard and back (GEARBX 17, figure 5).

TRACE_PARTS = ("easy", "hard", "easy again")


def routed(subject: Subject, entropies: list[float]) -> tuple[list[float], list[str]]:
    """Return the rolling mean (bits) after each entropy, and the gear that the gate selects, from the lowest on."""
    monitor, gate = Monitor(subject.vocab_size), ThresholdGate(subject.thresholds)
    readings = [monitor.update(value) for value in entropies]
    return [reading.mean for reading in readings], [NAMES[gate.update(reading)] for reading in readings]


def shifts(gears: list[str]) -> list[int]:
    """Return the positions whose gear differs from the previous one's."""
    return [place for place, (a, b) in enumerate(itertools.pairwise(gears), 1) if a != b]


def measure_routing_trace(subject: Subject) -> dict[str, Any]:
    """Entropy, rolling mean and gear after each token, teacher-forced; a third of the tokens for each part."""
    third = max(2, subject.max_tokens // 3)
    parts = [subject.tokens(text)[:third] for text in (EASY, HARD, EASY)]
    entropies = subject.entropies([token for part in parts for token in part])
    means, gears = routed(subject, entropies)
    lengths = [len(part) for part in parts]
    thresholds = list(subject.thresholds)
    return {"lengths": lengths, "thresholds": thresholds, "entropies": entropies, "means": means, "gears": gears}


def draw_routing_trace(data: Mapping[str, Any], figure: Any) -> None:
    """Dots: entropies; line: rolling mean; bands: gears; triangles: shifts; dotted lines: where a part begins."""
    axes, gears = figure.subplots(), data["gears"]
    changes = [0, *shifts(gears), len(gears)]
    for start, end in itertools.pairwise(changes):
        place = NAMES.index(gears[start])
        label = gears[start] if gears.index(gears[start]) == start else None
        band = {"facecolor": gear_color(place, len(NAMES)), "alpha": 0.35, "hatch": HATCHES[place], "edgecolor": "0.5"}
        axes.axvspan(start - 0.5, end - 0.5, linewidth=0, label=label, **band)
    axes.plot(data["entropies"], ".", color="0.3", markersize=3, label="entropy")
    axes.plot(data["means"], color=BLACK, label="rolling mean of 3")
    top = max(data["entropies"]) * 1.08
    axes.plot(changes[1:-1], [top] * len(changes[1:-1]), "v", color=BLACK, label="shift", clip_on=False)
    for threshold in data["thresholds"]:
        axes.axhline(threshold, **GUIDE)
    for place in itertools.accumulate(data["lengths"][:-1]):
        axes.axvline(place - 0.5, color=BLACK, linestyle=":")
    axes.set(xlabel="token (easy, hard, easy again)", ylabel="entropy, bits", xlim=(-0.5, len(gears) - 0.5))
    handles, labels = axes.get_legend_handles_labels()
    shown = dict(zip(labels, handles))
    order = sorted(shown, key=(*NAMES, *labels).index)  # gears first, from the lowest
    axes.legend([shown[name] for name in order], order, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def table_routing_trace(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return, for each part of the text: mean entropy, share of each gear, shifts."""
    ends = list(itertools.accumulate(data["lengths"]))
    rows = []
    for name, end, length in zip(TRACE_PARTS, ends, data["lengths"]):
        start = end - length
        gears = data["gears"][start:end]
        mean = sum(data["entropies"][start:end]) / length
        count = sum(start <= place < end for place in shifts(data["gears"]))
        rows.append([name, str(length), f"{mean:.2f}", *(f"{gears.count(g) / length:.0%}" for g in NAMES), str(count)])
    return ["part", "tokens", "mean entropy, bits", *NAMES, "shifts"], rows


# Picture 8: the share of tokens in each gear, by workload (GEARBX 17, figure 8).


def measure_gear_shares(subject: Subject) -> dict[str, Any]:
    """Return, for each workload, the gear after each token, teacher-forced."""
    found = {}
    for name, text in WORKLOADS.items():
        entropies = subject.entropies(subject.tokens(text))
        found[name] = {"mean": sum(entropies) / len(entropies), "gears": routed(subject, entropies)[1]}
    return {"thresholds": list(subject.thresholds), "workloads": found}


def share(gears: list[str], name: str) -> float:
    return gears.count(name) / len(gears)


def draw_gear_shares(data: Mapping[str, Any], figure: Any) -> None:
    """Draw a bar for each workload, divided by gear."""
    axes, workloads = figure.subplots(), data["workloads"]
    left = [0.0] * len(workloads)
    for place, gear in enumerate(NAMES):
        shares = [100 * share(found["gears"], gear) for found in workloads.values()]
        style = {"color": gear_color(place, len(NAMES)), "hatch": HATCHES[place], "edgecolor": "white"}
        axes.barh(list(workloads), shares, left=left, label=gear, **style)
        left = [start + size for start, size in zip(left, shares)]
    axes.invert_yaxis()
    axes.set(xlabel="share of tokens, %", xlim=(0, 100))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def table_gear_shares(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return, for each workload: mean entropy, share of each gear, shifts."""
    rows = []
    for name, found in data["workloads"].items():
        gears = found["gears"]
        cells = [f"{share(gears, gear):.0%}" for gear in NAMES]
        rows.append([name, str(len(gears)), f"{found['mean']:.2f}", *cells, str(len(shifts(gears)))])
    return ["workload", "tokens", "mean entropy, bits", *NAMES, "shifts"], rows


# Picture 2: memory of the weights by format, predicted and measured (GEARBX 17, figure 2).

GROUP_SIZE = 64
FORMATS = (("rowwise", 8), ("rowwise", 6), ("rowwise", 4), ("rowwise", 2), ("affine", 8), ("affine", 4))
HALF = 2  # bytes of fp16


def predicted(shape: tuple[int, ...], format: str, bits: int) -> tuple[float, int]:
    """Return bytes of the codes and of the scales in fp16: one a row, or a scale and a bias for every 64 weights."""
    size = math.prod(shape)
    scales = shape[0] if format == "rowwise" else 2 * size // GROUP_SIZE
    return size * bits / 8, scales * HALF


def measured(layer: nn.Linear, format: str, bits: int) -> int:
    """Return bytes of the arrays that the format makes of a layer in fp16, padding included."""
    dense = nn.Linear(1, 1, bias=False)
    dense.weight = layer.weight.astype(mx.float16)
    module = get_format(format).modules(dense, bits, (bits,), GROUP_SIZE, mx.float16)[bits]
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def measure_memory_by_format(subject: Subject) -> dict[str, Any]:
    """Return bytes of all linear layers in fp16, and in each format: codes and scales as predicted, and as they are."""
    layers = list(matrices(subject).values())
    rows = []
    for format, bits in FORMATS:
        parts = [predicted(layer.weight.shape, format, bits) for layer in layers]
        codes, scales = (sum(column) for column in zip(*parts))
        whole = sum(measured(layer, format, bits) for layer in layers)
        rows.append({"format": format, "bits": bits, "codes": codes, "scales": scales, "measured": whole})
    return {"layers": len(layers), "fp16": sum(HALF * layer.weight.size for layer in layers), "rows": rows}


def label(row: Mapping[str, Any]) -> str:
    return f"{row['format']} {row['bits']}"


def draw_memory_by_format(data: Mapping[str, Any], figure: Any) -> None:
    """Bars: codes and scales as predicted, over fp16; diamonds: the arrays."""
    axes, rows, whole = figure.subplots(), data["rows"], data["fp16"]
    names = ["fp16", *map(label, rows)]
    codes = [1.0, *(row["codes"] / whole for row in rows)]
    scales = [0.0, *(row["scales"] / whole for row in rows)]
    axes.bar(names, codes, width=0.6, color=BLUE, label="codes, predicted")
    axes.bar(names, scales, width=0.6, bottom=codes, color=ORANGE, hatch=HATCHES[1], label="scales, predicted")
    sizes = [row["measured"] / whole for row in rows]
    axes.plot(names[1:], sizes, "D", color="black", markerfacecolor="white", label="arrays, measured")
    axes.set(ylabel="bytes, fp16 = 1", xlabel="format and bits")
    axes.legend()


def table_memory_by_format(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """MB predicted and measured, their share of fp16, and the share of the scales."""
    head = ["format", "bits", "predicted, MB", "measured, MB", "of fp16", "of it scales"]
    rows = [["fp16", "16", f"{data['fp16'] / 1e6:.3f}", f"{data['fp16'] / 1e6:.3f}", "100.0%", "0.0%"]]
    for row in data["rows"]:
        made = row["codes"] + row["scales"]
        sizes = [f"{made / 1e6:.3f}", f"{row['measured'] / 1e6:.3f}", f"{row['measured'] / data['fp16']:.1%}"]
        rows.append([row["format"], str(row["bits"]), *sizes, f"{row['scales'] / made:.1%}"])
    return head, rows


# Picture 7: where the weights are, by gear and residency (GEARBX 6.3, Table 6; 17, figure 7).

RESIDENCIES = ("resident", "disk")


def measure_residency(subject: Subject) -> dict[str, Any]:
    """Return bytes in MLX's pool, in each gear, after all gears have been engaged once."""
    found = {name: places(subject, name) for name in RESIDENCIES}
    return {"residencies": found, "dense": sum(array.nbytes for array in managed_weights(subject))}


def managed_weights(subject: Subject) -> list[mx.array]:
    """Weights of the layers that change gear, as loaded."""
    return [layer.module.weight for layer in Gearbox(subject.load(), str(GEARS[-1]), kernels="mlx").layers]


def places(subject: Subject, residency: str) -> dict[str, int]:
    """Return bytes of format rowwise, whose gears are arrays of their own, as in the paper."""
    gc.collect()
    before = mx.get_active_memory()
    model = subject.load()
    ladder = ",".join(map(str, GEARS))
    directory = subject.directory if residency == "disk" else None
    gearbox = Gearbox(model, ladder, format="rowwise", kernels="mlx", residency=residency, checkpoint=directory)
    for gear in gearbox.ladder:
        gearbox.shift(gear)
    found = {}
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        gc.collect()
        found[gear.name] = mx.get_active_memory() - before
    return found


def draw_residency(data: Mapping[str, Any], figure: Any) -> None:
    """Bars: MLX's memory over the dense weights of the layers that change gear."""
    panels, dense = figure.subplots(1, len(data["residencies"]), sharey=True), data["dense"]
    for axes, (name, gears) in zip(panels, data["residencies"].items()):
        axes.bar(NAMES, [gears[gear] / dense for gear in NAMES], 0.6, color=BLUE, edgecolor="white")
        axes.set(title=name, xlabel="gear")
    panels[0].set_ylabel("bytes, dense layers = 1")


def table_residency(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """MB in MLX's memory, and over the dense layers."""
    rows = []
    for name, gears in data["residencies"].items():
        for gear in NAMES:
            rows.append([name, gear, f"{gears[gear] / 1e6:.2f}", f"{gears[gear] / data['dense']:.2f}"])
    return ["residency", "gear", "MLX's memory, MB", "over the dense layers"], rows


# Picture 3: the time of a pass, by gear, with a dequant cache and with packed kernels (GEARBX 7.1; 17, figure 3).

LADDER = ",".join(map(str, GEARS))
TRIALS, PASSES = 9, 5
WAYS = {"first": "first pass, unpacking", "cached": "dequant cache", "packed": "packed kernel"}
WAY_COLORS = (ORANGE, BLUE, VERMILION)


def pass_seconds(model: nn.Module, passes: int) -> float:
    """Return processor time of a pass over one token, the mean of so many."""
    start = time.process_time()
    for _ in range(passes):
        mx.eval(model(mx.array([[1]])))
    return (time.process_time() - start) / passes


def trial_of_passes(cached: Gearbox, packed: Gearbox | None) -> dict[str, dict[str, float]]:
    """Return seconds of each way, by gear; gears and ways take turns. The top gear is dense in all of them."""
    found: dict[str, dict[str, float]] = {}
    for gear in reversed(list(cached.ladder)):
        cached.shift(gear)  # which empties the caches of the gear before
        times = {"first": pass_seconds(cached.model, 1), "cached": pass_seconds(cached.model, PASSES)}
        if packed is not None:
            packed.shift(gear)
            pass_seconds(packed.model, 1)
            times["packed"] = pass_seconds(packed.model, PASSES)
        found[gear.name] = times
    return found


def measure_forward_latency(subject: Subject) -> dict[str, Any]:
    """Return processor times of a pass over one token: for each gear and way the trials, in seconds."""
    cached = Gearbox(subject.load(), LADDER, format=Rowwise(cache=True), kernels="mlx")
    native = cpu.why_not() is None
    packed = Gearbox(subject.load(), LADDER, format="rowwise", kernels="native") if native else None
    trial_of_passes(cached, packed)  # makes the gears, and warms up
    trials = [trial_of_passes(cached, packed) for _ in range(TRIALS)]
    gears = {
        gear.name: {way: [each[gear.name][way] for each in trials] for way in trials[0][gear.name]}
        for gear in cached.ladder
    }
    return {"gears": gears, "bits": {gear.name: gear.bits for gear in cached.ladder}}


def ratios(data: Mapping[str, Any], gear: str, way: str) -> list[float]:
    """Return each trial's time over that of the top gear, dense weights on MLX, in the same trial."""
    dense = list(data["gears"].values())[-1]["cached"]
    return [a / b for a, b in zip(data["gears"][gear][way], dense)]


def draw_bars(axes: Any, found: Mapping[str, Sequence[Sequence[float]]], colors: Sequence[str]) -> None:
    """Bars side by side: for each name the medians of the trials at each place, with their range; a line at 1."""
    for number, ((name, trials), color) in enumerate(zip(found.items(), colors)):
        middle = [statistics.median(each) for each in trials]
        ends = [[m - min(e) for m, e in zip(middle, trials)], [max(e) - m for m, e in zip(middle, trials)]]
        left = [x + 0.27 * (number - (len(found) - 1) / 2) for x in range(len(trials))]
        style = {"color": color, "hatch": HATCHES[number], "label": name, "edgecolor": "white"}
        ranges = ends if max(map(len, trials)) > 1 else None
        axes.bar(left, middle, 0.25, yerr=ranges, error_kw={"linewidth": 0.8, "capsize": 2}, **style)
    axes.axhline(1, **GUIDE)


def draw_forward_latency(data: Mapping[str, Any], figure: Any) -> None:
    """Bars: medians over dense weights on MLX, with the range of the trials."""
    axes, gears = figure.subplots(), list(data["gears"])
    ways = [way for way in WAYS if way in data["gears"][gears[0]]]
    draw_bars(axes, {WAYS[way]: [ratios(data, gear, way) for gear in gears] for way in ways}, WAY_COLORS)
    axes.set_xticks(range(len(gears)), [f"{gear} ({data['bits'][gear]} bits)" for gear in gears])
    axes.set(ylabel="processor time, dense = 1")
    axes.legend()


def table_forward_latency(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return milliseconds (median), and the ratio to dense weights on MLX with its range, for each gear and way."""
    rows = []
    for gear, ways in data["gears"].items():
        for way, times in ways.items():
            found = ratios(data, gear, way)
            middle = f"{1e3 * statistics.median(times):.2f}"
            rows.append([gear, str(data["bits"][gear]), WAYS[way], middle, spread(found)])
    return ["gear", "bits", "path", "ms", "of dense"], rows


# Picture 9: speed by the share of tokens in each gear, as bytes predict it and as measured (GEARBX 9; 17, figure 9).

MIXTURES = (  # shares of low, mid and high; the third is the paper's
    *((0.0, 0.0, 1.0), (0.2, 0.3, 0.5), (0.55, 0.25, 0.2)),
    *((0.8, 0.1, 0.1), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)),
)
MIXED_TOKENS, RUN, MIXED_TRIALS = 60, 10, 5


def measure_bandwidth(subject: Subject) -> dict[str, Any]:
    """Return seconds of a token and of all shifts, for each mix and trial, on the kernels in use; bytes of gears."""
    gearbox = engaged(None, subject.shape, LADDER)
    plans = [plan_of(gearbox.ladder, shares, MIXED_TOKENS, RUN) for shares in MIXTURES]
    seconds = results_in_turn(
        {place: partial(seconds_of, gearbox, plan) for place, plan in enumerate(plans)}, MIXED_TRIALS
    )
    return {
        "shape": subject.shape,
        "bytes": {gear.name: gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder},
        "plans": [[gear.name for gear in plan] for plan in plans],
        "trials": [*zip(*seconds.values())],
    }


def speedups(data: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return the speedup of a mixture over high gear alone.

    Returns:
        `of_bytes`, and for each trial `predicted` (GEARBX 9, from the times of the gears alone and of the shifts) and
        `measured`.
    """
    plan, read = data["plans"][place], data["bytes"]
    counts = {name: plan.count(name) for name in NAMES}
    alone = {name: next(i for i, each in enumerate(data["plans"]) if set(each) == {name}) for name in NAMES}
    predicted, found = [], []
    for trial in data["trials"]:
        times = {name: trial[where][0] for name, where in alone.items()}
        predicted.append(dynamic_speedup(counts, times, "high", trial[place][1]))
        found.append(times["high"] / trial[place][0])
    of_bytes = len(plan) * read["high"] / sum(count * read[name] for name, count in counts.items())
    return {"of_bytes": of_bytes, "predicted": predicted, "measured": found}


def draw_bandwidth(data: Mapping[str, Any], figure: Any) -> None:
    """Bars: what bytes predict, what the times of the gears predict, and what was measured, with its range."""
    axes = figure.subplots()
    found = [speedups(data, place) for place in range(len(MIXTURES))]
    bars = {
        "by bytes": [[each["of_bytes"]] for each in found],
        "by the times of the gears": [[statistics.median(each["predicted"])] for each in found],
        "measured": [each["measured"] for each in found],
    }
    draw_bars(axes, bars, (BLUE, ORANGE, VERMILION))
    axes.set_xticks(range(len(found)), [mixture_name(shares) for shares in MIXTURES])
    axes.set(xlabel="tokens in low, mid and high gear, %", ylabel="speed, high gear alone = 1")
    axes.legend()


def mixture_name(shares: tuple[float, ...]) -> str:
    return ", ".join(f"{100 * each:.0f}" for each in shares)


def table_bandwidth(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return, for each mix of gears: shifts, and its speedup over high gear, by each account."""
    rows = []
    for place, (shares, plan) in enumerate(zip(MIXTURES, data["plans"])):
        found = speedups(data, place)
        speeds = [spread(found[way]) for way in ("predicted", "measured")]
        rows.append([mixture_name(shares), str(len(shifts(plan))), f"{found['of_bytes']:.2f}", *speeds])
    return ["low, mid, high, %", "shifts", "by bytes", "by the times of the gears", "measured"], rows


Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class PaperPicture:
    """What measures, draws and tabulates a picture."""

    measure: Callable[[Subject], dict[str, Any]]
    draw: Callable[[Mapping[str, Any], Any], None]
    table: Callable[[Mapping[str, Any]], Table]

    def write(self, data: Mapping[str, Any], path: Path) -> None:
        """Draw a picture into a file."""
        pyplot = get_pyplot()
        with pyplot.rc_context(SETTINGS):
            figure = pyplot.figure(figsize=(7.2, 3.2), layout="constrained")
            self.draw(data, figure)
            save(figure, path)


PICTURES = {
    "entropy_signal": PaperPicture(measure_entropy_signal, draw_entropy_signal, table_entropy_signal),
    "memory_by_format": PaperPicture(measure_memory_by_format, draw_memory_by_format, table_memory_by_format),
    "forward_latency": PaperPicture(measure_forward_latency, draw_forward_latency, table_forward_latency),
    "routing_trace": PaperPicture(measure_routing_trace, draw_routing_trace, table_routing_trace),
    "residency": PaperPicture(measure_residency, draw_residency, table_residency),
    "gear_shares": PaperPicture(measure_gear_shares, draw_gear_shares, table_gear_shares),
    "bandwidth": PaperPicture(measure_bandwidth, draw_bandwidth, table_bandwidth),
}


def subject_of(name: str | None, max_tokens: int) -> Subject:
    """Raises GearbxError for a model that cannot be loaded."""
    _, tokenizer, config = load(name, return_config=True)
    longest = min(max_tokens, context_length(config) or max_tokens)
    return Subject(model_name(name), lambda: load(name)[0], find(name or DEMO_MODEL), tokenizer, longest)


@study("docs/figures.md", writes="images/figures/*.svg", minutes=2)
def figures(only: list[str] = [], model: str | None = None, max_tokens: int = 160) -> Found:  # noqa: B006
    """Reproduce the figures of the paper with a model.

    Args:
        only: Names of figures, such as gear_shares; all if omitted.
        model: Directory or Hub repository of an original model; the bundled one if omitted.
        max_tokens: Tokens to read of each text, at least 6.
    """
    for name in only:
        if name not in PICTURES:
            raise GearbxError(f"--only {name}: there is no such picture; {choose(name, PICTURES)}")
    if max_tokens < 6:
        raise GearbxError(f"--max-tokens {max_tokens}: is too few; give 6 or more")
    subject = subject_of(model, max_tokens)
    data = {name: PICTURES[name].measure(subject) for name in track(only or [*PICTURES], "figures")}
    tables = {name: table(*PICTURES[name].table(found)) for name, found in data.items()}
    return Found(
        tables, data, {f"figures/{name}.svg": partial(PICTURES[name].write, found) for name, found in data.items()}
    )
