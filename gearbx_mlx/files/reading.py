"""Typed contents of text and JSON files of any origin, or one line with the error.

msgspec validates the types; `why_unfit` rewrites its errors with the exact place and the value.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import accumulate, repeat
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from ..errors import GearbxError, choose, one_line

MAX_SHOWN = 60  # characters of a value in a message
TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
NOT_A_NUMBER = re.compile(r"-?(NaN|Infinity)")

Step = str | int


def shown(value: Any) -> str:
    """Return a JSON value for a message: one line, shortened to `MAX_SHOWN`; only its start is serialized."""
    start = value[:MAX_SHOWN] if isinstance(value, str) else value
    parts = accumulate(json.JSONEncoder().iterencode(start))
    text = next((text for text in parts if len(text) > MAX_SHOWN), None) or json.dumps(start)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def malformed(error: Exception, text: str | bytes) -> str:
    """Return the reason why text is not JSON, and its place."""
    if isinstance(error, UnicodeError):
        return f"not JSON: not UTF-8 text ({error.reason})" if hasattr(error, "reason") else "not JSON: not UTF-8 text"
    if "Invalid UTF-8" in str(error):  # message of msgspec 0.23
        return "not JSON: not UTF-8 text"
    if isinstance(error, msgspec.ValidationError):  # the only validation without a type
        return "not JSON: a number has too many digits"
    found = re.fullmatch(r"JSON is malformed: (.*) \(byte (\d+)\)", str(error))
    if found is None:
        return "not JSON: it ends too early, or has half of a surrogate pair"
    data = text.encode() if isinstance(text, str) else text
    before, after = data[: int(found[2])], data[int(found[2]) :]
    line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
    number = NOT_A_NUMBER.match(after[:16].decode(errors="replace"))
    reason = f"{number[0]} is not a finite number" if number else found[1]
    return f"not JSON: {reason} at line {line}, column {column}"


def why_unfit(error: msgspec.ValidationError, content: Any, kind: Any, place: Sequence[Step] = ()) -> str:
    """Return the reason why a value does not fit a type, at its first part that does not. place: of the value."""
    for step, part, wanted in typed_parts(content, kind):
        try:
            msgspec.convert(part, wanted, str_keys=True)
        except msgspec.ValidationError as inner:
            return why_unfit(inner, part, wanted, [*place, step])
    with_keys = [each for each in members(kind) if isinstance(content, dict) and get_origin(each) in (dict, Mapping)]
    for key, mapping in ((key, mapping) for mapping in with_keys for key in content):
        try:
            msgspec.convert({key: content[key]}, mapping, str_keys=True)
        except msgspec.ValidationError as inner:
            message = str(inner).rpartition(" - at `key`")[0]
            return f"{where(place)} has the key {shown(key)}, {expectation(message, get_args(mapping)[0])}"
    message = str(error)
    field = FIELD.fullmatch(message)
    if field and field[1] == "missing required":
        return f"{where(place)} has no field '{field[2]}'"
    if field:
        known = [name for member in members(kind) for name in fields_of(member) or ()]
        return f"{where([*place, field[2]])} is not known; {choose(field[2], known)}"
    expected = expectation(message, kind)
    if expected:
        return f"{where(place)} is {shown(content)}, {expected}"
    return f"{where(place)}: {message}" if place else message  # from a validation of this package


def typed_parts(content: Any, kind: Any) -> Iterator[tuple[Step, Any, Any]]:
    """Yield the parts of a JSON value: name or number, value, and expected type."""
    for member in members(kind):
        origin, types = get_origin(member), get_args(member)
        if isinstance(content, dict):
            fields = fields_of(member) or (dict.fromkeys(content, types[1]) if origin in (dict, Mapping) else {})
            yield from ((name, content[name], fields[name]) for name in content if name in fields)
        elif isinstance(content, list) and origin in (list, tuple, Sequence):
            each = types if origin is tuple and types[-1] is not Ellipsis else repeat(types[0])
            yield from ((place, part, wanted) for place, (part, wanted) in enumerate(zip(content, each)))


def fields_of(kind: Any) -> dict[str, Any] | None:
    """Return the types of an object's fields by their names in JSON; None for types without fixed fields."""
    own = get_origin(kind) or kind
    if isinstance(own, type) and issubclass(own, msgspec.Struct):
        return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return get_type_hints(own, include_extras=True) if is_dataclass(own) or is_typeddict(own) else None


def members(kind: Any) -> list[Any]:
    """Return the types of a union, or a single type, without the bounds of their values."""
    if get_origin(kind) is Annotated:
        return members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [member for part in get_args(kind) for member in members(part)]
    return [kind]


def where(place: Sequence[Step]) -> str:
    """Return a place in a JSON value as JavaScript writes it: layers["a.b"].shape[1]."""
    plain = [isinstance(step, str) and step.isidentifier() and len(step) < MAX_SHOWN for step in place]
    parts = [f".{step}" if is_name else f"[{shown(step)}]" for step, is_name in zip(place, plain)]
    return "".join(parts).removeprefix(".") or "it"


def expectation(message: str, kind: Any) -> str:
    """Return the expected kind of value from msgspec's message; empty for messages of other code."""
    if message.startswith("Invalid enum value"):
        values = [value for member in members(kind) if get_origin(member) is Literal for value in get_args(member)]
        return f"not one of {', '.join(map(str, sorted(values)))}"
    if message.endswith("out of range"):
        return "not a finite number" if float in members(kind) else "a number with too many digits"
    found = re.fullmatch(r"Expected `([^`]+)`(.*?)(, got .*)?", message, re.DOTALL)
    if not found:
        return ""
    name = " or ".join(TYPE_WORDS.get(part, part) for part in found[1].split(" | "))
    return f"not {name}{found[2].replace(' matching regex', ' that matches')}"


T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # the largest integers that every JSON reader has exactly


def finite(text: str) -> float:
    """Return a number of JSON. Raises ValueError for an infinite one."""
    number = float(text)
    if math.isinf(number):
        raise ValueError
    return number


JSON = msgspec.json.Decoder(float_hook=finite)  # msgspec's own floats take up to 50 microseconds each
LARGEST_JSON = 2**26  # characters
DEEPEST = 64  # levels of objects and lists inside each other


def read_text(path: Path, what: str, remedy: str, largest: int = 2**30, newline: str | None = None) -> str:
    """Return the text of a UTF-8 file of at most `largest` characters.

    what: the expected kind with its article, such as "a precision manifest". remedy: for a file of a different kind.
    newline: as of `open`.
    Raises GearbxError for a file that cannot be opened, is not UTF-8 text, or is too large.
    """
    try:
        with open(path, encoding="utf-8-sig", newline=newline) as file:
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


def unreadable(path: Path, error: OSError) -> GearbxError:
    """Return the error for a file that cannot be read."""
    return GearbxError(f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions")


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON.

    Raises GearbxError, without file and remedy, for other text and too deep nesting; NaN, Infinity and unpaired
    surrogates are not JSON.
    """
    try:
        content = JSON.decode(text)
    except RecursionError as error:
        raise GearbxError(f"nested more than {DEEPEST} levels deep") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise GearbxError(malformed(error, text)) from error
    check_depth(content)
    return content


def parse_python_json(text: str) -> Any:
    """Return the value of JSON with NaN and Infinity, such as a config.json. Raises GearbxError as `parse_json`."""
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
    """Validate the depth of objects and lists before recursive code reads them. Raises GearbxError above `DEEPEST`."""
    level = [content]
    for _ in range(DEEPEST):
        parts = (part for part in level if isinstance(part, dict | list))
        inner = (value for part in parts for value in (part.values() if isinstance(part, dict) else part))
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return
    raise GearbxError(f"nested more than {DEEPEST} levels deep")


def typed(content: Any, kind: type[T]) -> T:
    """Return a value of `parse_json` as a typed value, such as a msgspec Struct, a dataclass or list[str].

    Raises GearbxError with the field that does not fit and its value, without file and remedy.
    """
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise GearbxError(why_unfit(error, content, kind)) from error


def check_schema(content: Any, what: str, schema: str, version: int) -> None:
    """Validate schema and version of a JSON object. what: such as "a drafting file". Raises GearbxError for others."""
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise GearbxError(f"it is not {what}: its schema is not '{schema}'")
    if type(content.get("version")) is not int or content["version"] != version:
        raise GearbxError(f"it has version {shown(content.get('version'))}, and this gearbx-mlx reads {version}")


def read_as(path: Path, parse: Callable[[str], T], what: str, remedy: str) -> T:
    """Return the result of `parse` for the text of a JSON file.

    parse: raises GearbxError without the file's name. what, remedy: as in `read_text`. Raises GearbxError, with file
    and remedy, if the file cannot be read or `parse` raises one.
    """
    text = read_text(path, what, remedy, LARGEST_JSON)
    try:
        return parse(text)
    except GearbxError as error:
        raise GearbxError(f"{path}: cannot be read as {what} ({one_line(error, 600)}); {remedy}") from error


def read_json(path: Path, kind: type[T], what: str, remedy: str) -> T:
    """Return a JSON file as a value of a type. Arguments and errors: see `read_as` and `typed`."""
    return read_as(path, lambda text: typed(parse_json(text), kind), what, remedy)


def json_lines(path: Path, text: str, kind: type[T], remedy: str, first: int = 1) -> Iterator[tuple[int, T]]:
    """Yield the number and value of each line of JSON Lines, from `first` on; empty lines are skipped.

    Only "\\n" ends a line: splitlines() would also split at separators inside a string. Raises GearbxError, with file,
    line and remedy, for a line that does not fit the type.
    """
    for number, line in enumerate(text.split("\n"), first):
        if line.strip():
            try:
                value = typed(parse_json(line), kind)
            except GearbxError as error:
                raise GearbxError(f"{path}, line {number}: {error}; {remedy}") from error
            yield number, value
