"""Settings: fields of frozen dataclasses with default, bounds, choices and parser, each stated once.

`setting` makes a field that programs and files set. `flag` makes one that is a flag too, with name and help. `Settings`
validates the values.
"""

import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar

from .errors import GearbxError, check_choice, check_range

BYTE_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str, shown: str) -> int:
    """Parse bytes such as "3GB", "3 GiB", "500M" or "1e9". shown: name for the message.

    Raises:
        GearbxError: other text.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper().replace("E", "e"))
    try:
        count = float(found[1]) * BYTE_UNITS[found[2]] if found else 0.0
    except (ValueError, KeyError):
        count = 0.0
    if not 1 <= count < math.inf:
        raise GearbxError(f"{shown}: not a size, got '{text}'; use bytes such as 3GB, 500MB or 2GiB")
    return round(count)


def human_bytes(count: float) -> str:
    """Return bytes with three digits and a unit: 1234567 is 1.23 MB. Powers of ten, as in mlx-lm."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


def setting(
    default: Any = MISSING,
    *,
    minimum: float | None = None,
    maximum: float = math.inf,
    choices: tuple[Any, ...] = (),
    named: bool = False,
    parse: Callable[[str], Any] | None = None,
    kw_only: bool = False,
    **rules: Any,
) -> Any:
    """Return a field that `Settings` validates.

    Args:
        minimum, maximum: bounds of a number, inclusive; NaN is outside.
        choices: allowed values.
        named: True for a path or the name of a model; it must not be empty.
        parse: converts text to the field's value; a program may pass the value itself.
        rules: more metadata.
    """
    rules |= {"choices": choices, "named": named, "parse": parse}
    if minimum is not None:
        rules["bounds"] = minimum, maximum
    return field(default=default, metadata=rules, kw_only=kw_only)


def flag(
    default: Any = MISSING,
    help: str = "",
    *,
    name: str = "",
    also: tuple[str, ...] = (),
    exclusive: str = "",
    rare: bool = False,
    default_text: str = "",
    **rules: Any,
) -> Any:
    """Return a `setting` that is a flag.

    Args:
        default: a required flag has none.
        help: a fragment without a period, at most 20 words including the default that is appended.
        name: the flag's name with underscores, if not the field's.
        also: more names of the flag.
        exclusive: a label; at most one flag with this label may be set.
        rare: only `--help-all` shows it.
        default_text: the default in words, if it depends on other flags, files or the machine.
        rules: of `setting`; and of `add_argument`: metavar, nargs, const.
    """
    has_text = default not in (MISSING, None, "", ()) and default is not False
    if default_text or has_text:
        help = f"{help} [default: {default_text or as_text(default)}]"
    return setting(default, help=help, flag=name, also=also, exclusive=exclusive, rare=rare, **rules)


def flags_in(kind: Any) -> dict[str, Field]:
    """Return the fields of a group that are flags, by the flag's name with underscores."""
    return {item.metadata["flag"] or item.name: item for item in fields(kind) if "flag" in item.metadata}


def shown_name(item: Field) -> str:
    """Return a field's name in messages: its flag, or its own name."""
    return flag_of(item.metadata["flag"] or item.name) if "flag" in item.metadata else item.name


def as_text(value: Any) -> str:
    """Return a flag's value as text that it could be parsed from."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return ",".join(map(as_text, value)) if isinstance(value, tuple) else str(value)


def flag_of(name: str) -> str:
    """Return the name of a field as a flag: prefill_step_size is --prefill-step-size."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Settings:
    """A group of flags and settings that validates its own fields. title: heading in `--help`.

    Raises:
        GearbxError: a value outside its bounds or choices, an empty name, or text that cannot be parsed.
    """

    title: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value, rules = getattr(self, item.name), item.metadata
            if value is None:
                continue
            is_read = rules.get("parse") and isinstance(value, str)
            if item.type in (int, int | None) and type(value) is not int and not is_read:
                raise GearbxError(f"{shown_name(item)}: must be a whole number, got {value!r}; use an int")
            if "bounds" in rules:
                check_range(shown_name(item), value, *rules["bounds"])
            if rules.get("choices"):
                for one in value if isinstance(value, list | tuple) else [value]:
                    check_choice(flag_of(item.name), one, rules["choices"])
            if rules.get("named") and isinstance(value, str) and not value.strip():
                raise GearbxError(f"{shown_name(item)}: empty; use a name, or omit it")
            if is_read:
                object.__setattr__(self, item.name, rules["parse"](value))


def given_names(settings: Settings, default: Settings) -> list[str]:
    """Return the names of settings that differ from their defaults."""
    return [item.name for item in fields(settings) if getattr(settings, item.name) != getattr(default, item.name)]
