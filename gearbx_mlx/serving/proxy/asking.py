"""How the proxy asks a server for the log-probabilities of its first tokens: servers differ, and the proxy learns."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..remote.ways import OpenAIWay, Question, ways_to_ask
from .failed import Declined
from .handed_over import CHAT, lengths_of

FORGET = 60.0  # seconds after which what a server could not do is tried again: it may be another one by then
SEVERAL_TEXTS = ("echo", "suffix", "best_of")  # whose logprobs would be of more than one answer
NOT_JUDGED = ("stream", "stream_options", "n", *SEVERAL_TEXTS)


class Ways:
    """The ways to ask that are not known to fail, for each path of a server. Threads share it."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, list[OpenAIWay]]] = {}
        self._proven: set[tuple[str, OpenAIWay]] = set()

    def known(self, path: str) -> list[OpenAIWay]:
        """The ways that are left, the best first."""
        since, left = self._left.get(path, (-FORGET, []))
        return list(left) if time.monotonic() - since < FORGET else every_way(path)

    def keep(self, path: str, left: Sequence[OpenAIWay]) -> None:
        """Learn that no others work."""
        self._left[path] = time.monotonic(), [way for way in self.known(path) if way in left]

    def prove(self, path: str, way: OpenAIWay) -> None:
        """An answer had log-probabilities."""
        self._proven.add((path, way))

    def proven(self, path: str, way: OpenAIWay) -> bool:
        """Whether some answer had log-probabilities, so that one without them says nothing of the server."""
        return (path, way) in self._proven


def every_way(path: str) -> list[OpenAIWay]:
    ways = ways_to_ask(Question("", chat=path == CHAT), openai=True, ollama=False)
    return [way for way in ways if isinstance(way, OpenAIWay)]


def asked_whole(body: Mapping[str, Any], tokens: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A request for the first tokens of an answer, as a whole, with more fields."""
    lengths = {name: min(tokens, length) for name, length in lengths_of(body).items()}
    kept = {name: value for name, value in body.items() if name not in NOT_JUDGED}
    return {**kept, **(lengths or {"max_tokens": tokens}), **fields, "stream": False}


def judged_by_stream(body: Mapping[str, Any]) -> bool:
    """Whether the stream that a client asks for can be judged, and given to it then."""
    one = body.get("n") in (None, 1) and not any(body.get(name) for name in SEVERAL_TEXTS)
    return body.get("stream") is True and one and not body.get("logprobs")


def about_logprobs(error: Declined) -> bool:
    """Whether a server refused a request for the log-probabilities that the proxy asked for."""
    return error.status in (400, 422) and any(word in error.body for word in (b"logprobs", b"n_probs"))
