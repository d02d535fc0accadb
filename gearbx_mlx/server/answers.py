"""OpenAI's response objects: completions, chunks of a stream, usage, log-probabilities and tool calls.

A `CompletionBuilder` turns the events of its sequences into these objects. Other APIs are dialects of them.
"""

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import get_system_fingerprint
from pydantic import BaseModel, BeforeValidator, Field, Json

from ..telemetry.summary import Tally
from .job import GenerationContext, PrefillProgress, TokenEvent
from .requests import AnyRequest, ChatRequest
from .web import Refused

log = logging.getLogger("gearbx_mlx.server")


class ParsedCall(BaseModel):
    """A tool call from a model's parser. Some models write the arguments' JSON as a string."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[dict[str, Any] | Json[dict[str, Any]], BeforeValidator(lambda given: given or {})] = {}
    id: Any = None

    def as_chat(self) -> dict[str, Any]:
        """Return OpenAI's object of the call. Raises ValueError for arguments beyond JSON."""
        arguments = json.dumps(self.arguments, ensure_ascii=False, allow_nan=False)
        identity = self.id if isinstance(self.id, str) and self.id else str(uuid.uuid4())
        return {"function": {"name": self.name, "arguments": arguments}, "type": "function", "id": identity}


class ChoiceBuilder:
    """A builder of one choice, whole or in deltas. An invalid tool call becomes text."""

    def __init__(self, request: AnyRequest, index: int, context: GenerationContext):
        self.request, self.index, self.context = request, index, context
        self.chat = isinstance(request, ChatRequest)
        self.parse = context.prompt.served.tokenizer.tool_parser if request.allows_calls else None
        self.state = context.machine.make_state(context.prompt.state)
        self.num_calls, self.call_text = 0, ""  # complete calls, and the text of an incomplete one
        self.finish_reason: str | None = None
        self.stop_word: str | None = None
        self.is_first, self.offset = True, 0
        self.start_delta()

    def start_delta(self) -> None:
        """Forget everything that the previous delta had."""
        self.text = self.reasoning = ""
        self.new_calls, self.tokens = list[dict[str, Any]](), list[TokenEvent]()

    @property
    def is_complete(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_delta(self) -> bool:
        return bool(self.text or self.reasoning or self.new_calls or self.is_complete)

    def add(self, token: TokenEvent) -> None:
        """Add a token's text to its channel; the last token also flushes a possible start of a mark."""
        self.tokens.append(token)
        self.stop_word, self.finish_reason = token.stop_word, token.finish_reason
        self.state, segments = TextStateMachine.split(self.state, token.text)
        if self.is_complete:
            self.state, rest, channel = TextStateMachine.flush(self.state)
            segments.append((channel, rest))
        for channel, part in segments:
            if channel == "reasoning":
                self.reasoning += part
            elif channel == "tool":
                self.call_text += part
            else:
                self.end_call()
                self.text += part
        if self.is_complete:
            self.end_call()
        if self.num_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def end_call(self) -> None:
        """Turn the text of a tool call into calls, with indices in a stream; invalid calls become text."""
        calls = self.parsed_calls(self.call_text) if self.call_text else []
        self.text += "" if calls else self.call_text
        if self.request.stream:
            calls = [call | {"index": index} for index, call in enumerate(calls, self.num_calls)]
        self.num_calls, self.call_text = self.num_calls + len(calls), ""
        self.new_calls += calls

    def parsed_calls(self, text: str) -> list[dict[str, Any]]:
        """Return the tool calls in text; empty if any part is invalid."""
        if self.parse is None:
            return []
        try:
            parsed = self.parse(text, self.request.prompt_tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [ParsedCall.model_validate(call).as_chat() for call in calls]
        except Exception as error:  # parsers raise any type of error for a model's text
            log.debug("invalid tool call: %s", type(error).__name__)
            return []

    def whole(self) -> dict[str, Any]:
        """Return the complete choice."""
        if not self.chat:
            return self.choice() | {"text": self.text}
        content = self.text or (None if self.new_calls else "")
        return self.choice() | {"message": {"role": "assistant", "content": content, **self.reasoning_and_calls()}}

    def delta(self) -> dict[str, Any]:
        """Return the new part of the choice; a chat's first delta has the role."""
        choice = self.choice()
        if not self.chat:
            choice["text"] = self.text
        else:
            delta = {"role": "assistant", "content": ""} if self.is_first else {}
            choice["delta"] = delta | ({"content": self.text} if self.text else {}) | self.reasoning_and_calls()
        self.offset += sum(len(one.logprob["token"]) for one in self.tokens if one.logprob is not None)
        self.is_first = False
        self.start_delta()
        return choice

    def reasoning_and_calls(self) -> dict[str, Any]:
        reasoning = {"reasoning": self.reasoning} if self.reasoning else {}
        return reasoning | ({"tool_calls": self.new_calls} if self.new_calls else {})

    def choice(self) -> dict[str, Any]:
        """Return the common fields of whole choices and deltas; `stop_reason` is the stop word, as in vLLM."""
        logprobs = None
        if self.request.num_logprobs is not None:
            entries = [one.logprob for one in self.tokens if one.logprob is not None]
            logprobs = {"content": entries} if self.chat else text_logprobs(entries, self.offset)
        stopped = {} if self.stop_word is None else {"stop_reason": self.stop_word}
        return {"index": self.index, "finish_reason": self.finish_reason, "logprobs": logprobs, **stopped}


class CompletionBuilder:
    """A builder of OpenAI's completion, whole or in chunks.

    Args:
        num_choices: sequences of the completion.
        index, context: of the first sequence that has started.
        ignored: unknown fields of the request.
    """

    def __init__(
        self,
        request: AnyRequest,
        num_choices: int,
        index: int,
        context: GenerationContext,
        ignored: Sequence[str] = (),
    ):
        self.request, self.num_choices, self.context, self.ignored = request, num_choices, context, ignored
        self.choices = {index: ChoiceBuilder(request, index, context)}
        self.tally = Tally.of(context.prompt.served.gears)
        chat = isinstance(request, ChatRequest)
        self.chunk_head = {"object": "chat.completion.chunk"} if chat else {}
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": request.model or context.model,
            "system_fingerprint": get_system_fingerprint(),
        }

    def add(self, index: int, event: Any) -> ChoiceBuilder | None:
        """Add an event; return the choice that a token belongs to, None for other events."""
        if isinstance(event, GenerationContext):
            self.choices[index] = ChoiceBuilder(self.request, index, event)
        if not isinstance(event, TokenEvent):
            return None
        self.tally.add(event.response)
        self.choices[index].add(event)
        return self.choices[index]

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; a prompt of several choices counts once."""
        prompts = [one.context for one in self.choices.values() if one.index % self.request.choices == 0]
        prompt, answer = sum(len(context.prompt.tokens) for context in prompts), self.tally.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(context.cached for context in prompts)},
        }

    @property
    def report(self) -> dict[str, Any]:
        """The `gearbx` of the completion."""
        tally = self.tally
        return {
            "mode": self.context.mode.name,
            "gear_tokens": tally.gear_tokens,
            "passes": tally.passes,
            "shifts": tally.shifts,
            "mean_entropy_bits": tally.mean(tally.entropy_sum),
            "weight_bytes_per_token": tally.mean(tally.weight_bytes),
            **self.context.mode.summary(tally),
            **({"ignored": self.ignored} if self.ignored else {}),
        }

    async def whole(self, events: AsyncIterator[tuple[int, Any]]) -> dict[str, Any]:
        """Return the completion after all events."""
        async for index, event in events:
            self.add(index, event)
        choices = [self.choices[index].whole() for index in range(self.num_choices)]
        return {**self.head, "choices": choices, "usage": self.usage, "gearbx": self.report}

    async def chunks(self, events: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[dict[str, Any] | PrefillProgress]:
        """Yield chunks as soon as their text is final, and the progress of prefills."""
        head, num_complete = self.head | self.chunk_head, 0
        mode = self.context.mode
        first = {"mode": mode.name, "thresholds": self.context.prompt.served.thresholds(mode)}
        async for index, event in events:
            choice = self.add(index, event)
            if isinstance(event, PrefillProgress):
                yield event
            if choice is None or not choice.has_delta:
                continue
            num_complete += choice.is_complete
            report = {"tokens": token_reports(choice.tokens), **first}
            report |= self.report if num_complete == self.num_choices else {}
            yield {**head, "choices": [choice.delta()], "gearbx": report}
            first = {}
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield {**head, "choices": [], "usage": self.usage}


def token_reports(tokens: Sequence[TokenEvent]) -> list[dict[str, Any]]:
    """Return the `gearbx.tokens` of a chunk: gear, source, entropy and rolling mean entropy (bits) of each token."""
    return [
        {
            "gear": one.response.gear,
            "source": one.response.source,
            "entropy": round(one.response.entropy, 4),
            "mean_entropy": round(one.response.mean_entropy, 4),
        }
        for one in tokens
    ]


def text_logprobs(entries: Sequence[dict[str, Any]], offset: int) -> dict[str, Any]:
    """Return a chat's log-probabilities in the format of text completions, after `offset` characters."""
    return {
        "tokens": [own["token"] for own in entries],
        "token_logprobs": [own["logprob"] for own in entries],
        "top_logprobs": [{other["token"]: other["logprob"] for other in own["top_logprobs"]} for own in entries],
        "text_offset": list(accumulate((len(own["token"]) for own in entries), initial=offset))[:-1],
    }


# Dialects.

Event = tuple[str | None, Any]
"""Name (or None) and data of a server-sent event."""


class Dialect:
    """OpenAI's own format of a completion, and the interface of other formats. One object serves one completion."""

    def whole(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the response for a whole completion."""
        return completion

    def begin(self, usage: Mapping[str, Any]) -> None:
        """Start a stream; `usage` has the prompt's tokens."""

    def events(self, chunk: Mapping[str, Any]) -> Iterable[Event]:
        """Return the events for a chunk."""
        return [(None, chunk)]

    def last(self) -> Iterable[Event]:
        """Return the last events of a complete stream."""
        return [(None, "[DONE]")]

    def failed(self, refused: Refused) -> Event:
        """Return the last event of a failed stream."""
        return None, refused.body()


@dataclass
class Block:
    """A block of an answer; `call` is OpenAI's object of a tool call, whose `text` are its arguments."""

    kind: str  # thinking, text or call
    place: int
    call: Mapping[str, Any]
    text: str = ""


class BlockDialect(Dialect):
    """A dialect with an answer of blocks; one block at a time is open.

    Subclasses define the whole `answer`, its own events (`opening`, `closing`), and the events of a
    block (`started`, `grown`, `ended`).

    Attributes:
        head: the completion's first chunk.
        choice: the choice with the finish reason.
        report: `gearbx`, without tokens.
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
        self.add({**completion, "choices": [{**choice, "delta": choice["message"]}]})
        self.close()
        answer: Mapping[str, Any] = self.answer()
        return answer

    def events(self, chunk: Mapping[str, Any]) -> Iterable[Event]:
        return self.named(self.add(chunk))

    def last(self) -> Iterable[Event]:
        return self.named(self.close() + self.closing())

    def named(self, events: Iterable[dict[str, Any]]) -> list[Event]:
        """Return events with their types as names."""
        return [(event["type"], event) for event in events]

    def add(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events for a chunk; its `gearbx.tokens` are in those with text."""
        found: list[dict[str, Any]] = []
        self.usage = chunk.get("usage") or self.usage
        if not self.head:
            self.head = chunk
            found += self.opening()
        gearbx = dict(chunk.get("gearbx") or {})
        tokens = {"gearbx": {"tokens": gearbx.pop("tokens")}} if "tokens" in gearbx else {}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            events = self.extend("thinking", delta.get("reasoning")) + self.extend("text", delta.get("content"))
            for call in delta.get("tool_calls") or ():
                events += self.extend("call", call["function"]["arguments"], call)
            found += (event | tokens if "delta" in event else event for event in events)
            self.choice = choice if choice.get("finish_reason") else self.choice
        self.report |= gearbx
        return found

    def extend(self, kind: str, text: str | None, call: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the events for new text; a different kind opens a new block."""
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
    """Return a server-sent event; string data is sent verbatim."""
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
