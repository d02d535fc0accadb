"""Tokens of another server's answers, with the log-probabilities that it lists (GEARBX 12.3)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

from msgspec import Struct

from ..errors import GearbxError
from ..files.reading import typed
from ..routing.bounds import entropy_bounds, rounding_as_written

ASSUMED_VOCABULARY = 262144  # Gemma's: the upper bounds stay valid for smaller vocabularies
UNLISTED = 0.0  # nats, the limit of an unlisted token when no list bounds it


class RemoteError(GearbxError):
    """A failure of another server: one line with its URL and the remedy.

    Attributes:
        status: HTTP status of a refused request, 0 for other failures.
        reason: the server's message, or the failure without URL and remedy.
    """

    def __init__(self, message: str, status: int = 0, reason: str = ""):
        super().__init__(message)
        self.status, self.reason = status, reason


def byte_symbols() -> dict[str, int]:
    """Return GPT-2's symbols for bytes: a printable byte is its own character, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


SYMBOLS = byte_symbols()


@dataclass(frozen=True)
class ListedToken:
    """A token of an answer."""

    text: str
    logprobs: tuple[float, ...]  # natural, in descending order; empty if the server lists none
    unlisted: float = UNLISTED  # upper limit of every unlisted token's log-probability
    number: int | None = None  # index in the vocabulary; None if the server omits it

    def entropy(self, vocab_size: int) -> tuple[float, float]:
        """Return both bounds of the entropy in bits. Raises GearbxError if no distribution has these numbers."""
        return entropy_bounds(self.logprobs, vocab_size, rounding_as_written(self.logprobs), self.unlisted)


class Candidate(Struct, frozen=True):
    """One of the most likely tokens at a position."""

    token: str = ""
    logprob: float | None = None
    id: int | None = None


class Entry(Candidate, frozen=True):
    """A chosen token with its alternatives, in the format of chat completions."""

    top_logprobs: list[Candidate] | None = None


class Logprobs(Struct, frozen=True):
    """Log-probabilities of a choice: `content` in a chat completion, the other fields in a text completion."""

    content: list[Entry] | None = None
    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


def listed_tokens(choice: Mapping[str, Any], requested: int) -> list[ListedToken]:
    """Return the tokens of a choice of a chat or text completion.

    Args:
        requested: number of log-probabilities per token in the request.

    Raises:
        GearbxError: neither format.
    """
    logprobs = typed(choice.get("logprobs") or {}, Logprobs)
    if logprobs.content is not None:
        found = [chat_token(entry, requested) for entry in logprobs.content]
    else:
        tops = chain(logprobs.top_logprobs or (), repeat(None))
        pairs = ((name, top or {}) for name, top in zip(logprobs.tokens or (), tops))
        found = [ListedToken(name, descending(top.values()), text_limit(name, top, requested)) for name, top in pairs]
    texts = decoded_names([token.text for token in found], choice_text(choice))
    return [replace(token, text=text) for token, text in zip(found, texts)]


def choice_text(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, reasoning first."""
    message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    if not isinstance(message, dict):
        return ""
    parts = (message.get(name) for name in ("reasoning_content", "reasoning", "content"))
    return "".join(part for part in parts if isinstance(part, str))


def chat_token(entry: Entry, requested: int) -> ListedToken:
    """Return a token of a chat completion. A chosen token beyond the most likely ones joins their list."""
    top = [one for one in entry.top_logprobs or () if one.logprob is not None]
    ranked = descending([one.logprob for one in top if one.logprob is not None])
    unlisted = limit(ranked, requested)
    own = entry.logprob
    is_listed = any(one.token == entry.token for one in top)
    if ranked and own is not None and -1000 < own < ranked[-1] and not is_listed:  # OpenAI writes -9999 for -inf
        ranked = (*ranked, own)
    chosen = chosen_candidate(entry, top)
    return ListedToken(chosen.token, ranked, unlisted, chosen.id)


def chosen_candidate(entry: Entry, top: Sequence[Candidate]) -> Candidate:
    """Return the chosen token. mlx_lm.server names the first of an unordered list, so there it is the most likely."""
    values = [one.logprob or 0.0 for one in top]
    is_unordered = values != sorted(values, reverse=True)
    return top[values.index(max(values))] if is_unordered and top[0].token == entry.token else entry


def text_limit(name: str, top: Mapping[str, float], requested: int) -> float:
    """Return the upper limit of unlisted tokens in a text completion.

    Tokens with equal text share a key, and the chosen token may come on top of the requested ones. So a list that
    ends with the chosen token can lack a more likely one.
    """
    ranked = descending(top.values())
    if len(ranked) > 1 and top.get(name) == ranked[-1] and len(ranked) <= requested:
        return UNLISTED
    return limit(ranked, requested)


def limit(ranked: Sequence[float], requested: int) -> float:
    """Return the last requested log-probability; a shorter list bounds no other token."""
    return ranked[requested - 1] if 0 < requested <= len(ranked) else UNLISTED


def descending(values: Iterable[float]) -> tuple[float, ...]:
    """Sort in descending order. NaN has no rank, and `entropy_bounds` refuses it later."""
    return tuple(sorted(values, reverse=True))


def decoded_names(names: Sequence[str], text: str) -> list[str]:
    """Return token names decoded to text if the answer's text confirms the decoding, else unchanged.

    A token that ends within a character becomes U+FFFD.
    """
    if text and text not in "".join(names):
        if all(char in SYMBOLS for name in names for char in name):
            parts = [bytes(SYMBOLS[char] for char in name) for name in names]
            if text.encode("utf-8", "replace") in b"".join(parts):
                return [part.decode("utf-8", "replace") for part in parts]
        spaced = [name.replace("▁", " ") for name in names]  # SentencePiece
        if text in "".join(spaced):
            return spaced
    return list(names)
