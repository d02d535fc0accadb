"""What flags and settings have in common.

A group of flags becomes a frozen dataclass whose fields have the flags' names, defaults and bounds. A parser made by
`new_parser` leaves flags that were not given out of its result, so that each default stands once: in the dataclass.
"""

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ..errors import GearbxError

T = TypeVar("T")
LARGEST_SHOWN = 2**31  # an upper bound that no user meets is not worth showing


def new_parser(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m gearbx_mlx.{command}",
        description=description,
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
    )


def flag_of(name: str) -> str:
    """prefill_step_size -> --prefill-step-size."""
    return "--" + name.replace("_", "-")


def number(default: Any, least: float, greatest: float = math.inf) -> Any:
    """A field whose value, unless it is None, is from `least` to `greatest`; NaN is refused."""
    return field(default=default, metadata={"bounds": (least, greatest)})


def one_of(default: Any, *choices: Any) -> Any:
    """A field whose value, unless it is None, is one of the choices."""
    return field(default=default, metadata={"choices": choices})


def name(default: str | None = None) -> Any:
    """A field for a path or the name of a model, which is not empty."""
    return field(default=default, metadata={"named": True})


@dataclass(frozen=True)
class Settings:
    """Settings that check their own fields.

    Raises:
        GearbxError: a value outside of its field's bounds or choices, or an empty name.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            value, rules = getattr(self, item.name), item.metadata
            if value is None:
                continue
            if "bounds" in rules:
                check_bounds(item.name, value, *rules["bounds"])
            if "choices" in rules and value not in rules["choices"]:
                choices = ", ".join(map(str, rules["choices"]))
                raise GearbxError(f"{flag_of(item.name)} is {value}; choose from {choices}")
            if "named" in rules and not str(value).strip():
                raise GearbxError(f"{flag_of(item.name)} is empty; name something, or leave the flag out")


def check_bounds(name: str, value: float, least: float, greatest: float = math.inf) -> None:
    """Raises GearbxError for a number outside of its bounds."""
    try:
        inside = least <= value <= greatest
    except TypeError:  # from a program
        inside = False
    if not inside:
        upper = f" to {greatest:g}" if greatest < LARGEST_SHOWN else " or more"
        raise GearbxError(f"{flag_of(name)} is {value}; give {least:g}{upper}")


def settings_of(kind: type[T], flags: argparse.Namespace) -> T:
    """The settings that some of a command's flags make: those with the names of the dataclass's fields."""
    given = vars(flags)
    return kind(**{item.name: given[item.name] for item in fields(kind) if item.name in given})  # type: ignore[arg-type]


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
        raise GearbxError(f"there is no setting '{unknown}'; choose from {', '.join(known)}")
    values = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
    return kind(
        **{
            group: groups[group](**{name: values[name] for name in members if name in values})
            for group, members in names.items()
        }
    )
