"""Bits for every layer: by quality (floors, a memory budget) or by measured sensitivity (manifest, allocation).

The module itself has quality floors, and defaults that `--help` shows without slow imports. A floor is the lowest
cosine between a layer's weights and their quantized values (XFP 4.3).
"""

import contextlib
import os
from dataclasses import dataclass

from ..errors import GearbxError

STRICT, LAZY = 0.98, 0.93
ACCURACY_THRESHOLD = 0.5  # percent of perplexity that a layer at its fewest bits may add
EXCHANGES = 16  # default for the measured tables with an exchange of bits between two layers


@dataclass(frozen=True)
class Floors:
    """Lowest median cosines. Raises GearbxError for values that are not between 0 and 1."""

    strict: float = STRICT
    lazy: float = LAZY

    def __post_init__(self) -> None:
        for name in ("strict", "lazy"):
            if not 0 < getattr(self, name) < 1:
                raise GearbxError(f"{name} floor: must be between 0 and 1, got {getattr(self, name):g}; use a cosine")

    @classmethod
    def chosen(cls, strict: float | None = None, lazy: float | None = None) -> "Floors":
        """Return the given floors, else XFP_MIN_COS_STRICT and XFP_MIN_COS_LAZY, else the defaults."""
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
    raise GearbxError(f"{variable}: must be between 0 and 1, got '{text}'; use a cosine")
