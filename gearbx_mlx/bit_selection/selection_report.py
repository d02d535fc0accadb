"""A selection of bits as rows, in the form of XFP's tables 3 and A.1."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from ..gears.ladder import DENSE
from .codebook_selection import CodebookChoice, Selection


def component(choice: CodebookChoice) -> str:
    """The class and the last name of a layer, such as attention q_proj."""
    return f"{choice.kind} {choice.path.split('.')[-1]}"


def grouped_choices(selection: Selection, key) -> dict[str, list[CodebookChoice]]:
    groups: dict[str, list[CodebookChoice]] = defaultdict(list)
    for choice in selection.choices:
        groups[key(choice)].append(choice)
    return dict(groups)


def bits_text(choices: list[CodebookChoice]) -> str:
    """How many layers have which bits, such as 233×xfp3, 2×xfp4; dense: no codebook reaches the floor."""
    counts = Counter(choice.bits for choice in choices)
    return ", ".join(f"{n}×{'dense' if bits == DENSE else f'xfp{bits}'}" for bits, n in sorted(counts.items()))


def effective(choices: list[CodebookChoice]) -> float:
    return sum(c.weights * c.effective_bits for c in choices) / sum(c.weights for c in choices)


def class_rows(selection: Selection) -> list[dict[str, Any]]:
    """XFP's table 3: class, layers, floor, selected bits, effective bits per weight; the last row is the total."""
    rows = [
        {
            "component": kind,
            "layers": len(choices),
            "floor": choices[0].floor,
            "selected": bits_text(choices),
            "effective_bits": effective(choices),
        }
        for kind, choices in grouped_choices(selection, lambda c: c.kind).items()
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
    """XFP's table A.1: a row for each component, over its layers.

    A row has the mean cosine without and with outliers, the mean and the largest gain by outliers, the ratio of the
    error without outliers to the error with them at the 50th and 90th percentile, and the share of outliers.
    """
    rows = []
    for name, choices in grouped_choices(selection, component).items():
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
    """A row for each layer."""
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


def selection_as_dict(selection: Selection) -> dict[str, Any]:
    """The whole report, for a JSON file."""
    return {
        "floors": vars(selection.floors),
        "classes": class_rows(selection),
        "components": component_rows(selection),
        "layers": layer_rows(selection),
    }
