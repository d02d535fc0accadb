"""OpenAI's answers: whole completions, chunks of a stream, usage, log-probabilities and calls of tools.

An `Answer` turns the tokens of its texts into these objects as they come. Other APIs are dialects of them.
"""

import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import get_system_fingerprint
from typing_extensions import NotRequired, TypedDict

from ..telemetry.summary import Tally
from .job import Alternative, Begun, Emitted, Progress
from .requests import BaseRequest, ChatRequest
from .web import Refused

IMPOSSIBLE = -9999.0  # as OpenAI writes minus infinity

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
    """The gears that wrote an answer, and what they read. A mode adds fields of its own."""

    mode: str
    gear_tokens: dict[str, int]
    passes: dict[str, int]
    shifts: int
    mean_entropy_bits: float
    weight_bytes_per_token: float


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


# What a model writes.


@dataclass
class Written:
    """What is new: text, thoughts, and calls that are complete, as OpenAI's objects."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def __iadd__(self, other: "Written") -> "Written":
        self.text, self.reasoning, self.calls = (
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.calls + other.calls,
        )
        return self


class Channels:
    """Sorts the text of one answer as it comes, by mlx-lm's own state machine. What should be a call and is none is
    text."""

    def __init__(self, machine: TextStateMachine, state: str, calls: "Calls"):
        self._calls = calls
        self._state = machine.make_state(state)
        self._channel = state
        self._call = ""

    def feed(self, text: str, last: bool = False) -> Written:
        """What the text adds; after the `last` one nothing is kept back as the possible beginning of a mark."""
        self._state, segments = TextStateMachine.split(self._state, text)
        if last:
            self._state, rest, channel = TextStateMachine.flush(self._state)
            segments.append((channel, rest))
        written = Written()
        for channel, part in segments:
            if channel == "reasoning":
                written.reasoning += part
            elif channel == "tool":
                self._call += part
            else:
                self._close_call(written)
                written.text += part
            self._channel = channel
        if last:
            self._close_call(written)
        return written

    def _close_call(self, written: Written) -> None:
        if self._channel == "tool" and self._call:
            calls = self._calls.read(self._call)
            written.calls += calls
            written.text += "" if calls else self._call
        self._call = "" if self._channel == "tool" else self._call


class Calls:
    """Reads the calls of one answer, each as soon as it is complete.

    Args:
        parse: mlx-lm's parser of the model's own way to call, (text, tools) -> a call or a list of them; None: nothing
            is a call.
        tools: that the model was shown.
        numbered: whether calls have an index, as those of a stream do.
    """

    def __init__(self, parse: Callable[[str, Any], Any] | None, tools: Sequence[Any] | None, numbered: bool):
        self._parse, self._tools, self._numbered = parse, tools, numbered
        self.made = 0
        """How many calls were read."""

    def read(self, text: str) -> list[dict[str, Any]]:
        """The calls that a text is; empty where a part of it is none."""
        if self._parse is None:
            return []
        try:
            parsed = self._parse(text, self._tools)
            calls = [call_of(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception as error:  # a parser reads what a model wrote, and raises what it likes
            log.debug("what should be a call of a tool is none: %s", type(error).__name__)
            return []
        if self._numbered:
            calls = [call | {"index": index} for index, call in enumerate(calls, self.made)]
        self.made += len(calls)
        return calls


def call_of(call: Any) -> dict[str, Any]:
    """A call with its arguments as JSON. Raises ValueError or TypeError for what is no call."""
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("it names no function")
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):  # some models write the JSON as text
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    identity = call.get("id")
    return {
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)},
        "type": "function",
        "id": identity if isinstance(identity, str) and identity else str(uuid.uuid4()),
    }


# The answer.


class Writing:
    """One text on its way out, as a choice of OpenAI's.

    ended: whether all of it has come.
    """

    def __init__(self, request: BaseRequest, index: int, begun: Begun):
        self.request, self.index, self.begun = request, index, begun
        self.chat = isinstance(request, ChatRequest)
        parser = begun.prompt.served.tokenizer.tool_parser if request.takes_calls else None
        self.calls = Calls(parser, request.shown_tools, bool(request.stream))
        self.channels = Channels(begun.machine, begun.prompt.state, self.calls)
        self.finish_reason = "stop"
        self.stop_word: str | None = None
        self.ended = False
        self.first, self.offset = True, 0
        self.written, self.emitted = Written(), list[Emitted]()  # what was not sent yet

    def take(self, emitted: Emitted) -> None:
        self.emitted.append(emitted)
        self.stop_word = emitted.stop_word
        self.ended = emitted.finish_reason is not None
        self.finish_reason = emitted.finish_reason or self.finish_reason
        self.written += self.channels.feed(emitted.text, last=self.ended)
        if self.calls.made and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def whole(self) -> dict[str, Any]:
        """The choice, once all of its tokens have come."""
        written = self.written
        if not self.chat:
            return self.choice() | {"text": written.text}
        message: dict[str, Any] = {"role": "assistant", "content": written.text or (None if written.calls else "")}
        message |= {"reasoning": written.reasoning} if written.reasoning else {}
        message |= {"tool_calls": written.calls} if written.calls else {}
        return self.choice() | {"message": message}

    def piece(self) -> dict[str, Any]:
        """What is new of the choice; the first one of a chat names the role."""
        written, said = self.written, self.choice()
        if not self.chat:
            said["text"] = written.text
        else:
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if self.first else {}
            added = {"content": written.text, "reasoning": written.reasoning, "tool_calls": written.calls}
            said["delta"] = delta | {name: value for name, value in added.items() if value}
        self.offset += sum(len(one.logprob.text) for one in self.emitted if one.logprob is not None)
        self.written, self.emitted, self.first = Written(), [], False
        return said

    def choice(self) -> dict[str, Any]:
        """What whole choices and pieces have in common."""
        emitted, logprobs = self.emitted, None
        if self.request.alternatives is not None:
            logprobs = chat_logprobs(emitted) if self.chat else text_logprobs(emitted, self.offset)
        stopped = {} if self.stop_word is None else {"stop_reason": self.stop_word}
        reason = self.finish_reason if self.ended else None
        return {"index": self.index, "finish_reason": reason, "logprobs": logprobs, **stopped}


class Answer:
    """An answer on its way out: what has come of its texts so far, as OpenAI has it.

    Args:
        texts: how many texts it has.
        index, begun: of the first that has begun.
    """

    def __init__(self, request: BaseRequest, texts: int, index: int, begun: Begun):
        self.request, self.texts, self.begun = request, texts, begun
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
        }

    async def whole(self, answers: AsyncIterator[tuple[int, Any]]) -> dict[str, Any]:
        """The completion, once all of its tokens have come."""
        async for index, found in answers:
            self.take(index, found)
        choices = [self.writings[index].whole() for index in range(self.texts)]
        return {**self.head, "choices": choices, "usage": self.usage, "gearbx": self.report}

    async def chunks(self, answers: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[dict[str, Any] | Progress]:
        """The chunks of a stream, each as soon as its text is certain; how far prompts are read between them."""
        head, ended = self.head | self.streams_as, 0
        seen = {"mode": self.begun.mode.name, "thresholds": self.begun.prompt.served.thresholds(self.begun.mode)}
        async for index, found in answers:
            writing = self.take(index, found)
            if isinstance(found, Progress):
                yield found
            if writing is None or not (writing.written or writing.ended):
                continue
            ended += writing.ended
            reported = {"tokens": token_reports(writing.emitted), **seen}
            reported |= self.report if ended == self.texts else {}
            yield {**head, "choices": [writing.piece()], "gearbx": reported}
            seen = {}
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield {**head, "choices": [], "usage": self.usage}


def token_reports(emitted: Sequence[Emitted]) -> list[dict[str, Any]]:
    """The `gearbx.tokens` of a chunk: gear, entropy and its rolling mean (bits) of every token in it.

    A token that a tolerance let stand has `given_up`, in nats.
    """
    return [
        {
            "gear": one.seen.gear,
            "entropy": round(one.seen.entropy, 4),
            "mean_entropy": round(one.seen.mean_entropy, 4),
            **({"given_up": round(one.seen.given_up, 4)} if one.seen.given_up else {}),
        }
        for one in emitted
    ]


def chat_logprobs(emitted: Sequence[Emitted]) -> dict[str, Any]:
    """Log-probabilities of tokens, natural. Tokens that are impossible are no alternatives."""
    known = [(one.logprob, possible(one.likeliest)) for one in emitted if one.logprob is not None]
    return {"content": [{**entry(own), "top_logprobs": [entry(other) for other in others]} for own, others in known]}


def text_logprobs(emitted: Sequence[Emitted], offset: int = 0) -> dict[str, Any]:
    """The same in the form of text completions; `offset` characters of the answer came before them."""
    known = [(one.logprob, possible(one.likeliest)) for one in emitted if one.logprob is not None]
    offsets = list(accumulate((len(own.text) for own, _ in known), initial=offset))[:-1]
    return {
        "tokens": [own.text for own, _ in known],
        "token_logprobs": [finite(own.logprob) for own, _ in known],
        "top_logprobs": [{other.text: other.logprob for other in others} for _, others in known],
        "text_offset": offsets,
    }


def entry(one: Alternative) -> dict[str, Any]:
    return {"id": one.token, "token": one.text, "logprob": finite(one.logprob), "bytes": list(one.spelled)}


def possible(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Those with a finite log-probability: a response_format leaves fewer tokens than may be asked for."""
    return [one for one in alternatives if math.isfinite(one.logprob)]


def finite(logprob: float) -> float:
    """A log-probability as JSON can have it."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


# How an answer looks.

Event = tuple[str | None, Any]
"""Its name, if it has one, and its data."""


class Dialect:
    """How a completion looks to its client: OpenAI's own. One object serves one answer."""

    def whole(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """What becomes of a whole completion."""
        return completion

    def begin(self, usage: Mapping[str, Any]) -> None:
        """Take note of what is known before the first chunk of a stream: tokens of the prompt."""

    def events(self, chunk: Mapping[str, Any]) -> Iterable[Event]:
        """What becomes of a chunk of a stream."""
        return [(None, chunk)]

    def last(self) -> Iterable[Event]:
        """What ends a stream that is complete."""
        return [(None, "[DONE]")]

    def failed(self, refused: Refused) -> Event:
        """What ends a stream that failed."""
        return None, refused.body()


class BlockDialect(Dialect):
    """A dialect in which an answer is a row of blocks: "thinking", "text" and "call", of which one is open at a time.

    kind, place: of the open block; kind is None between blocks. content: what it has so far. call: that it is.
    """

    def __init__(self) -> None:
        self.kind: str | None = None
        self.place, self.content = -1, ""
        self.call: Mapping[str, Any] = {}

    def started(self) -> Iterator[dict[str, Any]]:
        """The events that open the block."""
        raise NotImplementedError

    def grown(self, text: str) -> dict[str, Any]:
        """The event for more of it."""
        raise NotImplementedError

    def ended(self) -> Iterator[dict[str, Any]]:
        """The events that close it."""
        raise NotImplementedError

    def written(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events for what a chunk brought."""
        for kind, name in (("thinking", "reasoning"), ("text", "content")):
            if text := delta.get(name):
                if self.kind != kind:
                    yield from self.open(kind)
                yield self.grow(text)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name"):  # else the chunk goes on with the call before
                yield from self.open("call", call)
            if function.get("arguments") and self.kind == "call":
                yield self.grow(function["arguments"])

    def open(self, kind: str, call: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Begin a block, after the end of the one before."""
        yield from self.close()
        self.kind, self.place, self.content, self.call = kind, self.place + 1, "", call or {}
        yield from self.started()

    def grow(self, text: str) -> dict[str, Any]:
        self.content += text
        return self.grown(text)

    def close(self) -> Iterator[dict[str, Any]]:
        if self.kind is not None:
            yield from self.ended()
        self.kind = None


def with_tokens(events: Iterable[dict[str, Any]], chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Events for a chunk; its `gearbx.tokens` stand with the text that they brought."""
    gearbx = chunk.get("gearbx") or {}
    for event in events:
        is_text = "delta" in event and "tokens" in gearbx
        yield event | {"gearbx": {"tokens": gearbx["tokens"]}} if is_text else event


def named(events: Iterable[dict[str, Any]]) -> Iterable[Event]:
    """Events by their names, which are their types."""
    return [(event["type"], event) for event in events]


def event_text(event: Event) -> str:
    """A server-sent event; text is sent as it is."""
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
