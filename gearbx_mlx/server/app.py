"""Routes of the server: OpenAI's completions and responses, Anthropic's messages, models, health and metrics.

A route parses a request, submits it to the scheduler's compute thread, and sends the events of its answer.
"""

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import mlx.core as mx
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from ..telemetry.summary import Tally
from ..telemetry.trace import LOOKUP, Token, writer_of
from . import dialects
from .answers import CompletionBuilder, Dialect, event_text
from .bodies import BodyRoute, in_thread
from .job import GenerationContext, PendingRequest, PrefillProgress, TokenEvent
from .requests import AnyRequest, ChatRequest, TextRequest
from .scheduler import Scheduler
from .web import (
    LOG_FIELDS,
    Guard,
    Refused,
    RequestLimits,
    Shutdown,
    application,
    event_stream,
    page_router,
    refusal,
    response_schema,
)

MESSAGES_PATH, MODELS_PATH = "/v1/messages", "/v1/models"
FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # buckets, seconds
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # buckets, seconds
RATE_SECONDS = 10  # window of tokens per second
MAX_NAMES, MAX_NAME_LENGTH = 20, 100  # unknown fields of a request in log and answer, and characters of each


class Metrics:
    """Prometheus metrics of one server: requests, tokens, gears, drafts, times. No label has text of a client.

    Args:
        scheduler: source of running and waiting requests and of MLX's memory; None: no model.
        clock: monotonic seconds.
    """

    def __init__(self, scheduler: Scheduler | None = None, clock: Callable[[], float] = time.monotonic):
        self.registry, self.clock = CollectorRegistry(), clock
        self.times: deque[float] = deque(maxlen=2**18)  # times of the latest tokens, more than RATE_SECONDS can have
        own: dict[str, Any] = {"namespace": "gearbx", "registry": self.registry}
        if scheduler is not None:
            Gauge("requests_running", "Sequences in generation", **own).set_function(lambda: scheduler.running)
            Gauge("requests_waiting", "Queued sequences", **own).set_function(lambda: scheduler.queued)
            Gauge("memory_bytes", "Bytes of MLX's arrays", **own).set_function(mx.get_active_memory)
            Gauge("peak_memory_bytes", "Peak bytes of MLX's arrays", **own).set_function(mx.get_peak_memory)
        self.requests = Counter("requests", "Answered requests", ["route", "status"], **own)
        self.prompts = Counter("prompts", "Prompts", **own)
        self.prompt_tokens = Counter("prompt_tokens", "Prefilled prompt tokens", **own)
        self.cached_tokens = Counter("prompt_cached_tokens", "Prompt tokens with a KV cache", **own)
        self.cache_hits = Counter("prompt_cache_hits", "Prompts with a KV cache of a prefix", **own)
        doc = f"Generated tokens by gear; {LOOKUP}: accepted from prompt lookup"
        self.tokens = Counter("generated_tokens", doc, ["gear"], **own)
        self.gear_share = Gauge("gear_share", "Share of a gear in generated tokens", ["gear"], **own)
        self.shifts = Counter("shifts", "Tokens in a different gear than the previous one", **own)
        self.weight_bytes = Counter("weight_bytes_read", "Bytes of weights read", **own)
        self.drafted = Counter("drafted_tokens", "Drafted tokens", ["source"], **own)
        self.accepted = Counter("accepted_tokens", "Accepted drafted tokens", ["source"], **own)
        acceptance = Gauge("acceptance_rate", "Accepted share of drafted tokens", ["source"], **own)
        doc = "Seconds from a request to its first token"
        self.first = Histogram("time_to_first_token_seconds", doc, buckets=FIRST_TOKEN, **own)
        doc = "Seconds between two tokens of an answer"
        self.others = Histogram("time_per_token_seconds", doc, buckets=PER_TOKEN, **own)
        doc = f"Generated tokens per second, over the last {RATE_SECONDS} seconds"
        Gauge("tokens_per_second", doc, **own).set_function(self.tokens_per_second)
        self.tally = tally = Tally(defaultdict(int), {})
        acceptance.labels("draft").set_function(lambda: tally.accepted / max(1, tally.drafted))
        acceptance.labels("lookup").set_function(lambda: tally.from_lookup / max(1, tally.lookup_drafted))

    def answered(self, route: str, status: int) -> None:
        """Count an answered request by its route, or "other"."""
        self.requests.labels(route, str(status)).inc()

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt with its tokens, `cached` of them with a KV cache."""
        self.prompts.inc()
        self.prompt_tokens.inc(tokens - cached)
        self.cached_tokens.inc(cached)
        self.cache_hits.inc(cached > 0)

    def token(self, response: Token, seconds: float, first: bool = False) -> None:
        """Count a token. `seconds` is the time since the previous token, or since the request for the first one."""
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
        """Return the rate of all answers together, over the last whole seconds."""
        now = int(self.clock())
        return sum(now - RATE_SECONDS <= at < now for at in list(self.times)) / RATE_SECONDS

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


@dataclass(frozen=True)
class Service:
    """Shared objects of the routes, with the log fields of one answer."""

    scheduler: Scheduler
    metrics: Metrics
    shutdown: Shutdown
    in_thread: Callable[..., Awaitable[Any]]  # `bodies.in_thread` for this application
    log_fields: dict[str, Any] = field(default_factory=dict)


def service_of(request: Request) -> Service:
    """Return the service with a request's log fields."""
    return replace(request.app.state.service, log_fields=request.scope[LOG_FIELDS])


Here = Annotated[Service, Depends(service_of)]


# OpenAPI descriptions.


ERRORS: dict[int | str, dict[str, Any]] = {status: {"description": "Error"} for status in ("4XX", "5XX")}
STREAM_SCHEMA = response_schema(
    "text/event-stream",
    {  # an event; its data is JSON, or [DONE]
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


# Routes.


@keyed.post("/chat/completions", responses=STREAM_SCHEMA, summary="As with /v1")
@keyed.post("/v1/chat/completions", responses=STREAM_SCHEMA)
async def chat_completion(body: ChatRequest, here: Here) -> Response:
    return await complete(here, body, body, Dialect())


@keyed.post("/v1/completions", responses=STREAM_SCHEMA)
async def text_completion(body: TextRequest, here: Here) -> Response:
    return await complete(here, body, body, Dialect())


@keyed.post("/v1/responses", responses=STREAM_SCHEMA)
async def response(body: dialects.ResponsesRequest, here: Here) -> Response:
    chat, dialect = await here.in_thread(lambda: (dialects.chat_of_response(body), dialects.ResponseDialect(body)))
    return await complete(here, body, chat, dialect)


@keyed.post(MESSAGES_PATH, responses=STREAM_SCHEMA)
async def message(body: dialects.MessagesRequest, here: Here) -> Response:
    return await complete(here, body, await here.in_thread(dialects.chat_of_messages, body), dialects.Messages())


@keyed.post(f"{MESSAGES_PATH}/count_tokens")
async def count_tokens(body: dialects.CountTokensRequest, here: Here) -> Response:
    count = await here.in_thread(lambda: here.scheduler.count(dialects.chat_of_messages(body)))
    return JSONResponse({"input_tokens": count})


@keyed.get(MODELS_PATH)
async def list_models(here: Here) -> Response:
    return JSONResponse({"object": "list", "data": model_entries(here)})


@keyed.get(f"{MODELS_PATH}/{{model:path}}")
async def describe_model(model: str, here: Here) -> Response:
    provider = here.scheduler.provider
    name = provider.name if model in provider.names else model
    found = next((entry for entry in model_entries(here) if entry["id"] == name), None)
    if found is None:
        why = f"model: not served here, got {model[:200]!a}; choose from {', '.join(provider.catalog)}"
        raise Refused(404, why, code="model_not_found")
    return JSONResponse(found)


@router.get("/health")
async def health(here: Here) -> Response:
    healthy = here.scheduler.is_healthy
    return JSONResponse({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)


@keyed.get("/metrics", response_class=Response, responses=response_schema("text/plain", {"type": "string"}))
async def metrics(here: Here) -> Response:
    return Response(here.metrics.text(), media_type=CONTENT_TYPE_LATEST)


ROUTERS = page_router, router, keyed


def server_application(guard: Guard, scheduler: Scheduler | None = None) -> FastAPI:
    """Return the application of a model's server; without a scheduler, only its OpenAPI description works."""
    routes = APIRouter()
    for part in ROUTERS:
        routes.include_router(part, responses=ERRORS)
    metrics = Metrics(scheduler)
    app = application(
        routes,
        guard,
        ("/", "/health", "/openapi.json"),
        lambda path, refused: dialects.messages_error(refused) if path.startswith(MESSAGES_PATH) else refused.body(),
        lambda path, status: metrics.answered(route_of(path), status),
        RequestLimits if scheduler is None else scheduler.provider.limits,
        title="gearbx_mlx.server",
        version="1",
        description="A model in gears, behind the APIs of OpenAI and Anthropic.",
    )
    if scheduler is not None:
        app.state.service = Service(scheduler, metrics, app.state.shutdown, partial(in_thread, app))
    return app


ROUTES = {route.path for part in ROUTERS for route in part.routes}  # type: ignore[attr-defined]


def route_of(path: str) -> str:
    """Return a path's route for the metrics; all models share /v1/models."""
    if path.startswith(f"{MODELS_PATH}/"):
        return MODELS_PATH
    return path if path in ROUTES or path == "/openapi.json" else "other"


def model_entries(here: Service) -> list[dict[str, Any]]:
    """Return OpenAI's entries of the models, with the gears of the loaded one."""
    provider = here.scheduler.provider
    key, served = provider.model_key, provider.served
    loaded = None if key is None else provider.name_of(key)
    found = []
    for name in provider.catalog:
        entry = {"id": name, "object": "model", "created": provider.created, "owned_by": "gearbx-mlx"}
        if served is not None and name == loaded:
            gears = {"modes": served.modes, "gears": served.gears, "bits": served.bits, "mode": served.default_mode}
            entry |= {"gearbx": gears, "context_length": served.context, "vocab_size": served.vocabulary}
        found.append(entry)
    return found


# Completions.


async def complete(here: Service, body: BaseModel, request: AnyRequest, dialect: Dialect) -> Response:
    """Answer a completion, whole or as a stream.

    Args:
        body: the client's request; log and answer name its unknown fields.
        request: the chat or text completion for it.
    """
    parts, ignored = request.split(), [name[:MAX_NAME_LENGTH] for name in sorted(body.model_extra or ())[:MAX_NAMES]]
    if ignored:
        here.log_fields["ignored"] = ",".join(ignored)
    events = answer_events(here, parts)
    index, context = await anext(events)
    builder = CompletionBuilder(request, len(parts), index, context, ignored)
    if request.stream:
        dialect.begin(builder.usage)
        return event_stream(stream_events(here, builder, events, dialect))
    async with aclosing(events):
        return JSONResponse(dialect.whole(await builder.whole(events)))


async def answer_events(here: Service, parts: Sequence[AnyRequest]) -> AsyncGenerator[tuple[int, Any], None]:
    """Submit one request per sequence, and yield (index, event) of all, with metrics. Closing cancels the sequences.

    Raises:
        Exception: any error of the computation.
    """
    queue: asyncio.Queue[Any] = asyncio.Queue()
    cancelled, num_open = threading.Event(), len(parts)
    start, times = time.perf_counter(), dict[int, float]()
    log_fields = here.log_fields
    try:
        for place, part in enumerate(parts):
            with here.shutdown.interrupting():
                await here.in_thread(here.scheduler.submit, PendingRequest(part, place, queue, cancelled))
        while num_open:
            with here.shutdown.interrupting():
                index, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_open -= 1
                continue
            if isinstance(event, GenerationContext):
                size = len(event.prompt.tokens)
                here.metrics.prompt(size, event.cached)
                log_fields |= {"mode": event.mode.name, "prompt": log_fields.get("prompt", 0) + size}
                log_fields |= {"cached": log_fields.get("cached", 0) + event.cached}
                log_fields.setdefault("tokens", 0)
            if isinstance(event, TokenEvent):
                now = time.perf_counter()
                here.metrics.token(event.response, now - times.get(index, start), index not in times)
                log_fields["tokens"] += 1
                log_fields.setdefault("first", f"{now - start:.3f}")
                times[index] = now
            yield index, event
    finally:
        cancelled.set()


async def stream_events(
    here: Service, builder: CompletionBuilder, events: AsyncGenerator[Any, None], dialect: Dialect
) -> AsyncGenerator[str, None]:
    """Yield the server-sent events of an answer. A later error is an event of its own, and ends the stream."""
    async with aclosing(events):
        try:
            async for chunk in builder.chunks(events):
                if not isinstance(chunk, PrefillProgress):
                    for event in dialect.events(chunk):
                        yield event_text(event)
                elif 0 < chunk.done < chunk.total:
                    yield f": keepalive {chunk.done}/{chunk.total}\n\n"
        except Exception as error:
            refused = refusal(error)
            here.log_fields["failed"] = refused.status_code
            yield event_text(dialect.failed(refused))
            return
        for event in dialect.last():
            yield event_text(event)
