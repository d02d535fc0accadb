"""A server of others as a source of tokens with log-probabilities: any OpenAI-style one, and Ollama's own API."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...errors import GearbxError
from ...files.reading import typed
from ..names import AUTO, OLLAMA
from .answers import Chunk
from .connection import Connection, RefusedError, RemoteError
from .ways import OllamaWay, Question, Way, after_silence, others, ways_to_ask

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
            self.listed = []
        self.model = self.only_model() if model is None else model
        self.way: Way | None = None

    def only_model(self) -> str:
        names = [model.id for model in self.listed]
        if len(names) == 1:
            return names[0]
        shown = ", ".join(names[:10]) or "none"
        raise self.connection.error(f"its models are {shown}", "name one with --server-model")

    def vocab_size(self) -> int | None:
        """The length of the model's logits, if the server says it: llama.cpp does, Ollama, and ours."""
        own = next((model for model in self.listed if model.id == self.model), None)
        found = sizes_in(own.fields) if own else None
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
        ways, words = ways_to_ask(question, self.openai, self.ollama), ""
        while ways:
            try:
                with closing(self.asked(ways[0], question, TRIED_TOKENS, 0.0)) as chunks:
                    if any(token.logprobs for chunk in islice(chunks, TRIED_CHUNKS) for token in chunk.tokens):
                        return ways[0]
                ways = after_silence(ways)
            except RefusedError as error:
                if not about_logprobs(error):
                    raise
                ways, words = others(ways, ways[0]), f" ({error.reason})"
        raise self.connection.error(
            f"gives no log-probabilities for {self.model}{words}", "start it with them, or use another server"
        )

    def answer(self, question: Question, max_tokens: int, temperature: float = 0.0) -> Chunks:
        """The answer as it comes. Closing the generator ends the request.

        Raises:
            RemoteError: the server fails, now or in the midst of the answer, or gives no log-probabilities.
        """
        self.way = self.way or self.learn(question)
        return self.asked(self.way, question, max_tokens, temperature)

    def asked(self, way: Way, question: Question, max_tokens: int, temperature: float) -> Chunks:
        """The answer to a question that is asked in this way; as `answer`."""
        path, body = way.request(question)
        place = self.connection.root if isinstance(way, OllamaWay) else self.connection.base
        body = {"model": self.model, **body, **way.options(max_tokens, temperature)}
        with self.connection.opened(place + path, body) as reply:
            for chunk in way.chunks(reply):
                if chunk.tokens:
                    reply.heard()
                yield chunk


@dataclass(frozen=True)
class Model:
    """A model of a list. fields: what else the server says of it."""

    id: str
    fields: dict[str, Any]


def listed_models(connection: Connection) -> list[Model]:
    """The models that a server lists. Raises RemoteError if it has no list, or is not there."""
    content = connection.json(f"{connection.base}/models")
    rows = content.get("data") if isinstance(content, dict) else None
    found = [row for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str)]
    return [Model(row["id"], row | (row["meta"] if isinstance(row.get("meta"), dict) else {})) for row in found]


def is_ollama(connection: Connection) -> bool:
    """Whether a server is Ollama, which says so at its root. Raises RemoteError if it is not there."""
    try:
        with connection.opened(connection.root + "/") as reply:
            return "Ollama is running" in reply.beginning()
    except RefusedError:
        return False


def sizes_in(fields: dict[str, Any]) -> int | None:
    """The size of a vocabulary among what a server says of a model: vocab_size, n_vocab, or llama.vocab_size."""
    for name, value in fields.items():
        if name.rpartition(".")[2] in VOCABULARY:
            try:
                size = typed(value, int)
            except GearbxError:
                continue
            if size > 0:
                return size
    return None


def about_logprobs(error: RefusedError) -> bool:
    """Whether a server refused a request for the number or the kind of its log-probabilities."""
    return error.status in (400, 422) and any(word in error.reason for word in ("logprobs", "n_probs"))
