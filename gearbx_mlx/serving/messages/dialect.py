"""How a chat completion looks to a client of Anthropic's API."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..dialect import Dialect, Event
from ..guarded import Refused
from . import answer
from .stream import Events


class Messages(Dialect):
    """Anthropic's."""

    def __init__(self) -> None:
        self._events = Events()

    def whole(self, completion: Mapping[str, Any]) -> Mapping[str, Any]:
        return answer.message(completion)

    def begin(self, usage: Mapping[str, Any]) -> None:
        self._events.begin(usage)

    def events(self, chunk: Mapping[str, Any]) -> Iterable[Event]:
        return named(self._events.of(chunk))

    def last(self) -> Iterable[Event]:
        return named(self._events.last())

    def failed(self, refused: Refused) -> Event:
        return "error", self.error(refused)

    def error(self, refused: Refused) -> dict[str, Any]:
        return answer.error(refused.status, refused.message)


def named(events: Iterable[dict[str, Any]]) -> Iterable[Event]:
    """Events by their names, which are their types."""
    return [(event["type"], event) for event in events]
