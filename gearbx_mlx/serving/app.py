"""The routes of the server: OpenAI's completions, Anthropic's messages, and what says how the server is.

A route reads a request, hands it to the scheduler, whose thread computes, and sends what comes back as it comes.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from .answers import Answer, ChatCompletion, Dialect, TextCompletion, event_text
from .job import Asked, Begun, Emitted, Progress
from .messages import (
    CountedTokens,
    CountTokensRequest,
    MessageAnswer,
    Messages,
    MessagesError,
    MessagesRequest,
    chat_request,
    messages_error,
)
from .metrics import EXPOSED, Metrics
from .requests import BaseRequest, ChatRequest, TextRequest
from .responses import ResponseAnswer, ResponseDialect, ResponsesRequest, chat_of_response
from .scheduler import Scheduler
from .web import Guard, Refused, application, event_stream, page, refusal

MESSAGES, MODELS = "/v1/messages", "/v1/models"
PUBLIC = ("/", "/health", "/openapi.json")  # without the key


@dataclass(frozen=True)
class Service:
    """What computes, and what counts."""

    scheduler: Scheduler
    metrics: Metrics


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


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


def also(media_type: str, schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {media_type: {"schema": schema}}}}


EVENT = {  # of a stream; its data is JSON, or [DONE]
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
STREAMED = also("text/event-stream", EVENT)
router = APIRouter(responses=failing(Error))
keyed = APIRouter(
    responses=failing(Error),
    dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(APIKeyHeader(name="x-api-key", auto_error=False))],
)
theirs = APIRouter(responses=failing(MessagesError), dependencies=keyed.dependencies)


# The routes.


@keyed.post("/chat/completions", response_model=ChatCompletion, responses=STREAMED, summary="As with /v1")
@keyed.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def answer_a_chat(body: ChatRequest, here: Here) -> Response:
    return await complete(here, body, Dialect())


@keyed.post("/v1/completions", response_model=TextCompletion, responses=STREAMED)
async def go_on_with_a_text(body: TextRequest, here: Here) -> Response:
    return await complete(here, body, Dialect())


@keyed.post("/v1/responses", response_model=ResponseAnswer, responses=STREAMED)
async def respond(body: ResponsesRequest, here: Here) -> Response:
    return await complete(here, chat_of_response(body), ResponseDialect(body))


@keyed.post("/v1/embeddings", response_model=Error, include_in_schema=False)
async def refuse_embeddings() -> Response:
    raise Refused(404, "no embeddings are served: models here write text; ask a server of an embedding model")


@theirs.post(MESSAGES, response_model=MessageAnswer, responses=STREAMED)
async def answer_messages(body: MessagesRequest, here: Here) -> Response:
    return await complete(here, chat_request(body), Messages())


@theirs.post(f"{MESSAGES}/count_tokens", response_model=CountedTokens)
async def count_tokens_of_a_prompt(body: CountTokensRequest, here: Here) -> Response:
    count = await run_in_threadpool(here.scheduler.count, chat_request(body))
    return JSONResponse({"input_tokens": count})


@keyed.get(MODELS, response_model=Models)
async def list_models(here: Here) -> Response:
    return JSONResponse({"object": "list", "data": about_models(here)})


@keyed.get(f"{MODELS}/{{model:path}}", response_model=Model)
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
    return Response(here.metrics.text(), media_type=EXPOSED)


@router.head("/", include_in_schema=False)
@router.get("/", response_class=Response, responses=also("text/html", {"type": "string"}))
async def show_the_page() -> Response:
    return page()


def server_application(guard: Guard, scheduler: Scheduler | None = None, metrics: Metrics | None = None) -> FastAPI:
    """The server of one model; without a scheduler, what describes it."""
    routes = APIRouter()
    for part in (router, keyed, theirs):
        routes.include_router(part)
    metrics = metrics or Metrics()
    app = application(
        routes,
        guard,
        PUBLIC,
        lambda path, refused: messages_error(refused) if path.startswith(MESSAGES) else refused.body(),
        lambda path, status: metrics.answered(route_of(path), status),
        title="gearbx_mlx.server",
        version="1",
        description="A model in gears, behind the APIs of OpenAI and Anthropic.",
    )
    if scheduler is not None:
        app.state.service = Service(scheduler, metrics)
    return app


ROUTES = {route.path for part in (router, keyed, theirs) for route in part.routes}  # type: ignore[attr-defined]


def route_of(path: str) -> str:
    """The route that a path belongs to, for counting: every model is below /v1/models."""
    if path.startswith(f"{MODELS}/"):
        return MODELS
    return path if path in ROUTES or path == "/openapi.json" else "other"


def about_models(here: Service) -> list[dict[str, Any]]:
    """The models that may be asked for; of the one that is loaded, its gears too."""
    provider = here.scheduler.provider
    names = [provider.name] * provider.has_own + list(provider.shelf)
    key, served = provider.model_key, provider.served
    loaded = None if key is None else provider.name_of(key)
    found = []
    for name in dict.fromkeys(names):
        about = {"id": name, "object": "model", "created": provider.created, "owned_by": "gearbx-mlx"}
        if served is not None and name == loaded:
            gears = {"modes": served.modes, "gears": served.gears, "bits": served.bits, "mode": served.default_mode}
            about |= {"gearbx": gears, "context_length": served.context, "vocab_size": served.vocabulary}
        found.append(about)
    return found


# Completions.


async def complete(here: Service, request: BaseRequest, dialect: Dialect) -> Response:
    """Answer a completion, in one piece or as a stream."""
    texts = request.apart()
    came = answers(here, texts)
    index, begun = await anext(came)
    answer = Answer(request, len(texts), index, begun)
    if request.stream:
        dialect.begin(answer.usage)
        return event_stream(stream(answer, came, dialect))
    async with aclosing(came):
        return JSONResponse(dialect.whole(await answer.whole(came)))


async def answers(here: Service, texts: Sequence[BaseRequest]) -> AsyncGenerator[tuple[int, Any], None]:
    """What comes of requests for a text each, with their places and every token counted; closed, it ends the work.

    Raises:
        Exception: what the computation failed with.
    """
    came: asyncio.Queue[Any] = asyncio.Queue()
    left, open_texts = threading.Event(), len(texts)
    since, begun = [time.perf_counter()] * len(texts), [False] * len(texts)
    try:
        for place, text in enumerate(texts):
            await run_in_threadpool(here.scheduler.submit, Asked(text, place, came, left))
        while open_texts:
            index, found = await came.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                open_texts -= 1
                continue
            if isinstance(found, Begun):
                here.metrics.prompt(len(found.prompt.tokens), found.cached)
            if isinstance(found, Emitted):
                now = time.perf_counter()
                here.metrics.token(found.seen, now - since[index], not begun[index])
                since[index], begun[index] = now, True
            yield index, found
    finally:
        left.set()


async def stream(answer: Answer, came: AsyncGenerator[Any, None], dialect: Dialect) -> AsyncGenerator[str, None]:
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
            yield event_text(dialect.failed(refusal(error)))
            return
        for event in dialect.last():
            yield event_text(event)
