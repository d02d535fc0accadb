"""Flags and settings of gearbx_mlx.chat."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from ..cli.flags import (
    CacheSettings,
    ControllerSettings,
    GearFlags,
    LayoutSettings,
    ModeFlags,
    ModelSettings,
    SamplingSettings,
    check_pair,
)
from ..cli.parser import FlagParser, add_flags, command_settings, parser_of
from ..cli.prompt import AnswerLengthSettings
from ..cli.start import command
from ..errors import GearbxError
from ..settings import Settings, flag


@dataclass(frozen=True)
class TerminalSettings(Settings):
    """Settings of the terminal."""

    title: ClassVar[str] = "terminal"

    no_history: bool = flag(False, "Do not load or save the history of typed lines")


@dataclass(frozen=True)
class ChatSettings:
    model: ModelSettings
    prompt: AnswerLengthSettings
    sampling: SamplingSettings
    cache: CacheSettings
    layout: LayoutSettings
    gears: GearFlags
    mode: ModeFlags
    controller: ControllerSettings
    terminal: TerminalSettings

    def __post_init__(self) -> None:
        check_pair(self)


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        ChatSettings,
        "chat",
        "Talk with a model that changes the precision of its weights while it answers.",
        "In the chat, /help lists its commands. Ctrl-C stops an answer, Ctrl-D ends the chat.",
    )


class LineParser(FlagParser):
    """A parser of flags of chat commands, whose errors do not end the chat."""

    hint = "gearbx_mlx chat --help shows the flags"

    def end(self, line: str) -> NoReturn:
        raise GearbxError(f"{self.prog}: {line}")


@dataclass(frozen=True)
class ModeChange:
    """Settings that /mode may change."""

    mode: ModeFlags


def parse_mode(name: str, words: Sequence[str]) -> ModeChange:
    """Parse a mode's name and flags. Raises GearbxError for invalid ones."""
    parser = LineParser(prog="/mode", argument_default=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    add_flags(parser, ModeFlags)
    return command_settings(ModeChange, vars(parser.parse_args(["--mode", name, *words])))


main = command("chat")
