"""Bits for every layer: by quality (floors, a memory budget) or by measured sensitivity (manifest, allocation).

Here is what flags say of them: quality floors, and numbers that `--help` shows before anything slow is imported. A
floor is the least cosine between a layer's weights and their quantized values (XFP 4.3).
"""

import contextlib
import os
from dataclasses import dataclass

from ..errors import GearbxError

STRICT, LAZY = 0.98, 0.93
ACCURACY_THRESHOLD = 0.5  # percent of perplexity that a layer at its fewest bits may add
EXCHANGES = 16  # tables with an exchange of bits between two layers that are measured, by default


@dataclass(frozen=True)
class Floors:
    """Least median cosines. Raises GearbxError for one that is not between 0 and 1."""

    strict: float = STRICT
    lazy: float = LAZY

    def __post_init__(self) -> None:
        for name in ("strict", "lazy"):
            if not 0 < getattr(self, name) < 1:
                raise GearbxError(f"the {name} floor is {getattr(self, name):g}; give a cosine between 0 and 1")

    @classmethod
    def chosen(cls, strict: float | None = None, lazy: float | None = None) -> "Floors":
        """Return floors as given, else as XFP_MIN_COS_STRICT and XFP_MIN_COS_LAZY say, else the defaults."""
        given = {"strict": strict, "lazy": lazy}
        return cls(**{name: from_environment(name) if value is None else value for name, value in given.items()})

    def of(self, kind: str) -> float:
        return self.lazy if kind == "routed" else self.strict


def from_environment(name: str) -> float:
    variable, default = {"strict": ("XFP_MIN_COS_STRICT", STRICT), "lazy": ("XFP_MIN_COS_LAZY", LAZY)}[name]
    text = os.environ.get(variable)
    if text is None:
        return default
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise GearbxError(f"{variable} is '{text}'; give a cosine between 0 and 1")
