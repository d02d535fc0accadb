"""`response_format` of a request: text, any JSON object, or JSON that fits a schema."""

from typing import Annotated, Any

import msgspec

from ...errors import GearbxError
from ...files.reading import check_depth

LARGEST_SCHEMA = 2**16  # bytes, as compact JSON


class Text(msgspec.Struct, frozen=True, tag="text"):
    """Text without any bounds, as without a response_format."""


class JsonObject(msgspec.Struct, frozen=True, tag="json_object"):
    """A JSON object, whatever it contains."""


class Schema(msgspec.Struct, frozen=True):
    """A JSON schema and its name. `strict` may be given, and changes nothing: every schema is kept strictly."""

    schema: dict[str, Any]
    name: Annotated[str, msgspec.Meta(max_length=64)] = "answer"
    description: str | None = None
    strict: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: Schema


ResponseFormat = Text | JsonObject | JsonSchema


def schema_text(response_format: ResponseFormat) -> str | None:
    """The schema that an answer has to fit, as compact JSON; None for text.

    Raises:
        GearbxError: a schema that is too large or nested too deeply.
    """
    if isinstance(response_format, Text):
        return None
    if isinstance(response_format, JsonObject):
        return '{"type":"object"}'
    schema = response_format.json_schema.schema
    try:
        check_depth(schema)
    except GearbxError as error:
        raise GearbxError(f"response_format: the schema is {error}; give a flatter one") from error
    text = msgspec.json.encode(schema)
    if len(text) > LARGEST_SCHEMA:
        size = f"{len(text)} bytes, and at most {LARGEST_SCHEMA} are read"
        raise GearbxError(f"response_format: the schema has {size}; give a smaller one")
    return text.decode()
