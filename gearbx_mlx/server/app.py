"""The routes of the server: OpenAI's completions, Anthropic's messages, and what says how the server is and counts.

A route reads a request, hands it to the scheduler, whose thread computes, and sends what comes back as it comes.
"""

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import mlx.core as mx
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from typing_extensions import TypedDict

from ..telemetry.summary import Tally
from ..telemetry.trace import LOOKUP, Token, writer_of
from .answers import Answer, ChatCompletion, Dialect, TextCompletion, event_text
from .bodies import BodyRoute, in_thread
from .dialects import (
    CountTokensRequest,
    Messages,
    MessagesRequest,
    ResponseDialect,
    ResponsesRequest,
    chat_of_messages,
    chat_of_response,
    messages_error,
)
from .job import Asked, Begun, Emitted, Progress
from .requests import AnyRequest, ChatRequest, TextRequest
from .scheduler import Scheduler
from .web import LOG_FIELDS, Guard, Refused, RequestLimits, Stop, also, application, event_stream, front, refusal

MESSAGES_PATH, MODELS_PATH = "/v1/messages", "/v1/models"
FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RATE_SECONDS = 10  # seconds over which tokens per second are counted
MAX_NAMED, LONGEST_NAME = 20, 100  # fields of a request that are not known, and characters of each


# What is counted.


class Metrics:
    """Counts what a server does, for Prometheus: requests, tokens, gears, drafts, times. Each object counts for itself.

    No label has text of a client in it.

    Args:
        scheduler: whose requests are counted, and the memory of MLX, when Prometheus asks; None: nothing is computed.
        clock: seconds that never go back.
    """

    def __init__(self, scheduler: Scheduler | None = None, clock: Callable[[], float] = time.monotonic):
        self.registry, self.clock = CollectorRegistry(), clock
        self.times: deque[float] = deque(maxlen=2**18)  # of the latest tokens: more than come in RATE_SECONDS
        own: dict[str, Any] = {"namespace": "gearbx", "registry": self.registry}
        if scheduler is not None:
            Gauge("requests_running", "Answers in the making", **own).set_function(lambda: scheduler.running)
            Gauge("requests_waiting", "Requests that wait for their turn", **own).set_function(lambda: scheduler.queued)
            Gauge("memory_bytes", "Bytes of MLX's arrays", **own).set_function(mx.get_active_memory)
            Gauge("peak_memory_bytes", "The most bytes that MLX's arrays had", **own).set_function(mx.get_peak_memory)
        self.requests = Counter("requests", "Requests that were answered", ["route", "status"], **own)
        self.prompts = Counter("prompts", "Prompts", **own)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts that were read", **own)
        self.cached_tokens = Counter("prompt_cached_tokens", "Tokens of prompts that were in a KV cache", **own)
        self.cache_hits = Counter("prompt_cache_hits", "Prompts whose beginning was in a KV cache", **own)
        said = f"Tokens of answers, by gear; {LOOKUP}: the text itself proposed them"
        self.tokens = Counter("generated_tokens", said, ["gear"], **own)
        self.gear_share = Gauge("gear_share", "Share of a gear in the tokens of answers", ["gear"], **own)
        self.shifts = Counter("shifts", "Tokens in another gear than the one before", **own)
        self.weight_bytes = Counter("weight_bytes_read", "Bytes of weights read", **own)
        self.drafted = Counter("drafted_tokens", "Tokens proposed for verification", ["source"], **own)
        self.accepted = Counter("accepted_tokens", "Proposed tokens that were accepted", ["source"], **own)
        acceptance = Gauge("acceptance_rate", "Share of proposed tokens that was accepted", ["source"], **own)
        self.first = Histogram(
            "time_to_first_token_seconds", "Seconds from a request to its first token", buckets=FIRST_TOKEN, **own
        )
        self.others = Histogram(
            "time_per_token_seconds", "Seconds between two tokens of an answer", buckets=PER_TOKEN, **own
        )
        said = f"Tokens of answers per second, over the last {RATE_SECONDS} seconds"
        Gauge("tokens_per_second", said, **own).set_function(self.tokens_per_second)
        self.tally = tally = Tally(defaultdict(int), {})
        acceptance.labels("draft").set_function(lambda: tally.accepted / max(1, tally.drafted))
        acceptance.labels("lookup").set_function(lambda: tally.from_lookup / max(1, tally.lookup_drafted))

    def answered(self, route: str, status: int) -> None:
        """Count an answered request. route: a path of the server; one name stands for all other paths."""
        self.requests.labels(route, str(status)).inc()

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt, of which some tokens were in a KV cache."""
        self.prompts.inc()
        self.prompt_tokens.inc(tokens - cached)
        self.cached_tokens.inc(cached)
        self.cache_hits.inc(cached > 0)

    def token(self, response: Token, seconds: float, first: bool = False) -> None:
        """Count a token of an answer. seconds: since the token before; since the request, for the first one."""
        self.tally.add(response)
        self.tokens.labels(writer_of(response)).inc()
        for gear, count in (*self.tally.gear_tokens.items(), (LOOKUP, self.tally.from_lookup)):
            self.gear_share.labels(gear).set(self.tally.mean(count))
        self.shifts.inc(response.shifted)
        self.weight_bytes.inc(response.weight_bytes)
        self.drafted.labels("draft").inc(response.drafted)
        self.accepted.labels("draft").inc(response.from_draft)
        self.drafted.labels("lookup").inc(response.lookup_drafted)
        self.accepted.labels("lookup").inc(response.source == LOOKUP)
        self.times.append(self.clock())
        (self.first if first else self.others).observe(seconds)

    def tokens_per_second(self) -> float:
        """Return tokens a second of all answers together, over the last whole seconds."""
        now = int(self.clock())
        return sum(now - RATE_SECONDS <= at < now for at in list(self.times)) / RATE_SECONDS

    def text(self) -> bytes:
        """Everything that was counted, in Prometheus's text format."""
        return generate_latest(self.registry)


@dataclass(frozen=True)
class Service:
    """What computes, what counts, the end of the server, and what its log is told of an answer.

    in_thread: calls a function as `bodies.in_thread` does.
    """

    scheduler: Scheduler
    metrics: Metrics
    stop: Stop
    in_thread: Callable[..., Awaitable[Any]]
    told: dict[str, Any] = field(default_factory=dict)


def service_of(request: Request) -> Service:
    """Return the service of one answer."""
    return replace(request.app.state.service, told=request.scope[LOG_FIELDS])


Here = Annotated[Service, Depends(service_of)]


# What the description says beside requests and answers.


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """OpenAI's error object."""

    error: ErrorObject


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    status: Literal["ok", "unavailable"]


def failing(error: Any) -> dict[int | str, dict[str, Any]]:
    """Any request may be wrong, and any server may fail."""
    return {status: {"model": error, "description": "Why there is no answer"} for status in ("4XX", "5XX")}


STREAM_SCHEMA = also(
    "text/event-stream",
    {  # an event, whose data is JSON, or [DONE]
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
        "required": ["data"],
    },
)
router = APIRouter()
keyed = APIRouter(
    route_class=BodyRoute,
    dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(APIKeyHeader(name="x-api-key", auto_error=False))],
)
theirs = APIRouter(route_class=BodyRoute, responses=failing(dict[str, Any]), dependencies=keyed.dependencies)


# The routes.


@keyed.post("/chat/completions", response_model=ChatCompletion, responses=STREAM_SCHEMA, summary="As with /v1")
@keyed.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM_SCHEMA)
async def answer_a_chat(body: ChatRequest, here: Here) -> Response:
    return await complete(here, body, body, Dialect())


@keyed.post("/v1/completions", response_model=TextCompletion, responses=STREAM_SCHEMA)
async def go_on_with_a_text(body: TextRequest, here: Here) -> Response:
    return await complete(here, body, body, Dialect())


@keyed.post("/v1/responses", response_model=dict[str, Any], responses=STREAM_SCHEMA)
async def respond(body: ResponsesRequest, here: Here) -> Response:
    chat, dialect = await here.in_thread(lambda: (chat_of_response(body), ResponseDialect(body)))
    return await complete(here, body, chat, dialect)


@keyed.post("/v1/embeddings", response_model=Error, include_in_schema=False)
async def refuse_embeddings() -> Response:
    raise Refused(404, "no embeddings are served: models here write text; ask a server of an embedding model")


@theirs.post(MESSAGES_PATH, response_model=dict[str, Any], responses=STREAM_SCHEMA)
async def answer_messages(body: MessagesRequest, here: Here) -> Response:
    return await complete(here, body, await here.in_thread(chat_of_messages, body), Messages())


@theirs.post(f"{MESSAGES_PATH}/count_tokens", response_model=dict[str, int])
async def count_tokens_of_a_prompt(body: CountTokensRequest, here: Here) -> Response:
    count = await here.in_thread(lambda: here.scheduler.count(chat_of_messages(body)))
    return JSONResponse({"input_tokens": count})


@keyed.get(MODELS_PATH, response_model=Models)
async def list_models(here: Here) -> Response:
    return JSONResponse({"object": "list", "data": about_models(here)})


@keyed.get(f"{MODELS_PATH}/{{model:path}}", response_model=Model)
async def describe_a_model(model: str, here: Here) -> Response:
    provider = here.scheduler.provider
    name = provider.name if model in provider.names else model
    found = next((about for about in about_models(here) if about["id"] == name), None)
    if found is None:
        raise Refused(404, f"the model {model[:200]!a} is not served here", code="model_not_found")
    return JSONResponse(found)


@router.get("/health", response_model=Health)
async def say_whether_answers_are_computed(here: Here) -> Response:
    healthy = here.scheduler.is_healthy
    return JSONResponse({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)


@keyed.get("/metrics", response_class=Response, responses=also("text/plain", {"type": "string"}))
async def show_what_was_counted(here: Here) -> Response:
    return Response(here.metrics.text(), media_type=CONTENT_TYPE_LATEST)


ROUTERS = front, router, keyed, theirs


def server_application(guard: Guard, scheduler: Scheduler | None = None) -> FastAPI:
    """Return the server of one model; without a scheduler, what describes it."""
    routes = APIRouter()
    for part in ROUTERS:
        routes.include_router(part, responses=failing(Error))
    metrics = Metrics(scheduler)
    app = application(
        routes,
        guard,
        ("/", "/health", "/openapi.json"),
        lambda path, refused: messages_error(refused) if path.startswith(MESSAGES_PATH) else refused.body(),
        lambda path, status: metrics.answered(route_of(path), status),
        RequestLimits if scheduler is None else scheduler.provider.limits,
        title="gearbx_mlx.server",
        version="1",
        description="A model in gears, behind the APIs of OpenAI and Anthropic.",
    )
    if scheduler is not None:
        app.state.service = Service(scheduler, metrics, app.state.stop, partial(in_thread, app))
    return app


ROUTES = {route.path for part in ROUTERS for route in part.routes}  # type: ignore[attr-defined]


def route_of(path: str) -> str:
    """Return the route that a path belongs to, for counting: every model is below /v1/models."""
    if path.startswith(f"{MODELS_PATH}/"):
        return MODELS_PATH
    return path if path in ROUTES or path == "/openapi.json" else "other"


def about_models(here: Service) -> list[dict[str, Any]]:
    """Return the models that may be asked for; of the one that is loaded, its gears too."""
    provider = here.scheduler.provider
    key, served = provider.model_key, provider.served
    loaded = None if key is None else provider.name_of(key)
    found = []
    for name in provider.catalogue:
        about = {"id": name, "object": "model", "created": provider.created, "owned_by": "gearbx-mlx"}
        if served is not None and name == loaded:
            gears = {"modes": served.modes, "gears": served.gears, "bits": served.bits, "mode": served.default_mode}
            about |= {"gearbx": gears, "context_length": served.context, "vocab_size": served.vocabulary}
        found.append(about)
    return found


# Completions.


async def complete(here: Service, body: BaseModel, request: AnyRequest, dialect: Dialect) -> Response:
    """Answer a completion, in one piece or as a stream.

    Args:
        body: what the client sent; fields in it that are not known are named in the answer and in the log.
        request: the chat or text completion that answers it.
    """
    texts, ignored = request.apart(), [name[:LONGEST_NAME] for name in sorted(body.model_extra or ())[:MAX_NAMED]]
    if ignored:
        here.told["ignored"] = ",".join(ignored)
    came = answers(here, texts)
    index, begun = await anext(came)
    answer = Answer(request, len(texts), index, begun, ignored)
    if request.stream:
        dialect.begin(answer.usage)
        return event_stream(stream_events(here, answer, came, dialect))
    async with aclosing(came):
        return JSONResponse(dialect.whole(await answer.whole(came)))


async def answers(here: Service, texts: Sequence[AnyRequest]) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield what comes of requests for a text each, with their places, and count it; closed, it ends the work.

    Raises what the computation failed with.
    """
    came: asyncio.Queue[Any] = asyncio.Queue()
    left, open_texts = threading.Event(), len(texts)
    asked, since = time.perf_counter(), dict[int, float]()
    told = here.told
    try:
        for place, text in enumerate(texts):
            with here.stop.heeded():
                await here.in_thread(here.scheduler.submit, Asked(text, place, came, left))
        while open_texts:
            with here.stop.heeded():
                index, found = await came.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                open_texts -= 1
                continue
            if isinstance(found, Begun):
                here.metrics.prompt(len(found.prompt.tokens), found.cached)
                told |= {"mode": found.mode.name, "prompt": told.get("prompt", 0) + len(found.prompt.tokens)}
                told |= {"cached": told.get("cached", 0) + found.cached, "tokens": told.get("tokens", 0)}
            if isinstance(found, Emitted):
                now = time.perf_counter()
                here.metrics.token(found.seen, now - since.get(index, asked), index not in since)
                told["tokens"] += 1
                told.setdefault("first", f"{now - asked:.3f}")
                since[index] = now
            yield index, found
    finally:
        left.set()


async def stream_events(
    here: Service, answer: Answer, came: AsyncGenerator[Any, None], dialect: Dialect
) -> AsyncGenerator[str, None]:
    """Events as tokens come. An error after the first of them is an event of its own, and ends the stream."""
    async with aclosing(came):
        try:
            async for chunk in answer.chunks(came):
                if not isinstance(chunk, Progress):
                    for event in dialect.events(chunk):
                        yield event_text(event)
                elif 0 < chunk.done < chunk.total:
                    yield f": keepalive {chunk.done}/{chunk.total}\n\n"
        except Exception as error:
            refused = refusal(error)
            here.told["failed"] = refused.status_code
            yield event_text(dialect.failed(refused))
            return
        for event in dialect.last():
            yield event_text(event)
