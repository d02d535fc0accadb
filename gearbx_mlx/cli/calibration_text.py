"""Flags of the calibration text, for commands that reduce single layers."""

import argparse
from dataclasses import dataclass

from ..kernels.names import KERNELS
from .settings import Settings, name, number, one_of

SAMPLES, LENGTH = 8, 256


@dataclass(frozen=True)
class CalibrationTextSettings(Settings):
    """The text (None: the one that ships), its windows and their most tokens, and the kernels that read it."""

    data: str | None = name()
    num_samples: int = number(SAMPLES, 1)
    sequence_length: int = number(LENGTH, 1)
    kernels: str = one_of("auto", *KERNELS)


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration text")
    group.add_argument(
        "--data",
        help="A text, or JSON Lines with text, or question and answer (GSM8K). Default: sums, prose, verse that ship",
    )
    group.add_argument("--num-samples", type=int, help=f"Windows of the text. Default: {SAMPLES}")
    group.add_argument("--sequence-length", type=int, help=f"Most tokens of a window. Default: {LENGTH}")
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        help="As for generate. Activations are not rounded, because only weights are measured. Default: auto",
    )
