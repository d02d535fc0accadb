"""The chunks of a streamed chat completion become the events of Anthropic's API."""

from collections.abc import Iterator, Mapping
from typing import Any

from .answer import ending, opened, usage

Event = dict[str, Any]
PING: Event = {"type": "ping"}


class Blocks:
    """The content blocks of a stream: one is open at a time.

    kind: of the open block; None: none is.
    """

    def __init__(self) -> None:
        self.kind: str | None = None
        self._index = -1

    def open(self, block: Event) -> Iterator[Event]:
        """Begin a block, after the end of the one before."""
        yield from self.close()
        self.kind, self._index = block["type"], self._index + 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def close(self) -> Iterator[Event]:
        if self.kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self.kind = None

    def grow(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def written(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """The events for what a chunk brought."""
        if thoughts := delta.get("reasoning"):
            if self.kind != "thinking":
                yield from self.open({"type": "thinking", "thinking": "", "signature": ""})
            yield self.grow({"type": "thinking_delta", "thinking": thoughts})
        if text := delta.get("content"):
            if self.kind != "text":
                yield from self.open({"type": "text", "text": ""})
            yield self.grow({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name"):  # else the chunk goes on with the call before
                yield from self.open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            if function.get("arguments") and self.kind == "tool_use":
                yield self.grow({"type": "input_json_delta", "partial_json": function["arguments"]})


class Events:
    """The events of one message, made of the chunks of a chat completion with `include_usage`.

    message_start counts the prompt's tokens, and message_delta all. `gearbx.tokens` stands with the text that the
    tokens brought, and what else `gearbx` has in message_delta.
    """

    def __init__(self) -> None:
        self._blocks = Blocks()
        self._begun = False
        self._ended = ending({})
        self._counts: Mapping[str, Any] | None = None
        self._gearbx: Event = {}

    def begin(self, counts: Mapping[str, Any]) -> None:
        """Take note of the usage before the first token."""
        self._counts = counts

    def of(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """The events for a chunk."""
        if not self._begun:
            yield {"type": "message_start", "message": opened(chunk) | {"usage": usage(self._counts)}}
            yield PING
            self._begun = True
        gearbx = dict(chunk.get("gearbx") or {})
        tokens = {"gearbx": {"tokens": gearbx.pop("tokens")}} if "tokens" in gearbx else {}
        for choice in chunk.get("choices") or ():
            for event in self._blocks.written(choice.get("delta") or {}):
                yield event | tokens if event["type"] == "content_block_delta" else event
            if choice.get("finish_reason"):
                self._ended = ending(choice)
        self._counts = chunk.get("usage") or self._counts
        self._gearbx = gearbx or self._gearbx

    def last(self) -> Iterator[Event]:
        """The events after the last chunk."""
        yield from self._blocks.close()
        gearbx = {"gearbx": self._gearbx} if self._gearbx else {}
        yield {"type": "message_delta", "delta": self._ended, "usage": usage(self._counts), **gearbx}
        yield {"type": "message_stop"}
