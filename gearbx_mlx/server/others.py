"""Client of other servers with OpenAI's API, and a proxy that routes prompts among their models.

`analyze --server` reads whole answers with `RemoteServer`. `routed_application` serves clients: the prompt selects a
model (GEARBX 11), and each part of the answer gets its entropy and gear (GEARBX 12.3).
"""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import anyio
import httpx
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from httpx_sse import EventSource

from ..cli.flags import DEFAULT_TIMEOUT
from ..errors import GearbxError, escaped, one_line
from ..files.reading import parse_json, parse_python_json, typed
from ..routing.gates import first_gear
from .bodies import BodyRoute
from .logprobs import ListedToken, RemoteError, choice_text, listed_tokens
from .web import MAX_ROUTING_CHARS, Guard, Refused, Shutdown, application, event_stream, is_loopback, page_router

MAX_ANSWER_BYTES = 2**28
CHAT_PATH, TEXT_PATH = "/chat/completions", "/completions"
EVENTS, DONE = "text/event-stream", "[DONE]"
URL_REMEDY = "use one such as http://127.0.0.1:8080/v1"
LOGPROB_COUNTS = (20, 11, 10, 5, 1)  # the maximum of OpenAI, of mlx_lm.server, and of other servers
VOCABULARY_FIELDS = ("vocab_size", "n_vocab")

log = logging.getLogger("gearbx_mlx.server")


def objects_in(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list, and none of any other value."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


# Requests for log-probabilities.


@dataclass(frozen=True)
class LogprobRequest:
    """Number of log-probabilities requested per token, and the request fields for it."""

    count: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


def logprob_requests(path: str) -> list[LogprobRequest]:
    """Return all variants, best first. Text completions have one numeric field, or the fields of chat."""
    chat = [LogprobRequest(count, {"logprobs": True, "top_logprobs": count}) for count in LOGPROB_COUNTS]
    text = [LogprobRequest(count, {"logprobs": count}) for count in LOGPROB_COUNTS]
    return chat if path == CHAT_PATH else text + chat


def client_logprobs(body: Mapping[str, Any]) -> LogprobRequest | None:
    """Return the client's own request for log-probabilities; None without one."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    if logprobs is None or logprobs is False:
        return None
    return LogprobRequest(top if type(top) is int else logprobs if type(logprobs) is int else 0)


@dataclass(frozen=True)
class Question:
    """A prompt: verbatim for text completions, else a user message after the optional `system` message."""

    prompt: str
    chat: bool = True
    system: str | None = None
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the server's chat template

    def request(self, model: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request for a greedy answer."""
        body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0.0}
        if not self.chat:
            return TEXT_PATH, {**body, "prompt": self.prompt}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        template = {"chat_template_kwargs": self.template} if self.template else {}
        return CHAT_PATH, {**body, **template, "messages": [*system, {"role": "user", "content": self.prompt}]}


# The client.


class RemoteServer:
    """A server with OpenAI's API; each request has its own connection.

    Args:
        url: base URL, such as http://127.0.0.1:8080/v1. Proxies of the environment apply, except to loopback.
        key: sent as a bearer token, and hidden in messages.
        timeout: seconds for a connection, for a whole answer, and between two events of a stream.

    Attributes:
        shown: the URL without credentials.
        logprob_requests: variants that may still work, by path.
        num_logprobs: log-probabilities per token in the latest answer.

    Raises:
        GearbxError: an invalid URL, or a key that no header can carry.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = DEFAULT_TIMEOUT):
        parts = parsed_url(url)
        if key and not (key.isascii() and key.isprintable()):
            raise GearbxError("the API key has characters that no HTTP header can have; use printable ASCII")
        if not parts.path.rstrip("/"):
            parts = parts.copy_with(path="/v1")
        self.base, self.shown = (str(each).rstrip("/") for each in (parts, parts.copy_with(userinfo=b"")))
        self.key, self.timeout = key, timeout
        self.trust_env = not is_loopback(parts.host)
        self.logprob_requests = {path: logprob_requests(path) for path in (CHAT_PATH, TEXT_PATH)}
        self.num_logprobs = 0

    @asynccontextmanager
    async def opened(self, path: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[httpx.Response]:
        """Send a request, POST with a JSON body or GET without, and yield its response.

        Raises:
            RemoteError: no answer, an incomplete one (also while the caller reads it), or a status of 300 or more.
        """
        headers = {"Accept-Encoding": "identity", "User-Agent": "gearbx-mlx", "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))  # ASCII: half surrogates pass
        try:
            async with (
                httpx.AsyncClient(timeout=self.timeout, verify=certificates(), trust_env=self.trust_env) as client,
                client.stream(method, self.base + path, headers=headers, content=content) as response,
            ):
                if response.status_code >= 300:
                    raise self.refused(response.status_code, await self.text(response))
                yield response
        except (httpx.TimeoutException, TimeoutError) as error:
            raise self.failed(f"no token for {self.timeout:g} s", "set a longer --server-timeout") from error
        except (httpx.ConnectError, UnicodeError) as error:  # the latter: a name that no host can have
            raise self.failed(f"no connection ({one_line(error)})", "start the server, or set --server") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self.failed(f"incomplete answer ({one_line(error)})", "see the server's log, and retry") from error

    async def text(self, response: httpx.Response) -> str:
        """Return a whole answer within the time limit."""
        with anyio.fail_after(self.timeout):
            return b"".join([part async for part in self.parts(response)]).decode("utf-8", "replace")

    async def parts(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """Yield the parts of an answer. Raises RemoteError for too many bytes."""
        size = 0
        async for part in response.aiter_raw():  # still compressed: a few bytes could expand without limit
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise self.failed(f"sent more than {MAX_ANSWER_BYTES} bytes")
            yield part

    async def whole(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object that answers a request. Raises RemoteError for any other answer."""
        async with self.opened(path, body) as response:
            return self.object_in(await self.text(response))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the objects of a stream as they arrive. Raises RemoteError also for an incomplete stream."""
        async with self.opened(path, body) as response:
            if EVENTS not in response.headers.get("content-type", ""):
                self.object_in(await self.text(response))  # may be an error object
                raise self.failed("the answer is not a stream", "use another server")
            stream = httpx.Response(200, headers={"Content-Type": EVENTS}, content=self.parts(response))
            async with aclosing(EventSource(stream).aiter_sse()) as events:
                while True:
                    with anyio.fail_after(self.timeout):
                        event = await anext(events, None)
                    if event is None:
                        raise self.failed("incomplete stream", "see the server's log")
                    if event.data.strip() == DONE:
                        return
                    yield self.object_in(event.data)

    def object_in(self, text: str) -> dict[str, Any]:
        """Return the JSON object in text. Raises RemoteError for other content and for error objects."""
        try:
            found = typed(parse_python_json(text), dict[str, Any])
        except GearbxError as error:
            raise self.failed(f"not an answer of OpenAI's API ({error})") from error
        if found.get("error") and not found.get("choices"):
            raise self.failed(f"reports an error: {error_message(found['error'])}", "see the server's log")
        return found

    def failed(
        self, problem: str, remedy: str = "set --server to the API's URL, such as http://HOST:PORT/v1"
    ) -> RemoteError:
        """Return the error for a failure."""
        return RemoteError(self.hidden(f"{self.shown}: {problem}; {remedy}"), reason=self.hidden(problem))

    def refused(self, status: int, body: str) -> RemoteError:
        """Return the error for a refused request: OpenAI's error object, mlx-lm's text, or the start of the body."""
        try:
            content = parse_json(body)
            reason = error_message(content.get("error", content) if isinstance(content, dict) else content)
        except GearbxError:
            reason = "no reason given" if "<" in body or not body.strip() else error_message(body)
        key, reason = "pass --server-api-key", self.hidden(reason)
        remedies = {401: key, 403: key, 404: "set --server-model and --server", 429: "retry later"}
        remedy = remedies.get(status, "see the server's log" if status >= 500 else "use other flags")
        return RemoteError(f"{self.shown}: answers {status} ({reason}); {remedy}", status, reason)

    def hidden(self, text: str) -> str:
        """Return the text without the key: a server may repeat it."""
        return text.replace(self.key, "***") if self.key else text

    async def models(self) -> dict[str, dict[str, Any]]:
        """Return the listed models' entries by name."""
        rows = objects_in((await self.whole("/models")).get("data"))
        return {row["id"]: row for row in rows if isinstance(row.get("id"), str)}

    async def model(self, name: str | None) -> tuple[str, int | None]:
        """Return the model of this name, or the only one, and its vocabulary size (None if the list omits it).

        Raises:
            RemoteError: no name, and several models or no list.
        """
        try:
            listed = await self.models()
        except RemoteError:
            if name is None:
                raise
            listed = {}
        if name is None and len(listed) != 1:
            shown = ", ".join(list(listed)[:10]) or "none"
            raise self.failed(f"its models are {shown}", "choose one with --server-model")
        name = next(iter(listed)) if name is None else name
        places = objects_in([listed.get(name), listed.get(name, {}).get("meta")])
        sizes = [place.get(key) for place in places for key in VOCABULARY_FIELDS]
        return name, next((size for size in sizes if type(size) is int and size > 0), None)

    async def answer(self, question: Question, model: str, max_tokens: int) -> list[ListedToken]:
        """Return at most `max_tokens` tokens of the greedy answer, by the first log-probability request that works.

        Raises:
            RemoteError: the server fails, or lists no log-probabilities.
        """
        path, body = question.request(model, max_tokens)
        reason = ""
        while self.logprob_requests[path]:
            request = self.logprob_requests[path][0]
            try:
                choices = objects_in((await self.whole(path, {**body, **request.fields})).get("choices"))
                if not choices:
                    raise self.failed("answers without choices")
                tokens = listed_tokens(choices[0], request.count)[:max_tokens]
                if any(token.logprobs for token in tokens) or not choice_text(choices[0]):
                    self.num_logprobs = request.count
                    return tokens
                rest = [one for one in self.logprob_requests[path] if one.fields.keys() != request.fields.keys()]
                self.logprob_requests[path] = rest
            except RemoteError as error:
                if not refuses_logprobs(error):
                    raise
                reason = f" ({error.reason})"
                self.logprob_requests[path].remove(request)
            except GearbxError as error:
                raise self.failed(f"not an answer of OpenAI's API ({error})") from error
        remedy = "start it with log-probabilities, or use another server"
        raise self.failed(f"no log-probabilities for {model}{reason}", remedy)


@cache
def certificates() -> Any:
    """Return this machine's certificates, cached: loading takes tens of milliseconds."""
    return httpx.create_ssl_context()


def parsed_url(url: str) -> httpx.URL:
    """Return a server's URL. Raises GearbxError for an invalid one, without a possible password."""
    url = url.strip()
    try:
        parts = httpx.URL(url)
        has_port = parts.port is None or 0 < parts.port < 2**16
        if parts.scheme in ("http", "https") and parts.host and has_port and not set("?#\\ ") & set(url):
            return parts
    except httpx.InvalidURL:
        pass
    shown = "" if set("@?#") & set(url) else f", got {url[:100]!a}"
    raise GearbxError(f"--server: not the http or https URL of an API{shown}; {URL_REMEDY}")


def error_message(error: Any) -> str:
    """Return the message of OpenAI's error object, or of the value in its place, shortened to one line."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


def refuses_logprobs(error: RemoteError) -> bool:
    """Return whether a server refused the number or kind of log-probabilities."""
    return error.status in (400, 422) and "logprobs" in error.reason


# The proxy.

AUTO = "auto"  # model name that lets the prompt choose


@dataclass(frozen=True)
class RoutedModels:
    """Models of another server, in ascending order of bits, with a common `vocab_size`."""

    remote: RemoteServer
    models: tuple[str, ...]
    vocab_size: int

    def choose_model(self, body: Mapping[str, Any]) -> str:
        """Return the requested model, else the one that the prompt selects (GEARBX 11).

        Raises:
            Refused: an unknown name.
        """
        name = body.get("model")
        if name in self.models:
            return str(name)
        if name not in (None, "", AUTO):
            names = ", ".join((AUTO, *self.models))
            raise Refused(404, f"model: unknown, got {str(name)[:200]!a}; choose from {names}", param="model")
        return self.models[first_gear(routing_text(body)[:MAX_ROUTING_CHARS], len(self.models))]

    async def answer(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the objects of a stream, or one whole answer, each with its `gearbx`. Raises Refused."""
        model, own, left = self.choose_model(body), client_logprobs(body), list(self.remote.logprob_requests[path])
        while True:
            request, has_started = own or next(iter(left), LogprobRequest()), False
            try:
                async for part in self.forwarded(path, {**body, **request.fields, "model": model}):
                    has_started, self.remote.logprob_requests[path] = True, left
                    yield self.annotated(part, model, request.count, own is None)
                return
            except RemoteError as error:
                if has_started or own or not left or not refuses_logprobs(error):
                    raise refusal_of(error) from error
                left.remove(request)

    async def forwarded(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the objects of a stream, or one whole answer, as the request's `stream` sets."""
        if body.get("stream") is not True:
            yield await self.remote.whole(path, body)
            return
        async with aclosing(self.remote.events(path, body)) as events:
            async for chunk in events:
                yield chunk

    def annotated(self, answer: dict[str, Any], model: str, requested: int, hide: bool) -> dict[str, Any]:
        """Return an answer with gear and entropy of its tokens; `hide` removes the log-probabilities."""
        choices = objects_in(answer.get("choices"))
        try:
            tokens = [token for choice in choices for token in listed_tokens(choice, requested) if token.logprobs]
            bounds = [token.entropy(self.vocab_size) for token in tokens]
        except GearbxError as error:
            raise self.remote.failed(f"invalid log-probabilities ({one_line(error)})") from error
        for choice in choices if hide else ():
            choice |= {"logprobs": None}
        found = [{"gear": model, "entropy_low": round(low, 4), "entropy_high": round(high, 4)} for low, high in bounds]
        return {**answer, "gearbx": {"mode": "prompt", "gear": model, "tokens": found}}


def routing_text(body: Mapping[str, Any]) -> str:
    """Return the user's last message or the prompt of a text completion; "" without text."""
    messages, content = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        own = [one.get("content") for one in objects_in(messages) if one.get("role") == "user"]
        content = own[-1] if own else None
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return " ".join(text for text in texts if isinstance(text, str))


def refusal_of(error: RemoteError) -> Refused:
    """Return a client's view of an error: all of it for a wrong request, else only that the server failed."""
    if 400 <= error.status < 500 and error.status not in (401, 403, 407):  # these concern the proxy's key
        return Refused(error.status, error.reason)
    log.warning("%s", escaped(one_line(error)))
    return Refused(502, f"the server of this model: {error.reason}", "server_error", code="bad_gateway")


router = APIRouter(route_class=BodyRoute)
router.include_router(page_router)


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    routed: RoutedModels = request.app.state.routed
    entry = {"object": "model", "created": 0, "owned_by": "gearbx-mlx"}
    auto = {"id": AUTO, **entry, "gearbx": {"gears": routed.models}, "vocab_size": routed.vocab_size}
    return JSONResponse({"object": "list", "data": [auto, *({"id": name, **entry} for name in routed.models)]})


@router.get("/health")
async def health(request: Request) -> Response:
    try:
        await request.app.state.routed.remote.models()
    except RemoteError as error:
        if error.status != 404:  # a server without a list is up
            return JSONResponse({"status": "unavailable", "reason": error.reason}, 503)
    return JSONResponse({"status": "ok"})


@router.post(CHAT_PATH)
@router.post(f"/v1{CHAT_PATH}")
@router.post(f"/v1{TEXT_PATH}")
async def forward(request: Request, body: dict[str, Any]) -> Response:
    routed: RoutedModels = request.app.state.routed
    shutdown: Shutdown = request.app.state.shutdown
    if not isinstance(body.get("stream"), bool | None):
        raise Refused(400, "stream: neither true nor false; use one of them", param="stream")
    parts = routed.answer(request.url.path.removeprefix("/v1"), body)
    with shutdown.interrupting():
        first = await anext(parts, None)
    if body.get("stream"):
        return event_stream(stream_events(first, parts, shutdown))
    return Response(json.dumps(first), media_type="application/json")  # infinities of a server stay


async def stream_events(
    part: Any, parts: AsyncGenerator[dict[str, Any], None], shutdown: Shutdown
) -> AsyncIterator[str]:
    """Yield the events of a stream that starts with `part`. The last event of a broken stream is its error."""
    async with aclosing(parts):
        try:
            while part is not None:
                yield f"data: {json.dumps(part)}\n\n"
                with shutdown.interrupting():
                    part = await anext(parts, None)
        except Refused as refused:
            yield f"data: {json.dumps(refused.body())}\n\n"
            return
        yield f"data: {DONE}\n\n"


def routed_application(guard: Guard, routed: RoutedModels) -> FastAPI:
    """Return the application that routes prompts among another server's models."""
    app = application(router, guard, title="gearbx_mlx.server, models of another server")
    app.state.routed = routed
    return app
