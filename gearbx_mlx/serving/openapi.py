"""An OpenAPI description of what the server serves, made from the types of its requests and answers."""

import functools
from typing import Any

import msgspec

from .messages.request import CountTokensRequest, MessagesRequest
from .openapi_answers import (
    ChatCompletion,
    CountedTokens,
    Error,
    Health,
    MessageAnswer,
    MessagesError,
    Model,
    Models,
    TextCompletion,
)
from .requests import ChatRequest, TextRequest

REFERENCE = "#/components/schemas/{name}"
COMPLETIONS = {  # what is posted: a summary, the types of request and answer, and of an error
    "/v1/chat/completions": ("Answer a chat", ChatRequest, ChatCompletion, Error),
    "/chat/completions": ("The same as /v1/chat/completions", ChatRequest, ChatCompletion, Error),
    "/v1/completions": ("Go on with a text", TextRequest, TextCompletion, Error),
    "/v1/messages": ("Anthropic's messages", MessagesRequest, MessageAnswer, MessagesError),
}
COUNTED = ("Count a prompt's tokens", CountTokensRequest, CountedTokens, MessagesError)
ONE_MODEL = "/v1/models/{model}"
OBJECTS = {
    "/v1/models": ("The model that is served", Models),
    ONE_MODEL: ("The same, by its name", Model),
    "/health": ("Whether the server computes", Health),
}
NAMED = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
OTHERS = {  # a summary and the media type
    "/metrics": ("What was counted, for Prometheus", "text/plain"),
    "/openapi.json": ("This description", "application/json"),
    "/": ("A page to type and watch", "text/html"),
}
PUBLIC = ("/", "/health", "/openapi.json")  # without the key
WRONG = {  # statuses that every route with a body may have
    "400": "The request is wrong.",
    "401": "The API key is missing or wrong.",
    "404": "The model is not served here.",
    "405": "The route has another method.",
    "408": "The request came too slowly.",
    "411": "The request has no Content-Length.",
    "413": "The body is too large.",
    "500": "The server failed.",
    "503": "Nothing is computed at the moment.",
}
HEAD = {
    "openapi": "3.1.0",
    "info": {
        "title": "gearbx_mlx.server",
        "version": "1",
        "description": "A model in gears, behind the APIs of OpenAI and Anthropic.",
    },
    "security": [{}, {"bearer": []}, {"key": []}],
}
EVENT = {  # of a stream; its data is JSON, or [DONE]
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@functools.cache
def description() -> dict[str, Any]:
    """OpenAPI 3.1."""
    described: list[tuple[Any, ...]] = [*COMPLETIONS.values(), COUNTED, *OBJECTS.values()]
    types = list(dict.fromkeys(kind for _, *kinds in described for kind in kinds))
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    schema = dict(zip(types, schemas))
    posts = {path: posted(summary, *map(schema.get, kinds)) for path, (summary, *kinds) in COMPLETIONS.items()}
    for operation in posts.values():
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": EVENT}
    posts["/v1/messages/count_tokens"] = posted(COUNTED[0], *map(schema.get, COUNTED[1:]))
    gets = {path: got(summary, schema[kind], schema[Error]) for path, (summary, kind) in OBJECTS.items()}
    for path, (summary, media_type) in OTHERS.items():
        kind = "object" if media_type == "application/json" else "string"
        gets[path] = got(summary, {"type": kind}, schema[Error], media_type)
    gets[ONE_MODEL]["parameters"] = [NAMED]
    gets[ONE_MODEL]["responses"] |= failures(schema[Error], {"404": WRONG["404"]})
    for path in PUBLIC:
        gets[path]["security"] = []
    paths = {path: {"post": operation} for path, operation in posts.items()}
    paths |= {path: {"get": operation} for path, operation in gets.items()}
    return {**HEAD, "components": {"schemas": components, "securitySchemes": KEYS}, "paths": paths}


def posted(summary: str, body: Any, answer: Any, error: Any) -> dict[str, Any]:
    """An operation with a JSON body."""
    content = {"application/json": {"schema": answer}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer.", "content": content}, **failures(error, WRONG)},
    }


def got(summary: str, answer: Any, error: Any, media_type: str = "application/json") -> dict[str, Any]:
    """An operation without a body."""
    statuses = {status: WRONG[status] for status in ("400", "401", "405", "500", "503")}
    content = {media_type: {"schema": answer}}
    return {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}, **failures(error, statuses)},
    }


def failures(error: Any, statuses: dict[str, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": error}}
    return {status: {"description": said, "content": content} for status, said in statuses.items()}
