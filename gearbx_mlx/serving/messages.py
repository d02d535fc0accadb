"""Anthropic's Messages API, in terms of chat completions: requests, whole answers, streams and errors."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, field_validator
from typing_extensions import TypedDict

from .answers import BlockDialect, Event, GearsReport
from .requests import (
    ChatRequest,
    Count,
    Number,
    Options,
    Share,
    Tokens,
    as_chat,
    chat_content,
    json_schema,
    named_tool,
    text_of,
    tool_call,
)
from .web import Refused

# Requests.

ToolName = Annotated[str, Field(min_length=1, max_length=128)]


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str

    def as_chat(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class Base64(BaseModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class Url(BaseModel):
    type: Literal["url"]
    url: str


class ImageBlock(BaseModel):
    type: Literal["image"]
    source: Annotated[Base64 | Url, Field(discriminator="type")]

    def as_chat(self) -> dict[str, Any]:
        source = self.source
        url = source.url if isinstance(source, Url) else f"data:{source.media_type};base64,{source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


Shown = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolUseBlock(BaseModel):
    """A call that the model asked for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(BaseModel):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Shown] = ""
    is_error: StrictBool = False


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BaseModel):
    """Thinking that only another server can read; it is left out."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class Turn(BaseModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(BaseModel):
    """A function of the client's. `input_schema` is a JSON schema."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None


class ToolChoice(BaseModel):
    """Whether the model is shown tools, may call one, has to (`any`), or has to call the one that is named (`tool`)."""

    type: Literal["auto", "any", "none", "tool"]
    name: ToolName | None = None


class ThinkingChoice(BaseModel):
    """Whether a model that can think before it answers does so; it sets its own budget."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class JsonFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    format: JsonFormat | None = None


class CountTokensRequest(BaseModel):
    """Body of `/v1/messages/count_tokens`. Fields that are not named here are ignored."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None

    @field_validator("messages")
    @classmethod
    def ends_with_the_user(cls, messages: list[Turn]) -> list[Turn]:
        if messages[-1].role == "assistant":  # an answer that is begun already: a chat completion has none
            raise ValueError("the last of the messages is the assistant's; end with the user's")
        return messages


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`. `gearbx` is that of a chat completion. Fields that are not named here are ignored."""

    max_tokens: Tokens
    stop_sequences: list[str] | None = None
    stream: StrictBool = False
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    gearbx: Options | None = None


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """The chat completion that answers a request. Raises Refused for what a chat completion cannot be."""
    system = [{"role": "system", "content": text_of(request.system)}] if request.system else []
    messages = system + [part for message in request.messages for part in chat_messages(message)]
    choice = request.tool_choice.type if request.tool_choice is not None else "auto"
    tools = request.tools if request.tools is not None and choice != "none" else []
    functions = [{"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in tools]
    chosen: Any = "none" if choice == "none" else None
    if functions and request.tool_choice is not None:
        chosen = {"any": "required", "tool": named_tool(request.tool_choice.name)}.get(choice)
    wanted = request.output_config.format if request.output_config is not None else None
    return as_chat(
        request,
        messages,
        functions,
        None if request.thinking is None else request.thinking.type != "disabled",
        tool_choice=chosen,
        stop=getattr(request, "stop_sequences", None) or None,
        response_format=None if wanted is None else json_schema("answer", wanted.schema_),
    )


def chat_messages(message: Turn) -> list[dict[str, Any]]:
    """A message as those of a chat: what tools returned stands in messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [tool_message(block) for block in message.content if isinstance(block, ToolResultBlock)]
    uses = [block for block in message.content if isinstance(block, ToolUseBlock)]
    calls = [tool_call(one.id, one.name, json.dumps(one.input, ensure_ascii=False)) for one in uses]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    rest = [block for block in message.content if isinstance(block, TextBlock | ImageBlock)]
    if not rest and not calls and (results or not thoughts):
        return results or [{"role": message.role, "content": ""}]
    own: dict[str, Any] = {"role": message.role, "content": chat_content(rest)}
    own |= {"tool_calls": calls} if calls else {}
    own |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, own]


def tool_message(block: ToolResultBlock) -> dict[str, Any]:
    content = chat_content(block.content)
    if block.is_error and isinstance(content, str):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


# Answers.


class MessageUsage(TypedDict):
    """Anthropic counts tokens of the prompt that were cached beside the others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(TypedDict):
    """A message with the text, thoughts and tool calls of a chat completion."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    gearbx: GearsReport


class CountedTokens(TypedDict):
    input_tokens: int


class MessagesErrorObject(TypedDict):
    type: str
    message: str


class MessagesError(TypedDict):
    """An error as Anthropic's clients read it; in a stream, the data of an event `error`."""

    type: Literal["error"]
    error: MessagesErrorObject


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


def message_usage(counts: Mapping[str, Any]) -> MessageUsage:
    cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": counts.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts.get("completion_tokens", 0),
    }


def ending(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Why a text ended. A choice may name the stop word in `stop_reason`."""
    word = choice.get("stop_reason")
    if isinstance(word, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": word}
    return {"stop_reason": STOP_REASONS.get(choice.get("finish_reason") or "", "end_turn"), "stop_sequence": None}


def arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call; none where the model wrote no JSON object."""
    try:
        given = json.loads(text or "{}")
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


class Messages(BlockDialect):
    """How a chat completion, with `include_usage`, looks to a client of Anthropic's API.

    message_start counts the prompt's tokens, and message_delta all. `gearbx.tokens` stands with the text that the
    tokens brought, and what else `gearbx` has in message_delta.
    """

    def answer(self) -> dict[str, Any]:
        return {
            "id": f"msg_{str(self.head.get('id', '')).removeprefix('chatcmpl-')}",
            "type": "message",
            "role": "assistant",
            "model": self.head.get("model", ""),
            "content": list(self.blocks),
            **(ending(self.ended_with) if self.ended_with else {"stop_reason": None, "stop_sequence": None}),
            "usage": message_usage(self.usage),
            **self.report,
        }

    def begin(self, usage: Mapping[str, Any]) -> None:
        self.usage = usage

    def opening(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self.answer()}, {"type": "ping"}]

    def closing(self) -> list[dict[str, Any]]:
        usage = message_usage(self.usage)
        ended = {"type": "message_delta", "delta": ending(self.ended_with), "usage": usage, **self.report}
        return [ended, {"type": "message_stop"}]

    def block(self) -> dict[str, Any]:
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": self.content, "signature": ""}
        if self.kind == "text":
            return {"type": "text", "text": self.content}
        name = (self.call.get("function") or {}).get("name")
        return {"type": "tool_use", "id": self.call.get("id"), "name": name, "input": arguments(self.content)}

    def started(self) -> list[dict[str, Any]]:
        return [{"type": "content_block_start", "index": self.place, "content_block": self.block()}]

    def grown(self, text: str) -> dict[str, Any]:
        kind, name = DELTAS[self.kind or ""]
        return {"type": "content_block_delta", "index": self.place, "delta": {"type": kind, name: text}}

    def ended(self) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": self.place}]

    def failed(self, refused: Refused) -> Event:
        return "error", messages_error(refused)
