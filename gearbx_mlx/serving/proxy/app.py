"""The proxy's routes: answers of one of two servers on their way out, and what the proxy counts of them."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ...routing.pair import NAMES
from ..web import Guard, Refused, application, escaped, event_stream, front
from .route import CHAT, TEXT, Between, ProxyRoute
from .upstream import Declined, Failed, Upstream

log = logging.getLogger("gearbx_mlx.server")


class ProxyMetrics:
    """Counts who answered and why, what failed, and how long clients waited."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "gearbx_proxy", "registry": self.registry}
        self.answers = Counter("answers", "Answers, by server and reason.", ["server", "why"], **own)
        self.failures = Counter("failures", "Failures of a server.", ["server"], **own)
        self.handed_over = Counter(
            "handed_over_tokens", "Tokens of the small server that the large one went on with.", **own
        )
        self.left = Counter("clients_left", "Clients that left too early.", **own)
        self.first = Histogram("first_bytes_seconds", "From a request to the first bytes of its answer.", **own)
        self.requests = Gauge("requests", "Requests at this moment.", **own)

    def begun(self, route: ProxyRoute, seconds: float) -> None:
        """Log and count who answers, and why; so many seconds after the request."""
        decision = route.decision
        assert decision is not None
        server = NAMES[decision.server]
        self.answers.labels(server, decision.why).inc()
        self.handed_over.inc(route.handed_over)
        self.first.observe(seconds)
        reason = f" ({escaped(decision.reason)})" if decision.reason else ""
        log.info("the %s server answers: %s%s; %d tokens handed over", server, decision.why, reason, route.handed_over)


router = APIRouter()
router.include_router(front)


@router.post("/chat/completions")
@router.post("/v1/chat/completions")
async def answer_a_chat(request: Request, body: dict[str, Any]) -> Response:
    return await complete(request, CHAT, body)


@router.post("/v1/completions")
async def go_on_with_a_text(request: Request, body: dict[str, Any]) -> Response:
    return await complete(request, TEXT, body)


@router.get("/health")
async def check_both_servers(request: Request) -> Response:
    """Well while a request can be answered: with `fallback` one server is enough."""
    between: Between = request.app.state.between
    reasons = await asyncio.gather(*(server.why_not_well() for server in between.servers))
    down = sum(reason is not None for reason in reasons)
    well = down == 0 or (down == 1 and between.fallback)
    status = "ok" if down == 0 else "degraded" if well else "unavailable"
    servers = {
        server.name: {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
        for server, reason in zip(between.servers, reasons)
    }
    return JSONResponse({"status": status, "servers": servers}, 200 if well else 503)


@router.get("/v1/models")
async def list_models_of_both(request: Request) -> Response:
    rows = [row for server in request.app.state.between.servers for row in await models_of(server)]
    return JSONResponse({"object": "list", "data": rows})


async def models_of(server: Upstream) -> list[dict[str, Any]]:
    """The models that requests reach on a server: the one that it is asked for, or those that it lists."""
    mark = {"object": "model", "gearbx": {"server": server.name}}
    if server.model is not None:
        return [{"id": server.model, "created": 0, "owned_by": "gearbx-mlx", **mark}]
    try:
        return [row | mark for row in await server.models()]
    except Failed as error:
        log.warning("%s", escaped(error.message))
        return []


@router.get("/metrics")
async def show_what_was_counted(request: Request) -> Response:
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def proxy_application(guard: Guard, between: Between) -> FastAPI:
    """The proxy between two servers."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for server in between.servers:
            await server.client.aclose()

    app = application(router, guard, title="gearbx_mlx.server, a proxy", lifespan=lifespan)
    app.state.between, app.state.metrics = between, ProxyMetrics()
    return app


async def complete(request: Request, path: str, body: dict[str, Any]) -> Response:
    """The answer of one of the servers, as a stream or whole; or what a server says of a request that it refuses."""
    if not isinstance(body.get("stream"), bool | None):
        raise Refused(400, "stream is neither true nor false", param="stream")
    metrics = request.app.state.metrics
    route = ProxyRoute(request.app.state.between, metrics.failures, path, body)
    parts = counted(route, metrics)
    try:
        first = await anext(parts)
    except Declined as error:
        later = {"Retry-After": error.retry_after} if error.retry_after else {}
        return Response(error.said, error.status, {"Content-Type": error.kind, **later})
    if isinstance(first, bytes):
        return event_stream(events(first, parts))
    async for _ in parts:
        pass
    return JSONResponse(first)


async def counted(route: ProxyRoute, metrics: ProxyMetrics) -> AsyncGenerator[Any, None]:
    """The parts of an answer, counted before they are sent: what a client has read stands in /metrics."""
    started = time.perf_counter()
    with metrics.requests.track_inprogress():
        try:
            async for part in route.answer():
                if started and route.begun:
                    metrics.begun(route, time.perf_counter() - started)
                    started = 0.0
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            metrics.left.inc()
            raise
        except Failed as error:
            log.warning("%s", escaped(error.message))
            raise


async def events(first: bytes, parts: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
    """The events of a stream; where it breaks off, the last one has the reason, and there is no end of the stream."""
    yield first
    async with aclosing(parts):
        try:
            async for part in parts:
                yield part
        except Failed as error:
            yield b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
