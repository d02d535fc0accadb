"""`GearbxError`, the only exception meant for users, with checks of numbers, choices and lists of numbers."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)
LONGEST_NAME = 60  # characters of a mistyped word that are compared with names
LARGEST_SHOWN = 2**31  # messages omit upper bounds from here on: no user reaches them


class GearbxError(ValueError):
    """A user's mistake. The message is one line: `thing: problem, got value; remedy`."""


class GearbxWarning(UserWarning):
    """A warning that a run may differ from the user's expectation."""


class OutputLost(Exception):
    """A failure to write to standard output. The run ends, and its files are kept.

    It is no OSError, because handlers of OSError name a file in their messages.

    Args:
        reason: the system's words, such as "No space left on device".
        closed_pipe: True if the reader has ended, as with `| head`.
    """

    def __init__(self, reason: str, closed_pipe: bool = False):
        super().__init__(f"standard output: cannot be written ({reason}); use another destination")
        self.reason, self.closed_pipe = reason, closed_pipe


@contextmanager
def error_context(thing: object) -> Iterator[None]:
    """Prefix the message of an error inside with `thing`, such as a file."""
    try:
        yield
    except GearbxError as error:
        raise GearbxError(f"{thing}: {error}") from error


def one_line(error: BaseException, length: int = 300) -> str:
    """Return an error's message on one line of at most `length` characters, or its class without a message."""
    return " ".join(str(error).split())[:length] or type(error).__name__


def escaped(text: str) -> str:
    """Return text on one line with control characters escaped, since names may contain them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def check_range(name: str, value: float, minimum: float, maximum: float = math.inf) -> None:
    """Validate that a number is inside its inclusive bounds. name: for the message."""
    try:
        inside, above = minimum <= value <= maximum, value > maximum
    except TypeError:  # a program may pass any value
        inside = above = False
    if not inside:
        bounded = maximum < LARGEST_SHOWN or (above and value < math.inf)
        number = "a finite number, " if above and not bounded else ""
        upper = f" to {maximum:g}" if bounded else " or more"
        raise GearbxError(f"{name}: out of range, got {value}; use {number}{minimum:g}{upper}")


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name closest to a mistyped one, ignoring leading dashes; None if none is close."""
    bare = {name.lstrip("-"): name for name in names}
    word = word.lstrip("-")[:LONGEST_NAME]
    likely = difflib.get_close_matches(word, bare)
    swapped = [name for name in likely if sorted(name) == sorted(word)]  # --modle is --model rather than --mode
    return next((bare[name] for name in swapped + likely), None)


def choose(word: Any, choices: Iterable[Any]) -> str:
    """Return the remedy for an unknown word: the closest choice, else all choices."""
    names = [*map(str, choices)]
    near = nearest(word, names) if isinstance(word, str) else None
    return f"did you mean {near}?" if near else f"choose from {', '.join(names)}"


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Validate that a value is among the choices. name: for the message."""
    choices = tuple(choices)
    if value not in choices:
        problem = "unknown" if isinstance(value, str) else "unsupported"
        raise GearbxError(f"{name}: {problem}, got {value}; {choose(value, choices)}")


def numbers(name: str, text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """Parse comma-separated numbers. name: for the message.

    Raises:
        GearbxError: other text.
    """
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError as error:
        whole = "whole " if kind is int else ""
        raise GearbxError(f"{name}: not {whole}numbers, got '{text}'; use commas between them: {example}") from error
