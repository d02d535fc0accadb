"""Picture 5: the gears over a text that goes from easy to hard and back (GEARBX 17, figure 5)."""

import itertools
from collections.abc import Mapping
from typing import Any

from ...routing.gates import Monitor, ThresholdGate
from ...telemetry.trace import BLACK, gear_color
from .style import GUIDE, HATCHES
from .subject import NAMES, Subject
from .workloads import EASY, HARD

PARTS = ("easy", "hard", "easy again")


def routed(subject: Subject, entropies: list[float]) -> tuple[list[float], list[str]]:
    """The rolling mean (bits) after each entropy and the gear that the gate then chooses, beginning in the lowest."""
    monitor, gate = Monitor(subject.vocab_size), ThresholdGate(subject.thresholds)
    readings = [monitor.update(value) for value in entropies]
    return [reading.mean for reading in readings], [NAMES[gate.update(reading)] for reading in readings]


def shifts(gears: list[str]) -> list[int]:
    """Where a gear differs from the one before it."""
    return [place for place, (a, b) in enumerate(itertools.pairwise(gears), 1) if a != b]


def measure(subject: Subject) -> dict[str, Any]:
    """Entropy, rolling mean and gear after each token, teacher-forced; a third of the tokens for each part."""
    third = max(2, subject.max_tokens // 3)
    parts = [subject.tokens(text)[:third] for text in (EASY, HARD, EASY)]
    entropies = subject.entropies([token for part in parts for token in part])
    means, gears = routed(subject, entropies)
    lengths = [len(part) for part in parts]
    thresholds = list(subject.thresholds)
    return {"lengths": lengths, "thresholds": thresholds, "entropies": entropies, "means": means, "gears": gears}


def draw(data: Mapping[str, Any], figure: Any) -> None:
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


def table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For each part of the text: mean entropy, share of each gear, shifts."""
    ends = list(itertools.accumulate(data["lengths"]))
    rows = []
    for name, end, length in zip(PARTS, ends, data["lengths"]):
        start = end - length
        gears = data["gears"][start:end]
        mean = sum(data["entropies"][start:end]) / length
        count = sum(start <= place < end for place in shifts(data["gears"]))
        rows.append([name, str(length), f"{mean:.2f}", *(f"{gears.count(g) / length:.0%}" for g in NAMES), str(count)])
    return ["part", "tokens", "mean entropy, bits", *NAMES, "shifts"], rows
