"""Flags of `cache`, and the kinds of what is kept in the user's cache."""

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
    "models": "configuration and tokenizer of GGUF files",
    "times": "measured times, and what texts taught",
    "imports": "names that transformers defines",
    "history": "lines that were typed in chat",
    "other": "anything else",
}


@dataclass(frozen=True)
class EmptySettings(Settings):
    """Say what to remove from the cache; nothing without the flag."""

    title: ClassVar[str] = "cache"

    empty: str | None = flag(
        None, "Remove what is kept of one kind, or all of it.", choices=("all", *CACHE_KINDS), named=True
    )


@dataclass(frozen=True)
class UsersCacheSettings:
    """Everything that `cache` runs with."""

    cache: EmptySettings


def setup_arg_parser() -> argparse.ArgumentParser:
    said = "Show how large the user's cache is, or empty it. What is missing there is made again when it is needed."
    return parser_of(UsersCacheSettings, "cache", said)


main = command("cache")
