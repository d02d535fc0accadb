"""Pictures of entropies and gears: the signal (1), a trace over one text (5), shares by workload (8)."""

import itertools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from gearbx_mlx.decoding.sampling import entropy_bits
from gearbx_mlx.routing.gates import HIGH_BITS, LOW_BITS, REFERENCE_VOCABULARY, Monitor, ThresholdGate
from gearbx_mlx.telemetry.trace import BLACK, BLUE, GREEN, VERMILION, gear_color

from .subject import GUIDE, HATCHES, LINES, NAMES, Subject

# Texts that ship: written for this package, under its licence.


# Easy for the model that ships, which learned from worked sums.
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
    """The text in two parts, cut at a space."""
    middle = text.index(" ", len(text) // 2)
    return [text[:middle], text[middle:]]


MIXED = "\n".join(part for parts in zip(halves(CHAT), halves(MATHEMATICS), halves(CODE)) for part in parts)
WORKLOADS = {"chat": CHAT, "mathematics": MATHEMATICS, "code": CODE, "mixed": MIXED}


# Picture 1: the entropy of peaked, moderate and flat logits, and of easy and hard texts (GEARBX 17, figure 1).

SAMPLES = 64
# How many of the logits are raised, and by how much, over standard normal noise.
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
    """For each kind of logits: median and deciles in bits, and the share below, between and above the thresholds."""
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
    """The rolling mean (bits) after each entropy and the gear that the gate then chooses, beginning in the lowest."""
    monitor, gate = Monitor(subject.vocab_size), ThresholdGate(subject.thresholds)
    readings = [monitor.update(value) for value in entropies]
    return [reading.mean for reading in readings], [NAMES[gate.update(reading)] for reading in readings]


def shifts(gears: list[str]) -> list[int]:
    """Where a gear differs from the one before it."""
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
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def table_routing_trace(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For each part of the text: mean entropy, share of each gear, shifts."""
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
    """For each workload the gear after each token, teacher-forced."""
    found = {}
    for name, text in WORKLOADS.items():
        entropies = subject.entropies(subject.tokens(text))
        found[name] = {"mean": sum(entropies) / len(entropies), "gears": routed(subject, entropies)[1]}
    return {"thresholds": list(subject.thresholds), "workloads": found}


def share(gears: list[str], name: str) -> float:
    return gears.count(name) / len(gears)


def draw_gear_shares(data: Mapping[str, Any], figure: Any) -> None:
    """A bar for each workload, divided by gear."""
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
    """For each workload: mean entropy, share of each gear, shifts."""
    rows = []
    for name, found in data["workloads"].items():
        gears = found["gears"]
        cells = [f"{share(gears, gear):.0%}" for gear in NAMES]
        rows.append([name, str(len(gears)), f"{found['mean']:.2f}", *cells, str(len(shifts(gears)))])
    return ["workload", "tokens", "mean entropy, bits", *NAMES, "shifts"], rows
