"""HTTP layer of every server here: access control, limits on bodies, error objects, the page, and uvicorn in a thread.

The applications are FastAPI's. `Gatekeeper` wraps one: it refuses foreign pages, requires the key, limits bodies,
cancels requests of clients that disconnect, and answers exceptions with error objects. A wrong request gets a 4xx
status, and the log escapes all text of clients.
"""

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import socket
import sys
import threading
import time
import traceback
from base64 import b64encode
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
import h11
import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import GearbxError, escaped, one_line

REQUEST_TIMEOUT = 30.0  # seconds for a client to send its request
DRAIN_TIMEOUT = 1.0  # seconds without a byte of a refused body; then its connection closes
MAX_BODY_BYTES = 2**24
SMALL_BODY_BYTES = 2**16  # one such body per connection fits into memory
MAX_BODIES = 4  # largest bodies in memory at once
MAX_THREADS = 2  # threads that validate and tokenize requests
MAX_ROUTING_CHARS = 2**16  # characters of a prompt that select its gear or model
MAX_HEADERS, MAX_PATH_BYTES = 100, 2**16
LOG_FIELDS = "gearbx.log_fields"  # key in a request's scope: fields that a route adds to the log line
PLAIN = re.compile(r"[\w.,:-]+", re.ASCII)
INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)

log = logging.getLogger("gearbx_mlx.server")


# Access.


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host name spells; None for a domain name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Return whether a host name means only this machine."""
    address = address_of(name)
    return name == "localhost" if address is None else address.is_loopback


def host_name(host: str) -> str:
    """Return the host of a header or URL authority, without port; "" if invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


@dataclass(frozen=True)
class Guard:
    """Access rules of a server."""

    api_key: str | None = None  # None: no key is required
    allowed_origins: tuple[str, ...] = ()  # origins of pages besides the server's own; "*": all
    max_body: int | None = None  # bytes; None: as the server's models require
    request_timeout: float = REQUEST_TIMEOUT
    host: str = "127.0.0.1"  # host name or address that the server listens on
    allowed_hosts: tuple[str, ...] = ()  # additional names of the server in requests

    def check_page(self, headers: Headers) -> None:
        """Validate the Host and Origin headers.

        A browser sends requests of any page, with the page's origin. A page whose own name resolves to this machine
        (DNS rebinding) has the server's origin, so host names are checked too.

        Raises:
            Refused: a host name that is not the server's, or a page of a foreign origin.
        """
        hosts = [host.lower() for host in headers.getlist("host")]
        for host in hosts:
            if not self.is_own_name(host_name(host)):
                why = f"Host: not a name of this server, got {host[:200]!a}; use --allowed-hosts to allow it"
                raise Refused(403, why, code="host_not_allowed")
        own = [f"{scheme}://{host}" for host in hosts for scheme in ("http", "https")]
        for origin in (origin.lower() for origin in headers.getlist("origin")):
            if origin not in own and not {"*", origin} & set(self.allowed_origins):
                why = f"Origin: foreign page, got {origin[:200]!a}; use --allowed-origins to allow it"
                raise Refused(403, why, code="origin_not_allowed")

    def is_own_name(self, name: str) -> bool:
        """Return whether a Host header may have this name. Beyond loopback, any address: rebinding needs a name."""
        if is_loopback(name) or name in (self.host.lower(), *self.allowed_hosts):
            return True
        return address_of(name) is not None and not is_loopback(self.host)


# Errors.


class Refused(HTTPException):
    """A response with OpenAI's error object, its type `kind` and its `code`; `param` is the wrong field."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(status, message)
        self.message, self.kind, self.param, self.code = message, kind, param, code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refusal(error: BaseException) -> Refused:
    """Return a client's view of an error: its own mistakes in full, only the type of all others."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestValidationError):  # only for an empty body: BodyRoute parses all others
        return Refused(400, "body: not a JSON object; use one")
    if isinstance(error, HTTPException):  # from the router
        return Refused(error.status_code, f"{error.detail}: no such route", code="not_found")
    if isinstance(error, GearbxError):
        return Refused(400, one_line(error))
    log.error("%s: %s", type(error).__name__, escaped(one_line(error)), exc_info=log.isEnabledFor(logging.DEBUG))
    return Refused(500, f"the server failed ({type(error).__name__}); see its log", "server_error")


# From the socket to the routes.


class RequestLimits(NamedTuple):
    """Maximum bytes of a body, and maximum values in it."""

    body: int = MAX_BODY_BYTES
    values: int = 2**18


@dataclass
class Gatekeeper:
    """ASGI middleware that applies a guard."""

    app: ASGIApp
    guard: Guard
    public: Collection[str]  # paths that need no key
    error_object: Callable[[str, Refused], Mapping[str, Any]]  # body of an error response, by the request's path
    answered: Callable[[str, int], None]  # called with path and status of every response
    limits: Callable[[], RequestLimits] = RequestLimits
    held: int = 0  # bytes of all bodies above SMALL_BODY_BYTES whose requests have no response yet

    def __post_init__(self) -> None:
        self.inside = CORSMiddleware(
            self.answer, self.guard.allowed_origins, allow_methods=["GET", "POST", "OPTIONS"], allow_headers=["*"]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self.inside
        try:
            self.guard.check_page(Headers(scope=scope))
        except Refused as refused:
            self.answered(scope["path"], refused.status_code)
            log_answer(scope, refused.status_code, {})
            answer = self.response(scope, refused)
            send = draining(send, receive) if scope["method"] == "POST" else send
        await answer(scope, receive, send)

    def response(self, scope: Scope, refused: Refused) -> Response:
        return JSONResponse(self.error_object(scope["path"], refused), refused.status_code)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that passed the page check, and log it at its end."""
        status, is_complete, is_read, start = 0, False, scope["method"] != "POST", time.perf_counter()
        scope[LOG_FIELDS] = log_fields = dict[str, Any]()

        async def sending(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                self.answered(scope["path"], status)
            else:
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            with self.holding(self.checked_length(scope)):
                body = await Request(scope, receive).body() if scope["method"] == "POST" else b""
                is_read = True
                await until_disconnect(lambda: self.app(scope, replayed(body), sending), receive)
        except ClientDisconnect:
            pass
        except Exception as error:
            response = self.response(scope, refusal(error))
            traceback.clear_frames(error.__traceback__)  # frames keep the body until a garbage collection
            if not status:
                await response(scope, receive, sending if is_read else draining(sending, receive))
        finally:
            seconds = f"{time.perf_counter() - start:.3f}"
            log_answer(scope, status, {"seconds": seconds, **log_fields, **({} if is_complete else {"left": "early"})})

    def checked_length(self, scope: Scope) -> int:
        """Return the body's length in bytes. Raises Refused for requests that the headers disqualify."""
        headers = Headers(scope=scope)
        if len(headers) > MAX_HEADERS:
            raise Refused(431, f"headers: more than {MAX_HEADERS}; omit some")
        if len(scope["raw_path"]) > MAX_PATH_BYTES:
            raise Refused(414, f"path: more than {MAX_PATH_BYTES} bytes; use a shorter one")
        scope["query_string"] = b""  # no route reads it
        if scope["path"] not in self.public:
            self.check_key(headers)
        if scope["method"] != "POST":
            return 0
        length = headers.get("content-length", "")
        if not length or "transfer-encoding" in headers:  # chunks may exceed the announced length
            raise Refused(411, "Content-Length: missing, or beside a Transfer-Encoding; use it without the latter")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise Refused(415, "Content-Encoding: the body is compressed; omit the encoding")
        if len(length) > 18:
            raise Refused(400, "Content-Length: not a number of bytes; use one")
        if int(length) > (max_body := self.max_body):
            raise Refused(413, f"body: at most {max_body} bytes, got {int(length)}; use a shorter one")
        MutableHeaders(scope=scope)["content-type"] = "application/json"  # regardless of the client's type
        return int(length)

    @property
    def max_body(self) -> int:
        return self.guard.max_body or self.limits().body

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count a body as held. Raises Refused if held bodies exceed the memory for them; small ones never do."""
        size = size if size > SMALL_BODY_BYTES else 0
        if size and self.held + size > MAX_BODIES * self.max_body:
            why = f"the server holds {self.held} bytes of pending requests; use it again later"
            raise Refused(503, why, "server_error", code="overloaded")
        self.held += size
        try:
            yield
        finally:
            self.held -= size

    def check_key(self, headers: Headers) -> None:
        """Validate the key: `Authorization: Bearer KEY` or `x-api-key: KEY`. Raises Refused."""
        if self.guard.api_key is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        own = self.guard.api_key.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(key.strip(" \t").encode("latin-1"), own):
            why = "API key: missing or wrong; pass the server's"
            raise Refused(401, why, "authentication_error", code="invalid_api_key")


def log_answer(scope: Scope, status: int, log_fields: Mapping[str, Any]) -> None:
    """Log a response: client, request, status and fields."""
    client = (scope.get("client") or ("?",))[0]
    more = "".join(f" {name}={quoted(str(value))}" for name, value in log_fields.items())
    log.info('%s "%s %s" %d%s', client, escaped(scope["method"]), escaped(scope["path"]), status, more)


def quoted(value: str) -> str:
    """Return a value for a log line: a plain word unchanged, else as a JSON string, so that it forms no other field."""
    return value if PLAIN.fullmatch(value) else json.dumps(value)


def replayed(body: bytes) -> Receive:
    """Return a `receive` that delivers a body; `until_disconnect` watches for disconnects."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await anyio.sleep_forever()
        return messages.pop()

    return receive


def draining(send: Send, receive: Receive) -> Send:
    """Return a `send` for a request with an unread body; its connection closes after the response.

    The client gets the response at once. The rest of the body is then dropped as long as it arrives, up to the request
    timeout: closing a socket with unread bytes would reset the connection and could destroy the response.
    """

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif not message.get("more_body", False):
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                more = True
                while more:
                    with anyio.fail_after(DRAIN_TIMEOUT):
                        more = (await receive()).get("more_body", False)
            message = {**message, "body": b""}
        await send(message)

    return sending


async def until_disconnect(answer: Callable[[], Awaitable[None]], receive: Receive) -> None:
    """Answer a request, and cancel the answer if the client disconnects."""
    failure: Exception | None = None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            await answer()
        except Exception as error:  # a task group would wrap it in an ExceptionGroup
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def stopping() -> Refused:
    return Refused(503, "the server is stopping", "server_error")


class Shutdown:
    """The end of a server, as an event that interrupts all pending answers."""

    def __init__(self) -> None:
        self.is_set = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waits = set[anyio.CancelScope]()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Wait in this context for a part of an answer. Raises Refused if the server stops first."""
        self.loop = asyncio.get_running_loop()
        with anyio.CancelScope() as wait:
            if self.is_set:
                wait.cancel()
            self.waits.add(wait)
            try:
                yield
            finally:
                self.waits.discard(wait)
        if wait.cancelled_caught:
            raise stopping()

    def set(self) -> None:
        """Cancel all present and future waits, from any thread."""
        self.is_set = True
        if self.loop is not None:
            with suppress(RuntimeError):  # the loop is closed, so no wait is left
                self.loop.call_soon_threadsafe(self.cancel_waits)

    def cancel_waits(self) -> None:
        for wait in self.waits:
            wait.cancel()


def raise_error(request: Request, error: Exception) -> Response:
    """Pass an error on to `Gatekeeper`."""
    raise error


def application(
    router: APIRouter,
    guard: Guard,
    public: Collection[str] = ("/", "/health"),
    error_object: Callable[[str, Refused], Mapping[str, Any]] = lambda path, refused: refused.body(),
    answered: Callable[[str, int], None] = lambda path, status: None,
    limits: Callable[[], RequestLimits] = RequestLimits,
    **metadata: Any,
) -> FastAPI:
    """Return the application of a router, with the arguments of `Gatekeeper`, and `metadata` for FastAPI."""
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False, **metadata)
    app.state.shutdown, app.state.limits, app.state.threads = Shutdown(), limits, anyio.CapacityLimiter(MAX_THREADS)
    app.include_router(router)
    for kind in (HTTPException, RequestValidationError):
        app.add_exception_handler(kind, raise_error)
    gate: dict[str, Any] = {"error_object": error_object, "answered": answered, "limits": limits}
    app.add_middleware(Gatekeeper, guard=guard, public=public, **gate)
    return app


def event_stream(events: AsyncIterable[str | bytes]) -> StreamingResponse:
    """Return a response of server-sent events, each sent at once."""
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, headers=headers)


def response_schema(media_type: str, schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a response that is not JSON."""
    return {200: {"content": {media_type: {"schema": schema}}}}


# The page.

page_router = APIRouter()


@page_router.head("/", include_in_schema=False)
@page_router.get("/", response_class=Response, responses=response_schema("text/html", {"type": "string"}))
async def show_page() -> Response:
    return page()


@functools.cache
def page() -> Response:
    """Return the page at `/`, one file; a browser stores none of it and runs only its own scripts."""
    text = files("gearbx_mlx.server").joinpath("page.html").read_bytes()
    headers = {"Content-Security-Policy": policy(text), "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


def policy(text: bytes) -> str:
    """Return the page's Content-Security-Policy: its own scripts and styles by hash, inline images, its own server."""
    found: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for kind, inside in INLINE.findall(text):
        found[kind].append(f"'sha256-{b64encode(hashlib.sha256(inside).digest()).decode()}'")
    return (
        f"default-src 'none'; script-src {' '.join(found[b'script'])}; style-src {' '.join(found[b'style'])}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


# The server.

MAX_CONNECTIONS = 256
MAX_TIMER_DELAY = 0.5  # seconds; a timer that is later means that the process was suspended
LAST_READ = 0.02  # seconds for the event loop to read data that arrived during a suspension
SWITCH_INTERVAL = 0.001  # seconds between switches of Python threads
SHUTDOWN_TIMEOUT = 2  # seconds for pending answers to end
TOO_SLOW = Refused(408, "the request arrived too slowly", "timeout")


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for clients that send or receive slowly."""

    timeout = REQUEST_TIMEOUT  # seconds

    def connection_made(self, transport: Any) -> None:
        self.timers: dict[Any, asyncio.TimerHandle] = {}  # by their callbacks
        super().connection_made(transport)
        self.set_timer(True, self.close_slow)
        self.idle_since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS - 16:  # idle connections make room for new ones
            others = (each for each in self.connections if isinstance(each, PatientProtocol) and each is not self)
            idle = min((each for each in others if each.is_idle), key=lambda each: each.idle_since, default=None)
            if idle is not None:
                idle.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.set_timer(self.is_incomplete, self.close_slow)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = self.loop.time()
        self.set_timer(self.is_incomplete, self.close_slow)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.set_timer(True, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.set_timer(False, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self.timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Close the connection of a client that sends no more, after an immediate response."""
        self.loop.call_later(0.2, self.transport.close)  # seconds
        return True

    @property
    def is_idle(self) -> bool:
        """Absence of a request whose headers are complete."""
        return self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and not self.transport.is_closing()

    @property
    def is_incomplete(self) -> bool:
        """Presence of a partial request."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def set_timer(self, is_waiting: bool, callback: Callable[[], None]) -> None:
        """Start the timer of a callback if none runs, or cancel it."""
        if not is_waiting and callback in self.timers:
            self.timers.pop(callback).cancel()
        elif is_waiting and callback not in self.timers:
            due = self.loop.time() + self.timeout
            self.timers[callback] = self.loop.call_at(due, self.time_out, callback, due)

    def time_out(self, callback: Callable[[], None], due: float) -> None:
        """Call `callback` after a last read; a process that was suspended (Ctrl-Z) starts the timer again.

        After a suspension, the loop may call a timer before it reads.
        """
        if self.loop.time() < due + MAX_TIMER_DELAY:
            self.timers[callback] = self.loop.call_later(LAST_READ, callback)
        else:
            del self.timers[callback]
            self.set_timer(True, callback)

    def close_slow(self) -> None:
        """Close the connection, with status 408 if no response has started."""
        if self.is_incomplete and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.refuse(TOO_SLOW)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 cannot parse."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if status == 431 and b"\n" not in self.conn.trailing_data[0]:
            status = 414
        self.refuse(Refused(status, escaped(str(error))))
        self.transport.close()

    def refuse(self, refused: Refused) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(refused.body()).encode()
        headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        self.transport.write(f"HTTP/1.1 {refused.status_code} \r\n{headers}\r\n\r\n".encode() + body)


class Server:
    """A socket that listens at once, and uvicorn in a thread that answers between `start` and `stop`.

    Args:
        host, port: address; port 0 is any free port.
        timeout: seconds for a client to send a request, or to receive a response.

    Raises:
        GearbxError: an address that does not exist or is taken.
    """

    def __init__(self, host: str, port: int, timeout: float = REQUEST_TIMEOUT):
        self.timeout = timeout
        self.description = ""  # the served models in a few words
        self.app: Any = None
        self.uvicorn: uvicorn.Server | None = None
        self.ended = threading.Event()
        try:
            family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            self.socket = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
            # Without it, a response's body waits 40 ms for the client's acknowledgement of the headers.
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = (getattr(error, "strerror", None) or one_line(error)).partition(" (while")[0]
            raise GearbxError(f"cannot listen on {host}, port {port} ({reason}); use another port or host") from error

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.socket.close()

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self, app: ASGIApp) -> None:
        """Start to answer."""
        sys.setswitchinterval(SWITCH_INTERVAL)  # for the event loop, beside threads that parse or compute
        self.app = app
        config = uvicorn.Config(
            app,
            http=type("Protocol", (PatientProtocol,), {"timeout": self.timeout}),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="critical",  # Gatekeeper logs requests and errors
            access_log=False,
            server_header=False,
            headers=[("server", "gearbx-mlx"), ("x-content-type-options", "nosniff")],
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=2**16,  # bytes of a request before its body
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        )
        self.uvicorn = server = uvicorn.Server(config)

        def run() -> None:
            try:
                server.run([self.socket])
            finally:
                self.ended.set()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        while not (server.started or self.ended.is_set()):
            time.sleep(0.005)

    def wait(self) -> None:
        """Wait for the end of the server, not by a join: a signal's exception passes through, and would break a join.

        The timeout is for a suspended process, where a different thread may receive the signal.
        """
        while not self.ended.wait(MAX_TIMER_DELAY):
            pass

    def stop(self) -> None:
        """Stop the server. Pending answers end with an error within SHUTDOWN_TIMEOUT seconds."""
        if self.uvicorn is not None:
            self.app.state.shutdown.set()
            self.uvicorn.should_exit = True
            self.ended.wait()
            self.thread.join()


class EscapingFormatter(logging.Formatter):
    """A formatter that escapes line breaks and terminal codes in records, and indents tracebacks."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        first, *traceback = super().format(record).split("\n")
        return "\n".join([first, *(f"  {escaped(line)}" for line in traceback)])
