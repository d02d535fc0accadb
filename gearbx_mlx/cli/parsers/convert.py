"""Flags of `convert`, and the settings that they become."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ...bit_selection.defaults import Floors
from ...errors import GearbxError
from ...gears.ladder import DEFAULT_LADDER, DTYPES, EMBEDDINGS, Ladder
from ..budget import Budget, BudgetSettings
from ..device import device_flag
from ..floors import FloorSettings
from ..gears import LayoutSettings, quality_ladder
from ..settings import Settings, command_settings, flag, parser_of

DESCRIPTION = (
    "Write a checkpoint that holds several gears. mlx-lm reads it as a 4-bit model if the format is planes or affine. "
    "To continue an interrupted run, give the same command again."
)


@dataclass(frozen=True)
class ConversionSettings(Settings):
    """Which model to convert (None: the one that ships), and where to write it.

    dtype: the type to save the original weights in; None: theirs. manifest: a precision manifest, one of whose tables
    is written for mlx-lm, or which lies beside the gears.
    """

    title: ClassVar[str] = "conversion"

    model: str | None = flag(
        None, "Local directory or Hub repository. Default: the model that ships.", named=True, also=("--hf-path",)
    )
    mlx_path: str = flag("mlx_model", "Path to save the MLX model.", named=True)
    revision: str | None = flag(None, "Of a Hub repository: a branch, a tag or a commit.", named=True)
    trust_remote_code: bool = flag(False, "Enable trusting remote code for tokenizer")
    dtype: str | None = flag(None, "Type to save the original weights in. Default: theirs", choices=DTYPES)
    device: str | None = device_flag()
    embeddings: str | None = flag(
        None,
        "Whether the lowest gear looks up quantized rows of embeddings, as what mlx_lm.convert writes. The other gears "
        f"have the original rows. Default: {EMBEDDINGS[0]}",
        choices=EMBEDDINGS,
    )
    upload_repo: str | None = flag(None, "The Hugging Face repo to upload the model to.", named=True)
    manifest: str | None = flag(
        None,
        "From gearbx_mlx.sensitivity or allocate. With several gears it lies in the checkpoint, and says which layers "
        "a controller caps first, and how far. With one (--gears 4) write its table, instead of gears, as a checkpoint "
        "for mlx-lm with every layer at its own bits.",
        metavar="FILE",
        named=True,
    )
    verify: str | None = flag(
        None,
        "Instead of converting, compare every array of a geared checkpoint with its hash. Of format exact, also make "
        "the original's files again and compare them.",
        metavar="DIR",
        named=True,
    )
    restore: str | None = flag(
        None,
        "Instead of converting, write the original of a geared checkpoint of format exact to --mlx-path: every file "
        "that mlx-lm reads, byte for byte.",
        metavar="DIR",
        named=True,
    )


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
        if self.conversion.verify is not None or self.conversion.restore is not None:
            self._check_alone()
        elif self.conversion.manifest is not None:
            self._check_manifest()
        elif self.layout.format == "exact" and self.conversion.dtype is not None:
            raise GearbxError(
                f"--dtype {self.conversion.dtype}: format exact has the weights bit for bit; leave it out, "
                "or convert the model first with mlx_lm.convert --dtype, which rounds"
            )
        elif not self.ladder.quantized_bits:
            raise GearbxError(f"--gears {self.ladder}: nothing to convert; give a gear of fewer bits")
        elif isinstance(self.quality, Budget) and self.ladder[0].bits != 2:
            raise GearbxError(
                f"--gears {self.ladder}: a budget finds the bits of a gear that begins at 2; leave out --gears"
            )

    def _check_alone(self) -> None:
        conversion, layout = self.conversion, self.layout
        given = [
            conversion.embeddings,
            conversion.model,
            conversion.manifest,
            conversion.upload_repo,
            conversion.dtype,
            conversion.trust_remote_code or None,
            *vars(layout).values(),
        ]
        if conversion.verify is not None and conversion.restore is not None:
            raise GearbxError("--restore and --verify are two commands; --restore compares everything that it writes")
        if any(value is not None for value in given) or self.floors.wanted or self.budget.wanted:
            if conversion.restore is not None:
                raise GearbxError(
                    "--restore writes what was converted; leave out all flags but --mlx-path and --revision"
                )
            raise GearbxError("--verify compares a checkpoint and writes none; leave out what is for writing one")

    def _check_manifest(self) -> None:
        if self.conversion.dtype or self.layout.manage or self.conversion.embeddings:
            raise GearbxError(
                "--manifest names the layers and their weights; leave out --dtype, --manage and --embeddings"
            )
        self.layout.named(self.layout.format or "affine")  # which has no choices
        if self.floors.wanted or self.budget.wanted:
            raise GearbxError("--manifest has the bits of every layer; leave out the floors and the budget")

    @property
    def writes_table(self) -> bool:
        """Whether a table of a manifest is written, and no gears."""
        gears = self.layout.gears
        return self.conversion.manifest is not None and (gears is None or len(Ladder.parse(gears)) == 1)

    @property
    def ladder(self) -> Ladder:
        """The gears to write."""
        by_quality = self.floors.wanted or self.budget.wanted
        format = self.layout.chosen_format
        return Ladder.parse(self.layout.gears or quality_ladder(format, by_quality, DEFAULT_LADDER))

    @property
    def quality(self) -> Floors | Budget | None:
        """What the bits of every layer follow from: floors, a budget, or nothing but the gears."""
        format = self.layout.chosen_format
        return self.budget.budget(format, self.floors) or self.floors.floors(format)


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(ConvertSettings, "convert", DESCRIPTION)


def parse() -> ConvertSettings:
    return command_settings(ConvertSettings, vars(setup_arg_parser().parse_args()))
