"""A setting is a field of a frozen dataclass, with everything that a flag, a file or a program needs to give it.

`flag` makes a field that is a flag as well, with its name, bounds, choices and help, and how its text is parsed: once.
`setting` makes one that programs and files alone set. `Settings` checks the values. Whoever has such a group gets its
default from the field, where it stands once.
"""

import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar

from .errors import GearbxError, check_choice, check_range

BYTE_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str, shown: str) -> int:
    """Return the bytes of "3GB", "3 GiB", "500M" or "1e9". Raises GearbxError, about `shown`, for anything else."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper().replace("E", "e"))
    try:
        count = float(found[1]) * BYTE_UNITS[found[2]] if found else 0.0
    except (ValueError, KeyError):
        count = 0.0
    if not 1 <= count < math.inf:
        raise GearbxError(f"{shown}: '{text}' is not a size; give bytes such as 3GB, 500MB or 2GiB")
    return round(count)


def human_bytes(count: float) -> str:
    """Return bytes for people: 1234567 is 1.23 MB, in powers of ten as mlx-lm reports memory."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


def setting(
    default: Any = MISSING,
    *,
    least: float | None = None,
    most: float = math.inf,
    choices: tuple[Any, ...] = (),
    named: bool = False,
    parse: Callable[[str], Any] | None = None,
    kw_only: bool = False,
    **rules: Any,
) -> Any:
    """Return a field that `Settings` checks.

    Args:
        least, most: bounds of a number; NaN is outside.
        choices: the values that it can have.
        named: a path or the name of a model, which is not empty.
        parse: makes the field's value of text, once; a program may give the value itself.
        rules: what else is to be known of it.
    """
    rules |= {"choices": choices, "named": named, "parse": parse}
    if least is not None:
        rules["bounds"] = least, most
    return field(default=default, metadata=rules, kw_only=kw_only)


def flag(
    default: Any = MISSING,
    help: str = "",
    *,
    name: str = "",
    also: tuple[str, ...] = (),
    exclusive: str = "",
    rare: bool = False,
    **rules: Any,
) -> Any:
    """Return a `setting` that is a flag.

    Args:
        default: a required flag has none.
        help: the default is added to it, unless it names one.
        name: as a field has it, where that is not the field's own.
        also: further names of the flag.
        exclusive: at most one flag of those with the same word here may be given.
        rare: `--help-all` shows it, and `--help` does not.
        rules: of `setting`; and of `add_argument`: metavar, nargs, const.
    """
    if default not in (MISSING, None, "") and default is not False and "Default:" not in help:
        help = f"{help} Default: {default}"
    return setting(default, help=help, flag=name, also=also, exclusive=exclusive, rare=rare, **rules)


def flags_in(kind: Any) -> dict[str, Field]:
    """Return the fields of a group that are flags, by the flag's name as a field has it."""
    return {item.metadata["flag"] or item.name: item for item in fields(kind) if "flag" in item.metadata}


def shown_name(item: Field) -> str:
    """Return what a message calls a field: its flag, or its own name."""
    return flag_of(item.metadata["flag"] or item.name) if "flag" in item.metadata else item.name


def as_text(value: Any) -> str:
    """Return the text that a flag's value was parsed of."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return ",".join(map(as_text, value)) if isinstance(value, tuple) else str(value)


def flag_of(name: str) -> str:
    """Return the name of a field as a flag: prefill_step_size is --prefill-step-size."""
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
                check_range(shown_name(item), value, *rules["bounds"])
            if rules.get("choices"):
                for one in value if isinstance(value, list | tuple) else [value]:
                    check_choice(flag_of(item.name), one, rules["choices"])
            if rules.get("named") and isinstance(value, str) and not value.strip():
                raise GearbxError(f"{shown_name(item)} is empty; name something, or leave the flag out")
            if rules.get("parse") and isinstance(value, str):
                object.__setattr__(self, item.name, rules["parse"](value))


def given_names(settings: Settings, default: Settings) -> list[str]:
    """Return the names of settings that differ from their defaults."""
    return [item.name for item in fields(settings) if getattr(settings, item.name) != getattr(default, item.name)]
