"""EAD's Figure 1: the score over the large model's share of the tokens; colour is the threshold.

matplotlib is the extra `plots`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..telemetry.report import get_pyplot, save
from .pair_scores import ThresholdPoint, points, scores_of

COIN = "0.45"  # a grey of its own lightness, with hollow markers and a dashed line besides
PARAMETERS = "parameters used, % of the large model's"
APART = 5  # in per cent of the axis: labels of thresholds that are nearer than that are left out


def draw_pair(report: Mapping[str, Any], path: Path) -> None:
    """A panel for each score of the report, a marker for each threshold with its bits beside it, the coin's dashed.

    Args:
        report: the content of evaluation.json, of a pair.
        path: a png or svg file, which is replaced.
    """
    pyplot = get_pyplot()
    scores = scores_of(report)
    figure, panels = pyplot.subplots(1, len(scores), figsize=(5.4 * len(scores), 4.6), layout="constrained")
    for axes, (score, name) in zip(panels, scores.items()):
        found, falls = points(report, score), score == "perplexity"
        draw_panel(axes, found, pyplot.get_cmap("viridis"), 1 if falls else 100)
        label(axes, found, 1 if falls else 100, (-6, -13) if falls else (-6, 5))
        axes.set_ylabel(name if falls else f"{name}, %")
    panels[0].legend(frameon=False)
    small, large, data = (Path(report[name]).name for name in ("small_model", "model", "data"))
    figure.suptitle(f"{small} and {large} on {data}; labels: entropy threshold, bits")
    save(figure, path)


def draw_panel(axes: Any, found: Sequence[ThresholdPoint], color_of: Callable[[float], Any], scale: float) -> None:
    """The points of one score, with a second axis for the parameters that are used.

    Args:
        color_of: from 0 (the highest threshold) to 1; ascends in lightness.
        scale: 100 for a part of 1.
    """
    coins = [point.coin or (point.share, point.score) for point in found if point.coin or point.share in (0, 1)]
    line: dict[str, Any] = {"linestyle": "--", "marker": "D", "markerfacecolor": "white", "label": "a coin"}
    axes.plot([100 * share for share, _ in coins], [scale * score for _, score in coins], color=COIN, **line)
    axes.plot([100 * point.share for point in found], [scale * point.score for point in found], color="0.2", zorder=2)
    style = {"marker": "o", "markersize": 8, "markeredgecolor": "0.2", "capsize": 3, "zorder": 3}
    for index, point in enumerate(found):
        place, error = (100 * point.share, scale * point.score), scale * point.error
        color = color_of(0.95 * index / max(len(found) - 1, 1))
        axes.errorbar(*place, error, color=color, ecolor="0.5", label=None if index else "entropy", **style)
    axes.set(xlabel="tokens by the large model, %", xlim=(-8, 104))
    axes.margins(y=0.12)
    axes.spines["right"].set_visible(False)
    axes.secondary_xaxis("top", functions=both_ways(ratio_of_small(found))).set_xlabel(PARAMETERS)


def ratio_of_small(found: Sequence[ThresholdPoint]) -> float:
    """The small model's parameters over the large one's, P_S / P_L, by any point at which it computes tokens."""
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
