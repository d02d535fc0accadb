"""What a part of a server's answer says of its tokens: text, bounds of their entropy, and whether it is over."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from ...errors import GearbxError, one_line
from ...files.reading import typed
from ...routing.bounds import entropy_bounds, rounding_of
from ..remote.answers import Logprobs, tokens_of
from .tagged import choices_of


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
    finish = choice.get("finish_reason")
    bounds = reported(answer, vocab_size) or bounds_of(choice.get("logprobs"), vocab_size, asked)
    return Part(text, bounds, bool(text or more), not more, finish)


class Reported(Struct):
    """A token of one of our servers, in a chunk's `gearbx`."""

    entropy: Annotated[float, Meta(ge=0)]


def reported(answer: dict[str, Any], vocab_size: int) -> tuple[tuple[float, float], ...]:
    """The entropies that one of our servers reports, which need no bounds; none of others."""
    own = answer.get("gearbx")
    tokens = own.get("tokens") if isinstance(own, dict) else None
    if not isinstance(tokens, list):
        return ()
    entropies = [token.entropy for token in typed(tokens, list[Reported])]
    if any(bits > math.log2(vocab_size) for bits in entropies):
        raise GearbxError(f"its entropies are impossible for a vocabulary of {vocab_size}")
    return tuple((bits, bits) for bits in entropies)


def bounds_of(logprobs: Any, vocab_size: int, asked: int) -> tuple[tuple[float, float], ...]:
    if not logprobs:
        return ()
    try:
        tokens = tokens_of(typed(logprobs, Logprobs), asked)
        return tuple(
            entropy_bounds(token.logprobs, vocab_size, rounding_of(token.logprobs), token.unlisted)
            for token in tokens
            if token.logprobs
        )
    except GearbxError as error:
        raise GearbxError(f"its logprobs are impossible: {one_line(error)}") from error
