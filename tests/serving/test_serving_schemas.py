"""Schemas of a response_format: which ones are refused, and how the others are compiled."""

import time

import pytest
from schemas import format_of

from gearbx_mlx import GearbxError
from gearbx_mlx.serving.grammar import LARGEST_SCHEMA, constraint_for
from gearbx_mlx.serving.requests import TextRequest, parse
from gearbx_mlx.serving.web import Refused

DEEP = {"type": "integer"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"type": "integer", "minimum": 7, "maximum": 3}, "Unsatisfiable"),
        ({"$ref": "http://example.com/schema"}, "does not fetch"),
        ({"$ref": "#"}, "no grammar"),
        ({"not": {"type": "object"}}, "Unimplemented"),
        (DEEP, "64 levels deep"),
        ({"enum": ["x" * LARGEST_SCHEMA]}, f"at most {LARGEST_SCHEMA}"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_in_one_line(demo, schema, said):
    start = time.perf_counter()
    with pytest.raises(GearbxError, match="response_format") as error:
        constraint_for(demo.tokenizer, format_of(schema))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, " is {}: unable to extract tag using discriminator 'type'"),
        ({"type": 5}, " is {\"type\": 5}: input tag '5' found using 'type' does not match"),
        ({"type": "yaml"}, "expected tags: 'text', 'json_object', 'json_schema'"),
        ({"type": "json_schema"}, "response_format.json_schema: field required"),
        (
            {"type": "json_schema", "json_schema": {"schema": [1]}},
            ".json_schema.schema is [1]: input should be a valid",
        ),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 3}}, ".json_schema.name is 3: input should be"),
    ],
)
def test_a_response_format_that_is_none_is_refused(content, said):
    with pytest.raises(Refused) as error:
        parse(TextRequest, {"prompt": "x", "response_format": content})
    assert error.value.message.startswith("response_format")
    assert said in error.value.message
