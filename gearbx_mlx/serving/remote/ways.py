"""How to ask a server for log-probabilities: the request, and its answer as chunks. OpenAI's API and Ollama's own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..names import OLLAMA, OPENAI
from .answers import Chunk, ollama_chunk, openai_chunk
from .connection import Reply, events

ASK = (20, 11, 10, 5, 1)  # OpenAI's most, mlx_lm.server's, and what others stop at
CHAT_FORMS, TEXT_FORMS = ("flag",), ("number", "flag", "n_probs")
DONE = "[DONE]"


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
class OpenAIWay:
    """How to ask an OpenAI-style server for `asked` log-probabilities of each token.

    form: which fields say so: "number" or "flag", or llama.cpp's "n_probs". streamed: mlx_lm.server and others give no
    log-probabilities in streams.
    """

    asked: int
    form: str
    streamed: bool
    api: ClassVar[str] = OPENAI

    @property
    def fields(self) -> dict[str, Any]:
        """Those of a request's body that ask for log-probabilities."""
        forms = {
            "number": {"logprobs": self.asked},
            "flag": {"logprobs": True, "top_logprobs": self.asked},
            "n_probs": {"n_probs": self.asked},
        }
        return forms[self.form]

    def request(self, question: Question) -> tuple[str, dict[str, Any]]:
        """The path below the API's URL, and the body."""
        body = {"stream": self.streamed, **self.fields}
        if question.chat:
            template = {"chat_template_kwargs": question.template} if question.template else {}
            return "/chat/completions", body | template | {"messages": question.messages}
        return "/completions", body | {"prompt": question.prompt}

    def options(self, max_tokens: int, temperature: float) -> dict[str, Any]:
        return {"max_tokens": max_tokens, "temperature": temperature}

    def chunks(self, reply: Reply) -> Iterator[Chunk]:
        """Raises RemoteError for what is no answer, or a stream without an end."""
        if "event-stream" not in reply.kind:  # a whole answer, asked for or not; or a page
            yield self.chunk(reply, reply.text())
            return
        finished = False
        for data in events(reply.lines()):
            if data.strip() == DONE:
                return
            chunk = self.chunk(reply, data)
            finished = finished or chunk.finished
            yield chunk
        if not finished:
            raise reply.connection.cut("the stream ends without its last event")

    def chunk(self, reply: Reply, text: str) -> Chunk:
        return reply.connection.parsed(text, lambda content: openai_chunk(content, self.asked), reply.kind)


@dataclass(frozen=True)
class OllamaWay:
    """How to ask Ollama by its own API, which streams one JSON object a line."""

    asked: int
    api: ClassVar[str] = OLLAMA

    def request(self, question: Question) -> tuple[str, dict[str, Any]]:
        """The path below the server's URL, and the body."""
        body = {"stream": True, "logprobs": True, "top_logprobs": self.asked}
        if question.chat:
            return "/api/chat", body | {"messages": question.messages}
        return "/api/generate", body | {"prompt": question.prompt, "raw": True}

    def options(self, max_tokens: int, temperature: float) -> dict[str, Any]:
        return {"options": {"num_predict": max_tokens, "temperature": temperature}}

    def chunks(self, reply: Reply) -> Iterator[Chunk]:
        """Raises RemoteError as `OpenAIWay.chunks`."""
        for line in reply.lines():
            if not line.strip():
                continue
            chunk = reply.connection.parsed(line, lambda content: ollama_chunk(content, self.asked), reply.kind)
            yield chunk
            if chunk.finished:
                return
        raise reply.connection.cut("the stream ends without its last line")


Way = OpenAIWay | OllamaWay
AnyWay = TypeVar("AnyWay", bound=Way)


def ways_to_ask(question: Question, openai: bool, ollama: bool) -> list[Way]:
    """Every way to ask this of a server with these APIs, the best first."""
    forms = CHAT_FORMS if question.chat else TEXT_FORMS
    own: list[Way] = [OllamaWay(asked) for asked in ASK] if ollama else []
    if not openai:
        return own
    return own + [OpenAIWay(asked, form, streamed) for asked in ASK for form in forms for streamed in (True, False)]


def others(ways: Sequence[AnyWay], refused: Way) -> list[AnyWay]:
    """Those that ask with other fields than one that was refused."""
    return [way for way in ways if fields_of(way) != fields_of(refused)]


def after_silence(ways: Sequence[AnyWay]) -> list[AnyWay]:
    """Those to try after the first, which was answered without log-probabilities: asking for fewer brings none."""
    return [way for way in ways if kind_of(way) != kind_of(ways[0])]


def kind_of(way: Way) -> tuple[Any, ...]:
    """Everything of a way except how many log-probabilities it asks for."""
    return type(way), getattr(way, "form", ""), getattr(way, "streamed", True)


def fields_of(way: Way) -> tuple[Any, ...]:
    """What a server may refuse of a way: everything except whether the answer is streamed."""
    return type(way), way.asked, getattr(way, "form", "")
