"""What the proxy changes in an answer: `gearbx` comes in, the small server's text before, its logprobs out again."""

from collections.abc import Iterator
from typing import Any

import msgspec

from .upstream import Upstream, data_of

DONE = b"[DONE]"


class Tags:
    """Changes the events of a stream, or a whole answer.

    Args:
        server: whose answer it is.
        gearbx: what the answer says of its way.
        text: that comes before the answer's own.
        without_logprobs: take them out: the client did not ask for them.
    """

    def __init__(self, server: Upstream, gearbx: dict[str, Any], text: str = "", without_logprobs: bool = False):
        self.server, self.gearbx, self.text, self.without_logprobs = server, gearbx, text, without_logprobs
        self.begun = self.finished = False

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A whole answer, changed in place."""
        self.begun = True
        self.change(answer)
        return answer | {"gearbx": self.beside(answer)}

    def event(self, event: bytes) -> bytes:
        """An event: the bytes as they came, unless something in it is to be changed.

        Raises:
            Failed: the event reports an error, or is none of this API.
        """
        chunk = chunk_of(event, self.server)
        if chunk is None:
            self.finished = self.finished or data_of(event) == DONE
            return event
        first, last = not self.begun, is_last(chunk)
        self.begun, self.finished = True, self.finished or last
        changed = self.change(chunk)
        if first or last:
            chunk["gearbx"] = self.beside(chunk)
        return event_of(chunk) if first or last or changed else event

    def beside(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What the answer says of its way, with what a server of models in gears has said of itself."""
        own = answer.get("gearbx")
        return (own if isinstance(own, dict) else {}) | self.gearbx

    def change(self, answer: dict[str, Any]) -> bool:
        """Puts the text before, takes the logprobs out. Returns whether there was anything to do."""
        changed = False
        for choice in choices_of(answer):
            if self.text:
                prepend(choice, self.text)
                self.text, changed = "", True
            if self.without_logprobs and choice.get("logprobs") is not None:
                choice["logprobs"] = None
                changed = True
        return changed


def prepend(choice: dict[str, Any], text: str) -> None:
    """Begin what a choice says with a text."""
    message = choice.get("delta") or choice.get("message")
    if "text" in choice:
        choice["text"] = text + (choice["text"] or "")
    elif isinstance(message, dict):
        message["content"] = text + (message.get("content") or "")
    else:
        choice["delta"] = {"content": text}


def choices_of(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = answer.get("choices")
    yield from (one for one in choices if isinstance(one, dict)) if isinstance(choices, list) else ()


def is_last(chunk: dict[str, Any]) -> bool:
    """Whether a chunk ends a text, or comes after it with the usage."""
    usage = not chunk.get("choices") and chunk.get("usage") is not None
    return usage or any(choice.get("finish_reason") is not None for choice in choices_of(chunk))


def chunk_of(event: bytes, server: Upstream) -> dict[str, Any] | None:
    """The chunk of an answer in an event; None of a comment and of the last event.

    Raises:
        Failed: the event reports an error, or has no chunk.
    """
    data = data_of(event)
    if not data or data == DONE:
        return None
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise server.failed("streams what is no JSON") from error
    if not isinstance(found, dict):
        raise server.failed("streams what is no JSON object")
    if "choices" not in found:
        raise server.reported(found["error"]) if found.get("error") else server.failed("streams no answer")
    return found


def event_of(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
