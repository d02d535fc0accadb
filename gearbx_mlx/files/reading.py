"""Text and JSON from files of any origin: typed contents, or one line that says what is wrong.

msgspec checks the types; `misfit` puts what it says into words, with the exact place and the value.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import inspect

from ..errors import GearbxError, one_line

LONGEST = 60  # characters of a value that a message shows
NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
MESSAGE = re.compile(r"(.*?)(?: - at (`key` in )?`\$([^`]*)`)?", re.DOTALL)
STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
ANY = "..."  # msgspec's name for every key of an object that has no fixed fields
FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
NOT_A_NUMBER = re.compile(r"-?(NaN|Infinity)")

Step = str | int
WITH_FIELDS = inspect.StructType | inspect.DataclassType | inspect.TypedDictType
OBJECTS = WITH_FIELDS | inspect.DictType
LISTS = inspect.ListType | inspect.TupleType | inspect.SetType | inspect.VarTupleType


def shown(value: Any) -> str:
    """A value of a JSON file for a message: one line, shortened."""
    text = json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def malformed(error: Exception, text: str | bytes) -> str:
    """Why a text is not JSON, and where."""
    if isinstance(error, UnicodeError):
        return f"not JSON: not UTF-8 text ({error.reason})" if hasattr(error, "reason") else "not JSON: not UTF-8 text"
    if isinstance(error, msgspec.ValidationError):  # the only one that needs no type
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


def misfit(error: msgspec.ValidationError, content: Any, kind: Any) -> str:
    """Why a value does not fit a type: the field, the value, and what it is not."""
    match = MESSAGE.fullmatch(str(error))
    assert match is not None
    message, of_key, place = match[1], match[2], match[3] or ""
    steps: list[Step] = [name or (ANY if index == ANY else int(index)) for name, index in STEP.findall(place)]
    try:
        steps, value, key = narrowed(content, kind, str(error), [*steps, ANY] if of_key else steps)
    except (LookupError, TypeError):  # no place: a name in the file imitates one
        message, of_key, steps, value, key = str(error), None, [], content, ""
    info = inspect.type_info(kind)
    if of_key:
        expected = expectation(message, branch(union_at(info, steps[:-1], content), {}).key_type)
        return f"{where(steps[:-1])} has the key {shown(key)}, {expected}"
    if message.startswith("Invalid value"):  # of the field that says which of several objects it is
        tags = [str(part.tag) for part in members(union_at(info, steps[:-1], content)) if getattr(part, "tag", None)]
        return f"{where(steps)} is {shown(value)}, not one of {', '.join(tags)}"
    kind = branch(union_at(info, steps, content), value)
    field = FIELD.fullmatch(message)
    if field and field[1] == "missing required":
        return f"{where(steps)} has no field '{field[2]}'"
    if field:
        known = ", ".join(part.encode_name for part in kind.fields)
        return f"{where([*steps, field[2]])} is not known; choose from {known}"
    expected = expectation(message, kind)
    if expected:
        return f"{where(steps)} is {shown(value)}, {expected}"
    return f"{where(steps)}: {message}" if steps else message  # from a check of our own


def narrowed(content: Any, kind: Any, message: str, steps: list[Step]) -> tuple[list[Step], Any, str]:
    """The steps with the keys that msgspec does not name, the value that they lead to, and the last key.

    An object that contains the wrong entry alone fails with the same message.
    """

    def fails(exact: list[Step], part: dict) -> bool:
        try:
            msgspec.convert(put(content, exact, part), kind, str_keys=True)
        except msgspec.ValidationError as error:
            return str(error) == message
        return False

    exact: list[Step] = []
    value, key = content, ""
    for step in steps:
        if step == ANY:
            step = key = next((name for name in value if fails(exact, {name: value[name]})), "")
        exact.append(step)
        value = value[step]
    return exact, value, key


def put(content: Any, steps: list[Step], value: Any) -> Any:
    """A copy of a JSON value with another value in one place; the rest is shared."""
    if not steps:
        return value
    copied = content.copy()
    copied[steps[0]] = put(content[steps[0]], steps[1:], value)
    return copied


def where(steps: list[Step]) -> str:
    """A place in a JSON value as JavaScript writes it: layers["a.b"].shape[1]."""
    plain = [isinstance(step, str) and step.isidentifier() and len(step) < LONGEST for step in steps]
    parts = [f".{step}" if is_name else f"[{shown(step)}]" for step, is_name in zip(steps, plain)]
    return "".join(parts).removeprefix(".") or "it"


def union_at(info: Any, steps: list[Step], content: Any) -> Any:
    """msgspec's description of the type in a place of a JSON value, of all of them where there are several."""
    for step in steps:
        info = branch(info, content)
        if isinstance(info, WITH_FIELDS):
            fields = (field.type for field in info.fields if field.encode_name == step)
            info = next(fields, inspect.StrType())  # text alone says which of several objects it is
        elif isinstance(info, inspect.DictType):
            info = info.value_type
        else:
            info = info.item_types[int(step)] if isinstance(info, inspect.TupleType) else info.item_type
        content = content[step]
    return info


def branch(info: Any, value: Any) -> Any:
    """The type that a value is meant to be, among several: for an object, the one that it names."""
    types = [part for part in members(info) if not isinstance(part, inspect.NoneType)]
    if isinstance(value, dict):
        types = [part for part in types if isinstance(part, OBJECTS)] or types
        named = [part for part in types if getattr(part, "tag_field", None) and value.get(part.tag_field) == part.tag]
        return (named or types)[0]
    if isinstance(value, list):
        types = [part for part in types if isinstance(part, LISTS)] or types
    return types[0]


def members(info: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type that it is."""
    return info.types if isinstance(info, inspect.UnionType) else (info,)


def expectation(message: str, info: Any) -> str:
    """What a value is not, from msgspec's message; empty for a message that msgspec did not write."""
    if message.startswith("Invalid enum value"):
        return f"not one of {', '.join(map(str, info.values))}"
    if message.endswith("out of range"):
        return "not a finite number" if isinstance(info, inspect.FloatType) else "a number with too many digits"
    found = re.fullmatch(r"Expected `([^`]+)`(.*?)(, got .*)?", message, re.DOTALL)
    if not found:
        return ""
    name = " or ".join(NAMES.get(part, part) for part in found[1].split(" | "))
    return f"not {name}{found[2].replace(' matching regex', ' that matches')}"


T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # as far as every reader of JSON counts exactly

LARGEST_JSON, LARGEST_TEXT = 2**26, 2**30  # characters
MALFORMED = (msgspec.DecodeError, UnicodeError, RecursionError)  # what msgspec raises for a text that is not JSON
DEEPEST = 64  # levels of objects and lists inside each other


def read_text(path: Path, what: str, remedy: str, largest: int = LARGEST_TEXT) -> str:
    """The text of a UTF-8 file.

    Args:
        what: the file is to be, with its article, such as "a precision manifest".
        remedy: for a file that is something else.
        largest: size, in characters.

    Raises:
        GearbxError: it cannot be opened, is not UTF-8 text, or is too large.
    """
    try:
        with open(path, encoding="utf-8") as file:
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
    """The error for a file that seems to be there and cannot be read."""
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
    """Raises GearbxError unless a JSON object has this schema and version.

    Args:
        what: it is to be, with its article, such as "a drafting file".
    """
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise GearbxError(f"it is not {what}: its schema is not '{schema}'")
    if type(content.get("version")) is not int or content["version"] != version:
        raise GearbxError(f"it has version {shown(content.get('version'))}, and this gearbx-mlx reads {version}")


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
