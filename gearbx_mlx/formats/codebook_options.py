"""What a format of codebooks leaves to choose: outliers, rounds, library and groups (XFP 3.4, 4.1, 4.2).

The choices are part of the format's name, as in "codebook-library:group=64,sigma=2.5". So they go wherever the name
goes: into a checkpoint, a manifest, a model card, and back. A name without choices has XFP's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..errors import GearbxError

GROUPS = (32, 64, 128, 256)  # whole words of packed codes


def option(default: float, least: float, most: float, *choices: int) -> Any:
    return field(default=default, metadata={"range": (least, most), "choices": choices})


@dataclass(frozen=True)
class CodebookOptions:
    """Choices of a codebook format. The defaults are XFP's.

    sigma: weights further from the mean than so many standard deviations of the matrix are outliers.
    cap: the largest share of a matrix's weights that can be outliers; 0: none are.
    rounds: of Lloyd's iteration.
    library: codebooks of a matrix; group: weights that share one, with a scale and a mid-point. Both are of format
        codebook-library alone.

    Raises:
        GearbxError: a value outside of its range.
    """

    sigma: float = option(3.0, 1, 100)
    cap: float = option(0.02, 0, 0.5)
    rounds: int = option(20, 1, 1000)
    library: int = option(32, 1, 256)  # a group names one with a byte
    group: int = option(128, min(GROUPS), max(GROUPS), *GROUPS)

    def __post_init__(self) -> None:
        for item in fields(self):
            check_option(item.name, getattr(self, item.name))

    def __str__(self) -> str:
        """What differs from the defaults: "group=64,sigma=2.5"."""
        chosen = {
            item.name: getattr(self, item.name) for item in fields(self) if getattr(self, item.name) != item.default
        }
        return ",".join(f"{name}={value:g}" for name, value in sorted(chosen.items()))

    @property
    def gaussian_share(self) -> float:
        """The share of outliers among weights of a normal distribution, to four places."""
        return min(self.cap, round(math.erfc(self.sigma / math.sqrt(2)), 4))

    @classmethod
    def parse(cls, text: str) -> "CodebookOptions":
        """The inverse of `str`. Raises GearbxError for text that is none."""
        kinds = {item.name: item.type for item in fields(cls)}
        found: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in kinds or name in found:
                raise GearbxError(f"codebooks have no choice '{part}' in '{text}'; choose from {', '.join(kinds)}")
            try:
                found[name] = int(value) if kinds[name] is int else float(value)
            except ValueError:
                raise GearbxError(f"{name} of codebooks is '{value}'; give a number") from None
        return cls(**found)  # type: ignore[arg-type]


def check_option(name: str, value: float, shown: str | None = None) -> None:
    """Raises GearbxError for a value outside of its range. shown: what the message calls it."""
    rules = next(item.metadata for item in fields(CodebookOptions) if item.name == name)
    (least, most), choices, shown = rules["range"], rules["choices"], shown or f"{name} of codebooks"
    if choices and value not in choices:
        raise GearbxError(f"{shown} is {value}; choose from {', '.join(map(str, choices))}")
    if not least <= value <= most:  # not a number neither
        raise GearbxError(f"{shown} is {value}; give {least:g} to {most:g}")


def split_name(name: str) -> tuple[str, str]:
    """The name of a format without its choices, and their text, which may be empty."""
    base, _, text = name.partition(":")
    return base, text


def name_with(base: str, options: CodebookOptions) -> str:
    """The name of a format with its choices."""
    return f"{base}:{options}" if str(options) else base


def changed_name(name: str, changes: Mapping[str, Any]) -> str:
    """The name of a format with some of its choices changed. Raises GearbxError for a value outside of its range."""
    base, text = split_name(name)
    return name_with(base, replace(CodebookOptions.parse(text), **changes)) if changes else name
