"""Flags of `list`."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ..cli.parser import parser_of
from ..cli.start import command
from ..settings import Settings, flag


@dataclass(frozen=True)
class PlaceSettings(Settings):
    """Name the directory whose models are listed beside those of the Hub's cache."""

    title: ClassVar[str] = "list"

    directory: str = flag(".", "Directory of converted models and GGUF files", named=True)


@dataclass(frozen=True)
class ListSettings:
    """Everything that `list` runs with."""

    place: PlaceSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    said = "List the models at hand, with what --model takes: the Hub's cache, a directory, and what is installed."
    return parser_of(ListSettings, "list", said)


main = command("list")
