"""The one exception that a user is meant to read, and what raises it for a number, a choice, or text with numbers."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)
LONGEST_NAME = 60  # characters of a word of any length that are compared with names
LARGEST_SHOWN = 2**31  # an upper bound that no user meets is not worth showing


class GearbxError(ValueError):
    """A mistake that the user can mend: the message is one line that names the thing, its value and the remedy."""


class GearbxWarning(UserWarning):
    """Something that works, but perhaps not as the user thinks."""


class OutputLost(Exception):
    """Standard output cannot be written. The run ends, and the files that it wrote so far are kept.

    It is not an OSError, so that no file is blamed for it. reason: the system's words, such as "No space left on
    device". closed_pipe: the reader has gone, as with `| head`.
    """

    def __init__(self, reason: str, closed_pipe: bool = False):
        super().__init__(f"standard output cannot be written ({reason}); redirect it to another place")
        self.reason, self.closed_pipe = reason, closed_pipe


@contextmanager
def error_context(thing: object) -> Iterator[None]:
    """Begins the message of an error inside with what it is about, such as a file."""
    try:
        yield
    except GearbxError as error:
        raise GearbxError(f"{thing}: {error}") from error


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an error's message on one line, at most so many characters; its kind where there is no message."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def escaped(text: str) -> str:
    """Return text that stays on one line and cannot steer a terminal: a name may contain any character."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def check_range(shown: str, value: float, least: float, most: float = math.inf) -> None:
    """Raises GearbxError for a number outside of its bounds. shown: what the message calls it."""
    try:
        inside, above = least <= value <= most, value > most
    except TypeError:  # from a program
        inside = above = False
    if not inside:
        bounded = most < LARGEST_SHOWN or (above and value < math.inf)
        number = "a finite number, " if above and not bounded else ""
        upper = f" to {most:g}" if bounded else " or more"
        raise GearbxError(f"{shown} is {value}; give {number}{least:g}{upper}")


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like a mistyped one; dashes before names do not count."""
    bare = {name.lstrip("-"): name for name in names}
    word = word.lstrip("-")[:LONGEST_NAME]
    likely = difflib.get_close_matches(word, bare)
    swapped = [name for name in likely if sorted(name) == sorted(word)]  # --modle is --model rather than --mode
    return next((bare[name] for name in swapped + likely), None)


def choose(word: Any, choices: Iterable[Any]) -> str:
    """Return the remedy for an unknown word: the choice that is near, else all of them."""
    names = [*map(str, choices)]
    near = nearest(word, names) if isinstance(word, str) else None
    return f"did you mean {near}?" if near else f"choose from {', '.join(names)}"


def check_choice(shown: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises GearbxError for a value that is not among the choices. shown: what the message calls it."""
    choices = tuple(choices)
    if value not in choices:
        raise GearbxError(f"{shown} is {value}; {choose(value, choices)}")


def numbers(shown: str, text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """Return numbers of text with commas between. Raises GearbxError for other text. shown: what a message calls it."""
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError as error:
        whole = "whole " if kind is int else ""
        raise GearbxError(f"{shown} '{text}' are not {whole}numbers with commas between, such as {example}") from error
