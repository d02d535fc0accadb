"""OpenAI's Responses API, in terms of chat completions: requests, whole answers and streams. Nothing is stored."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictBool
from typing_extensions import TypedDict

from .answers import BlockDialect, Event, GearsReport, named, with_tokens
from .messages import ToolName, called, chat_content
from .requests import ChatRequest, NotServed, Number, Options, Share, Tokens, parse
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


class FunctionTool(BaseModel):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChosenFunction(BaseModel):
    type: Literal["function"]
    name: ToolName


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


SAME = {"model", "stream", "temperature", "top_p", "gearbx"}  # as in a chat completion


def chat_of_response(request: ResponsesRequest) -> ChatRequest:
    """The chat completion that answers a request. Raises Refused for what a chat completion cannot be."""
    body = request.model_dump(include=SAME, exclude_none=True, exclude_unset=True)
    body["messages"] = [{"role": "system", "content": request.instructions}] if request.instructions else []
    items = request.input
    for item in [MessageItem(type="message", role="user", content=items)] if isinstance(items, str) else items:
        add_item(body["messages"], item)
    if request.max_output_tokens is not None:
        body["max_tokens"] = request.max_output_tokens
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    if request.tools:
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in request.tools]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
    if isinstance(request.tool_choice, ChosenFunction):
        body["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    elif request.tool_choice is not None:
        body["tool_choice"] = request.tool_choice
    if request.text is not None and (wanted := request.text.format) is not None:
        body["response_format"] = {"type": wanted.type}
        if wanted.type == "json_schema":
            body["response_format"]["json_schema"] = {"name": wanted.name, "schema": wanted.schema_}
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["chat_template_kwargs"] = {"enable_thinking": request.reasoning.effort != "none"}
    return parse(ChatRequest, body)


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
        function = {"name": item.name, "arguments": item.arguments}
        messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


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


class ResponseDialect(BlockDialect):
    """How a chat completion, with `include_usage`, looks to a client of the Responses API.

    `gearbx.tokens` stands with the text that the tokens brought, and what else `gearbx` has in the last event.
    """

    def __init__(self, request: ResponsesRequest):
        super().__init__()
        self._number = 0
        self._identity = uuid.uuid4().hex
        self._output: list[dict[str, Any]] = []
        self._response: dict[str, Any] = {
            "id": f"resp_{self._identity}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
            "store": False,
            **request.model_dump(include={"instructions", "temperature", "top_p", "max_output_tokens"}),
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "tool_choice": request.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "output": self._output,
            "usage": None,
        }

    def whole(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        for _ in self.written(completion["choices"][0]["message"]):
            pass
        for _ in self.close():
            pass
        self._note(completion)
        return self._response

    def _note(self, completion: Mapping[str, Any]) -> None:
        """What a completion or a chunk says beside its text."""
        self._response["model"] = completion.get("model", "")
        for choice in completion.get("choices") or ():
            if choice.get("finish_reason") == "length":
                cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
                self._response |= cut
            elif choice.get("finish_reason"):
                self._response["status"] = "completed"
        if (counts := completion.get("usage")) is not None:
            self._response["usage"] = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            }
        gearbx = {name: value for name, value in (completion.get("gearbx") or {}).items() if name != "tokens"}
        self._response |= {"gearbx": self._response.get("gearbx", {}) | gearbx} if gearbx else {}

    def events(self, chunk: Mapping[str, Any]) -> Iterable[Event]:
        found: list[dict[str, Any]] = []
        if not self._number:
            self._response["model"] = chunk.get("model", "")
            kinds = "response.created", "response.in_progress"
            found += ({"type": kind, "response": self._response | {"output": []}} for kind in kinds)
        for choice in chunk.get("choices") or ():
            found += with_tokens(self.written(choice.get("delta") or {}), chunk)
        self._note(chunk)
        return self._numbered(found)

    def last(self) -> Iterable[Event]:
        found = list(self.close())
        return self._numbered([*found, {"type": f"response.{self._response['status']}", "response": self._response}])

    def failed(self, refused: Refused) -> Event:
        error = refused.body()["error"]
        (event,) = self._numbered([{**error, "type": "error", "error": error}])
        return event

    def _numbered(self, events: Iterable[dict[str, Any]]) -> list[Event]:
        found = [event | {"sequence_number": number} for number, event in enumerate(events, self._number)]
        self._number += len(found)
        return list(named(found))

    # A block is an item of the output, and text and thoughts are a part of one.

    def started(self) -> Iterator[dict[str, Any]]:
        yield {"type": "response.output_item.added", "output_index": self.place, "item": self._item("in_progress")}
        if self.kind != "call":
            yield {"type": "response.content_part.added", **self._place, "part": self._part}

    def grown(self, text: str) -> dict[str, Any]:
        return {"type": f"response.{self._part_name}.delta", **self._place, "delta": text, **self._logprobs}

    def ended(self) -> Iterator[dict[str, Any]]:
        said = {"arguments" if self.kind == "call" else "text": self.content}
        yield {"type": f"response.{self._part_name}.done", **self._place, **said, **self._logprobs}
        if self.kind != "call":
            yield {"type": "response.content_part.done", **self._place, "part": self._part}
        self._output.append(self._item("completed"))
        yield {"type": "response.output_item.done", "output_index": self.place, "item": self._output[-1]}

    @property
    def _part_name(self) -> str:
        names = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
        return names[self.kind or ""]

    @property
    def _part(self) -> dict[str, Any]:
        annotations: dict[str, Any] = {"annotations": [], "logprobs": []} if self.kind == "text" else {}
        return {"type": self._part_name, "text": self.content, **annotations}

    @property
    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.kind == "text" else {}

    @property
    def _place(self) -> dict[str, Any]:
        part = {} if self.kind == "call" else {"content_index": 0}
        return {"item_id": self._item("")["id"], "output_index": self.place, **part}

    def _item(self, status: str) -> dict[str, Any]:
        """The block as an item of the output; parts of it once it is complete."""
        content = [self._part] if status == "completed" else []
        kinds: dict[str, dict[str, Any]] = {
            "thinking": {"type": "reasoning", "summary": [], "content": content},
            "text": {"type": "message", "role": "assistant", "content": content},
            "call": {
                "type": "function_call",
                "call_id": self.call.get("id"),
                "name": called(self.call),
                "arguments": self.content,
            },
        }
        prefix = {"thinking": "rs", "text": "msg", "call": "fc"}[self.kind or ""]
        return {"id": f"{prefix}_{self._identity}_{self.place}", **kinds[self.kind or ""], "status": status}
