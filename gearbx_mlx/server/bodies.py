"""Parsing of bodies into typed requests: in a thread, with time and memory that the body's length bounds.

Python needs fifty times the bytes of some JSON, and pydantic hundreds of bytes per wrong value. So values are counted
before decoding, lists and objects have a maximum size, and validation of a list ends at its first error.
"""

import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any, TypeVar, get_origin

from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from ..errors import GearbxError, escaped, one_line
from ..files.reading import parse_json, shown
from .web import Refused

PIECE = 2**18  # bytes whose values are counted at once
MAX_BLANKS = 2**22  # bytes of white space between values; skipping it is slow
MAX_LITERAL = 400  # bytes of a number with its brackets; the largest finite number has 309 digits
MAX_ITEMS = 10_000  # messages, parts or tools in a list
MAX_FIELDS = 1024  # per object

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


# Types of fields.


def few_fields(content: Any) -> Any:
    """Return a value. Raises one ValueError for an object with too many fields, instead of one per field."""
    if isinstance(content, dict) and len(content) > MAX_FIELDS:
        raise ValueError(f"object: too many fields, got {len(content)}; use {MAX_FIELDS} at most")
    return content


AnyObject = Annotated[dict[str, Any], BeforeValidator(few_fields)]
ListOf = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]


class Part(BaseModel, frozen=True):
    """An object in a body."""

    @model_validator(mode="before")
    @classmethod
    def has_few_fields(cls, content: Any) -> Any:
        return few_fields(content)


# JSON.


def decoded(body: bytes, max_values: int) -> Any:
    """Return the value of a JSON text. Raises Refused for other text, and for too many values."""
    check_size(body, max_values)
    try:
        return parse_json(body)  # refuses NaN, half surrogate pairs and deep nesting
    except GearbxError as error:
        raise Refused(400, f"body: {one_line(error)}") from error


def check_size(body: bytes, max_values: int) -> None:
    """Validate that a JSON text is cheap to decode.

    Raises:
        Refused: more values than `max_values`, a number with too many digits, or too much white space.
    """
    values, strings, inside, literal, blanks = 1, 0, 0, 0, 0  # literal: bytes outside strings since the last comma
    for piece in pieces(body):
        bare = piece.replace(rb"\\", b"").replace(rb"\"", b"")  # every other quote delimits a string
        parts = bare.split(b'"')
        spaced = b"".join(parts[inside::2])
        outside = spaced.translate(None, b" \t\r\n")
        blanks += len(spaced) - len(outside)
        inside ^= (len(parts) - 1) & 1
        strings += len(parts) // 2
        values += sum(map(outside.count, (b",", b"[", b"{")))  # one of them precedes each value except the first
        first, *others = map(len, outside.split(b","))
        longest, literal = max(literal + first, *others, 0), others[-1] if others else literal + first
        if values > max_values or strings > 2 * max_values:  # a key and a value each
            raise Refused(400, f"body: more than {max_values} values; use fewer")
        if blanks > MAX_BLANKS:
            raise Refused(400, f"body: more than {MAX_BLANKS} bytes of white space between values; omit it")
        if longest > MAX_LITERAL:
            why = f"body: not JSON, or a number or nested lists of more than {MAX_LITERAL} bytes; use shorter ones"
            raise Refused(400, why)


def pieces(body: bytes) -> Iterator[bytes]:
    """Yield a JSON text in pieces that no escape crosses; other threads run in between."""
    start = 0
    while start < len(body):
        piece = body[start : start + PIECE]
        escapes = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        yield body[start : start + PIECE + 1] if escapes else piece
        start += PIECE + escapes


# Requests.


def parse(kind: type[M], content: Any) -> M:
    """Return a typed request. Raises Refused for a missing or wrong field."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise validation_refusal(error.errors(include_url=False, include_input=False), content) from error


def validation_refusal(errors: Any, body: Any) -> Refused:
    """Return the refusal for pydantic's errors, with the wrong field and its problem.

    The deepest error counts, because the others concern alternative types of the field. An excessive length counts
    before all others.
    """
    found = [(*field_of(error, body), error) for error in errors]
    field, value, error = max(found, key=lambda one: (one[2]["type"] == "too_long", *map(one[0].count, "[.")))
    whys = dict.fromkeys(other["msg"][:1].lower() + other["msg"][1:300] for name, _, other in found if name == field)
    given = "" if error["type"] == "missing" else f" is {shown(value)}"
    message = escaped(f"{field}{given}: {' or '.join(whys)}")
    param = re.split(r"[.\[]", field)[0]
    if error["type"] == "value_error":
        problem = escaped(str(error["ctx"]["error"]))
        message = problem if not param or param in problem else f"{field}: {problem}"
    elif not field:
        message = "body: not a JSON object; use one"
    return Refused(400, message, param=param or None)


def field_of(error: Any, body: Any) -> tuple[str, Any]:
    """Return an error's field, such as messages[0].content without pydantic's type names, and its value."""
    field, value = "", body
    for part in error["loc"]:
        if isinstance(value, list) and isinstance(part, int):
            field, value = f"{field}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (error["type"] == "missing" and part == error["loc"][-1])):
            field, value = f"{field}.{part}"[-MAX_LITERAL:] if field else str(part)[:MAX_LITERAL], value.get(part)
    return field, value


# Routes.


def read_body(kind: Any, max_values: int, body: bytes) -> Any:
    """Return a body as the route's parameter: a pydantic model, or any JSON object. Raises Refused."""
    content = decoded(body, max_values)
    if not isinstance(content, dict):
        raise Refused(400, "body: not a JSON object; use one")
    return parse(kind, content) if issubclass(kind, BaseModel) else content


async def in_thread(app: Any, function: Callable[..., T], *args: Any) -> T:
    """Call a function in one of the few threads for requests: large ones need time and memory."""
    return await run_sync(function, *args, limiter=app.state.threads)


class BodyRequest(Request):
    """A request whose `json` is the route's parameter. FastAPI does not validate a model instance again."""

    kind: Any = dict

    async def json(self) -> Any:
        return await in_thread(self.app, read_body, self.kind, self.app.state.limits().values, await self.body())


class BodyRoute(APIRoute):
    """A route that parses its body in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind: Any = dict if self.body_field is None else self.body_field.field_info.annotation

        async def answer(request: Request) -> Response:
            read = BodyRequest(request.scope, request.receive)
            read.kind = get_origin(kind) or kind
            return await handle(read)

        return answer
