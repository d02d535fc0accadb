"""The routes of the server, on top of mlx-lm's scheduler of requests."""

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from mlx_lm.server import get_system_fingerprint

from ..files.reading import typed
from ..telemetry.summary import Tally
from .answers import Shape, usage
from .channels import Channels
from .dialect import Dialect
from .exposition import exposition
from .guarded import Refused, not_allowed, not_found, refusal
from .messages.dialect import Messages
from .messages.request import CountTokensRequest, MessagesRequest, chat_body
from .metrics import Metrics
from .openapi import PUBLIC, description
from .page import Paged
from .requests import ChatRequest, Request, TextRequest, parse
from .scheduler import Scheduler
from .tokens import Asked, Begun, Emitted, Progress, gearbox_report, token_reports
from .tools import Calls

LOOK = 0.25  # seconds between two looks at whether the client is still there
COMPLETIONS: dict[str, type[Request]] = {
    "/v1/chat/completions": ChatRequest,
    "/chat/completions": ChatRequest,
    "/v1/completions": TextRequest,
}
MESSAGES, COUNT_TOKENS, MODELS = "/v1/messages", "/v1/messages/count_tokens", "/v1/models"
ROUTES = {*COMPLETIONS, MESSAGES, COUNT_TOKENS, MODELS, "/", "/health", "/metrics", "/openapi.json"}


def route_of(path: str) -> str | None:
    """The route that a path belongs to: every model is below /v1/models. None: it has none."""
    if path.startswith(f"{MODELS}/"):
        return MODELS
    return path if path in ROUTES else None


class Gone(ConnectionError):
    """The client has left."""


@dataclass
class Answer:
    """An answer on its way out: what has come of it so far."""

    begun: Begun
    shape: Shape
    asked: Asked

    def __post_init__(self) -> None:
        self.tally: Tally = self.begun.tally()
        request = self.asked.request
        parse = self.begun.context.tool_parser if request.takes_calls else None
        self.calls = Calls(parse, request.shown_tools, bool(request.stream))
        self.channels = Channels(self.begun.context, self.calls)
        self.finish_reason = "stop"
        self.stop_word: str | None = None

    def take(self, emitted: Emitted) -> Any:
        """Count a token, and return what it adds."""
        self.tally.add(emitted.seen)
        self.stop_word = emitted.stop_word
        if emitted.finish_reason is not None:
            self.finish_reason = emitted.finish_reason
        written = self.channels.feed(emitted.text, last=emitted.finish_reason is not None)
        if self.calls.made and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return written

    @property
    def usage(self) -> dict[str, Any]:
        context = self.begun.context
        return usage(len(context.prompt), self.tally.tokens, context.prompt_cache_count)

    @property
    def report(self) -> dict[str, Any]:
        return gearbox_report(self.begun.mode, self.tally)


class Handler(Paged):
    """Answers requests. A subclass has `guard`, `scheduler` and `metrics`."""

    scheduler: Scheduler
    metrics: Metrics

    def get(self, path: str) -> None:
        if path == "/health":
            healthy = self.scheduler.is_healthy
            self.send_object({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)
        elif route_of(path) == MODELS:
            self.send_models(unquote(path.removeprefix(MODELS).removeprefix("/")))
        elif path == "/":
            self.send_page()
        elif path == "/metrics":
            self.send_bytes(*exposition(self.metrics))
        elif path == "/openapi.json":
            self.send_object(description())
        else:
            raise not_allowed("GET") if route_of(path) else not_found(path)

    def public(self, path: str) -> bool:
        return path in PUBLIC

    def post(self, path: str, body: dict[str, Any]) -> None:
        if path == MESSAGES:
            chat = chat_body(typed(body, MessagesRequest))
            self.complete(Asked(parse(ChatRequest, chat), chat["messages"]))
        elif path == COUNT_TOKENS:
            chat = chat_body(typed(body, CountTokensRequest))
            self.send_object({"input_tokens": self.scheduler.count(Asked(parse(ChatRequest, chat), chat["messages"]))})
        elif path in COMPLETIONS:
            self.complete(Asked(parse(COMPLETIONS[path], body), body.get("messages", [])))
        else:
            raise not_allowed("POST") if route_of(path) else not_found(path)

    @property
    def dialect(self) -> Dialect:
        """How answers to this path look."""
        return Messages() if getattr(self, "path", "").startswith(MESSAGES) else Dialect()

    def error_object(self, refused: Refused) -> dict[str, Any]:
        return self.dialect.error(refused)

    def start(self, status: int, headers: Mapping[str, str] = {}) -> None:
        path = getattr(self, "path", "").partition("?")[0]
        self.metrics.answered(route_of(path) or "other", status)
        super().start(status, headers)

    def send_models(self, name: str) -> None:
        """The model that is served, or all of them."""
        provider = self.scheduler.provider
        served = provider.served
        about = {"id": provider.name, "object": "model", "created": provider.created, "owned_by": "gearbx-mlx"}
        if served is not None:
            about["gearbx"] = {
                "modes": served.modes,
                "gears": served.gears,
                "bits": served.bits,
                "mode": served.default_mode,
            }
            about |= {"context_length": served.context, "vocab_size": served.vocabulary}
        if not name:
            self.send_object({"object": "list", "data": [about]})
        elif name in provider.names:
            self.send_object(about)
        else:
            raise Refused(404, f"the model {name[:200]!a} is not served here", code="model_not_found")

    def complete(self, asked: Asked) -> None:
        """Answer a completion, in one piece or as a stream."""
        start = time.perf_counter()
        try:
            self.scheduler.submit(asked)
            answers = self.answers(asked)
            begun = next(answers)
            model = asked.request.model or begun.model
            shape = Shape(isinstance(asked.request, ChatRequest), model, get_system_fingerprint())
            answer = Answer(begun, shape, asked)
            self.metrics.prompt(len(begun.context.prompt), max(0, begun.context.prompt_cache_count))
            send = self.stream if asked.request.stream else self.send_whole
            send(answer, self.counted(answers, start))
        finally:
            asked.left.set()

    def counted(self, answers: Iterator[Any], since: float) -> Iterator[Any]:
        """The same, with every token counted; `since`: seconds on the clock when the request came."""
        first = True
        for found in answers:
            if isinstance(found, Emitted):
                now = time.perf_counter()
                self.metrics.token(found.seen, now - since, first)
                since, first = now, False
            yield found

    def answers(self, asked: Asked) -> Iterator[Any]:
        """What comes of a request, as long as the client waits for it.

        Raises:
            Gone: the client has left.
            Exception: what the computation failed with.
        """
        while True:
            try:
                found = asked.answers.get(timeout=LOOK)
            except queue.Empty:
                if not self.scheduler.generation_available():
                    raise Refused(503, "the thread that computes has ended", "server_error") from None
                if self.client_left():
                    raise Gone from None
                continue
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            if self.client_left():
                raise Gone
            yield found

    def send_whole(self, answer: Answer, answers: Iterator[Any]) -> None:
        text, reasoning, calls, emitted = "", "", [], []
        for found in answers:
            if isinstance(found, Progress):
                continue
            written = answer.take(found)
            emitted.append(found)
            text, reasoning = text + written.text, reasoning + written.reasoning
            calls += written.calls
        wants = answer.asked.request.wants_logprobs
        logprobs = answer.shape.logprobs(emitted) if wants else None
        ended = answer.finish_reason, logprobs, answer.stop_word
        whole = answer.shape.whole(text, reasoning, calls, *ended)
        self.send_object(self.dialect.whole({**whole, "usage": answer.usage, "gearbx": answer.report}))

    def stream(self, answer: Answer, answers: Iterator[Any]) -> None:
        """Send tokens as they come. An error after the first of them is an event of its own, and ends the stream."""
        dialect = self.dialect

        def send(chunk: dict[str, Any]) -> None:
            for name, event in dialect.events(chunk):
                self.send_event(event, name)

        dialect.begin(answer.usage)
        self.start_events()
        try:
            self.send_tokens(answer, answers, send)
        except ConnectionError:
            raise
        except Exception as error:
            name, event = dialect.failed(refusal(error))
            self.send_event(event, name)
            return
        for name, event in dialect.last():
            self.send_event(event, name)

    def send_tokens(self, answer: Answer, answers: Iterator[Any], send: Callable[[Any], None]) -> None:
        shape, request = answer.shape, answer.asked.request
        waiting: list[Emitted] = []
        first, offset = True, 0
        for found in answers:
            if isinstance(found, Progress):
                if 0 < found.done < found.total:
                    self.wfile.write(f": keepalive {found.done}/{found.total}\n\n".encode())
                continue
            written = answer.take(found)
            waiting.append(found)
            ended = found.finish_reason is not None
            if not written and not ended:
                continue
            logprobs = shape.logprobs(waiting, offset) if request.wants_logprobs else None
            reason = answer.finish_reason if ended else None
            parts = written.text, written.reasoning, written.calls
            chunk = shape.chunk(*parts, reason, logprobs, first, answer.stop_word)
            seen: dict[str, Any] = {"tokens": token_reports(waiting)}
            if first:
                seen |= {"mode": answer.begun.mode.name, "thresholds": answer.begun.thresholds}
            send({**chunk, "gearbx": {**seen, **answer.report} if ended else seen})
            offset += len(written.text)
            waiting, first = [], False
        if request.stream_options is not None and request.stream_options.include_usage:
            send(shape.usage_chunk(answer.usage))
