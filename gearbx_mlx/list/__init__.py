"""Flags of `list`."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ..cli.parser import parser_of
from ..cli.start import command
from ..settings import Settings, flag


@dataclass(frozen=True)
class PlaceSettings(Settings):
    """The directory to list besides the Hub's cache."""

    title: ClassVar[str] = "list"

    directory: str = flag(".", "Directory of converted models and GGUF files", named=True)


@dataclass(frozen=True)
class ListSettings:
    """Settings of `list`."""

    place: PlaceSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    text = "List the models in the Hub's cache, a directory and installed packages, by their names for --model."
    return parser_of(ListSettings, "list", text)


main = command("list")
