"""Schemas of answers, and a prompt for them."""

from gearbx_mlx.server.grammar import ResponseFormat, Schema

PROMPT = "Question: Tom is 8 years old and likes milk. Who is Tom?\nAnswer:"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["milk", "tea", "a ball"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
CHOICE = {"enum": ["yes", "no", "perhaps"]}
TOO_MUCH = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}  # compiles, but no more


def format_of(schema):
    return ResponseFormat("json_schema", Schema(schema, "it"))
