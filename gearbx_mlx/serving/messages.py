"""Anthropic's Messages API, in terms of chat completions: requests, whole answers, streams and errors."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, field_validator
from typing_extensions import TypedDict

from .answers import BlockDialect, Event, GearsReport, named, with_tokens
from .requests import ChatRequest, Count, Number, Options, Share, Tokens, parse
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

    @property
    def address(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class Url(BaseModel):
    type: Literal["url"]
    url: str

    @property
    def address(self) -> str:
        return self.url


class ImageBlock(BaseModel):
    type: Literal["image"]
    source: Annotated[Base64 | Url, Field(discriminator="type")]

    def as_chat(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.source.address}}


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
    """Whether the model is shown tools, and may or has to (`any`) call one."""

    type: Literal["auto", "any", "none"]


class OneTool(BaseModel):
    """The tool that the model has to call."""

    type: Literal["tool"]
    name: ToolName


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
    tool_choice: Annotated[ToolChoice | OneTool, Field(discriminator="type")] | None = None
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


SAME = {"model", "max_tokens", "stream", "temperature", "top_p", "top_k", "gearbx"}  # as in a chat completion
THINKS = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": True}


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """The chat completion that answers a request. Raises Refused for what a chat completion cannot be."""
    return parse(ChatRequest, chat_body(request))


def chat_body(request: CountTokensRequest) -> dict[str, Any]:
    """The body of the chat completion that answers a request."""
    body = request.model_dump(include=SAME, exclude_none=True, exclude_unset=True)
    system = [{"role": "system", "content": text_of(request.system)}] if request.system else []
    body["messages"] = system + [part for message in request.messages for part in chat_messages(message)]
    body.update(tool_fields(request))
    if isinstance(request, MessagesRequest):
        body |= {"stop": request.stop_sequences} if request.stop_sequences else {}
        body |= {"stream_options": {"include_usage": True}} if request.stream else {}
    if request.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": THINKS[request.thinking.type]}
    if request.output_config is not None and request.output_config.format is not None:
        schema = request.output_config.format.schema_
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return body


def text_of(content: str | list[Any]) -> str:
    """The text of blocks, of each on lines of its own."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def tool_fields(request: CountTokensRequest) -> dict[str, Any]:
    """`tools` and `tool_choice` of a chat completion."""
    choice = request.tool_choice
    if choice is not None and choice.type == "none":
        return {"tool_choice": "none"}
    if not request.tools:
        return {}
    functions = [
        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        for tool in request.tools
    ]
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": function} for function in functions]}
    if isinstance(choice, OneTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None and choice.type == "any":
        fields["tool_choice"] = "required"
    return fields


def chat_messages(message: Turn) -> list[dict[str, Any]]:
    """A message as those of a chat: what tools returned stands in messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [tool_message(block) for block in message.content if isinstance(block, ToolResultBlock)]
    calls = [tool_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    rest = [block for block in message.content if isinstance(block, TextBlock | ImageBlock)]
    if not rest and not calls and (results or not thoughts):
        return results or [{"role": message.role, "content": ""}]
    own: dict[str, Any] = {"role": message.role, "content": chat_content(rest)}
    own |= {"tool_calls": calls} if calls else {}
    own |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, own]


def chat_content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    """The content of a chat message; text alone as text, since not every chat template takes parts."""
    if isinstance(content, str) or all(hasattr(part, "text") for part in content):
        return text_of(content)
    return [part.as_chat() for part in content]


def tool_call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


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


def opened(completion: Mapping[str, Any], counts: Mapping[str, Any] | None) -> dict[str, Any]:
    """A message before anything was written."""
    return {
        "id": f"msg_{str(completion.get('id', '')).removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": completion.get("model", ""),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": message_usage(counts),
    }


def message_usage(counts: Mapping[str, Any] | None) -> MessageUsage:
    counts = counts or {}
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


def blocks_of(written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The blocks of a chat message: thoughts, text and tool calls."""
    if thoughts := written.get("reasoning"):
        yield {"type": "thinking", "thinking": thoughts, "signature": ""}
    if text := written.get("content"):
        yield {"type": "text", "text": text}
    for call in written.get("tool_calls") or ():
        function = call["function"]
        called = {"id": call["id"], "name": function["name"], "input": arguments(function.get("arguments"))}
        yield {"type": "tool_use", **called}


def arguments(text: str | None) -> dict[str, Any]:
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

    def __init__(self) -> None:
        super().__init__()
        self._begun = False
        self._ended = ending({})
        self._counts: Mapping[str, Any] | None = None
        self._gearbx: dict[str, Any] = {}

    def whole(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        choice = completion["choices"][0]
        answer = opened(completion, completion.get("usage")) | ending(choice)
        gearbx = {"gearbx": completion["gearbx"]} if "gearbx" in completion else {}
        return answer | {"content": list(blocks_of(choice["message"]))} | gearbx

    def begin(self, usage: Mapping[str, Any]) -> None:
        self._counts = usage

    def events(self, chunk: Mapping[str, Any]) -> Iterable[Event]:
        return named(self._events_of(chunk))

    def _events_of(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._begun:
            yield {"type": "message_start", "message": opened(chunk, self._counts)}
            yield {"type": "ping"}
            self._begun = True
        for choice in chunk.get("choices") or ():
            yield from with_tokens(self.written(choice.get("delta") or {}), chunk)
            if choice.get("finish_reason"):
                self._ended = ending(choice)
        self._counts = chunk.get("usage") or self._counts
        gearbx = {name: value for name, value in (chunk.get("gearbx") or {}).items() if name != "tokens"}
        self._gearbx = gearbx or self._gearbx

    def started(self) -> Iterator[dict[str, Any]]:
        block: dict[str, Any] = {
            "thinking": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
            "call": {"type": "tool_use", "id": self.call.get("id"), "name": called(self.call), "input": {}},
        }[self.kind or ""]
        yield {"type": "content_block_start", "index": self.place, "content_block": block}

    def grown(self, text: str) -> dict[str, Any]:
        delta = {
            "thinking": {"type": "thinking_delta", "thinking": text},
            "text": {"type": "text_delta", "text": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[self.kind or ""]
        return {"type": "content_block_delta", "index": self.place, "delta": delta}

    def ended(self) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_stop", "index": self.place}

    def last(self) -> Iterable[Event]:
        gearbx = {"gearbx": self._gearbx} if self._gearbx else {}
        ended = {"type": "message_delta", "delta": self._ended, "usage": message_usage(self._counts), **gearbx}
        return named([*self.close(), ended, {"type": "message_stop"}])

    def failed(self, refused: Refused) -> Event:
        return "error", messages_error(refused)


def called(call: Mapping[str, Any]) -> Any:
    """The name of the function that is called."""
    return (call.get("function") or {}).get("name")
