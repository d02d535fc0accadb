"""What `benchmark server` says: a row for each figure, with what it should be."""

import statistics
from collections.abc import Sequence
from typing import Any

COLUMNS = ("part", "kernels", "measure", "value", "spread", "least", "most", "count")


def row(
    part: str,
    measure: str,
    values: Sequence[float],
    kernels: str = "",
    least: float | None = None,
    most: float | None = None,
    count: int | None = None,
) -> dict[str, Any]:
    """The median of some values and their spread; least, most: what is aimed at. count: of what was measured."""
    value = statistics.median(values)
    spread = [min(values), max(values)] if len(values) > 1 else None
    reached = (least is None or value >= least) and (most is None or value <= most)
    return {
        **{"part": part, "kernels": kernels, "measure": measure, "value": value, "spread": spread},
        **{"least": least, "most": most, "reached": reached},
        "count": len(values) if count is None else count,
    }
