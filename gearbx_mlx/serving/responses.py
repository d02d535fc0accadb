"""OpenAI's Responses API, translated into chat completions: requests, whole answers and streams. Nothing is stored."""

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StrictBool
from typing_extensions import TypedDict

from ..files.reading import shown
from .answers import Block, BlockDialect, Event, GearsReport
from .requests import (
    ChatRequest,
    GearRequest,
    Kinds,
    NotServed,
    Number,
    Share,
    Tokens,
    as_chat,
    chat_content,
    check_block,
    json_schema,
    named_tool,
    of_kind,
    tool_call,
)
from .web import Refused

# Requests.


PARTS: Kinds = {kind: {"text": str} for kind in ("input_text", "output_text", "text")} | {
    "input_image": {"image_url": str}
}
ITEMS: Kinds = {
    "message": {"role": str, "content": PARTS},
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "function_call_output": {"call_id": str, "output": PARTS},
    "reasoning": {},  # what a model thought before; it is left out
}
FIELDS = ("name", "description", "parameters")  # of a function
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def checked_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of the input, if it is one; only messages may leave their type out. Raises ValueError."""
    item = check_block({"type": "message"} | item, ITEMS)
    if item["type"] == "message" and item["role"] not in ROLES:
        raise ValueError(f"the role of a message is {shown(item['role'])}; choose from {', '.join(ROLES)}")
    return item


FORMATS: Kinds = {"text": {}, "json_object": {}, "json_schema": {"schema": dict}}
Function = Annotated[dict[str, Any], of_kind({"function": {"name": str}})]


class TextConfig(BaseModel):
    format: Annotated[dict[str, Any], of_kind(FORMATS)] | None = None


class ReasoningConfig(BaseModel):
    """Whether a model that can think does so: with every effort but "none"."""

    effort: str | None = None


class ResponsesRequest(GearRequest, frozen=True):
    """Body of `/v1/responses`. Fields that are not named here are ignored, as those that change no answer."""

    input: str | Annotated[list[Annotated[dict[str, Any], AfterValidator(checked_item)]], Field(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    stream: StrictBool | None = None
    tools: list[Function] | None = None
    tool_choice: Literal["none", "auto", "required"] | Function | None = None
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    previous_response_id: NotServed = None
    conversation: NotServed = None
    background: NotServed = None
    prompt: NotServed = None
    top_logprobs: NotServed = None


def chat_of_response(request: ResponsesRequest) -> ChatRequest:
    """Return the chat completion that answers a request. Raises Refused for what a chat completion cannot be."""
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    said = request.input
    for item in [{"type": "message", "role": "user", "content": said}] if isinstance(said, str) else said:
        add_item(messages, item)
    choice, effort, wanted = request.tool_choice, request.reasoning.effort, request.text.format
    if wanted is not None and wanted["type"] == "json_schema":
        wanted = json_schema(wanted.get("name", "answer"), wanted["schema"])
    functions = [{name: tool[name] for name in FIELDS if tool.get(name) is not None} for tool in request.tools or ()]
    return as_chat(
        request,
        messages,
        functions,
        None if effort is None else effort != "none",
        max_tokens=request.max_output_tokens,
        tool_choice=named_tool(choice["name"]) if isinstance(choice, dict) else choice,
        response_format=wanted,
    )


def add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item of the input to the messages of a chat; calls belong to the assistant's message before them."""

    def content(name: str) -> str | list[dict[str, Any]]:
        return chat_content(item.get(name), lambda part: str(part["image_url"]))

    if item["type"] == "message":
        messages.append({"role": ROLES[item["role"]], "content": content("content")})
    elif item["type"] == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content("output")})
    elif item["type"] == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = tool_call(item["call_id"], item["name"], item["arguments"])
        messages[-1].setdefault("tool_calls", []).append(call)


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

    A block is an item of the output, and text and thoughts are a part of one. `gearbx.tokens` stands with the text that
    the tokens brought, and what else `gearbx` has in the last event.
    """

    def __init__(self, request: ResponsesRequest):
        super().__init__()
        self.identity, self.created, self.number = uuid.uuid4().hex, int(time.time()), 0
        self.asked = request.model_dump(include={"instructions", "temperature", "top_p", "max_output_tokens"})
        self.asked |= {"tools": [], "tool_choice": "auto"}
        self.asked |= request.model_dump(include={"tools", "tool_choice"}, exclude_none=True)

    def answer(self) -> dict[str, Any]:
        is_cut = self.choice.get("finish_reason") == "length"
        return {
            "id": f"resp_{self.identity}",
            "object": "response",
            "created_at": self.created,
            "status": "incomplete" if is_cut else "completed" if self.choice else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "parallel_tool_calls": True,
            "store": False,
            **self.asked,
            "model": self.head["model"],
            "output": [self.item(block) for block in self.blocks],
            "usage": response_usage(self.usage),
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
        if block.kind == "call":
            return [added]
        return [added, {"type": "response.content_part.added", **self.where(block), "part": part_of(block)}]

    def grown(self, block: Block, text: str) -> dict[str, Any]:
        return {"type": f"response.{KINDS[block.kind][2]}.delta", **self.where(block), "delta": text}

    def ended(self, block: Block) -> list[dict[str, Any]]:
        said = {"arguments" if block.kind == "call" else "text": block.text}
        done = [{"type": f"response.{KINDS[block.kind][2]}.done", **self.where(block), **said}]
        if block.kind != "call":
            done.append({"type": "response.content_part.done", **self.where(block), "part": part_of(block)})
        return [*done, {"type": "response.output_item.done", "output_index": block.place, "item": self.item(block)}]

    def where(self, block: Block) -> dict[str, Any]:
        """Return item and part to which an event belongs."""
        part = {} if block.kind == "call" else {"content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return {"item_id": self.item(block)["id"], "output_index": block.place, **part, **logprobs}

    def item(self, block: Block) -> dict[str, Any]:
        """Return a block as an item of the output, as far as it has come."""
        prefix, item, _ = KINDS[block.kind]
        own: dict[str, Any] = {"content": [part_of(block)]}
        if block.kind == "call":
            own = {"call_id": block.call["id"], "name": block.call["function"]["name"], "arguments": block.text}
        return {"id": f"{prefix}_{self.identity}_{block.place}", **item, **own, "status": "completed"}


def part_of(block: Block) -> dict[str, Any]:
    annotations: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": KINDS[block.kind][2], "text": block.text, **annotations}


def response_usage(counts: Mapping[str, Any]) -> dict[str, Any] | None:
    if not counts:
        return None
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
