"""OpenAI's Responses API, in terms of chat completions: requests, whole answers and streams. Nothing is stored."""

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictBool
from typing_extensions import TypedDict

from .answers import BlockDialect, Event, GearsReport
from .messages import ToolName
from .requests import (
    ChatRequest,
    NotServed,
    Number,
    Options,
    Share,
    Tokens,
    as_chat,
    chat_content,
    json_schema,
    named_tool,
    tool_call,
)
from .web import Refused

# Requests.


class WrittenPart(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str

    def as_chat(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class PicturePart(BaseModel):
    type: Literal["input_image"]
    image_url: str

    def as_chat(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


SomePart = Annotated[WrittenPart | PicturePart, Field(discriminator="type")]


class MessageItem(BaseModel):
    """A message; only these may leave their type out."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[SomePart]


class CallItem(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str


class CallOutputItem(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[SomePart]


class ReasoningItem(BaseModel):
    """What a model thought before; it is left out."""

    type: Literal["reasoning"]


InputItem = Annotated[
    Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(lambda item: {"type": "message"} | item if isinstance(item, dict) else item),
]


class ChosenFunction(BaseModel):
    type: Literal["function"]
    name: ToolName


class FunctionTool(ChosenFunction):
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(BaseModel):
    """What the text has to be, as `response_format` of a chat completion."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextConfig(BaseModel):
    format: TextFormat | None = None


class ReasoningConfig(BaseModel):
    """Whether a model that can think does so: with every effort but "none"."""

    effort: str | None = None


class ResponsesRequest(BaseModel):
    """Body of `/v1/responses`. Fields that are not named here are ignored, as those that change no answer."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    stream: StrictBool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    gearbx: Options | None = None
    previous_response_id: NotServed = None
    conversation: NotServed = None
    background: NotServed = None
    prompt: NotServed = None
    top_logprobs: NotServed = None


def chat_of_response(request: ResponsesRequest) -> ChatRequest:
    """The chat completion that answers a request. Raises Refused for what a chat completion cannot be."""
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    items = request.input
    for item in [MessageItem(type="message", role="user", content=items)] if isinstance(items, str) else items:
        add_item(messages, item)
    choice, effort = request.tool_choice, request.reasoning
    wanted = request.text.format if request.text is not None else None
    response_format: dict[str, Any] | None = None
    if wanted is not None:
        is_schema = wanted.type == "json_schema"
        response_format = json_schema(wanted.name, wanted.schema_) if is_schema else {"type": wanted.type}
    return as_chat(
        request,
        messages,
        [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in request.tools or ()],
        None if effort is None or effort.effort is None else effort.effort != "none",
        max_tokens=request.max_output_tokens,
        tool_choice=named_tool(choice.name) if isinstance(choice, ChosenFunction) else choice,
        response_format=response_format,
    )


def add_item(messages: list[dict[str, Any]], item: Any) -> None:
    """Add an item of the input to the messages of a chat; calls belong to the assistant's message before them."""
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": chat_content(item.content)})
    elif isinstance(item, CallOutputItem):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": chat_content(item.output)})
    elif isinstance(item, CallItem):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(tool_call(item.call_id, item.name, item.arguments))


# Answers.


class ResponseAnswer(TypedDict):
    """A response with the text, thoughts and calls of a chat completion."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    gearbx: GearsReport


KINDS: dict[str, tuple[str, dict[str, Any], str]] = {  # of a block: prefix of its id, its item, the name of its part
    "thinking": ("rs", {"type": "reasoning", "summary": []}, "reasoning_text"),
    "text": ("msg", {"type": "message", "role": "assistant"}, "output_text"),
    "call": ("fc", {"type": "function_call"}, "function_call_arguments"),
}


class ResponseDialect(BlockDialect):
    """How a chat completion, with `include_usage`, looks to a client of the Responses API.

    `gearbx.tokens` stands with the text that the tokens brought, and what else `gearbx` has in the last event.
    """

    def __init__(self, request: ResponsesRequest):
        super().__init__()
        self.identity, self.created, self.number = uuid.uuid4().hex, int(time.time()), 0
        self.asked = request.model_dump(include={"instructions", "temperature", "top_p", "max_output_tokens"})
        self.asked["tools"] = [tool.model_dump() for tool in request.tools or ()]
        self.asked["tool_choice"] = request.model_dump(include={"tool_choice"})["tool_choice"] or "auto"

    def answer(self) -> dict[str, Any]:
        is_cut = self.ended_with.get("finish_reason") == "length"
        return {
            "id": f"resp_{self.identity}",
            "object": "response",
            "created_at": self.created,
            "status": "incomplete" if is_cut else "completed" if self.ended_with else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "parallel_tool_calls": True,
            "store": False,
            **self.asked,
            "model": self.head.get("model", ""),
            "output": list(self.blocks),
            "usage": response_usage(self.usage) if self.usage else None,
            **self.report,
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

    # A block is an item of the output, and text and thoughts are a part of one.

    def started(self) -> list[dict[str, Any]]:
        item = self.block() | {"status": "in_progress"} | ({"content": []} if self.kind != "call" else {})
        added = {"type": "response.output_item.added", "output_index": self.place, "item": item}
        if self.kind == "call":
            return [added]
        return [added, {"type": "response.content_part.added", **self.where, "part": self.part}]

    def grown(self, text: str) -> dict[str, Any]:
        return {"type": f"response.{self.part_name}.delta", **self.where, "delta": text, **self.logprobs}

    def ended(self) -> list[dict[str, Any]]:
        said = {"arguments" if self.kind == "call" else "text": self.content}
        done = [{"type": f"response.{self.part_name}.done", **self.where, **said, **self.logprobs}]
        if self.kind != "call":
            done.append({"type": "response.content_part.done", **self.where, "part": self.part})
        return [*done, {"type": "response.output_item.done", "output_index": self.place, "item": self.blocks[-1]}]

    @property
    def part_name(self) -> str:
        return KINDS[self.kind or ""][2]

    @property
    def part(self) -> dict[str, Any]:
        annotations: dict[str, Any] = {"annotations": [], "logprobs": []} if self.kind == "text" else {}
        return {"type": self.part_name, "text": self.content, **annotations}

    @property
    def logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.kind == "text" else {}

    @property
    def where(self) -> dict[str, Any]:
        """Item and part to which an event belongs."""
        part = {} if self.kind == "call" else {"content_index": 0}
        return {"item_id": self.block()["id"], "output_index": self.place, **part}

    def block(self) -> dict[str, Any]:
        prefix, item, _ = KINDS[self.kind or ""]
        own: dict[str, Any] = {"content": [self.part]}
        if self.kind == "call":
            name = (self.call.get("function") or {}).get("name")
            own = {"call_id": self.call.get("id"), "name": name, "arguments": self.content}
        return {"id": f"{prefix}_{self.identity}_{self.place}", **item, **own, "status": "completed"}


def response_usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
