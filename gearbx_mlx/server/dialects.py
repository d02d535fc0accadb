"""Anthropic's Messages API and OpenAI's Responses API, without storage, translated to and from chat completions.

Events with text have its `gearbx.tokens`; the last event has the other fields of `gearbx`.
"""

import json
import time
import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StrictBool, field_validator

from ..errors import choose
from ..files.reading import shown
from .answers import Block, BlockDialect, Event
from .bodies import AnyObject, ListOf, Part, parse
from .requests import (
    MAX_TOOLS,
    ChatRequest,
    Count,
    GearRequest,
    Name,
    NotServed,
    Number,
    Share,
    StopWords,
    Tokens,
    ToolName,
)
from .web import Refused

# Chat completions for requests of other APIs.

COMMON_FIELDS = {"model", "max_tokens", "stream", "temperature", "top_p", "top_k", "mode", "gear", "gearbx"}


def as_chat(
    request: BaseModel,
    messages: list[dict[str, Any]],
    functions: list[dict[str, Any]],
    thinking: bool | None,
    **fields: Any,
) -> ChatRequest:
    """Return the chat completion for a request of a different API.

    Args:
        functions: available tools.
        thinking: enables thinking; None: the template's default.
        fields: more fields; None omits one.

    Raises:
        Refused: an invalid chat completion.
    """
    own = COMMON_FIELDS & type(request).model_fields.keys()  # and no ignored ones
    body = request.model_dump(include=own, exclude_none=True, exclude_unset=True) | {"messages": messages}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if functions:
        body["tools"] = [{"type": "function", "function": function} for function in functions]
    if thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinking}
    return parse(ChatRequest, body | {name: value for name, value in fields.items() if value is not None})


def named_tool(name: str | None) -> dict[str, Any]:
    """Return the `tool_choice` that forces a call of a function."""
    return {"type": "function", "function": {"name": name}}


def tool_call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call of a chat message; `arguments` is a JSON text."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


JSON_NAMES = {str: "a string", dict: "an object"}
Kinds = Mapping[str, Mapping[str, Any]]
"""Required fields of a block by its type, each with a Python type or the kinds of nested blocks."""


def check_block(block: Any, kinds: Kinds) -> dict[str, Any]:
    """Return a block with all required fields; text may replace nested blocks. Raises ValueError."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"unknown block type {shown(kind)}; {choose(kind, kinds)}")
    for name, expected in kinds[kind].items():
        value, nested = block.get(name), isinstance(expected, Mapping)
        if nested and isinstance(value, list):
            for part in value:
                check_block(part, expected)
        elif not isinstance(value, str | NoneType if nested else expected):
            names = "text or a list of blocks" if nested else JSON_NAMES[expected]
            raise ValueError(f"{name} of a {kind} block: wrong type, got {shown(value)}; use {names}")
    return dict(block)


def of_kind(kinds: Kinds) -> AfterValidator:
    """Return a pydantic validator that calls `check_block`."""
    return AfterValidator(partial(check_block, kinds=kinds))


def chat_content(content: str | list[Any] | None) -> str | list[dict[str, Any]]:
    """Return the content of a chat message; text parts become one text, because some chat templates take no parts."""
    if not isinstance(content, list):
        return content or ""
    if all("text" in part["type"] for part in content):
        return "\n".join(part["text"] for part in content)
    return [
        {"type": "text", "text": part["text"]}
        if "text" in part["type"]
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in content
    ]


def url_of(image: dict[str, Any]) -> str:
    """Return the URL of an image; Anthropic's clients may send base64 data."""
    source = image.get("source", {})
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return str(image.get("image_url") or source.get("url") or data)


SHOWN: Kinds = {"text": {"text": str}, "image": {"source": dict}}
MESSAGE_BLOCKS: Kinds = {
    **SHOWN,
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str, "content": SHOWN},
    "thinking": {"thinking": str},
    "redacted_thinking": {},  # encrypted by a different server, and omitted
}
CHOICES: Kinds = {"auto": {}, "any": {}, "none": {}, "tool": {"name": str}}  # any: one of the tools must be called
THINKING: Kinds = {kind: {} for kind in ("enabled", "disabled", "adaptive", "between_tools")}
CONTENT_PARTS: Kinds = {kind: {"text": str} for kind in ("input_text", "output_text", "text")} | {
    "input_image": {"image_url": str}
}
ITEMS: Kinds = {
    "message": {"role": str, "content": CONTENT_PARTS},
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "function_call_output": {"call_id": str, "output": CONTENT_PARTS},
    "reasoning": {},  # the reasoning of earlier answers is omitted
}
ANSWER_FORMATS: Kinds = {"text": {}, "json_object": {}, "json_schema": {"schema": dict}}
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class ForeignRequest(GearRequest, frozen=True):
    """Common fields of both APIs, as in chat completions."""

    model: Name | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    stream: StrictBool | None = None


class TextConfig(Part, frozen=True):
    format: Annotated[AnyObject, of_kind(ANSWER_FORMATS)] | None = None

    @property
    def response_format(self) -> dict[str, Any] | None:
        """The response format of the chat completion."""
        wanted = self.format
        if wanted is None or wanted["type"] != "json_schema":
            return wanted
        schema = {"name": wanted.get("name", "answer"), "schema": wanted["schema"]}
        return {"type": "json_schema", "json_schema": schema}


# Requests of the Messages API.


class Turn(Part, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Annotated[AnyObject, of_kind(MESSAGE_BLOCKS)]]


class ClientTool(Part, frozen=True):
    """A tool; `input_schema` is a JSON schema."""

    name: ToolName
    input_schema: AnyObject
    description: str | None = None


class CountTokensRequest(ForeignRequest, frozen=True):
    """Body of `/v1/messages/count_tokens`."""

    messages: Annotated[ListOf[Turn], Field(min_length=1)]
    system: str | ListOf[Annotated[AnyObject, of_kind({"text": {"text": str}})]] | None = None
    tools: Annotated[ListOf[ClientTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[AnyObject, of_kind(CHOICES)] | None = None
    thinking: Annotated[AnyObject, of_kind(THINKING)] | None = None
    output_config: TextConfig | None = None
    stop_sequences: StopWords | None = None

    @field_validator("messages")
    @classmethod
    def ends_with_the_user(cls, messages: list[Turn]) -> list[Turn]:
        if messages[-1].role == "assistant":  # chat completions cannot continue a partial answer
            raise ValueError("messages: the last one is the assistant's; use the user's")
        return messages


class MessagesRequest(CountTokensRequest, frozen=True):
    """Body of `/v1/messages`."""

    max_tokens: Tokens
    top_k: Count | None = None


def chat_of_messages(request: CountTokensRequest) -> ChatRequest:
    """Return the chat completion for a request. Raises Refused for an invalid one."""
    messages = [{"role": "system", "content": chat_content(request.system)}] if request.system else []
    for turn in request.messages:
        messages += chat_messages(turn)
    choice = request.tool_choice or {"type": "auto"}
    tools = (request.tools or []) if choice["type"] != "none" else []
    chosen: dict[str, Any] = {"any": "required", "tool": named_tool(choice.get("name"))} if tools else {}
    return as_chat(
        request,
        messages,
        [{"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema} for tool in tools],
        None if request.thinking is None else request.thinking["type"] != "disabled",
        tool_choice="none" if choice["type"] == "none" else chosen.get(choice["type"]),
        stop=request.stop_sequences or None,
        response_format=(request.output_config or TextConfig()).response_format,
    )


def chat_messages(turn: Turn) -> list[dict[str, Any]]:
    """Return the chat messages for a message; tool results become separate messages."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in MESSAGE_BLOCKS}
    for block in turn.content:
        by_kind["text" if block["type"] in SHOWN else block["type"]].append(block)
    results = [result_of(block) for block in by_kind["tool_result"]]
    own: dict[str, Any] = {"role": turn.role, "content": chat_content(by_kind["text"])}
    if by_kind["tool_use"]:
        calls = [(one["id"], one["name"], json.dumps(one["input"], ensure_ascii=False)) for one in by_kind["tool_use"]]
        own["tool_calls"] = [tool_call(*call) for call in calls]
    if by_kind["thinking"]:
        own["reasoning_content"] = "\n".join(block["thinking"] for block in by_kind["thinking"])
    is_empty = own == {"role": turn.role, "content": ""} and not by_kind["text"]
    return results if results and is_empty else [*results, own]


def result_of(block: dict[str, Any]) -> dict[str, Any]:
    """Return the chat message for a tool result."""
    content = chat_content(block.get("content"))
    if block.get("is_error") is True and isinstance(content, str):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


# Requests of the Responses API.


def checked_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return a valid item of the input; only messages may omit their type. Raises ValueError."""
    item = check_block({"type": "message"} | item, ITEMS)
    if item["type"] == "message" and item["role"] not in ROLES:
        raise ValueError(f"unknown role {shown(item['role'])}; {choose(item['role'], ROLES)}")
    return item


Function = Annotated[AnyObject, of_kind({"function": {"name": str}})]


class ResponsesRequest(ForeignRequest, frozen=True):
    """Body of `/v1/responses`."""

    input: str | Annotated[ListOf[Annotated[AnyObject, AfterValidator(checked_item)]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: Annotated[ListOf[Function], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Function | None = None
    text: TextConfig | None = None
    reasoning: AnyObject | None = None  # every effort except "none" enables thinking
    previous_response_id: NotServed = None
    conversation: NotServed = None
    background: NotServed = None
    prompt: NotServed = None
    top_logprobs: NotServed = None


def chat_of_response(request: ResponsesRequest) -> ChatRequest:
    """Return the chat completion for a request. Raises Refused for an invalid one."""
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    items = request.input
    for item in [{"type": "message", "role": "user", "content": items}] if isinstance(items, str) else items:
        add_item(messages, item)
    choice, effort = request.tool_choice, (request.reasoning or {}).get("effort")
    fields = ("name", "description", "parameters")
    return as_chat(
        request,
        messages,
        [{name: tool[name] for name in fields if tool.get(name) is not None} for tool in request.tools or ()],
        None if effort is None else effort != "none",
        max_tokens=request.max_output_tokens,
        tool_choice=named_tool(choice["name"]) if isinstance(choice, dict) else choice,
        response_format=(request.text or TextConfig()).response_format,
    )


def add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item to the messages of a chat; tool calls join the preceding message of the assistant."""
    if item["type"] == "message":
        messages.append({"role": ROLES[item["role"]], "content": chat_content(item.get("content"))})
    elif item["type"] == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": chat_content(item.get("output"))})
    elif item["type"] == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = tool_call(item["call_id"], item["name"], item["arguments"])
        messages[-1].setdefault("tool_calls", []).append(call)


# Answers of the Messages API.

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {  # by the kind of a block: type and text field of a delta
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
ERRORS = {  # by status; all other statuses are api_error
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"},
}


def messages_error(refused: Refused) -> dict[str, Any]:
    """Return Anthropic's error object, also the data of a stream's event `error`."""
    kind = ERRORS.get(refused.status_code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


class Messages(BlockDialect):
    """Anthropic's format of a chat completion with `include_usage`."""

    def answer(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.head['id'].removeprefix('chatcmpl-')}",
            **{"type": "message", "role": "assistant", "model": self.head["model"]},
            "content": [content_block(block) for block in self.blocks],
            **self.ending,
            "usage": self.counted,
            **({"gearbx": self.report} if self.report else {}),
        }

    @property
    def counted(self) -> dict[str, int]:
        """Usage; `input_tokens` excludes cached tokens."""
        cached = self.usage["prompt_tokens_details"]["cached_tokens"]
        prompt = {"input_tokens": self.usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
        return {**prompt, "cache_creation_input_tokens": 0, "output_tokens": self.usage["completion_tokens"]}

    @property
    def ending(self) -> dict[str, Any]:
        """Stop reason, None before the end. A choice's `stop_reason` is its stop word."""
        word, finish_reason = self.choice.get("stop_reason"), self.choice.get("finish_reason", "")
        reason = "stop_sequence" if isinstance(word, str) else STOP_REASONS.get(finish_reason)
        return {"stop_reason": reason, "stop_sequence": word}

    def opening(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self.answer()}, {"type": "ping"}]

    def closing(self) -> list[dict[str, Any]]:
        ended = {"type": "message_delta", "delta": self.ending, "usage": self.counted, "gearbx": self.report}
        return [ended, {"type": "message_stop"}]

    def started(self, block: Block) -> list[dict[str, Any]]:
        return [{"type": "content_block_start", "index": block.place, "content_block": content_block(block)}]

    def grown(self, block: Block, text: str) -> dict[str, Any]:
        kind, name = DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.place, "delta": {"type": kind, name: text}}

    def ended(self, block: Block) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": block.place}]

    def failed(self, refused: Refused) -> Event:
        return "error", messages_error(refused)


def content_block(block: Block) -> dict[str, Any]:
    """Return Anthropic's object of a block so far."""
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    named = {"id": block.call["id"], "name": block.call["function"]["name"]}
    return {"type": "tool_use", **named, "input": json.loads(block.text or "{}")}


# Answers of the Responses API.

ITEM: dict[str, tuple[str, dict[str, Any], str]] = {  # by the kind of a block: id prefix, item, name of its part
    "thinking": ("rs", {"type": "reasoning", "summary": []}, "reasoning_text"),
    "text": ("msg", {"type": "message", "role": "assistant"}, "output_text"),
    "call": ("fc", {"type": "function_call"}, "function_call_arguments"),
}


class ResponseDialect(BlockDialect):
    """Format of the Responses API for a chat completion with `include_usage`. Each block is an output item."""

    def __init__(self, request: ResponsesRequest):
        super().__init__()
        self.identity, self.created, self.number = uuid.uuid4().hex, int(time.time()), 0
        self.request_fields = request.model_dump(include={"instructions", "temperature", "top_p", "max_output_tokens"})
        self.request_fields |= {"tools": [], "tool_choice": "auto"}
        self.request_fields |= request.model_dump(include={"tools", "tool_choice"}, exclude_none=True)

    def answer(self) -> dict[str, Any]:
        is_cut = self.choice.get("finish_reason") == "length"
        return {
            **{"id": f"resp_{self.identity}", "object": "response", "created_at": self.created},
            "status": "incomplete" if is_cut else "completed" if self.choice else "in_progress",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            **{"error": None, "parallel_tool_calls": True, "store": False, "model": self.head["model"]},
            **self.request_fields,
            "output": [self.item(block) for block in self.blocks],
            "usage": response_usage(self.usage) if self.usage else None,
            **({"gearbx": self.report} if self.report else {}),
        }

    def opening(self) -> list[dict[str, Any]]:
        return [{"type": kind, "response": self.answer()} for kind in ("response.created", "response.in_progress")]

    def closing(self) -> list[dict[str, Any]]:
        answer = self.answer()
        return [{"type": f"response.{answer['status']}", "response": answer}]

    def failed(self, refused: Refused) -> Event:
        error = refused.body()["error"]
        (event,) = self.named([{**error, "type": "error", "error": error}])
        return event

    def named(self, events: Iterable[dict[str, Any]]) -> list[Event]:
        found = [event | {"sequence_number": number} for number, event in enumerate(events, self.number)]
        self.number += len(found)
        return super().named(found)

    def started(self, block: Block) -> list[dict[str, Any]]:
        item = self.item(block) | {"status": "in_progress"} | ({"content": []} if block.kind != "call" else {})
        added = {"type": "response.output_item.added", "output_index": block.place, "item": item}
        return [added, *self.part_event(block, "added")]

    def grown(self, block: Block, text: str) -> dict[str, Any]:
        return {"type": f"response.{ITEM[block.kind][2]}.delta", **self.location(block), "delta": text}

    def ended(self, block: Block) -> list[dict[str, Any]]:
        content = {"arguments" if block.kind == "call" else "text": block.text}
        done = {"type": f"response.{ITEM[block.kind][2]}.done", **self.location(block), **content}
        item = {"type": "response.output_item.done", "output_index": block.place, "item": self.item(block)}
        return [done, *self.part_event(block, "done"), item]

    def part_event(self, block: Block, suffix: str) -> list[dict[str, Any]]:
        """Return the event that opens ("added") or closes ("done") an item's part; a tool call has no part."""
        if block.kind == "call":
            return []
        return [{"type": f"response.content_part.{suffix}", **self.location(block), "part": text_part(block)}]

    def location(self, block: Block) -> dict[str, Any]:
        """Return the fields for an event's item and part."""
        part = {} if block.kind == "call" else {"content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return {"item_id": self.item(block)["id"], "output_index": block.place, **part, **logprobs}

    def item(self, block: Block) -> dict[str, Any]:
        """Return the output item of a block so far."""
        prefix, item, _ = ITEM[block.kind]
        own: dict[str, Any] = {"content": [text_part(block)]}
        if block.kind == "call":
            own = {"call_id": block.call["id"], "name": block.call["function"]["name"], "arguments": block.text}
        return {"id": f"{prefix}_{self.identity}_{block.place}", **item, **own, "status": "completed"}


def text_part(block: Block) -> dict[str, Any]:
    annotations: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": ITEM[block.kind][2], "text": block.text, **annotations}


def response_usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        **{"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]},
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
