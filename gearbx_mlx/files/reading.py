"""Text and JSON from files that anybody may have written: typed contents, or one line that says what is wrong.

msgspec checks the types; `problems` puts what it says into words.
"""

import errno
import json
import os
import select
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ..errors import GearbxError, one_line
from .problems import malformed, misfit, shown

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # as far as every reader of JSON counts exactly

LARGEST_JSON, LARGEST_TEXT = 2**26, 2**30  # characters
MALFORMED = (msgspec.DecodeError, UnicodeError, RecursionError)  # what msgspec raises for a text that is not JSON
PATIENCE = 1  # seconds in which somebody opens a pipe for writing
DEEPEST = 64  # levels of objects and lists inside each other


def read_text(path: Path, what: str, remedy: str, largest: int = LARGEST_TEXT) -> str:
    """The text of a UTF-8 file.

    Args:
        what: the file is to be, with its article, such as "a precision manifest".
        remedy: for a file that is something else.
        largest: size, in characters.

    Raises:
        GearbxError: it cannot be opened, is no UTF-8 text, or is too large.
    """
    try:
        with open(path, encoding="utf-8", opener=open_patiently) as file:
            text = file.read(largest + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise GearbxError(f"{path}: cannot be read as {what} ({reason}); check the path and its permissions") from error
    except ValueError as error:  # bytes that are not UTF-8, or a path that contains a null character
        reason = getattr(error, "reason", None) or str(error)
        raise GearbxError(f"{path}: cannot be read as {what} (not UTF-8 text: {reason}); {remedy}") from error
    if len(text) > largest:
        raise GearbxError(f"{path}: cannot be read as {what} (longer than {largest} characters); {remedy}")
    return text


def open_patiently(path: str, flags: int) -> int:
    """Open a file; of a named pipe, wait a while for somebody who writes to it, and not for ever.

    Raises:
        OSError: it cannot be opened, or nobody writes to the pipe.
    """
    if not (os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode)):
        return os.open(path, flags)
    handle = os.open(path, flags | os.O_NONBLOCK)
    if not select.select([handle], [], [], PATIENCE)[0] and not has_writer(handle):
        os.close(handle)
        raise TimeoutError(errno.ETIMEDOUT, "nobody writes to this pipe")
    os.set_blocking(handle, True)
    return handle


def has_writer(pipe: int) -> bool:
    """Whether somebody has an empty pipe open for writing; it does not block."""
    try:
        return bool(os.read(pipe, 1))  # nothing: the end of what nobody writes
    except BlockingIOError:
        return True


def unreadable(path: Path, error: OSError) -> GearbxError:
    """The error for a file that is there, as far as anybody knows, and cannot be read."""
    return GearbxError(f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions")


def parse_json(text: str | bytes) -> Any:
    """What a JSON text contains.

    Raises:
        GearbxError: it is not JSON, or nested too deeply; NaN, Infinity and unpaired surrogates are not JSON. The
            message names neither a file nor a remedy.
    """
    try:
        content = msgspec.json.decode(text)
    except RecursionError as error:
        raise GearbxError(f"nested more than {DEEPEST} levels deep") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise GearbxError(malformed(error, text)) from error
    check_depth(content)
    return content


def parse_python_json(text: str) -> Any:
    """What a JSON text contains that may have NaN and Infinity, as Python's json writes them: some models' config.json.

    Raises:
        GearbxError: as parse_json, except for NaN and Infinity.
    """
    try:
        content = json.loads(text)
        check_depth(content)
        json.dumps(content, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except RecursionError as error:
        raise GearbxError(f"nested more than {DEEPEST} levels deep") from error
    except UnicodeError as error:
        raise GearbxError("not JSON: it has half of a surrogate pair") from error
    except GearbxError:
        raise
    except ValueError as error:
        raise GearbxError(f"not JSON: {error}") from error
    return content


def check_depth(content: Any) -> None:
    """Raises GearbxError if objects and lists are nested too deeply for what works on them next."""
    level = [content]
    for _ in range(DEEPEST):
        parts = (part for part in level if isinstance(part, dict | list))
        inner = (value for part in parts for value in (part.values() if isinstance(part, dict) else part))
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return
    raise GearbxError(f"nested more than {DEEPEST} levels deep")


def typed(content: Any, kind: type[T]) -> T:
    """What `parse_json` returned as a value of a type: a msgspec Struct, a dataclass, or a type such as list[str].

    Raises:
        GearbxError: it does not fit the type. The message names the field and its value, but neither a file nor a
            remedy.
    """
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise GearbxError(misfit(error, content, kind)) from error


def check_schema(content: Any, what: str, schema: str, version: int) -> None:
    """Raises GearbxError unless a JSON object is of this schema and version.

    Args:
        what: it is to be, with its article, such as "a drafting file".
    """
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise GearbxError(f"it is not {what}: its schema is not '{schema}'")
    if type(content.get("version")) is not int or content["version"] != version:
        raise GearbxError(f"it is of version {shown(content.get('version'))}, and this gearbx-mlx reads {version}")


def read_as(path: Path, parse: Callable[[str], T], what: str, remedy: str) -> T:
    """What a function makes of the text of a JSON file.

    Args:
        parse: raises GearbxError without naming the file.
        what, remedy: as in `read_text`.

    Raises:
        GearbxError: the file cannot be read, or `parse` raised one; the message names the file and the remedy.
    """
    text = read_text(path, what, remedy, LARGEST_JSON)
    try:
        return parse(text)
    except GearbxError as error:
        raise GearbxError(f"{path}: cannot be read as {what} ({one_line(error, 600)}); {remedy}") from error


def read_json(path: Path, kind: type[T], what: str, remedy: str) -> T:
    """A JSON file as a value of a type. The arguments and errors are those of `read_as` and `typed`."""
    return read_as(path, lambda text: typed(parse_json(text), kind), what, remedy)


def json_lines(path: Path, text: str, kind: type[T], remedy: str, first: int = 1) -> Iterator[tuple[int, T]]:
    """The number of each line of JSON Lines and its value; empty lines are skipped.

    Only "\\n" ends a line: splitlines() would also split at separators inside a string.

    Args:
        path: for the error.
        first: number of the first line.

    Raises:
        GearbxError: a line does not fit the type; the message names file, line and remedy.
    """
    for number, line in enumerate(text.split("\n"), first):
        if line.strip():
            try:
                value = typed(parse_json(line), kind)
            except GearbxError as error:
                raise GearbxError(f"{path}, line {number}: {error}; {remedy}") from error
            yield number, value
