"""EAD: two models that take turns. Its Table 1 and its Figure 1 along a text.

Along a given text, no model reads output of the other, so predictions do not depend on the gate. Each model reads the
text once, and the gate is replayed over the recorded entropies for every threshold.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from gearbx_mlx.evaluation.predictions import (
    Recording,
    entropy_of_logprobs,
    kl_divergence,
    log_softmax,
    quality,
    three_digits,
)
from gearbx_mlx.routing.pair import LARGE, SMALL, first_model, pair_gate, pair_monitor, parameter_ratio
from gearbx_mlx.telemetry.trace import get_pyplot, save

from .report import (
    Columns,
    against_chance,
    change_of_kl,
    kilobytes,
    markdown_table,
    percent,
    quality_arguments,
)
from .statistics import by_bucket


@dataclass(frozen=True)
class PairRecording:
    """The predictions of both models for the same n tokens.

    both: name of a field of Recording to its array, with (small, large) as a first axis; against the large model, whose
    KL from itself is 0. top_probability: (n,), of the large model. vocab_size: V, the same for both.
    """

    both: dict[str, Any]
    top_probability: np.ndarray
    vocab_size: int

    @property
    def small(self) -> Recording:
        return Recording(**{name: both[SMALL] for name, both in self.both.items()})

    @property
    def large(self) -> Recording:
        return Recording(**{name: both[LARGE] for name, both in self.both.items()})


def record_pair(
    small: nn.Module, large: nn.Module, windows: Iterable[tuple[Sequence[int], int]], vocab_size: int
) -> PairRecording:
    """Let both models read every window from its beginning.

    Args:
        windows: tokens, and how many of them are the prompt, in which predictions do not count.
    """
    parts = []
    for number, (window, prompt) in enumerate(windows):
        parts.append(record_window(small, large, window, max(prompt - 1, 0), number, vocab_size))
    return merged(parts)


def record_window(
    small: nn.Module, large: nn.Module, window: Sequence[int], start: int, number: int, vocab_size: int
) -> PairRecording:
    """Both models along a window, from its token `start` on."""
    logits = (model(mx.array([list(window[:-1])]))[0, start:, :vocab_size] for model in (large, small))
    p, q = (log_softmax(np.array(each.astype(mx.float32))) for each in logits)
    targets = np.array(window[start + 1 :])
    by_small, by_large = vars(compared(p, q, number, targets, SMALL)), vars(compared(p, p, number, targets, LARGE))
    both = {name: np.stack([by_small[name], by_large[name]]) for name in by_small}
    return PairRecording(both, np.exp(p.max(axis=-1)), vocab_size)


def merged(parts: Sequence[PairRecording]) -> PairRecording:
    """Return the recordings of windows as one."""
    both = {name: np.concatenate([part.both[name] for part in parts], axis=1) for name in parts[0].both}
    return PairRecording(both, np.concatenate([part.top_probability for part in parts]), parts[0].vocab_size)


def compared(p: np.ndarray, q: np.ndarray, window: int, targets: np.ndarray, gear: int) -> Recording:
    """Return the recording of one window: q against the large model's p, both (n, V)."""
    n = len(targets)
    return Recording(
        np.full(n, window),
        -q[np.arange(n), targets],
        kl_divergence(p, q),
        kl_divergence(q, p),
        p.argmax(axis=-1) == q.argmax(axis=-1),
        entropy_of_logprobs(q),
        np.full(n, gear),
        np.eye(2, dtype=int)[np.full(n, gear)],
    )


def turns(recording: PairRecording, threshold: float, window: int, min_duration: int) -> np.ndarray:
    """Return the model of each token (n,). The gate sees the entropies of the engaged model, as in generation."""
    windows, entropies = recording.both["window"][SMALL], recording.both["entropy"]
    monitor = pair_monitor(recording.vocab_size, window)
    gears: list[int] = []
    for text in np.unique(windows):
        monitor.reset()
        gate, engaged = pair_gate(threshold, min_duration), first_model(threshold)
        gate.reset(engaged)
        for place in np.flatnonzero(windows == text):
            gears.append(engaged)
            engaged = gate.update(monitor.update(float(entropies[engaged][place])))
    return np.array(gears)


def mixed(recording: PairRecording, gears: np.ndarray) -> Recording:
    """Return the recording of the two models in turns: each token from the model that computes it; gears (n,)."""
    return Recording(**{name: both[gears, np.arange(len(gears))] for name, both in recording.both.items()})


def by_coin(recording: PairRecording, share: float | np.ndarray, name: str) -> np.ndarray:
    """Return the expected result of a random choice between both models along a text: their weighted mean.

    Args:
        share: of the large model, one for all tokens, or one for each (n,).
        name: of a field of the recordings (n,).
    """
    small, large = recording.both[name].astype(float)
    return (1 - share) * small + share * large


def share_by_position(gears: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Return the large model's share (n,) at the position of each token in its window, over all windows."""
    position = np.concatenate([np.arange(count) for count in np.bincount(window)])
    return (np.bincount(position, gears == LARGE) / np.bincount(position))[position]


def sweep(
    recording: PairRecording,
    thresholds: Iterable[float],
    window: int,
    min_duration: int,
    parameters: tuple[int, int],
    weight_bytes: tuple[int, int],
) -> list[dict[str, Any]]:
    """Return a row for each threshold (bits), as in EAD's Table 1, compared with random choices.

    One random choice has the same share; the other has the same share at each position, which makes it depend on how
    texts usually go, but not on this text.

    Args:
        window, min_duration: tokens.
        parameters, weight_bytes: of the small and the large model; bytes that one token reads.
    """
    rows = []
    for threshold in thresholds:
        gears = turns(recording, threshold, window, min_duration)
        run, share = mixed(recording, gears), float(np.mean(gears == LARGE))
        tokens = quality_arguments(run, recording.large.nll)
        control = against_chance(run, partial(by_coin, recording, share))
        by_position = share_by_position(gears, run.window)
        control["perplexity"] = float(np.exp(by_coin(recording, share, "nll").mean()))
        rows.append(
            {
                "policy": "pair",
                "name": f"pair-{threshold:g}",
                "threshold": threshold,
                "share_top": share,
                "switches": int(sum(np.diff(gears[run.window == text]).astype(bool).sum() for text in set(run.window))),
                "parameter_ratio": parameter_ratio(share, parameters),
                "weight_bytes_per_token": float((run.passes @ np.array(weight_bytes)).mean()),
                **quality(**tokens),
                "buckets": by_bucket(recording.top_probability, tokens),
                "against_random_same_share": control,
                "against_random_same_positions": against_chance(run, partial(by_coin, recording, by_position)),
            }
        )
    return rows


COLUMNS: Columns = {
    "threshold": lambda row: f"{row['threshold']:g}",
    "large": lambda row: percent(row["share_top"]),
    "parameters": lambda row: percent(row["parameter_ratio"]),
    "kB/token": kilobytes,
    "perplexity": lambda row: f"{row['perplexity']:.3f}",
    "by chance": lambda row: f"{row['against_random_same_share']['perplexity']:.3f}",
    "agreement": lambda row: f"{row['top1_agreement']:.4f}",
    "chance": lambda row: f"{row['against_random_same_share']['top1_agreement']:.4f}",
    "KL mean": lambda row: three_digits(row["kl_mean"]),
    "vs chance": lambda row: change_of_kl(row["against_random_same_share"]),
    "by position": lambda row: change_of_kl(row["against_random_same_positions"]),
}


ReportRow = Mapping[str, Any]
SCORES = {"top1_agreement": "same favourite as the large model", "perplexity": "perplexity"}  # Table 1's first


@dataclass(frozen=True)
class ThresholdPoint:
    """A threshold in bits, the large model's share of the tokens and used parameters over its own, both parts of 1.

    score: as in the report. coin: that of a random choice with the same share.
    """

    threshold: float
    share: float
    parameters: float
    score: float
    coin: float


def points(report: ReportRow, score: str) -> list[ThresholdPoint]:
    """Return a point for each threshold, the highest first, as in Table 1."""
    found = []
    for row in report["policies"]:
        coin = row["against_random_same_share"][score]
        found.append(ThresholdPoint(row["threshold"], row["share_top"], row["parameter_ratio"], row[score], coin))
    return sorted(found, key=lambda point: -point.threshold)


def score_text(value: float, score: str) -> str:
    """Return a score as text: "12.5 %", and a perplexity as it is."""
    return f"{value:.3f}" if score == "perplexity" else percent(value)


def table_1(report: ReportRow) -> str:
    """EAD's Table 1, and what part of the large model's score that is, as in its abstract."""
    score, name = next(iter(SCORES.items()))
    found = points(report, score)
    best = found[-1].score if found[-1].share == 1 else 0.0  # the large model alone
    columns: Columns = {
        "entropy threshold, bits": lambda row: f"{row['threshold']:g}",
        "large model usage": lambda row: percent(row["share"]),
        name: lambda row: score_text(row["score"], score),
        "of the large model's": lambda row: percent(row["score"] / best) if best else "",
        "parameter ratio": lambda row: percent(row["parameters"]),
        "a coin's": lambda row: score_text(row["coin"], score) if 0 < row["share"] < 1 else "",
    }
    return markdown_table(columns, [vars(point) for point in found])


COIN = "0.45"  # a grey of its own lightness, with hollow markers and a dashed line besides
PARAMETERS_USED = "parameters used, % of the large model's"
APART = 5  # in per cent of the axis: labels of thresholds that are nearer than that are left out


def draw_pair(report: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each score, with a marker and its bits for each threshold; the random baseline is dashed.

    Args:
        report: the content of evaluation.json, of a pair.
        path: a png or svg file, which is replaced.
    """
    pyplot = get_pyplot()
    figure, panels = pyplot.subplots(1, len(SCORES), figsize=(5.4 * len(SCORES), 4.6), layout="constrained")
    for axes, (figure_of, name) in zip(panels, SCORES.items()):
        found, falls = points(report, figure_of), figure_of == "perplexity"
        draw_panel(axes, found, pyplot.get_cmap("viridis"), 1 if falls else 100)
        label(axes, found, 1 if falls else 100, (-6, -13) if falls else (-6, 5))
        axes.set_ylabel(name if falls else f"{name}, %")
    panels[0].legend(frameon=False)
    small, large, data = (Path(report[name]).name for name in ("small_model", "model", "data"))
    figure.suptitle(f"{small} and {large} on {data}; labels: entropy threshold, bits")
    save(figure, path)


def draw_panel(axes: Any, found: Sequence[ThresholdPoint], color_of: Callable[[float], Any], scale: float) -> None:
    """Draw the points of one score, with a second axis for the parameters used.

    Args:
        color_of: from 0 (the highest threshold) to 1; ascends in lightness.
        scale: 100 for a part of 1.
    """
    shares = [100 * point.share for point in found]
    line: dict[str, Any] = {"linestyle": "--", "marker": "D", "markerfacecolor": "white", "label": "a coin"}
    axes.plot(shares, [scale * point.coin for point in found], color=COIN, **line)
    axes.plot(shares, [scale * point.score for point in found], color="0.2", zorder=2)
    style = {"marker": "o", "markersize": 8, "markeredgecolor": "0.2", "linestyle": "", "zorder": 3}
    for index, point in enumerate(found):
        color = color_of(0.95 * index / max(len(found) - 1, 1))
        axes.plot(shares[index], scale * point.score, color=color, label=None if index else "entropy", **style)
    axes.set(xlabel="tokens by the large model, %", xlim=(-8, 104))
    axes.margins(y=0.12)
    axes.spines["right"].set_visible(False)
    axes.secondary_xaxis("top", functions=both_ways(ratio_of_small(found))).set_xlabel(PARAMETERS_USED)


def ratio_of_small(found: Sequence[ThresholdPoint]) -> float:
    """Return the small model's parameters over the large one's, P_S / P_L, by any point at which it computes tokens."""
    point = min(found, key=lambda point: point.share)
    return (point.parameters - point.share) / (1 - point.share) if point.share < 1 else 0.0


def both_ways(least: float) -> tuple[Callable, Callable]:
    """From the large model's share to the parameters that are used, and back; all in per cent."""
    return lambda share: 100 * least + (1 - least) * share, lambda ratio: (ratio - 100 * least) / (1 - least)


def label(axes: Any, found: Sequence[ThresholdPoint], scale: float, offset: tuple[int, int]) -> None:
    """Write the threshold beside each point that has room for it.

    Args:
        offset: in points, to the side of the curve on which there is room.
    """
    last = -math.inf
    for point in found:
        if 100 * abs(point.share - last) >= APART:
            place, last = (100 * point.share, scale * point.score), point.share
            axes.annotate(f"{point.threshold:g}", place, offset, textcoords="offset points", ha="right", fontsize=8)
