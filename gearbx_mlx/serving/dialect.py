"""How a completion looks to its client: as OpenAI's API has it. Other APIs are dialects of this."""

from collections.abc import Iterable, Mapping
from typing import Any

from .guarded import Refused

Event = tuple[str | None, Any]
"""Its name, if it has one, and its data."""


class Dialect:
    """OpenAI's own. One object serves one answer."""

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
        return None, self.error(refused)

    def error(self, refused: Refused) -> dict[str, Any]:
        """The body of an answer that is an error."""
        return refused.body()
