"""Argument parsers of commands, made from their groups of settings.

The parser's result has only flags that are set, so each default is stated once, at its field.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from ..errors import GearbxError, choose, escaped, nearest
from ..settings import Settings, flag_of, flags_in

T = TypeVar("T")
OF_ARGPARSE = "metavar", "nargs", "const"  # keywords of `add_argument` that a flag may have


class FlagParser(argparse.ArgumentParser):
    """A parser that suggests the nearest flag for a mistyped one, and whose `--help` omits rare flags.

    Args:
        kind: a dataclass of groups of settings, made by `settings`.
        keywords: of ArgumentParser. `prog` defaults to the command as typed.
    """

    def __init__(self, command: str = "", kind: Any = None, **keywords: Any):
        super().__init__(**{"prog": name_as_typed(command)} | keywords)
        self.rare: list[argparse.Action] = []
        self.words: tuple[str, ...] = ()
        """Fields for this number of words without flags, if none of these fields is set by a flag."""
        self.kind = kind
        if command:
            help = "show the versions of the packages and exit"
            self.add_argument("--version", action="version", version=version_line(), help=help)

    @property
    def hint(self) -> str:
        """The remedy if no flag is similar."""
        return f"{self.prog} --help shows the flags"

    def add_rare(self, actions: Sequence[argparse.Action]) -> None:
        """Show these flags only with `--help-all`."""
        if actions and not self.rare:
            help = f"show {len(actions)} more flags and exit"
            self.add_argument("--help-all", action=HelpAll, nargs=0, dest=argparse.SUPPRESS, help=help)
        self.rare += actions

    def format_help(self) -> str:
        shown = [(action, action.help) for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in shown:
                action.help = text

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known = [*self.flags()]
        for word in takewhile("--".__ne__, sys.argv[1:] if args is None else args):
            # argparse accepts the start of a flag's name, and text with a space as a value.
            prefix = word.split("=")[0]
            if prefix.startswith("--") and " " not in word and not any(name.startswith(prefix) for name in known):
                self.refuse(word)  # before argparse reports a missing flag
        parsed, unknown = self.parse_known_args(args, namespace)
        unknown = [word for word in unknown if word != "--"]
        words = [word for word in unknown if " " in word or not word.startswith("-")]
        if unknown == words and len(words) == len(self.words) and not any(hasattr(parsed, name) for name in self.words):
            for name, word in zip(self.words, words):
                setattr(parsed, name, word)
        elif unknown:
            self.refuse(unknown[0])
        return parsed

    def settings(self) -> Any:
        """Return the settings of the command line."""
        return command_settings(self.kind, vars(self.parse_args()))

    def error(self, message: str) -> NoReturn:
        """Exit with one line, without argparse's usage before it."""
        self.end(f"{message}; {self.hint}")

    def end(self, line: str) -> NoReturn:
        """Exit with one line."""
        self.exit(2, escaped(f"{self.prog}: error: {line}") + "\n")

    def refuse(self, word: str) -> NoReturn:
        """Exit with one line for a word that is not a flag."""
        name = word.split("=")[0]
        near = (self.flag_of_word(name) or nearest(name, self.flags())) if name.startswith("-") else None
        hint = f"did you mean {near}?" if near else self.hint
        if self.words and not name.startswith("-"):
            shown = " ".join(map(str.upper, self.words))
            hint = f"use {flag_of(self.words[-1])} {shlex.quote(word)}, or {self.prog} {shown}"
        what = "not a flag" if name.startswith("-") else "belongs to no flag"
        self.end(f"{word}: {what}; {hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            shown = (action.option_strings or [action.dest])[-1]
            self.end(f"{shown}: unknown, got {value}; {choose(value, action.choices)}")

    def flag_of_word(self, name: str) -> str | None:
        """Return the flag whose metavar has the word of an unknown flag: --summary FILE.json for --json."""
        word = name.strip("-").lower()
        found = [
            f"{action.option_strings[-1]} {action.metavar}"
            for action in self._actions
            if action.option_strings and word and word in re.split(r"\W+", str(action.metavar).lower())
        ]
        return min(found, key=len, default=None)

    def flags(self) -> Iterator[str]:
        """Yield the names of all flags, including subcommands' flags."""
        for action in self._actions:
            yield from action.option_strings
            for parser in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
                yield from parser.flags()


class HelpAll(argparse.Action):
    """The flag --help-all; it is not a setting."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.rare = []
        parser.print_help()
        parser.exit()


def version_line() -> str:
    """Return the versions, such as `gearbx-mlx 0.1.0 (mlx-lm 0.32.2, mlx 0.32.4)`."""
    return "gearbx-mlx {} (mlx-lm {}, mlx {})".format(*map(version, ("gearbx-mlx", "mlx-lm", "mlx")))


def name_as_typed(command: str) -> str:
    """Return the command as typed, or `python -m gearbx_mlx.generate`."""
    typed = Path(sys.argv[0]).name
    return typed if typed.startswith("gearbx") and not typed.endswith(".py") else f"python -m gearbx_mlx.{command}"


def parser_of(kind: type, command: str, description: str, epilog: str | None = None) -> FlagParser:
    """Return the parser of a command. kind: its dataclass of groups of settings."""
    texts = {"usage": "%(prog)s [flags]", "description": description, "epilog": epilog}
    parser = FlagParser(command, kind, **texts, argument_default=argparse.SUPPRESS)
    rare: list[argparse.Action] = []
    for group in get_type_hints(kind).values():
        rare += add_flags(parser.add_argument_group(group.title), group)
    parser.add_rare(rare)
    return parser


def add_flags(group: Any, kind: type[Settings]) -> list[argparse.Action]:
    """Add the flags of settings to a parser or one of its groups; return the rare ones."""
    rare = []
    exclusive: dict[str, Any] = {}
    types = get_type_hints(kind)
    for name, item in flags_in(kind).items():
        rules = item.metadata
        place, word = group, rules["exclusive"]
        if word:
            if word not in exclusive:
                exclusive[word] = group.add_mutually_exclusive_group()
            place = exclusive[word]
        keywords = argparse_keywords(item, types[item.name])
        action = place.add_argument(*rules["also"], flag_of(name), dest=item.name, help=rules["help"], **keywords)
        rare += [action] if rules["rare"] else []
    return rare


def argparse_keywords(item: Any, annotation: Any) -> dict[str, Any]:
    """Return keywords of `add_argument` for a field: type, choices, required."""
    kind = next(part for part in get_args(annotation) or (annotation,) if part is not NoneType)
    keywords: dict[str, Any] = {"required": item.default is MISSING}
    if kind is bool:
        return {"action": "store_true", **keywords}
    if kind in (int, float) and not item.metadata["parse"]:
        keywords["type"] = partial(parsed_number, kind)
    if choices := item.metadata["choices"]:
        # argparse checks words, and the settings check numbers, like other numbers out of range.
        keywords |= {"choices": choices} if kind is str else {"metavar": f"{{{','.join(map(str, choices))}}}"}
    return keywords | {name: item.metadata[name] for name in OF_ARGPARSE if name in item.metadata}


def parsed_number(kind: type, text: str) -> Any:
    """Parse a flag's number. argparse shows an ArgumentTypeError with the flag's name."""
    try:
        return kind(text)
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"not a {what}, got {' '.join(text.split()) or repr(text)}") from None


def command_settings(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the settings of a command, from parsed flags or from a program's keywords.

    Args:
        kind: a dataclass of groups of settings; a value belongs to the group with a field of its name.

    Raises:
        GearbxError: a name without a group, or as the groups.
    """
    groups: dict[str, Any] = {item.name: item.type for item in fields(kind)}  # type: ignore[arg-type]
    names = {group: [item.name for item in fields(group_kind)] for group, group_kind in groups.items()}
    known = sorted(name for members in names.values() for name in members)
    for unknown in sorted(values.keys() - known):
        raise GearbxError(f"{unknown}: no such setting; {choose(unknown, known)}")
    for name, value in values.items():
        if value == []:  # argparse's result for --flag=--
            raise GearbxError(f"{flag_of(name)}: no value, got --; pass a value, or omit the flag")
    values = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
    return kind(
        **{
            group: groups[group](**{name: values[name] for name in members if name in values})
            for group, members in names.items()
        }
    )
