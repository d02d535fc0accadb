"""Flags of `figures`, and the settings that they become."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ..model import ModelSettings
from ..settings import Settings, command_settings, flag, parser_of


@dataclass(frozen=True)
class PictureSettings(Settings):
    """Which pictures, of how much text, and where they go."""

    title: ClassVar[str] = "figures"

    out: str = flag("figures", "Directory for pictures, tables and data.", named=True)
    only: str | None = flag(None, "Numbers of pictures, such as 1,5. Default: all", metavar="NUMBERS", named=True)
    max_tokens: int = flag(160, "Tokens of each text that are read.", least=6)
    redraw: bool = flag(False, "Measure nothing: draw from the data in the directory.")


@dataclass(frozen=True)
class FiguresSettings:
    """Everything that `figures` runs with."""

    model: ModelSettings
    pictures: PictureSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        FiguresSettings,
        "figures",
        "Make the pictures of the paper from runs of a model: for each one SVG and PNG, its table as CSV, and what was "
        "measured as JSON.",
    )


def parse() -> FiguresSettings:
    return command_settings(FiguresSettings, vars(setup_arg_parser().parse_args()))
