"""OpenAI's answers: whole completions, chunks of a stream, usage, log-probabilities and calls of tools.

An `Answer` turns the tokens of its texts into these objects as they come. Other APIs are dialects of them.
"""

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import get_system_fingerprint
from pydantic import BaseModel, BeforeValidator, Field, Json
from typing_extensions import NotRequired, TypedDict

from ..telemetry.summary import Tally
from .job import Begun, Emitted, Progress
from .requests import AnyRequest, ChatRequest
from .web import Refused

log = logging.getLogger("gearbx_mlx.server")


# The objects.


class PromptTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """Tokens of the prompt, of the answer, and those of the prompt that were read for an earlier answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class GearsReport(TypedDict):
    """The gears that wrote an answer, and what they read. A mode adds fields of its own.

    ignored: fields of the request that are not known here.
    """

    mode: str
    gear_tokens: dict[str, int]
    passes: dict[str, int]
    shifts: int
    mean_entropy_bits: float
    weight_bytes_per_token: float
    ignored: NotRequired[list[str]]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class AnyChoice(TypedDict):
    """stop_reason: the stop word that ended the text, as vLLM names it."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None
    stop_reason: NotRequired[str]


class ChatChoice(AnyChoice):
    message: ChatMessage


class TextChoice(AnyChoice):
    text: str


class AnyCompletion(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    gearbx: GearsReport


class ChatCompletion(AnyCompletion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(AnyCompletion):
    object: Literal["text_completion"]
    choices: list[TextChoice]


# The answer.


class WrittenCall(BaseModel):
    """A call of a tool as a model's parser reads it. Some models write the JSON of the arguments as text."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[dict[str, Any] | Json[dict[str, Any]], BeforeValidator(lambda given: given or {})] = {}
    id: Any = None

    def as_chat(self) -> dict[str, Any]:
        """Return a call as OpenAI has it. Raises ValueError for arguments that JSON does not have."""
        arguments = json.dumps(self.arguments, ensure_ascii=False, allow_nan=False)
        identity = self.id if isinstance(self.id, str) and self.id else str(uuid.uuid4())
        return {"function": {"name": self.name, "arguments": arguments}, "type": "function", "id": identity}


class Writing:
    """One text on its way out, as a choice of OpenAI's.

    mlx-lm's own state machine tells text, thoughts and calls of tools apart. What should be a call and is none is text.

    ended: whether all of it has come. calls: how many tools it has called.
    """

    def __init__(self, request: AnyRequest, index: int, begun: Begun):
        self.request, self.index, self.begun = request, index, begun
        self.chat = isinstance(request, ChatRequest)
        self.parse = begun.prompt.served.tokenizer.tool_parser if request.takes_calls else None
        self.state = begun.machine.make_state(begun.prompt.state)
        self.calls, self.call = 0, ""  # the text of a call that is not complete
        self.finish_reason: str | None = None
        self.stop_word: str | None = None
        self.is_first, self.offset = True, 0
        self.sent()

    def sent(self) -> None:
        """Begin the next piece: all that has come was sent."""
        self.text = self.thoughts = ""
        self.new_calls, self.emitted = list[dict[str, Any]](), list[Emitted]()

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_news(self) -> bool:
        return bool(self.text or self.thoughts or self.new_calls or self.ended)

    def take(self, emitted: Emitted) -> None:
        """Sort a token's text; after the last one nothing is kept back as the possible beginning of a mark."""
        self.emitted.append(emitted)
        self.stop_word, self.finish_reason = emitted.stop_word, emitted.finish_reason
        self.state, segments = TextStateMachine.split(self.state, emitted.text)
        if self.ended:
            self.state, rest, channel = TextStateMachine.flush(self.state)
            segments.append((channel, rest))
        for channel, part in segments:
            if channel == "reasoning":
                self.thoughts += part
            elif channel == "tool":
                self.call += part
            else:
                self.end_call()
                self.text += part
        if self.ended:
            self.end_call()
        if self.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def end_call(self) -> None:
        """Take what was written as a call for the calls that it is, numbered in a stream, or for text."""
        calls = self.calls_in(self.call) if self.call else []
        self.text += "" if calls else self.call
        if self.request.stream:
            calls = [call | {"index": index} for index, call in enumerate(calls, self.calls)]
        self.calls, self.call = self.calls + len(calls), ""
        self.new_calls += calls

    def calls_in(self, text: str) -> list[dict[str, Any]]:
        """Return the calls that a text is; empty where a part of it is none."""
        if self.parse is None:
            return []
        try:
            parsed = self.parse(text, self.request.shown_tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [WrittenCall.model_validate(call).as_chat() for call in calls]
        except Exception as error:  # a parser reads what a model wrote, and raises what it likes
            log.debug("what should be a call of a tool cannot be read: %s", type(error).__name__)
            return []

    def whole(self) -> dict[str, Any]:
        """Return the choice, once all of its tokens have come."""
        if not self.chat:
            return self.choice() | {"text": self.text}
        content = self.text or (None if self.new_calls else "")
        return self.choice() | {"message": {"role": "assistant", "content": content, **self.beside_text()}}

    def piece(self) -> dict[str, Any]:
        """Return what is new of the choice; the first one of a chat names the role."""
        said = self.choice()
        if not self.chat:
            said["text"] = self.text
        else:
            delta = {"role": "assistant", "content": ""} if self.is_first else {}
            said["delta"] = delta | ({"content": self.text} if self.text else {}) | self.beside_text()
        self.offset += sum(len(one.logprob["token"]) for one in self.emitted if one.logprob is not None)
        self.is_first = False
        self.sent()
        return said

    def beside_text(self) -> dict[str, Any]:
        thoughts = {"reasoning": self.thoughts} if self.thoughts else {}
        return thoughts | ({"tool_calls": self.new_calls} if self.new_calls else {})

    def choice(self) -> dict[str, Any]:
        """Return what whole choices and pieces have in common."""
        logprobs = None
        if self.request.alternatives is not None:
            known = [one.logprob for one in self.emitted if one.logprob is not None]
            logprobs = {"content": known} if self.chat else text_logprobs(known, self.offset)
        stopped = {} if self.stop_word is None else {"stop_reason": self.stop_word}
        return {"index": self.index, "finish_reason": self.finish_reason, "logprobs": logprobs, **stopped}


class Answer:
    """An answer on its way out: what has come of its texts so far, as OpenAI has it.

    Args:
        texts: how many texts it has.
        index, begun: of the first that has begun.
        ignored: names of fields of the request that are not known.
    """

    def __init__(self, request: AnyRequest, texts: int, index: int, begun: Begun, ignored: Sequence[str] = ()):
        self.request, self.texts, self.begun, self.ignored = request, texts, begun, ignored
        self.writings = {index: Writing(request, index, begun)}
        self.tally = Tally.of(begun.prompt.served.gears)
        chat = isinstance(request, ChatRequest)
        self.streams_as = {"object": "chat.completion.chunk"} if chat else {}
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": request.model or begun.model,
            "system_fingerprint": get_system_fingerprint(),
        }

    def take(self, index: int, found: Any) -> Writing | None:
        """Count what has come; of a token, the text that it belongs to."""
        if isinstance(found, Begun):
            self.writings[index] = Writing(self.request, index, found)
        if not isinstance(found, Emitted):
            return None
        self.tally.add(found.seen)
        self.writings[index].take(found)
        return self.writings[index]

    @property
    def usage(self) -> Usage:
        """All tokens; a prompt of several texts counts once."""
        prompts = [one.begun for one in self.writings.values() if one.index % self.request.choices == 0]
        prompt, answer = sum(len(begun.prompt.tokens) for begun in prompts), self.tally.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(begun.cached for begun in prompts)},
        }

    @property
    def report(self) -> dict[str, Any]:
        """The `gearbx` of the answer: which gears wrote it, what they read, and what the mode adds."""
        tally = self.tally
        return {
            "mode": self.begun.mode.name,
            "gear_tokens": tally.gear_tokens,
            "passes": tally.passes,
            "shifts": tally.shifts,
            "mean_entropy_bits": tally.mean(tally.entropy_sum),
            "weight_bytes_per_token": tally.mean(tally.weight_bytes),
            **self.begun.mode.summary(tally),
            **({"ignored": self.ignored} if self.ignored else {}),
        }

    async def whole(self, answers: AsyncIterator[tuple[int, Any]]) -> dict[str, Any]:
        """Return the completion, once all of its tokens have come."""
        async for index, found in answers:
            self.take(index, found)
        choices = [self.writings[index].whole() for index in range(self.texts)]
        return {**self.head, "choices": choices, "usage": self.usage, "gearbx": self.report}

    async def chunks(self, answers: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[dict[str, Any] | Progress]:
        """Yield the chunks of a stream, each as soon as its text is certain; how far prompts are read between them."""
        head, ended = self.head | self.streams_as, 0
        seen = {"mode": self.begun.mode.name, "thresholds": self.begun.prompt.served.thresholds(self.begun.mode)}
        async for index, found in answers:
            writing = self.take(index, found)
            if isinstance(found, Progress):
                yield found
            if writing is None or not writing.has_news:
                continue
            ended += writing.ended
            reported = {"tokens": token_reports(writing.emitted), **seen}
            reported |= self.report if ended == self.texts else {}
            yield {**head, "choices": [writing.piece()], "gearbx": reported}
            seen = {}
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield {**head, "choices": [], "usage": self.usage}


def token_reports(emitted: Sequence[Emitted]) -> list[dict[str, Any]]:
    """Return the `gearbx.tokens` of a chunk: of each its gear, who proposed it, entropy and rolling mean (bits)."""
    return [
        {
            "gear": one.seen.gear,
            "source": one.seen.source,
            "entropy": round(one.seen.entropy, 4),
            "mean_entropy": round(one.seen.mean_entropy, 4),
        }
        for one in emitted
    ]


def text_logprobs(known: Sequence[dict[str, Any]], offset: int) -> dict[str, Any]:
    """Return tokens of a chat's list as text completions have them; `offset` characters came before them."""
    return {
        "tokens": [own["token"] for own in known],
        "token_logprobs": [own["logprob"] for own in known],
        "top_logprobs": [{other["token"]: other["logprob"] for other in own["top_logprobs"]} for own in known],
        "text_offset": list(accumulate((len(own["token"]) for own in known), initial=offset))[:-1],
    }


# How an answer looks.

Event = tuple[str | None, Any]
"""Its name, if it has one, and its data."""


class Dialect:
    """How a completion looks to its client: OpenAI's own. One object serves one answer."""

    def whole(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what becomes of a whole completion."""
        return completion

    def begin(self, usage: Mapping[str, Any]) -> None:
        """Take note of what is known before the first chunk of a stream: tokens of the prompt."""

    def events(self, chunk: Mapping[str, Any]) -> Iterable[Event]:
        """Return what becomes of a chunk of a stream."""
        return [(None, chunk)]

    def last(self) -> Iterable[Event]:
        """Return what ends a stream that is complete."""
        return [(None, "[DONE]")]

    def failed(self, refused: Refused) -> Event:
        """Return what ends a stream that failed."""
        return None, refused.body()


@dataclass
class Block:
    """A piece of an answer.

    kind: "thinking", "text" or "call". place: among the blocks, from 0. call: of a tool, as OpenAI has it. text: so
    far; of a call its arguments.
    """

    kind: str
    place: int
    call: Mapping[str, Any]
    text: str = ""


class BlockDialect(Dialect):
    """A dialect in which an answer is a row of blocks, of which one is open at a time.

    A class of it says how the `answer` looks, and which events begin it (`opening`), open, continue and close a block
    (`started`, `grown`, `ended`), and end it (`closing`).

    head: the first that came of the completion. choice: the one that says why the text ended. report: `gearbx`, without
    its tokens.
    """

    answer: Any
    opening: Any
    started: Any
    grown: Any
    ended: Any
    closing: Any

    def __init__(self) -> None:
        self.head: Mapping[str, Any] = {}
        self.choice: Mapping[str, Any] = {}
        self.usage: Mapping[str, Any] = {}
        self.report: dict[str, Any] = {}
        self.blocks: list[Block] = []
        self.is_open = False

    def begin(self, usage: Mapping[str, Any]) -> None:
        self.usage = usage

    def whole(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        (choice,) = completion["choices"]
        self.taken({**completion, "choices": [{**choice, "delta": choice["message"]}]})
        self.close()
        answer: Mapping[str, Any] = self.answer()
        return answer

    def events(self, chunk: Mapping[str, Any]) -> Iterable[Event]:
        return self.named(self.taken(chunk))

    def last(self) -> Iterable[Event]:
        return self.named(self.close() + self.closing())

    def named(self, events: Iterable[dict[str, Any]]) -> list[Event]:
        """Return events with their names, which are their types."""
        return [(event["type"], event) for event in events]

    def taken(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events for a chunk; its `gearbx.tokens` stand with the text that they brought."""
        found: list[dict[str, Any]] = []
        self.usage = chunk.get("usage") or self.usage
        if not self.head:
            self.head = chunk
            found += self.opening()
        gearbx = dict(chunk.get("gearbx") or {})
        tokens = {"gearbx": {"tokens": gearbx.pop("tokens")}} if "tokens" in gearbx else {}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            written = self.more("thinking", delta.get("reasoning")) + self.more("text", delta.get("content"))
            for call in delta.get("tool_calls") or ():
                written += self.more("call", call["function"]["arguments"], call)
            found += (event | tokens if "delta" in event else event for event in written)
            self.choice = choice if choice.get("finish_reason") else self.choice
        self.report |= gearbx
        return found

    def more(self, kind: str, text: str | None, call: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the events for more text, which begins a block of its own where the open one is of another kind."""
        if not text:
            return []
        found = []
        if call is not None or not self.is_open or self.blocks[-1].kind != kind:
            found += self.close()
            self.blocks.append(Block(kind, len(self.blocks), call or {}))
            self.is_open = True
            found += self.started(self.blocks[-1])
        self.blocks[-1].text += text
        return [*found, self.grown(self.blocks[-1], text)]

    def close(self) -> list[dict[str, Any]]:
        """Return the events that close the open block."""
        events: list[dict[str, Any]] = self.ended(self.blocks[-1]) if self.is_open else []
        self.is_open = False
        return events


def event_text(event: Event) -> str:
    """Return a server-sent event; text is sent as it is."""
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
