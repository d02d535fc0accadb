"""The calibration text of commands that reduce single layers."""

from dataclasses import dataclass
from typing import ClassVar

from ..kernels import KERNELS
from .settings import Settings, flag


@dataclass(frozen=True)
class CalibrationTextSettings(Settings):
    """The text (None: the one that ships), its windows and their most tokens, and the kernels that read it."""

    title: ClassVar[str] = "calibration text"

    data: str | None = flag(
        None,
        "A text, or JSON Lines with text, or question and answer (GSM8K). Default: sums, prose, verse that ship",
        named=True,
    )
    num_samples: int = flag(8, "Windows of the text.", least=1)
    sequence_length: int = flag(256, "Most tokens of a window.", least=1)
    kernels: str = flag(
        "auto", "As for generate. Activations are not rounded, because only weights are measured.", choices=KERNELS
    )
