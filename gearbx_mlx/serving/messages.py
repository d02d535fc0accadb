"""Anthropic's Messages API, translated into chat completions: requests, whole answers, streams and errors."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, field_validator
from typing_extensions import TypedDict

from .answers import Block, BlockDialect, Event, GearsReport
from .requests import (
    ChatRequest,
    Count,
    GearRequest,
    Kinds,
    Number,
    Share,
    Tokens,
    ToolName,
    as_chat,
    chat_content,
    json_schema,
    named_tool,
    of_kind,
    tool_call,
)
from .web import Refused

# Requests.


SHOWN: Kinds = {"text": {"text": str}, "image": {"source": dict}}
BLOCKS: Kinds = {
    **SHOWN,
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str, "content": SHOWN},
    "thinking": {"thinking": str},
    "redacted_thinking": {},  # thinking that only another server can read; it is left out
}


CHOICES: Kinds = {"auto": {}, "any": {}, "none": {}, "tool": {"name": str}}  # any: one of the tools has to be called
THINKING: Kinds = {kind: {} for kind in ("enabled", "disabled", "adaptive", "between_tools")}


class Turn(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[dict[str, Any], of_kind(BLOCKS)]]


class ClientTool(BaseModel):
    """A function of the client's. `input_schema` is a JSON schema."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None


class OutputConfig(BaseModel):
    format: Annotated[dict[str, Any], of_kind({"json_schema": {"schema": dict}})] | None = None


class CountTokensRequest(BaseModel, frozen=True):
    """Body of `/v1/messages/count_tokens`. Fields that are not named here are ignored."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    model: str | None = None
    system: str | list[Annotated[dict[str, Any], of_kind({"text": {"text": str}})]] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: Annotated[dict[str, Any], of_kind(CHOICES)] | None = None
    thinking: Annotated[dict[str, Any], of_kind(THINKING)] | None = None
    output_config: OutputConfig | None = None

    @field_validator("messages")
    @classmethod
    def ends_with_the_user(cls, messages: list[Turn]) -> list[Turn]:
        if messages[-1].role == "assistant":  # an answer that is begun already: a chat completion has none
            raise ValueError("the last of the messages is the assistant's; end with the user's")
        return messages


class MessagesRequest(CountTokensRequest, GearRequest, frozen=True):
    """Body of `/v1/messages`. Fields that are not named here are ignored."""

    max_tokens: Tokens
    stop_sequences: list[str] | None = None
    stream: StrictBool = False
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """Return the chat completion that answers a request. Raises Refused for what a chat completion cannot be."""
    system = [{"role": "system", "content": content_of(request.system)}] if request.system else []
    choice = request.tool_choice or {"type": "auto"}
    tools = (request.tools or []) if choice["type"] != "none" else []
    functions = [{"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in tools]
    chosen: dict[str, Any] = {"any": "required", "tool": named_tool(choice.get("name"))} if functions else {}
    wanted = request.output_config.format if request.output_config is not None else None
    return as_chat(
        request,
        system + [part for message in request.messages for part in chat_messages(message)],
        functions,
        None if request.thinking is None else request.thinking["type"] != "disabled",
        tool_choice="none" if choice["type"] == "none" else chosen.get(choice["type"]),
        stop=getattr(request, "stop_sequences", None) or None,
        response_format=None if wanted is None else json_schema("answer", wanted["schema"]),
    )


def chat_messages(message: Turn) -> list[dict[str, Any]]:
    """Return a message as those of a chat: what tools returned stands in messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [result_of(block) for block in message.content if block["type"] == "tool_result"]
    uses = [block for block in message.content if block["type"] == "tool_use"]
    thoughts = [block["thinking"] for block in message.content if block["type"] == "thinking"]
    rest = [block for block in message.content if block["type"] in SHOWN]
    if results and not (uses or thoughts or rest):
        return results
    own: dict[str, Any] = {"role": message.role, "content": content_of(rest)}
    if uses:
        calls = [(one["id"], one["name"], json.dumps(one["input"], ensure_ascii=False)) for one in uses]
        own["tool_calls"] = [tool_call(*call) for call in calls]
    return [*results, own | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})]


def result_of(block: dict[str, Any]) -> dict[str, Any]:
    """Return what a tool returned as a message."""
    content = content_of(block.get("content"))
    said = f"Error: {content}" if block.get("is_error") is True and isinstance(content, str) else content
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": said}


def content_of(content: str | list[Any] | None) -> str | list[dict[str, Any]]:
    def url_of(block: dict[str, Any]) -> str:
        source = block["source"]
        return str(source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}")

    return chat_content(content, url_of)


# Answers.


class MessageAnswer(TypedDict):
    """A message with the text, thoughts and tool calls of a chat completion."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]
    gearbx: GearsReport


class CountedTokens(TypedDict):
    input_tokens: int


class MessagesError(TypedDict):
    """An error as Anthropic's clients read it; in a stream, the data of an event `error`."""

    type: Literal["error"]
    error: dict[str, str]


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {  # by the kind of a block: type, and the name of what is new
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
ERRORS = {  # by status; other statuses are the server's
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(refused: Refused) -> MessagesError:
    kind = ERRORS.get(refused.status_code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


def message_usage(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return what was read and written; Anthropic counts tokens of the prompt that were cached beside the others."""
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }


class Messages(BlockDialect):
    """How a chat completion, with `include_usage`, looks to a client of Anthropic's API.

    message_start counts the prompt's tokens, and message_delta all. `gearbx.tokens` stands with the text that the
    tokens brought, and what else `gearbx` has in message_delta.
    """

    def answer(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.head['id'].removeprefix('chatcmpl-')}",
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": [shown(block) for block in self.blocks],
            **self.ending,
            "usage": message_usage(self.usage),
            **({"gearbx": self.report} if self.report else {}),
        }

    @property
    def ending(self) -> dict[str, Any]:
        """Why the text ended, as far as it has. A choice may name the stop word in `stop_reason`."""
        word, reason = self.choice.get("stop_reason"), self.choice.get("finish_reason", "")
        stopped = "stop_sequence" if isinstance(word, str) else STOP_REASONS.get(reason)
        return {"stop_reason": stopped, "stop_sequence": word}

    def opening(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self.answer()}, {"type": "ping"}]

    def closing(self) -> list[dict[str, Any]]:
        ended = {"type": "message_delta", "delta": self.ending, "usage": message_usage(self.usage)}
        return [{**ended, "gearbx": self.report}, {"type": "message_stop"}]

    def started(self, block: Block) -> list[dict[str, Any]]:
        return [{"type": "content_block_start", "index": block.place, "content_block": shown(block)}]

    def grown(self, block: Block, text: str) -> dict[str, Any]:
        kind, name = DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.place, "delta": {"type": kind, name: text}}

    def ended(self, block: Block) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": block.place}]

    def failed(self, refused: Refused) -> Event:
        return "error", messages_error(refused)


def shown(block: Block) -> dict[str, Any]:
    """Return a block of an answer as far as it has come."""
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    call = block.call
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": json.loads(block.text or "{}"),
    }
