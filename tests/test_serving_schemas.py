"""Schemas of a response_format: which are refused, and how they are compiled."""

import json
import time

import pytest
from test_serving_structured import format_of

from gearbx_mlx import GearbxError
from gearbx_mlx.serving.grammar import LARGEST_SCHEMA, AnswerForm, Constraint, Grammars, constraint_for
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
        ({}, " has no field 'type'"),
        ({"type": 5}, ".type is 5, not text"),
        ({"type": "yaml"}, '.type is "yaml", not one of text, json_object, json_schema'),
        ({"type": "json_schema"}, " has no field 'json_schema'"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, ".json_schema.schema is [1], not an object"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 3}}, ".json_schema.name is 3, not text"),
    ],
)
def test_a_response_format_that_is_none_is_refused(content, said):
    with pytest.raises(Refused) as error:
        parse(TextRequest, {"prompt": "x", "response_format": content})
    assert f"response_format{said}" in error.value.message


def test_a_schema_is_compiled_once(demo, monkeypatch):
    grammars = Grammars(demo.tokenizer)
    properties = {f"p{i}": {"type": "string"} for i in range(300)}
    schema = AnswerForm("response_format", json.dumps({"type": "object", "properties": properties}))
    first = grammars.constraint(schema)
    monkeypatch.setattr("gearbx_mlx.serving.grammar.compiled", None)
    assert isinstance(grammars.constraint(schema), Constraint)
    assert first is not grammars.constraint(schema)
