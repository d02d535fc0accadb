"""A chat completion becomes a message of Anthropic's API; so do errors."""

import json
from collections.abc import Mapping
from typing import Any

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {  # by status; other statuses are the server's
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message(completion: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the text, thoughts and tool calls of a chat completion, and its `gearbx` if it has one."""
    choice = completion["choices"][0]
    answer = opened(completion) | {
        "content": content(choice["message"]),
        "usage": usage(completion.get("usage")),
        **ending(choice),
    }
    return answer | ({"gearbx": completion["gearbx"]} if "gearbx" in completion else {})


def opened(completion: Mapping[str, Any]) -> dict[str, Any]:
    """A message before anything was written."""
    return {
        "id": f"msg_{str(completion.get('id', '')).removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": completion.get("model", ""),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(None),
    }


def ending(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Why a text ended. A choice may name the stop word in `stop_reason`."""
    word = choice.get("stop_reason")
    if isinstance(word, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": word}
    return {"stop_reason": STOP_REASONS.get(choice.get("finish_reason") or "", "end_turn"), "stop_sequence": None}


def content(written: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The blocks of a chat message: thoughts, text and tool calls."""
    blocks: list[dict[str, Any]] = []
    if thoughts := written.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    if text := written.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in written.get("tool_calls") or ():
        function = call["function"]
        called = {"id": call["id"], "name": function["name"], "input": arguments(function.get("arguments"))}
        blocks.append({"type": "tool_use", **called})
    return blocks


def arguments(text: str | None) -> dict[str, Any]:
    """The arguments of a tool call; none where the model wrote no JSON object."""
    try:
        given = json.loads(text or "{}")
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def usage(counts: Mapping[str, Any] | None) -> dict[str, int]:
    """Anthropic counts tokens of the prompt that were cached beside the others."""
    counts = counts or {}
    cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": counts.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts.get("completion_tokens", 0),
    }


def error(status: int, said: str) -> dict[str, Any]:
    """An error as Anthropic's clients read it; in a stream, as the data of an event `error`."""
    return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": said}}
