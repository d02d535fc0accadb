"""Flags of `cache`, and the kinds of entries in the user's cache."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ..cli.parser import parser_of
from ..cli.start import command
from ..settings import Settings, flag

CACHE_KINDS = {
    "kernels": "compiled CPU kernels",
    "bases": "codes of calibrated bases",
    "gears": "gears made from weights",
    "heads": "draft heads",
    "models": "configuration and tokenizer of GGUF files",
    "times": "measured times and acceptance rates",
    "imports": "names defined by transformers",
    "history": "typed lines of chat",
    "lookup": "prompts and outputs that --remember keeps",
    "other": "anything else",
}


@dataclass(frozen=True)
class EmptySettings(Settings):
    """The kind of entries to remove; None: no entries."""

    title: ClassVar[str] = "cache"

    empty: str | None = flag(
        None, "Kind of entries to remove, or all of them", choices=("all", *CACHE_KINDS), named=True
    )


@dataclass(frozen=True)
class UsersCacheSettings:
    """Settings of `cache`."""

    cache: EmptySettings


def setup_arg_parser() -> argparse.ArgumentParser:
    text = "Show the size of the user's cache, or empty it. Missing entries are made again when needed."
    return parser_of(UsersCacheSettings, "cache", text)


main = command("cache")
