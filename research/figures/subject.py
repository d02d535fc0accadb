"""The model that the pictures are made of, what it says of a text, and the style: fit for print, readable in grey."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from gearbx_mlx.decoding.sampling import entropy_bits
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.gears.discovery import discover, vocabulary
from gearbx_mlx.routing.gates import default_thresholds

GEARS = (4, 8, 16)  # bits of low, mid and high: GEARBX 2
NAMES = ("low", "mid", "high")
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "\\\\", "xx")
GUIDE: dict[str, Any] = {"color": "0.35", "linestyle": "--", "linewidth": 0.8}


@dataclass
class Subject:
    """A model and its tokenizer.

    Attributes:
        load: returns a new copy of the dense model, for a picture that changes it.
        directory: of its checkpoint.
        max_tokens: of a text, how many are read.
    """

    name: str
    load: Callable[[], nn.Module]
    directory: Path
    tokenizer: Any
    max_tokens: int

    @cached_property
    def model(self) -> nn.Module:
        """One copy, which no picture may change."""
        return self.load()

    @cached_property
    def vocab_size(self) -> int:
        return vocabulary(self.model)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The paper's 1.8 and 3.5 bits, scaled to this vocabulary (GEARBX 3.4)."""
        return default_thresholds(len(GEARS), self.vocab_size)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))[: self.max_tokens]

    def entropies(self, tokens: list[int]) -> list[float]:
        """Bits of the distribution after each token, teacher-forced, at full precision."""
        found: list[float] = entropy_bits(self.model(mx.array(tokens)[None])[0]).tolist()  # type: ignore[assignment]
        return found


def matrices(subject: Subject) -> dict[str, nn.Linear]:
    """Path to layer, of every dense linear layer that all formats can store. Raises GearbxError if there is none."""
    managed, _ = discover(subject.model, "all", format="affine")
    found = {layer.path: layer.module for layer in managed if isinstance(layer.module, nn.Linear)}
    if not found:
        raise GearbxError(f"{subject.name}: has no dense linear layer to quantize; choose an original model")
    return found
