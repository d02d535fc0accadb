"""Flags of `convert`, and the settings that they become."""

import argparse
from dataclasses import dataclass

from ...bit_selection.floors import Floors
from ...errors import GearbxError
from ...formats import DEFAULT_FORMAT
from ...gears.ladder import Ladder
from ...gears.names import DEFAULT_LADDER, DTYPES
from ..budget import Budget, BudgetSettings, add_budget_flags
from ..floors import FloorSettings, add_floor_flags
from ..gears import LayoutSettings, add_ladder_flags, add_layout_flags, quality_ladder
from ..settings import Settings, command_settings, name, new_parser, one_of

DESCRIPTION = (
    "Write a checkpoint that holds several gears. mlx-lm reads it as a 4-bit model if the format is planes or affine. "
    "To continue an interrupted run, give the same command again."
)


@dataclass(frozen=True)
class ConversionSettings(Settings):
    """Which model to convert (None: the one that ships), and where to write it.

    dtype: the type to save the original weights in; None: theirs. manifest: a precision manifest, one of whose tables
    is written for mlx-lm.
    """

    model: str | None = name()
    mlx_path: str = name("mlx_model")
    revision: str | None = name()
    trust_remote_code: bool = False
    dtype: str | None = one_of(None, *DTYPES)
    upload_repo: str | None = name()
    manifest: str | None = name()


@dataclass(frozen=True)
class ConvertSettings:
    """Everything that `convert` runs with.

    Raises:
        GearbxError: flags that exclude each other, or a ladder that has nothing to quantize.
    """

    conversion: ConversionSettings
    layout: LayoutSettings
    floors: FloorSettings
    budget: BudgetSettings

    def __post_init__(self) -> None:
        if self.conversion.manifest is not None:
            self._check_manifest()
        elif not self.ladder.quantized_bits:
            raise GearbxError(f"--gears {self.ladder}: nothing to convert; give a gear of fewer bits")
        elif isinstance(self.quality, Budget) and self.ladder[0].bits != 2:
            raise GearbxError(
                f"--gears {self.ladder}: a budget finds the bits of a gear that begins at 2; leave out --gears"
            )

    def _check_manifest(self) -> None:
        if self.conversion.dtype or self.layout.manage:
            raise GearbxError("--manifest names the layers and their weights; leave out --dtype and --manage")
        if self.floors.wanted or self.budget.wanted:
            raise GearbxError("--manifest has the bits of every layer; leave out the floors and the budget")

    @property
    def ladder(self) -> Ladder:
        """The gears to write."""
        by_quality = self.floors.wanted or self.budget.wanted
        format = self.layout.format or DEFAULT_FORMAT
        return Ladder.parse(self.layout.gears or quality_ladder(format, by_quality, DEFAULT_LADDER))

    @property
    def quality(self) -> Floors | Budget | None:
        """What the bits of every layer follow from: floors, a budget, or nothing but the gears."""
        format = self.layout.format or DEFAULT_FORMAT
        return self.budget.budget(format, self.floors) or self.floors.floors(format)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = new_parser("convert", DESCRIPTION)
    parser.add_argument(
        "--hf-path", "--model", dest="model", help="Local directory or Hub repository. Default: the model that ships."
    )
    parser.add_argument("--mlx-path", help="Path to save the MLX model. Default: mlx_model")
    parser.add_argument("--revision", help="Of a Hub repository: a branch, a tag or a commit.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Enable trusting remote code for tokenizer")
    parser.add_argument("--dtype", choices=DTYPES, help="Type to save the original weights in. Default: theirs")
    parser.add_argument("--upload-repo", help="The Hugging Face repo to upload the model to.")
    add_ladder_flags(parser)
    group = parser.add_argument_group("gearbox")
    add_layout_flags(group)
    group.add_argument(
        "--manifest",
        metavar="FILE",
        help="From gearbx_mlx.allocate. Instead of gears, write one of its tables (--gears 4) as a checkpoint for "
        "mlx-lm, with every layer at its own bits.",
    )
    add_floor_flags(parser)
    add_budget_flags(parser)
    return parser


def parse() -> ConvertSettings:
    return command_settings(ConvertSettings, vars(setup_arg_parser().parse_args()))
