"""From the bytes of a body to a typed request: in a thread, and with time and memory that its length bounds.

Python needs fifty times the bytes of some JSON, and pydantic hundreds of them for each value that is wrong. So a body
is counted before it is decoded, every list and object of it has a maximum, and a list is read to its first error.
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

PIECE = 2**18  # bytes of a body that are counted at once
MAX_BLANKS = 2**22  # bytes of white space between values, which are slow to skip
MAX_LITERAL = 400  # bytes of a number, with the brackets around it; the largest finite number has 309 digits
MAX_ITEMS = 10_000  # items of a list of messages, parts or tools
MAX_FIELDS = 1024  # fields of an object

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


# Types of fields.


def few_fields(content: Any) -> Any:
    """Return a value. Raises ValueError for an object with too many fields, before each of them gets an error."""
    if isinstance(content, dict) and len(content) > MAX_FIELDS:
        raise ValueError(f"an object has {len(content)} fields; send {MAX_FIELDS} at most")
    return content


AnyObject = Annotated[dict[str, Any], BeforeValidator(few_fields)]
ListOf = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]


class Part(BaseModel, frozen=True):
    """An object in a body."""

    @model_validator(mode="before")
    @classmethod
    def has_few_fields(cls, content: Any) -> Any:
        return few_fields(content)


# From bytes to a value.


def decoded(body: bytes, max_values: int) -> Any:
    """Return the value of a JSON text. Raises Refused for what is none, or has too many values."""
    check_size(body, max_values)
    try:
        return parse_json(body)  # no NaN, no half of a surrogate pair, no depth that is too much
    except GearbxError as error:
        raise Refused(400, f"the body is {one_line(error)}") from error


def check_size(body: bytes, max_values: int) -> None:
    """Validate that a JSON text is cheap to decode.

    Raises:
        Refused: more values than `max_values`, a number with too many digits, or too much white space.
    """
    values, strings, inside, literal, blanks = 1, 0, 0, 0, 0  # literal: bytes outside of strings since the last comma
    for piece in pieces(body):
        bare = piece.replace(rb"\\", b"").replace(rb"\"", b"")  # now each quote begins or ends a string
        parts = bare.split(b'"')
        spread = b"".join(parts[inside::2])
        outside = spread.translate(None, b" \t\r\n")
        blanks += len(spread) - len(outside)
        inside ^= (len(parts) - 1) & 1
        strings += len(parts) // 2
        values += sum(map(outside.count, (b",", b"[", b"{")))  # one of them is before each value but the first
        first, *others = map(len, outside.split(b","))
        longest, literal = max(literal + first, *others, 0), others[-1] if others else literal + first
        if values > max_values or strings > 2 * max_values:  # a key and a value each
            raise Refused(400, f"the body has more than {max_values} values; send fewer")
        if blanks > MAX_BLANKS:
            raise Refused(400, f"the body has more than {MAX_BLANKS} bytes of white space between values; omit it")
        if longest > MAX_LITERAL:
            why = f"the body is not JSON, or has a number or nested lists of more than {MAX_LITERAL} bytes; shorten it"
            raise Refused(400, why)


def pieces(body: bytes) -> Iterator[bytes]:
    """Yield the pieces of a JSON text, none of which ends within an escape: other threads run between two of them."""
    start = 0
    while start < len(body):
        piece = body[start : start + PIECE]
        escapes = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        yield body[start : start + PIECE + 1] if escapes else piece
        start += PIECE + escapes


# From a value to a request.


def parse(kind: type[M], content: Any) -> M:
    """Return a value as a typed request. Raises Refused for a field that is missing, or not what it should be."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise misfit_of_body(error.errors(include_url=False, include_input=False), content) from error


def misfit_of_body(errors: Any, body: Any) -> Refused:
    """Return the field that is wrong, and what it has to be.

    Of pydantic's errors it is the deepest: the others are of types that the field does not have. Too long is too long,
    whatever is in it.
    """
    found = [(*field_of(error, body), error) for error in errors]
    field, value, error = max(found, key=lambda one: (one[2]["type"] == "too_long", *map(one[0].count, "[.")))
    whys = dict.fromkeys(other["msg"][:1].lower() + other["msg"][1:300] for name, _, other in found if name == field)
    given = "" if error["type"] == "missing" else f" is {shown(value)}"
    said = escaped(f"{field}{given}: {' or '.join(whys)}")
    param = re.split(r"[.\[]", field)[0]
    if error["type"] == "value_error":
        told = escaped(str(error["ctx"]["error"]))
        said = told if not param or param in told else f"{field}: {told}"
    elif not field:
        said = "the body is not a JSON object"
    return Refused(400, said, param=param or None)


def field_of(error: Any, body: Any) -> tuple[str, Any]:
    """Return where an error is, such as messages[0].content, without names of pydantic's own; and the value there."""
    field, value = "", body
    for part in error["loc"]:
        if isinstance(value, list) and isinstance(part, int):
            field, value = f"{field}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (error["type"] == "missing" and part == error["loc"][-1])):
            field, value = f"{field}.{part}"[-MAX_LITERAL:] if field else str(part)[:MAX_LITERAL], value.get(part)
    return field, value


# Routes.


def read_body(kind: Any, max_values: int, body: bytes) -> Any:
    """Return a body as what a route takes: a pydantic model, or any JSON object. Raises Refused for another."""
    content = decoded(body, max_values)
    if not isinstance(content, dict):
        raise Refused(400, "the body is not a JSON object")
    return parse(kind, content) if issubclass(kind, BaseModel) else content


async def in_thread(app: Any, function: Callable[..., T], *args: Any) -> T:
    """Call a function that takes long for a large request. Few of an application run at once: each needs memory."""
    return await run_sync(function, *args, limiter=app.state.threads)


class BodyRequest(Request):
    """A request whose `json` is what its route takes. FastAPI validates no model that is one already."""

    kind: Any = dict

    async def json(self) -> Any:
        return await in_thread(self.app, read_body, self.kind, self.app.state.limits().values, await self.body())


class BodyRoute(APIRoute):
    """A route whose body is read in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind: Any = dict if self.body_field is None else self.body_field.field_info.annotation

        async def answer(request: Request) -> Response:
            read = BodyRequest(request.scope, request.receive)
            read.kind = get_origin(kind) or kind
            return await handle(read)

        return answer
