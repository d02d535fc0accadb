"""What servers answer, as chunks of text with the log-probabilities of their tokens. No network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import Struct

from ...errors import GearbxError
from ...files.reading import parse_python_json, typed
from ..others import brief, said_in


def byte_symbols() -> dict[str, int]:
    """GPT-2's symbols for bytes: a printable byte is its own character, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


SYMBOLS = byte_symbols()


def spelled(names: Sequence[str], text: str) -> list[str]:
    """The names as text, if this is what makes the text of the answer of them; else as they are.

    A token that ends within a character becomes U+FFFD.
    """
    if text and text not in "".join(names):
        if all(char in SYMBOLS for name in names for char in name):
            parts = [bytes(SYMBOLS[char] for char in name) for name in names]
            if text.encode() in b"".join(parts):
                return [part.decode("utf-8", "replace") for part in parts]
        spaced = [name.replace("▁", " ") for name in names]  # SentencePiece
        if text in "".join(spaced):
            return spaced
    return list(names)


UNLIKELY = -1000.0  # nats: OpenAI writes -9999 where it does not say how unlikely a token was
UNKNOWN = 0.0  # nats: any token may be as probable as this


@dataclass(frozen=True)
class RemoteToken:
    """A token of a server.

    text: as the server names it. logprobs: of the tokens that the server
    lists, natural, the largest first; empty where it lists none. unlisted: the log-probability that no other token
    exceeds. number: of the token in the vocabulary, where the server says it.
    """

    text: str
    logprobs: tuple[float, ...]
    unlisted: float = UNKNOWN
    number: int | None = None


@dataclass(frozen=True)
class Chunk:
    """A part of an answer: its text, its tokens, and whether the server says that it is the last one."""

    text: str = ""
    tokens: tuple[RemoteToken, ...] = ()
    finished: bool = False


class Listed(Struct, frozen=True):
    """One of the most likely tokens."""

    token: str = ""
    logprob: float | None = None
    id: int | None = None


class Entry(Listed, frozen=True):
    """A token that was chosen, with the most likely ones in its place: chat's format, and Ollama's."""

    top_logprobs: list[Listed] | None = None


class Logprobs(Struct, frozen=True):
    """`content`: the format of chat. The others: of text completions, one item for each token."""

    content: list[Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class Message(Struct, frozen=True):
    """What is written, and what is thought, under the names that servers have for it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    @property
    def text(self) -> str:
        return (self.reasoning_content or self.reasoning or self.thinking or "") + (self.content or "")


class Choice(Struct, frozen=True):
    text: str | None = None
    delta: Message | None = None
    message: Message | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class OpenAIAnswer(Struct, frozen=True):
    choices: list[Choice] = []
    error: Any = None


class OllamaAnswer(Struct, frozen=True):
    message: Message | None = None
    response: str = ""
    done: bool = False
    logprobs: list[Entry] | None = None
    error: Any = None


def openai_chunk(text: str, asked: int) -> Chunk:
    """An event of a stream, or a whole answer, of an OpenAI-style server.

    Args:
        asked: how many log-probabilities of each token were asked for.

    Raises:
        GearbxError: no such answer, or an error that the server reports in it.
    """
    answer = typed(parse_python_json(text), OpenAIAnswer)
    check_error(answer.error)
    if not answer.choices:  # such as the last event with the usage
        return Chunk()
    choice = answer.choices[0]
    message = choice.delta or choice.message
    written = message.text if message else choice.text or ""
    tokens = tokens_of(choice.logprobs, asked) if choice.logprobs else []
    if choice.delta is None:
        texts = spelled([token.text for token in tokens], written)
        tokens = [replace(token, text=text) for token, text in zip(tokens, texts)]
    return Chunk(written, tuple(tokens), choice.finish_reason is not None)


def ollama_chunk(text: str, asked: int) -> Chunk:
    """A line of an answer of Ollama's own API; arguments and errors as for `openai_chunk`."""
    answer = typed(parse_python_json(text), OllamaAnswer)
    check_error(answer.error)
    tokens = tuple(token_of(entry, asked) for entry in answer.logprobs or ())
    return Chunk(answer.message.text if answer.message else answer.response, tokens, answer.done)


def check_error(error: Any) -> None:
    if error:
        raise GearbxError(f"it reports an error: {brief(said_in(error))}")


def tokens_of(logprobs: Logprobs, asked: int) -> list[RemoteToken]:
    """The tokens of either format."""
    if logprobs.content is not None:
        return [token_of(entry, asked) for entry in logprobs.content]
    names, tops = logprobs.tokens or [], logprobs.top_logprobs or []
    found = []
    for place, name in enumerate(names):
        top = (tops[place] if place < len(tops) else None) or {}
        found.append(RemoteToken(name, descending(list(top.values())), unlisted_of_text(name, top, asked)))
    return found


def token_of(entry: Entry, asked: int) -> RemoteToken:
    """A token of chat's format. One that was chosen beyond the most likely ones is known as well."""
    top = [one for one in entry.top_logprobs or () if one.logprob is not None]
    ranked = descending([one.logprob for one in top if one.logprob is not None])
    unlisted = limit(ranked, asked)
    own = entry.logprob
    if ranked and own is not None and UNLIKELY < own < ranked[-1] and all(one.token != entry.token for one in top):
        ranked = (*ranked, own)
    chosen = named(entry, top)
    return RemoteToken(chosen.token, ranked, unlisted, chosen.id)


def named(entry: Entry, top: Sequence[Listed]) -> Listed:
    """The token that was chosen: mlx_lm.server names the first of an unordered list, so then it is the most likely."""
    values = [one.logprob or 0.0 for one in top]
    unordered = values != sorted(values, reverse=True)
    return top[values.index(max(values))] if unordered and top[0].token == entry.token else entry


def unlisted_of_text(name: str, top: dict[str, float], asked: int) -> float:
    """The limit of what a text completion does not list.

    Tokens with the same text are one key of its object, and the chosen token may be there beyond those asked for. So a
    list that the chosen token ends can lack a more likely one.
    """
    ranked = descending(list(top.values()))
    if len(ranked) > 1 and top.get(name) == ranked[-1] and len(ranked) <= asked:
        return UNKNOWN
    return limit(ranked, asked)


def limit(ranked: Sequence[float], asked: int) -> float:
    """The last of the tokens asked for; of a shorter list nobody knows what it leaves out."""
    return ranked[asked - 1] if len(ranked) >= asked else UNKNOWN


def descending(values: Sequence[float]) -> tuple[float, ...]:
    """Sorted, the largest first; NaN, which has no place, stays for whoever checks the numbers."""
    return tuple(sorted(values, reverse=True))
