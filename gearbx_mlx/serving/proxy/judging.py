"""Which of two servers answers: by the prompt, then by the entropy of the first tokens that the small one writes.

The rule is that of two models that take turns (routing/pair.py), at the first moment at which it lets go of the small
model: after `min_gear_duration` tokens, by the mean of the last `window`. Of a server's tokens the entropy is known
within bounds; the rule is applied to both. Servers differ in how they give log-probabilities, and the proxy learns it.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from ...errors import GearbxError, one_line
from ...files.reading import typed
from ...routing.bounds import BoundedRouting, entropy_bounds, rounding_of
from ...routing.gates import first_gear
from ...routing.pair import DEFAULT_MIN_DURATION, DEFAULT_WINDOW, LARGE, SMALL, pair_gate, pair_monitor
from .. import ASSUMED_VOCABULARY
from ..remote import Logprobs, Way, tokens_of, ways_to_ask

CHAT, TEXT = "/chat/completions", "/completions"
FORGET = 60.0  # seconds after which what a server could not do is tried again: it may be another one by then
SEVERAL_TEXTS = ("echo", "suffix", "best_of")  # whose logprobs would be of more than one answer
NOT_JUDGED = ("stream", "stream_options", "n", *SEVERAL_TEXTS)
LENGTHS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Rule:
    """When the large server answers.

    threshold: bits of mean entropy above which it does, 0 (always) to infinity (never). window: tokens in the mean.
    min_gear_duration: tokens that the small server writes before it is judged. vocab_size: of the small model, which
    bounds the entropy of the tokens that its server does not list.
    """

    threshold: float
    window: int = DEFAULT_WINDOW
    min_gear_duration: int = DEFAULT_MIN_DURATION
    vocab_size: int = ASSUMED_VOCABULARY

    def by_itself(self) -> int | None:
        """The server that the threshold chooses for every request; None between its ends."""
        return {0.0: LARGE, math.inf: SMALL}.get(self.threshold)


# The prompt.


def by_prompt(body: dict[str, Any]) -> int:
    """LARGE for a prompt that looks hard (GEARBX 11), else SMALL. The user's last message counts."""
    return LARGE if first_gear(typed_last(body), 2) == 1 else SMALL


def typed_last(body: dict[str, Any]) -> str:
    """The last message of a user, or the prompt of a text completion; "" where there is no text."""
    messages = body.get("messages")
    if isinstance(messages, list):
        own = [one for one in messages if isinstance(one, dict) and one.get("role") == "user"]
        return " ".join(texts(own[-1].get("content"))) if own else ""
    return " ".join(texts(body.get("prompt")))


def texts(content: Any) -> Iterator[str]:
    """The texts of a message or a prompt: a string, or a list of strings or of parts."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


# How to ask for tokens that can be judged.


class Ways:
    """The ways to ask that are not known to fail, for each path of a server."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, list[Way]]] = {}
        self._proven: set[tuple[str, Way]] = set()

    def known(self, path: str) -> list[Way]:
        """The ways that are left, the best first."""
        since, left = self._left.get(path, (-FORGET, []))
        if time.monotonic() - since < FORGET:
            return list(left)
        return ways_to_ask(chat=path == CHAT)

    def keep(self, path: str, left: Sequence[Way]) -> None:
        """Learn that no others work."""
        self._left[path] = time.monotonic(), [way for way in self.known(path) if way in left]

    def prove(self, path: str, way: Way) -> None:
        """An answer had log-probabilities."""
        self._proven.add((path, way))

    def proven(self, path: str, way: Way) -> bool:
        """Whether some answer had log-probabilities, so that one without them says nothing of the server."""
        return (path, way) in self._proven


def asked_whole(body: Mapping[str, Any], tokens: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A request for the first tokens of an answer, as a whole, with more fields."""
    lengths = {name: min(tokens, length) for name, length in lengths_of(body).items()}
    kept = {name: value for name, value in body.items() if name not in NOT_JUDGED}
    return {**kept, **(lengths or {"max_tokens": tokens}), **fields, "stream": False}


def judged_by_stream(body: Mapping[str, Any]) -> bool:
    """Whether the stream that a client asks for can be judged, and given to it then."""
    one = body.get("n") in (None, 1) and not any(body.get(name) for name in SEVERAL_TEXTS)
    return body.get("stream") is True and one and not body.get("logprobs")


def lengths_of(body: Mapping[str, Any]) -> dict[str, int]:
    """The most tokens that a client wants, under each name; 50.0 is 50."""
    found = {name: body.get(name) for name in LENGTHS}
    return {
        name: int(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    }


# What came.


@dataclass(frozen=True)
class Part:
    """A chunk of a stream, or a whole answer.

    text: of the answer, without calls of tools and thoughts. bounds: of the entropy of each token, in bits. spoken:
    whether anything is said. plain: whether `text` is all of that. finish: the reason for which the answer ends here.
    """

    text: str
    bounds: tuple[tuple[float, float], ...]
    spoken: bool
    plain: bool
    finish: str | None


def part_of(answer: dict[str, Any], vocab_size: int, asked: int) -> Part:
    """A part of an answer to a request for `asked` log-probabilities of each token.

    Raises:
        GearbxError: log-probabilities that no distribution has.
    """
    choice = next((one for one in choices_of(answer) if one.get("index", 0) == 0), {})
    message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    if not isinstance(message, dict) or not isinstance(text := message.get("content") or "", str):
        raise GearbxError("its answer has no text")
    more = any(value for name, value in message.items() if name not in ("content", "role"))
    bounds = reported(answer, vocab_size) or bounds_of(choice.get("logprobs"), vocab_size, asked)
    return Part(text, bounds, bool(text or more), not more, choice.get("finish_reason"))


def choices_of(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = answer.get("choices")
    yield from (one for one in choices if isinstance(one, dict)) if isinstance(choices, list) else ()


class ReportedToken(Struct):
    """A token of one of our servers, in a chunk's `gearbx`."""

    entropy: Annotated[float, Meta(ge=0)]


def reported(answer: dict[str, Any], vocab_size: int) -> tuple[tuple[float, float], ...]:
    """The entropies that one of our servers reports, which need no bounds; empty for any other server."""
    own = answer.get("gearbx")
    tokens = own.get("tokens") if isinstance(own, dict) else None
    if not isinstance(tokens, list):
        return ()
    entropies = [token.entropy for token in typed(tokens, list[ReportedToken])]
    if any(bits > math.log2(vocab_size) for bits in entropies):
        raise GearbxError(f"its entropies are impossible for a vocabulary of {vocab_size}")
    return tuple((bits, bits) for bits in entropies)


def bounds_of(logprobs: Any, vocab_size: int, asked: int) -> tuple[tuple[float, float], ...]:
    if not logprobs:
        return ()
    try:
        return tuple(
            entropy_bounds(token.logprobs, vocab_size, rounding_of(token.logprobs), token.unlisted)
            for token in tokens_of(typed(logprobs, Logprobs), asked)
            if token.logprobs
        )
    except GearbxError as error:
        raise GearbxError(f"its logprobs are impossible: {one_line(error)}") from error


class FirstTokens:
    """The first tokens of the small server, and what follows from them.

    seen: tokens. means: bounds of the mean over the window, in bits. choice: SMALL, LARGE, or None where the two bounds
    would choose differently.
    """

    def __init__(self, rule: Rule):
        self.rule, self.seen = rule, 0
        self.means: tuple[float, float] | None = None
        self.choice: int | None = SMALL
        self._routing = BoundedRouting(
            lambda: pair_monitor(rule.vocab_size, rule.window),
            lambda: pair_gate(rule.threshold, rule.min_gear_duration),
            first=SMALL,
            delay=0,
        )

    def add(self, bounds: tuple[float, float]) -> None:
        """Take the bounds of the next token's entropy, in bits; after the decision they change nothing."""
        if not self.complete:
            found = self._routing.update(bounds)
            self.means = found.means
            self.choice = min(found.possible) if len(found.possible) == 1 else None
        self.seen += 1

    @property
    def complete(self) -> bool:
        return self.seen >= self.rule.min_gear_duration
