"""Picture 1: the entropy of peaked, moderate and flat logits, and of easy and hard texts (GEARBX 17, figure 1)."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ...decoding.sampling import entropy_bits
from ...routing.gates import HIGH_BITS, LOW_BITS, REFERENCE_VOCABULARY
from ...telemetry.trace import BLUE, GREEN, VERMILION
from .style import GUIDE, LINES
from .subject import Subject
from .workloads import EASY, HARD

SAMPLES = 64
# How many of the logits are raised, and by how much, over standard normal noise.
REGIMES = {"peaked": (1, 20.0), "moderate": (8, 12.0), "flat": (0, 0.0)}
COLORS = (BLUE, GREEN, VERMILION)


def synthetic(raised: int, height: float) -> list[float]:
    """Bits of SAMPLES vectors of REFERENCE_VOCABULARY logits."""
    logits = np.random.default_rng(0).standard_normal((SAMPLES, REFERENCE_VOCABULARY)).astype(np.float32)
    logits[:, :raised] += height
    return entropy_bits(mx.array(logits)).tolist()  # type: ignore[return-value]


def measure(subject: Subject) -> dict[str, Any]:
    """Bits of each sample of each regime, and after each token of each text."""
    texts = {"easy text": EASY, "hard text": HARD}
    return {
        "synthetic": {
            "vocabulary": REFERENCE_VOCABULARY,
            "thresholds": [LOW_BITS, HIGH_BITS],
            "bits": {name: synthetic(*regime) for name, regime in REGIMES.items()},
        },
        "model": {
            "vocabulary": subject.vocab_size,
            "thresholds": list(subject.thresholds),
            "bits": {name: subject.entropies(subject.tokens(text)) for name, text in texts.items()},
        },
    }


def draw(data: Mapping[str, Any], figure: Any) -> None:
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


def table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
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
