"""A request of Anthropic's Messages API becomes the body of a chat completion."""

import json
from typing import Annotated, Any, Literal

import msgspec

from ...errors import GearbxError

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class Base64(msgspec.Struct, tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class Url(msgspec.Struct, tag="url"):
    url: str


class ImageBlock(msgspec.Struct, tag="image"):
    source: Base64 | Url


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call that the model asked for."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """What a call returned."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] = ""
    is_error: bool = False


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Thinking that only another server can read; it is left out."""


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class Turn(msgspec.Struct):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A function of the client's. `input_schema` is a JSON schema."""

    name: Name
    input_schema: dict[str, Any]
    description: str | None = None


class AutoChoice(msgspec.Struct, tag="auto"):
    """The model may call tools."""


class AnyChoice(msgspec.Struct, tag="any"):
    """As auto: nothing makes a model call a tool."""


class NoChoice(msgspec.Struct, tag="none"):
    """The model is shown no tools."""


class ToolChoice(msgspec.Struct, tag="tool"):
    """As auto: nothing makes a model call this tool."""

    name: Name


class Thinking(msgspec.Struct):
    """Whether a model that can think before it answers does so; it sets its own budget."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class JsonFormat(msgspec.Struct, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: JsonFormat | None = None


class CountTokensRequest(msgspec.Struct):
    """Body of `/v1/messages/count_tokens`. Fields that are not named here are ignored."""

    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: AutoChoice | AnyChoice | NoChoice | ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `/v1/messages`. `gearbx` is that of a chat completion. Fields that are not named here are ignored."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    gearbx: dict[str, Any] | None = None


SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "gearbx")  # as in a chat completion
THINKS = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": True}


def chat_body(request: CountTokensRequest) -> dict[str, Any]:
    """The body of the chat completion that answers a request.

    Raises:
        GearbxError: an answer that is begun already: a chat completion has none.
    """
    if request.messages[-1].role == "assistant":
        raise GearbxError("the last of the messages is the assistant's; end with the user's")
    given = {name: getattr(request, name, None) for name in SAME}
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    system = [{"role": "system", "content": text_of(request.system)}] if request.system else []
    body["messages"] = system + [part for message in request.messages for part in chat_messages(message)]
    body.update(tool_fields(request))
    if getattr(request, "stop_sequences", None):
        body["stop"] = request.stop_sequences  # type: ignore[attr-defined]
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if request.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": THINKS[request.thinking.type]}
    if request.output_config is not None and request.output_config.format is not None:
        schema = request.output_config.format.schema
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return body


def text_of(content: str | list[Any]) -> str:
    """The text of blocks, of each on lines of its own."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def tool_fields(request: CountTokensRequest) -> dict[str, Any]:
    """`tools` and `tool_choice` of a chat completion."""
    if isinstance(request.tool_choice, NoChoice):
        return {"tool_choice": "none"}
    if not request.tools:
        return {}
    fields: dict[str, Any] = {"tools": [function_of(tool) for tool in request.tools]}
    if isinstance(request.tool_choice, ToolChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    elif isinstance(request.tool_choice, AnyChoice):
        fields["tool_choice"] = "required"
    return fields


def function_of(tool: Tool) -> dict[str, Any]:
    """A tool as a chat completion has it."""
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


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
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return [*results, own]


def chat_content(blocks: list[Any]) -> str | list[dict[str, Any]]:
    """The content of a chat message; text alone as text, since not every chat template takes parts."""
    if all(isinstance(block, TextBlock) for block in blocks):
        return text_of(blocks)
    return [chat_part(block) for block in blocks]


def chat_part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, Url) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def tool_call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def tool_message(block: ToolResultBlock) -> dict[str, Any]:
    content = block.content if isinstance(block.content, str) else chat_content(block.content)
    if block.is_error and isinstance(content, str):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
