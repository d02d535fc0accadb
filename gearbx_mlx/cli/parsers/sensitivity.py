"""Flags of `sensitivity`, and the settings that they become."""

import argparse
from dataclasses import dataclass

from ...bit_selection.mlx_sensitivities import HIGH, LOW
from ...errors import GearbxError
from ...gears.ladder import DENSE, Ladder
from ..calibration_text import CalibrationTextSettings, add_text_flags
from ..gears import LayoutSettings, add_layout_flags
from ..model import ModelSettings, add_model_flags
from ..output import check_distinct
from ..settings import Settings, command_settings, name, new_parser

DEFAULT_BITS = "3,4,5,6,8"
DESCRIPTION = (
    "Measure, for every layer and every width, the KL from full precision and the change of perplexity when this layer "
    "alone is reduced. To continue an interrupted run, give the same command again."
)


@dataclass(frozen=True)
class MeasurementSettings(Settings):
    """What to measure, how, and where to write it."""

    bits: str = DEFAULT_BITS
    out: str = name("manifest.json")
    fast: bool = False
    compare: bool = False
    sensitivities: str | None = name()
    write_sensitivities: str | None = name()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.write_sensitivities is not None and not {LOW, HIGH} <= {*self.widths}:
            raise GearbxError(
                f"--bits {self.bits}: mlx_lm.dynamic_quant needs {LOW} and {HIGH} bits; measure these as well"
            )
        files = {"--sensitivities": self.sensitivities, "--write-sensitivities": self.write_sensitivities}
        check_distinct({"--out": self.out, **files})

    @property
    def widths(self) -> tuple[int, ...]:
        """Raises GearbxError for bits that make no ladder, or include 16."""
        widths = tuple(gear.bits for gear in Ladder.parse(self.bits))
        if DENSE in widths:
            raise GearbxError(
                f"--bits {self.bits}: 16 is full precision, which the others are compared with; leave it out"
            )
        return widths


@dataclass(frozen=True)
class SensitivitySettings:
    """Everything that `sensitivity` runs with."""

    model: ModelSettings
    text: CalibrationTextSettings
    measurement: MeasurementSettings
    layout: LayoutSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = new_parser("sensitivity", DESCRIPTION)
    add_model_flags(parser)
    add_text_flags(parser)
    group = parser.add_argument_group("sensitivity")
    group.add_argument("--bits", help=f"Widths, ascending. Default: {DEFAULT_BITS}")
    add_layout_flags(group)
    group.add_argument("--out", help="Default: manifest.json")
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--fast", action="store_true", help="To first order, from one backward pass, as in mlx_lm.dynamic_quant."
    )
    how.add_argument(
        "--compare", action="store_true", help="Measure, and print how well the fast way ranks the layers."
    )
    how.add_argument(
        "--sensitivities", metavar="FILE", help="Take a file of mlx_lm.dynamic_quant instead of measuring."
    )
    group.add_argument("--write-sensitivities", metavar="FILE", help="Write such a file, for mlx_lm.dynamic_quant.")
    return parser


def parse() -> SensitivitySettings:
    return command_settings(SensitivitySettings, vars(setup_arg_parser().parse_args()))
