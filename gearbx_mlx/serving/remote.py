"""Another server as a source of tokens with log-probabilities: any OpenAI-style one, and Ollama's own API.

A `Connection` makes requests; every way in which they fail is one line that names the URL and the remedy. A `Way` is
how to ask a server for log-probabilities; which one it understands is found out with the first tokens of an answer.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import Any

import httpx
from msgspec import Struct

from ..errors import GearbxError
from ..files.reading import parse_json, parse_python_json, typed
from . import AUTO, DEFAULT_TIMEOUT, OLLAMA, OPENAI, is_loopback
from .peer import DONE, EVENT_END, LINE_END, Peer, Reply, brief, data_of, hidden, parsed_url, pieces_in, said_in

# What servers answer, as chunks of text with the log-probabilities of their tokens


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

    def chunk(self, asked: int) -> Chunk:
        if not self.choices:  # such as the last event with the usage
            return Chunk()
        choice = self.choices[0]
        message = choice.delta or choice.message
        written = message.text if message else choice.text or ""
        tokens = tokens_of(choice.logprobs, asked) if choice.logprobs else []
        if choice.delta is None:
            texts = spelled([token.text for token in tokens], written)
            tokens = [replace(token, text=text) for token, text in zip(tokens, texts)]
        return Chunk(written, tuple(tokens), choice.finish_reason is not None)


class OllamaAnswer(Struct, frozen=True):
    message: Message | None = None
    response: str = ""
    done: bool = False
    logprobs: list[Entry] | None = None
    error: Any = None

    def chunk(self, asked: int) -> Chunk:
        tokens = tuple(token_of(entry, asked) for entry in self.logprobs or ())
        return Chunk(self.message.text if self.message else self.response, tokens, self.done)


def chunk_of(text: str, kind: type[OpenAIAnswer] | type[OllamaAnswer], asked: int) -> Chunk:
    """An event or a line of a stream, or a whole answer.

    Args:
        asked: how many log-probabilities of each token were asked for.

    Raises:
        GearbxError: no such answer, or an error that the server reports in it.
    """
    answer = typed(parse_python_json(text), kind)
    if answer.error:
        raise GearbxError(f"it reports an error: {brief(said_in(answer.error))}")
    return answer.chunk(asked)


def tokens_of(logprobs: Logprobs, asked: int) -> list[RemoteToken]:
    """The tokens of either format."""
    if logprobs.content is not None:
        return [token_of(entry, asked) for entry in logprobs.content]
    found = zip(logprobs.tokens or (), chain(logprobs.top_logprobs or (), repeat(None)))
    listed = ((name, top or {}) for name, top in found)
    return [RemoteToken(name, descending(top.values()), unlisted_of_text(name, top, asked)) for name, top in listed]


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
    ranked = descending(top.values())
    if len(ranked) > 1 and top.get(name) == ranked[-1] and len(ranked) <= asked:
        return UNKNOWN
    return limit(ranked, asked)


def limit(ranked: Sequence[float], asked: int) -> float:
    """The last of the tokens asked for; what a shorter list leaves out is not known."""
    return ranked[asked - 1] if len(ranked) >= asked else UNKNOWN


def descending(values: Iterable[float]) -> tuple[float, ...]:
    """Sorted, the largest first; NaN, which has no place, stays for the check of the numbers."""
    return tuple(sorted(values, reverse=True))


# Requests to a server


class RemoteError(GearbxError):
    """A server cannot be used: the message is one line with its URL and the remedy."""


class RefusedError(RemoteError):
    """A server answered with a `status` of 300 or more; `reason`: its words."""

    def __init__(self, message: str, status: int, reason: str):
        super().__init__(message)
        self.status, self.reason = status, reason


class Connection(Peer):
    """Requests to one server; a context that closes its sockets.

    Args:
        url: of the API, such as http://127.0.0.1:8080/v1. A proxy of the environment is used, except for loopback.
        api_key: sent as a bearer token, and in no message.
        timeout: seconds to wait for the connection, for an answer's next bytes, and from one token to the next.

    Raises:
        GearbxError: what is not a URL, or a key that no header can have.
    """

    absent, silent = "no connection ({})", "no token for {:g} s"

    def __init__(self, url: str, api_key: str | None = None, timeout: float = DEFAULT_TIMEOUT):
        parts = parsed_url(url, "--server")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise GearbxError("the API key has characters that no HTTP header can have; check it")
        self.shown = str(parts.copy_with(userinfo=b"")).rstrip("/")
        super().__init__(str(parts).rstrip("/"), api_key, timeout, timeout)
        self.client = httpx.Client(**self.options, trust_env=not is_loopback(parts.host))

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @property
    def root(self) -> str:
        """The URL without the version at its end: where a server has APIs of its own."""
        return self.base.removesuffix("/v1")

    @contextmanager
    def opened(self, url: str, body: Mapping[str, Any] | None = None) -> Iterator[Reply]:
        """The answer to a request: POST with a JSON body, or GET without one.

        Raises:
            RemoteError: no answer, or one that ends early; also while it is read inside.
            RefusedError: a status of 300 or more.
        """
        with self.failures(), self.client.stream(**self.request(url, body)) as response:
            reply = Reply(self, response)
            if response.status_code >= 300:
                raise self.refused(response.status_code, text_of(reply))
            yield reply

    def json(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that a request is answered with. Raises as `opened`, and RemoteError for what is not JSON."""
        with self.opened(url, body) as reply:
            return reply.parsed(text_of(reply), parse_json)

    def failed(self, what: str, remedy: str = "check the address, which usually ends in /v1") -> RemoteError:
        return RemoteError(hidden(f"{self.shown}: {what}; {remedy}", self.key))

    def refused(self, status: int, said: str) -> RefusedError:
        """The error for a request that is refused with these words."""
        reason = refusal(hidden(said, self.key))
        key = "give --server-api-key"
        remedies = {401: key, 403: key, 404: "check --server-model and the URL", 429: "wait, and ask for less"}
        remedy = remedies.get(status, "look at the server's log" if status >= 500 else "change what it refuses")
        return RefusedError(f"{self.shown}: answers {status} ({reason}); {remedy}", status, reason)


def text_of(reply: Iterable[bytes]) -> str:
    """A whole answer."""
    return b"".join(reply).decode("utf-8", "replace")


def texts_of(reply: Reply, lines: bool) -> Iterator[str]:
    """The lines of an answer, or the data of its events, as soon as each is there; all of it where it has no events."""
    if not (lines or reply.streams):
        yield text_of(reply)
        return
    rest, end = bytearray(), LINE_END if lines else EVENT_END
    pieces = (piece for part in reply for piece in pieces_in(rest, part, end))
    for piece in chain(pieces, [rest]):  # the last line may have no end
        data = bytes(piece) if lines else data_of(bytes(piece))
        if data.strip():
            yield data.decode("utf-8", "replace")


def refusal(text: str) -> str:
    """Why a server refuses a request, in its own words: OpenAI's error object, mlx-lm's text, or the body's begin."""
    try:
        content = parse_json(text)
    except GearbxError:
        return "no reason given" if "<" in text or not text.strip() else brief(text)
    return brief(said_in(content.get("error", content) if isinstance(content, dict) else content))


# How to ask for log-probabilities

ASK = (20, 11, 10, 5, 1)  # OpenAI's most, mlx_lm.server's, and what others stop at


@dataclass(frozen=True)
class Question:
    """What to ask: `prompt`, as it is (text completions), or as a message with the `system` prompt before it (chat).

    template: arguments for the server's chat template.
    """

    prompt: str
    chat: bool = True
    system: str | None = None
    template: dict[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Way:
    """How to ask a server for `asked` log-probabilities of each token.

    form: which fields say so: "number" or "flag", llama.cpp's "n_probs", or "ollama": its own API, which streams one
    JSON object a line. streamed: mlx_lm.server and others give no log-probabilities in streams.
    """

    asked: int
    form: str
    streamed: bool = True

    @property
    def api(self) -> str:
        return OLLAMA if self.form == OLLAMA else OPENAI

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a request's body that ask for log-probabilities."""
        others = {"number": {"logprobs": self.asked}, "n_probs": {"n_probs": self.asked}}
        return others.get(self.form, {"logprobs": True, "top_logprobs": self.asked})

    def request(self, question: Question, max_tokens: int) -> tuple[str, dict[str, Any]]:
        """The path below the URL of the API, or of the server for Ollama's, and the body."""
        body = {"stream": self.streamed, **self.fields}
        body |= {"messages": question.messages} if question.chat else {"prompt": question.prompt}
        if self.form == OLLAMA:
            body["options"] = {"num_predict": max_tokens, "temperature": 0.0}
            return ("/api/chat", body) if question.chat else ("/api/generate", body | {"raw": True})
        body |= {"max_tokens": max_tokens, "temperature": 0.0}
        if question.chat and question.template:
            body["chat_template_kwargs"] = question.template
        return "/chat/completions" if question.chat else "/completions", body

    def chunks(self, reply: Reply) -> Iterator[Chunk]:
        """The parts of an answer. Raises RemoteError for what is not an answer, or a stream without an end."""
        ollama = self.form == OLLAMA
        kind, unit = (OllamaAnswer, "line") if ollama else (OpenAIAnswer, "event")
        finished = not (ollama or reply.streams)
        for part in texts_of(reply, ollama):
            if part.strip() == DONE:
                return
            chunk = reply.parsed(part, lambda text: chunk_of(text, kind, self.asked))
            finished = finished or chunk.finished
            yield chunk
        if not finished:
            raise httpx.RemoteProtocolError(f"the stream ends without its last {unit}")


def about_logprobs(status: int, said: str) -> bool:
    """Whether a server refused a request for the number or the kind of its log-probabilities."""
    return status in (400, 422) and any(word in said for word in ("logprobs", "n_probs"))


def ways_to_ask(chat: bool, openai: bool = True, ollama: bool = False) -> list[Way]:
    """Every way to ask a server with these APIs for a chat, or for a text completion, the best first."""
    forms = ("flag",) if chat else ("number", "flag", "n_probs")
    own = [Way(asked, OLLAMA) for asked in ASK] if ollama else []
    return own + [Way(asked, form, streamed) for asked in ASK for form in forms for streamed in (True, False) if openai]


def others(ways: Sequence[Way]) -> list[Way]:
    """Those to try after the first, which was refused: they ask with other fields."""
    return [way for way in ways if (way.asked, way.form) != (ways[0].asked, ways[0].form)]


def after_silence(ways: Sequence[Way]) -> list[Way]:
    """Those to try after the first, which was answered without log-probabilities: asking for fewer brings none."""
    return [way for way in ways if (way.form, way.streamed) != (ways[0].form, ways[0].streamed)]


TRIED_TOKENS, TRIED_CHUNKS = 4, 64  # of the answer that shows what a server can do
VOCABULARY = ("vocab_size", "n_vocab")

Chunks = Generator[Chunk, None, None]


class RemoteServer:
    """Answers of one model of a server, token by token.

    Args:
        connection: to the server.
        model: its name there; None: the only one that the server has.
        api: "openai", "ollama", or "auto": Ollama's own where the server is Ollama.

    Raises:
        RemoteError: the server is not there, or has several models and none is named.
    """

    def __init__(self, connection: Connection, model: str | None = None, api: str = AUTO):
        self.connection = connection
        self.ollama = api == OLLAMA or (api == AUTO and is_ollama(connection))
        self.openai = api != OLLAMA
        try:
            self.listed = listed_models(connection)
        except RemoteError:
            if model is None:
                raise
            self.listed = {}
        if model is None and len(self.listed) != 1:
            shown = ", ".join(list(self.listed)[:10]) or "none"
            raise connection.failed(f"its models are {shown}", "name one with --server-model")
        self.model: str = next(iter(self.listed)) if model is None else model
        self.way: Way | None = None

    def vocab_size(self) -> int | None:
        """The length of the model's logits, if the server says it: llama.cpp does, Ollama, and ours."""
        found = sizes_in(self.listed.get(self.model, {}))
        if found is None and self.ollama:
            try:
                shown = self.connection.json(f"{self.connection.root}/api/show", {"model": self.model})
            except RefusedError:
                return None
            info = shown.get("model_info") if isinstance(shown, dict) else None
            found = sizes_in(info if isinstance(info, dict) else {})
        return found

    def learn(self, question: Question) -> Way:
        """Find out, by the first tokens of an answer, how the server gives log-probabilities and how many.

        Raises:
            RemoteError: it fails, or gives none.
        """
        ways, words = ways_to_ask(question.chat, self.openai, self.ollama), ""
        while ways:
            try:
                with closing(self.asked(ways[0], question, TRIED_TOKENS)) as chunks:
                    if any(token.logprobs for chunk in islice(chunks, TRIED_CHUNKS) for token in chunk.tokens):
                        return ways[0]
                ways = after_silence(ways)
            except RefusedError as error:
                if not about_logprobs(error.status, error.reason):
                    raise
                ways, words = others(ways), f" ({error.reason})"
        raise self.connection.failed(
            f"gives no log-probabilities for {self.model}{words}", "start it with them, or use another server"
        )

    def answer(self, question: Question, max_tokens: int) -> Chunks:
        """The greedy answer as it comes. Closing the generator ends the request.

        Raises:
            RemoteError: the server fails, now or in the midst of the answer, or gives no log-probabilities.
        """
        self.way = self.way or self.learn(question)
        return self.asked(self.way, question, max_tokens)

    def asked(self, way: Way, question: Question, max_tokens: int) -> Chunks:
        """The answer to a question that is asked in this way; as `answer`."""
        path, body = way.request(question, max_tokens)
        place = self.connection.root if way.api == OLLAMA else self.connection.base
        with self.connection.opened(place + path, {"model": self.model, **body}) as reply:
            for chunk in way.chunks(reply):
                if chunk.tokens:
                    reply.heard()
                yield chunk


def listed_models(connection: Connection) -> dict[str, dict[str, Any]]:
    """The models that a server lists, and what else it says of them.

    Raises:
        RemoteError: it has no list, or is not there.
    """
    content = connection.json(f"{connection.base}/models")
    rows = content.get("data") if isinstance(content, dict) else None
    found = [row for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str)]
    return {row["id"]: row | (row["meta"] if isinstance(row.get("meta"), dict) else {}) for row in found}


def is_ollama(connection: Connection) -> bool:
    """Whether a server is Ollama, which says so at its root. Raises RemoteError if it is not there."""
    try:
        with connection.opened(connection.root + "/") as reply:
            return "Ollama is running" in text_of(reply)
    except RefusedError:
        return False


def sizes_in(fields: dict[str, Any]) -> int | None:
    """The size of a vocabulary among what a server says of a model: vocab_size, n_vocab, or llama.vocab_size."""
    sizes = (value for name, value in fields.items() if name.rpartition(".")[2] in VOCABULARY)
    return next((size for size in sizes if type(size) is int and size > 0), None)
