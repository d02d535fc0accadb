"""Flags and settings are one thing: a field of a frozen dataclass.

`flag` makes a field with everything that argparse and the check of its value need. `parser_of` makes a command's parser
from the groups of settings that the command has. A flag that is not given is not in the parser's result, so that each
default stands once, at its field.
"""

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, NoReturn, TypeVar, get_args, get_type_hints

from ..errors import GearbxError, check_range
from ..gone import gone

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str, shown: str) -> int:
    """Bytes of "3GB", "3 GiB", "500M" or "1e9". shown: what the message calls it, such as a flag.

    Raises:
        GearbxError: anything else, or less than one byte.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper().replace("E", "e"))
    try:
        count = float(found[1]) * UNITS[found[2]] if found else 0.0
    except (ValueError, KeyError):
        count = 0.0
    if not 1 <= count < math.inf:
        raise GearbxError(f"{shown}: '{text}' is not a size; give bytes such as 3GB, 500MB or 2GiB")
    return round(count)


def human_bytes(count: float) -> str:
    """1234567 -> 1.23 MB, in powers of ten as mlx-lm reports memory."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


T = TypeVar("T")


def flag(
    default: Any = MISSING,
    help: str = "",
    *,
    least: float | None = None,
    most: float = math.inf,
    choices: tuple[Any, ...] = (),
    named: bool = False,
    also: tuple[str, ...] = (),
    exclusive: str = "",
    rare: bool = False,
    parse: Callable[[str], Any] | None = None,
    **argparse_keywords: Any,
) -> Any:
    """A field that is a flag.

    Args:
        default: a required flag has none.
        help: the default is added to it, unless it names one.
        least, most: bounds of a number; NaN is outside.
        choices: the values that it can have.
        named: a path or the name of a model, which is not empty.
        also: further names of the flag.
        exclusive: at most one flag of those with the same word here may be given.
        rare: `--help-all` shows it, and `--help` does not.
        parse: makes the field's value of text, once; a program may give the value itself.
        argparse_keywords: of `add_argument`: metavar, nargs, type.
    """
    if default not in (MISSING, None, "") and default is not False and "Default:" not in help:
        help = f"{help} Default: {default}"
    rules = {"help": help, "choices": choices, "named": named, "also": also, "exclusive": exclusive, "rare": rare}
    rules["parse"] = parse
    if least is not None:
        rules["bounds"] = least, most
    return field(default=default, metadata=rules | {"argparse": argparse_keywords})


class FlagParser(argparse.ArgumentParser):
    """A parser that names the nearest flag for a mistyped one, and whose `--help` leaves out what few people need.

    Args:
        kind: what its flags make: a dataclass of groups of settings.
        keywords: of ArgumentParser. Without `prog`, the command's name is as it was typed.
    """

    def __init__(self, command: str = "", kind: Any = None, **keywords: Any):
        super().__init__(**{"prog": name_as_typed(command)} | keywords)
        self.rare: list[argparse.Action] = []
        self.command, self.kind = command, kind
        if command:
            self.add_argument("--version", action=Version, help="show the versions of the packages and exit")

    def add_rare(self, actions: Sequence[argparse.Action]) -> None:
        """Let these be shown by `--help-all` alone."""
        if actions and not self.rare:
            self.add_argument("--help-all", action=HelpAll, help=f"show {len(actions)} more flags and exit")
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
        known = {*self.flags()}
        for word in sys.argv[1:] if args is None else args:  # before a flag that is missing is asked for
            name = word.split("=")[0]
            if name.startswith("--") and name not in known:
                self.refuse_gone(name)
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown[0])
        return parsed

    def settings(self) -> Any:
        """The settings of the command line. Raises GearbxError for flags that contradict each other or the files."""
        return command_settings(self.kind, vars(self.parse_args()))

    def refuse(self, word: str) -> NoReturn:
        """Exit with one line for a word that is not a flag."""
        name = word.split("=")[0]
        self.refuse_gone(name)
        near = nearest(name, self.flags()) if name.startswith("-") else None
        hint = f"did you mean {near}?" if near else f"{self.prog} --help shows the flags"
        self.exit(2, f"{self.prog}: error: there is no {word}; {hint}\n")

    def refuse_gone(self, name: str) -> None:
        """Exit with one line for a flag, or a flag with a value, that is gone."""
        said = gone(name, self.command)
        if said is not None:
            self.exit(2, f"{self.prog}: error: {said}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices and action.option_strings:
            self.refuse_gone(f"{action.option_strings[-1]} {value}")
        super()._check_value(action, value)

    def flags(self) -> Iterator[str]:
        """The names of all flags, those of subcommands too."""
        for action in self._actions:
            yield from action.option_strings
            for parser in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
                yield from parser.flags()


def nearest(word: str, names: Iterable[str], least: float = 0.6) -> str | None:
    """The name that is most like a mistyped one. least: how like it has to be, from 0 to 1."""
    return next(iter(difflib.get_close_matches(word, names, 1, least)), None)


def as_text(value: Any) -> str:
    """The text that a flag's value was parsed of."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return ",".join(map(as_text, value)) if isinstance(value, tuple) else str(value)


class ShowAndExit(argparse.Action):
    """A flag that prints something; it is not a setting."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str, **_: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, *_: Any) -> None:
        self.show(parser)
        parser.exit()

    def show(self, parser: Any) -> None:
        raise NotImplementedError


class HelpAll(ShowAndExit):
    def show(self, parser: Any) -> None:
        parser.rare = []
        parser.print_help()


class Version(ShowAndExit):
    def show(self, parser: Any) -> None:
        print(versions())


def versions() -> str:
    """gearbx-mlx 0.1.0 (mlx-lm 0.32.2, mlx 0.32.4)"""
    return "gearbx-mlx {} (mlx-lm {}, mlx {})".format(*map(version, ("gearbx-mlx", "mlx-lm", "mlx")))


def name_as_typed(command: str) -> str:
    """`gearbx_mlx generate`, `gearbx_mlx.generate` or `python -m gearbx_mlx.generate`."""
    typed = Path(sys.argv[0]).name
    return typed if typed.startswith("gearbx") and not typed.endswith(".py") else f"python -m gearbx_mlx.{command}"


def parser_of(kind: type, command: str, description: str, epilog: str | None = None) -> FlagParser:
    """The parser of a command whose settings are a dataclass of groups of settings."""
    parser = FlagParser(command, kind, description=description, epilog=epilog, argument_default=argparse.SUPPRESS)
    rare: list[argparse.Action] = []
    for group in get_type_hints(kind).values():
        rare += add_flags(parser.add_argument_group(group.title), group)
    parser.add_rare(rare)
    return parser


def add_flags(group: Any, kind: "type[Settings]") -> list[argparse.Action]:
    """Add the flags of some settings to a parser, or to a group of one; those that are rare."""
    rare = []
    exclusive: dict[str, Any] = {}
    types = get_type_hints(kind)
    for item in fields(kind):
        rules = item.metadata
        place, word = group, rules["exclusive"]
        if word:
            if word not in exclusive:
                exclusive[word] = group.add_mutually_exclusive_group()
            place = exclusive[word]
        names = (*rules["also"], flag_of(item.name))
        keywords = argparse_keywords(item, types[item.name])
        action = place.add_argument(*names, dest=item.name, help=rules["help"], **keywords)
        rare += [action] if rules["rare"] else []
    return rare


def argparse_keywords(item: Any, annotation: Any) -> dict[str, Any]:
    """Keywords of `add_argument` for a field: its type, choices and whether it is required."""
    kind = next(part for part in get_args(annotation) or (annotation,) if part is not NoneType)
    keywords: dict[str, Any] = {"required": item.default is MISSING}
    if kind is bool and "type" not in item.metadata["argparse"]:
        return {"action": "store_true", **keywords}
    if kind in (int, float) and not item.metadata["parse"]:
        keywords["type"] = kind
    if choices := item.metadata["choices"]:
        # argparse refuses a word; the settings refuse a number, in one line like any other number out of bounds.
        keywords |= {"choices": choices} if kind is str else {"metavar": f"{{{','.join(map(str, choices))}}}"}
    return keywords | item.metadata["argparse"]


def flag_of(name: str) -> str:
    """prefill_step_size -> --prefill-step-size."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Settings:
    """A group of flags and settings that checks its own fields. `title` stands above the flags in `--help`.

    Raises:
        GearbxError: a value outside of its field's bounds or choices, an empty name, text that cannot be parsed.
    """

    title: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value, rules = getattr(self, item.name), item.metadata
            if value is None:
                continue
            if "bounds" in rules:
                check_range(flag_of(item.name), value, *rules["bounds"])
            if rules.get("choices"):
                check_choice(item.name, value, rules["choices"])
            if rules.get("named") and not str(value).strip():
                raise GearbxError(f"{flag_of(item.name)} is empty; name something, or leave the flag out")
            if rules.get("parse") and isinstance(value, str):
                object.__setattr__(self, item.name, rules["parse"](value))


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises GearbxError for a value, or one of several, that is not among the choices."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if one not in choices:
            said = gone(f"{flag_of(name)} {one}")
            if said is not None:
                raise GearbxError(said)
            raise GearbxError(f"{flag_of(name)} is {one}; choose from {', '.join(map(str, choices))}")


def given(settings: Settings, default: Settings) -> list[str]:
    """The settings that differ from their defaults."""
    return [item.name for item in fields(settings) if getattr(settings, item.name) != getattr(default, item.name)]


def command_settings(kind: type[T], values: Mapping[str, Any]) -> T:
    """The settings of a command, from parsed flags or from a program's keywords.

    Args:
        kind: a dataclass whose fields are groups of settings; a value belongs to the group that has a field of its
            name.

    Raises:
        GearbxError: a name that no group has, or as the groups.
    """
    groups: dict[str, Any] = {item.name: item.type for item in fields(kind)}  # type: ignore[arg-type]
    names = {group: [item.name for item in fields(group_kind)] for group, group_kind in groups.items()}
    known = sorted(name for members in names.values() for name in members)
    for unknown in sorted(values.keys() - known):
        said = gone(flag_of(unknown))
        if said is not None:
            raise GearbxError(said)
        raise GearbxError(f"there is no setting '{unknown}'; choose from {', '.join(known)}")
    for name, value in values.items():
        if value == []:  # what argparse makes of --flag=--
            raise GearbxError(f"{flag_of(name)} is --; give a value, or leave the flag out")
    values = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
    return kind(
        **{
            group: groups[group](**{name: values[name] for name in members if name in values})
            for group, members in names.items()
        }
    )
