"""Flags of `sensitivity`, and their settings."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ..bit_selection import ACCURACY_THRESHOLD
from ..cli.flags import CalibrationTextSettings, ModelSettings, StorageSettings
from ..cli.parser import parser_of
from ..cli.start import command
from ..errors import LARGEST_SHOWN, GearbxError
from ..gears.ladder import Ladder
from ..settings import Settings, flag

DESCRIPTION = (
    "Measure, for every layer and width, the KL from full precision and the change of perplexity when only this layer "
    "is reduced. To continue an interrupted run, repeat the command."
)


def parse_widths(text: str) -> tuple[int, ...]:
    """Return --bits as numbers. Raises GearbxError for bits that make no ladder, or include 16."""
    ladder = Ladder.parse(text)
    if ladder.top.dense:
        raise GearbxError(f"--bits {text}: 16 is full precision, the reference of the others; omit 16")
    return ladder.quantized_bits


@dataclass(frozen=True)
class MeasurementSettings(Settings):
    """The measurements, and the output file."""

    title: ClassVar[str] = "sensitivity"

    bits: tuple[int, ...] = flag((3, 4, 5, 6, 8), "Bits to measure, ascending", parse=parse_widths)
    accuracy_threshold: float = flag(
        ACCURACY_THRESHOLD,
        "Maximum increase of the perplexity by one layer, in percent, for the layer's minimum bits",
        minimum=0.001,
        maximum=LARGEST_SHOWN,
    )
    out: str = flag("manifest.json", "File to write", named=True)
    fast: bool = flag(False, "First-order estimate from one backward pass, as in mlx_lm.dynamic_quant")


@dataclass(frozen=True)
class SensitivitySettings:
    """All settings of `sensitivity`."""

    model: ModelSettings
    text: CalibrationTextSettings
    measurement: MeasurementSettings
    layout: StorageSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(SensitivitySettings, "sensitivity", DESCRIPTION)


main = command("sensitivity")
