"""What a selection of bits chose, in the form of XFP's tables 3 and A.1."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from ..gears.ladder import DENSE
from .codebook_selection import Choice, Selection


def component(choice: Choice) -> str:
    """Layers are told together by class and name: attention q_proj."""
    return f"{choice.kind} {choice.path.split('.')[-1]}"


def grouped(selection: Selection, key) -> dict[str, list[Choice]]:
    groups: dict[str, list[Choice]] = defaultdict(list)
    for choice in selection.choices:
        groups[key(choice)].append(choice)
    return dict(groups)


def bits_text(choices: list[Choice]) -> str:
    """233xfp3, 2xfp4; layers that no codebook brings to their floor are dense."""
    counts = Counter(choice.bits for choice in choices)
    return ", ".join(f"{n}×{'dense' if bits == DENSE else f'xfp{bits}'}" for bits, n in sorted(counts.items()))


def effective(choices: list[Choice]) -> float:
    return sum(c.weights * c.effective_bits for c in choices) / sum(c.weights for c in choices)


def class_rows(selection: Selection) -> list[dict[str, Any]]:
    """Table 3: class, layers, floor, auto-selected bits, effective bits; the last row is of all."""
    rows = [
        {
            "component": kind,
            "layers": len(choices),
            "floor": choices[0].floor,
            "selected": bits_text(choices),
            "effective_bits": effective(choices),
        }
        for kind, choices in grouped(selection, lambda c: c.kind).items()
    ]
    every = list(selection.choices)
    total = {
        "component": "total",
        "layers": len(every),
        "floor": None,
        "selected": bits_text(every),
        "effective_bits": selection.effective_bits,
    }
    return [*rows, total]


def component_rows(selection: Selection) -> list[dict[str, Any]]:
    """Table A.1, of each component, over its layers.

    The means of both cosines, the mean and most that outliers add, the ratio of the errors without and with them at the
    50th and 90th percentile, and the share of outliers.
    """
    rows = []
    for name, choices in grouped(selection, component).items():
        found = [choice.quality for choice in choices]
        gains = [q.cosine - q.bulk_cosine for q in found]
        ratios = [q.bulk_error / q.error if q.error else 1.0 for q in found]
        rows.append(
            {
                "type": name,
                "layers": len(choices),
                "bits": bits_text(choices),
                "cos_bulk": float(np.mean([q.bulk_cosine for q in found])),
                "cos_outlier": float(np.mean([q.cosine for q in found])),
                "gain_mean": float(np.mean(gains)),
                "gain_max": float(np.max(gains)),
                "mse_ratio_p50": float(np.percentile(ratios, 50)),
                "mse_ratio_p90": float(np.percentile(ratios, 90)),
                "outlier_share": float(np.mean([q.outlier_share for q in found])),
                "effective_bits": effective(choices),
            }
        )
    return rows


def layer_rows(selection: Selection) -> list[dict[str, Any]]:
    """One row for each layer."""
    return [
        {
            "layer": choice.path,
            "type": component(choice),
            "floor": choice.floor,
            "bits": choice.bits,
            "cos_bulk": choice.quality.bulk_cosine,
            "cos_outlier": choice.quality.cosine,
            "outlier_share": choice.quality.outlier_share,
            "effective_bits": choice.effective_bits,
        }
        for choice in selection.choices
    ]


def as_dict(selection: Selection) -> dict[str, Any]:
    """All of it, for a file."""
    return {
        "floors": vars(selection.floors),
        "classes": class_rows(selection),
        "components": component_rows(selection),
        "layers": layer_rows(selection),
    }
