"""What every server here has in common: who may come in, how much of what they send is read, and how errors look.

The applications are FastAPI's. `Gatekeeper` stands in front of one: it turns foreign pages away, asks for the key,
holds a body that is not too large, gives a request up when its client leaves, and answers with an error object where
the application raises. What is wrong with a request gets a status of 4xx, and the server goes on; nothing that a client
wrote reaches the log unescaped.

`Server` has the socket and uvicorn, in a thread of its own, and no more patience with clients than is good for it.
"""

import asyncio
import functools
import hashlib
import hmac
import json
import logging
import re
import socket
import sys
import threading
import time
import traceback
from base64 import b64encode
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
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
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import GearbxError, escaped, one_line
from . import address_of, is_loopback

PATIENCE = 30.0  # seconds that a client has to send its request
SILENCE = 1.0  # seconds without a byte of a refused body, after which its connection closes
LARGEST_BODY = 2**24  # bytes
SMALL_BODY = 2**16  # bytes; as many of these as there are connections fit into memory
MAX_BODIES = 4  # largest bodies that are held at once
MAX_THREADS = 2  # that work on requests before they are computed
MAX_HEADERS, LONGEST_PATH = 100, 2**16
LOG_FIELDS = "gearbx.told"  # of a request's scope: what a route knows of its answer, for the log
PLAIN = re.compile(r"[\w.,:-]+", re.ASCII)
INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)

log = logging.getLogger("gearbx_mlx.server")


@dataclass(frozen=True)
class Guard:
    """Who may come in.

    api_key: that requests must bring; None: none. allowed_origins: of pages beside the server's own, "*": any.
    largest_body: bytes; None: as many as the server's models have a use for. patience: seconds that a client has to
    send its request. host: on which the server listens. allowed_hosts: further names by which requests may reach it.
    """

    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    largest_body: int | None = None
    patience: float = PATIENCE
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()

    def check_page(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises Refused for a request by a name that is not the server's, or of a page of another origin.

        A browser sends every page's requests, and says which page it was. A page that has its own name lead to this
        machine (DNS rebinding) has the server's origin, so names are checked too.
        """
        given = [(name, value.decode("latin-1").lower()) for name, value in headers]
        hosts = [value for name, value in given if name == b"host"]
        for host in hosts:
            if not self.is_reached_by(host_name(host)):
                why = f"this server is not reached as {host[:200]!a}; start it with --allowed-hosts to allow that"
                raise Refused(403, why, code="host_not_allowed")
        own = [f"{scheme}://{host}" for host in hosts for scheme in ("http", "https")]
        for origin in (value for name, value in given if name == b"origin"):
            if origin not in own and not {"*", origin} & set(self.allowed_origins):
                why = f"pages of {origin[:200]!a} may not ask; start the server with --allowed-origins to allow that"
                raise Refused(403, why, code="origin_not_allowed")

    def is_reached_by(self, name: str) -> bool:
        """Return whether a request may name the server so; beyond loopback by any address: rebinding needs a name."""
        if is_loopback(name) or name in (self.host.lower(), *self.allowed_hosts):
            return True
        return address_of(name) is not None and not is_loopback(self.host)


def host_name(host: str) -> str:
    """Return the host in a header or a URL's authority, without its port; "" where it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


class Refused(HTTPException):
    """A request that is answered with an error object.

    status: of HTTP. message: one line. kind, code: OpenAI's type and code of the error. param: the field that is wrong.
    """

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
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refusal(error: BaseException) -> Refused:
    """Return what a client gets to know of an error: a mistake of its own in full, others by their kind alone."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestValidationError):  # only of a body without a byte: BodyRoute has read all others
        return Refused(400, "the body is not a JSON object")
    if isinstance(error, HTTPException):  # of the router
        return Refused(error.status_code, f"{error.detail}: nothing is served in this way here", code="not_found")
    if isinstance(error, GearbxError):
        return Refused(400, one_line(error))
    log.error("%s: %s", type(error).__name__, escaped(one_line(error)), exc_info=log.isEnabledFor(logging.DEBUG))
    return Refused(500, f"the server failed ({type(error).__name__}); its log says why", "server_error")


# From the socket to the routes.


class RequestLimits(NamedTuple):
    """Bytes of a body, and values in it, that requests to the server have a use for."""

    body: int = LARGEST_BODY
    values: int = 2**18


@dataclass
class Gatekeeper:
    """An application behind its guard.

    public: paths that need no key. error_object: the body of an error, by the request's path. answered: called with the
    path and the status of every answer. limits: of a request that comes now. held: bytes of the bodies that are larger
    than SMALL_BODY, of all requests that have no answer yet.
    """

    app: ASGIApp
    guard: Guard
    public: Collection[str]
    error_object: Callable[[str, Refused], Mapping[str, Any]]
    answered: Callable[[str, int], None]
    limits: Callable[[], RequestLimits] = RequestLimits
    held: int = 0

    def __post_init__(self) -> None:
        self.inside = CORSMiddleware(
            self.answer, self.guard.allowed_origins, allow_methods=["GET", "POST", "OPTIONS"], allow_headers=["*"]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self.inside
        try:
            self.guard.check_page(scope["headers"])
        except Refused as refused:
            self.answered(scope["path"], refused.status_code)
            log_answer(scope, refused.status_code, {})
            answer = self.response(scope, refused)
            send = closing(send, receive) if scope["method"] == "POST" else send
        await answer(scope, receive, send)

    def response(self, scope: Scope, refused: Refused) -> Response:
        return JSONResponse(self.error_object(scope["path"], refused), refused.status_code)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that no foreign page has sent, and log it when the answer has ended."""
        status, whole, since = 0, False, time.perf_counter()
        is_read = scope["method"] != "POST"
        scope[LOG_FIELDS] = told = dict[str, Any]()

        async def sending(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                self.answered(scope["path"], status)
            else:
                whole = not message.get("more_body", False)
            await send(message)

        try:
            with self.holding(self.length(scope)):
                body = await Request(scope, receive).body() if scope["method"] == "POST" else b""
                is_read = True
                await unless_left(lambda: self.app(scope, replayed(body), sending), receive)
        except ClientDisconnect:
            pass
        except Exception as error:
            said = self.response(scope, refusal(error))
            traceback.clear_frames(error.__traceback__)  # which hold the body until Python looks for circles
            if not status:
                await said(scope, receive, sending if is_read else closing(sending, receive))
        finally:
            seconds = f"{time.perf_counter() - since:.3f}"
            log_answer(scope, status, {"seconds": seconds, **told, **({} if whole else {"left": "early"})})

    def length(self, scope: Scope) -> int:
        """Return how many bytes the body of a request has. Raises Refused for a request that may not come in."""
        headers = dict(scope["headers"])
        if len(scope["headers"]) > MAX_HEADERS:
            raise Refused(431, f"the request has more than {MAX_HEADERS} headers")
        if len(scope["raw_path"]) > LONGEST_PATH:
            raise Refused(414, f"the path has more than {LONGEST_PATH} bytes")
        scope["query_string"] = b""  # no route has a use for it
        if scope["path"] not in self.public:
            self.check_key(headers)
        if scope["method"] != "POST":
            return 0
        length = headers.get(b"content-length", b"")
        if not length or b"transfer-encoding" in headers:  # whose chunks may be more than the length says
            raise Refused(411, "the request has no Content-Length, or has a Transfer-Encoding; send the length alone")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refused(415, "the body is compressed; send it as it is, without Content-Encoding")
        if len(length) > 18:
            raise Refused(400, "Content-Length is not a number of bytes")
        if int(length) > (largest := self.largest_body):
            raise Refused(413, f"the body has {int(length)} bytes; send {largest} at most")
        kept = [header for header in scope["headers"] if header[0] != b"content-type"]
        scope["headers"] = [*kept, (b"content-type", b"application/json")]  # whatever the client calls it
        return int(length)

    @property
    def largest_body(self) -> int:
        return self.guard.largest_body or self.limits().body

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Hold a body. Raises Refused where those that are held need too much memory; small ones never do."""
        size = size if size > SMALL_BODY else 0
        if size and self.held + size > MAX_BODIES * self.largest_body:
            why = f"{self.held} bytes of other requests have no answer yet; ask again later"
            raise Refused(503, why, "server_error", code="overloaded")
        self.held += size
        try:
            yield
        finally:
            self.held -= size

    def check_key(self, headers: dict[bytes, bytes]) -> None:
        """Raises Refused without the key: `Authorization: Bearer KEY`, or `x-api-key: KEY`."""
        if self.guard.api_key is None:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        key = given if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(key.strip(b" \t"), self.guard.api_key.encode("utf-8", "surrogateescape")):
            raise Refused(401, "no API key, or a wrong one", "authentication_error", code="invalid_api_key")


def log_answer(scope: Scope, status: int, told: Mapping[str, Any]) -> None:
    """Write the line of an answer into the log: who asked for what, and what is known of the answer."""
    client = (scope.get("client") or ("?",))[0]
    more = "".join(f" {name}={quoted(str(value))}" for name, value in told.items())
    log.info('%s "%s %s" %d%s', client, escaped(scope["method"]), escaped(scope["path"]), status, more)


def quoted(value: str) -> str:
    """Return a value for a line of the log: a word as it is, anything else in quotes, which nobody takes for fields."""
    return value if PLAIN.fullmatch(value) else json.dumps(value)


def replayed(body: bytes) -> Receive:
    """Return the `receive` of an application: the body; that the client leaves is noticed elsewhere."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await anyio.sleep_forever()
        return messages.pop()

    return receive


def closing(send: Send, receive: Receive) -> Send:
    """Return the `send` for a request whose body is not read: its connection cannot be used again, and closes.

    The client has the response at once. The rest of the body is then dropped for as long as it comes, up to the
    server's patience: closing a socket with unread bytes would reset the connection and could destroy the response.
    """

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif not message.get("more_body", False):
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                more = True
                while more:
                    with anyio.fail_after(SILENCE):
                        more = (await receive()).get("more_body", False)
            message = {**message, "body": b""}
        await send(message)

    return sending


async def unless_left(answer: Callable[[], Awaitable[None]], receive: Receive) -> None:
    """Answer a request; where the client leaves before its end, the answer is cancelled."""
    failed: Exception | None = None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            await answer()
        except Exception as error:  # which a task group would put into a group of errors
            failed = error
        tasks.cancel_scope.cancel()
    if failed is not None:
        raise failed


def stopping() -> Refused:
    return Refused(503, "the server is stopping", "server_error")


class Stop:
    """The end of a server, of which all answers that are in the making hear at once."""

    def __init__(self) -> None:
        self.is_near = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waits = set[anyio.CancelScope]()

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Wait inside for a part of an answer. Raises Refused where the server stops before it comes."""
        self.loop = asyncio.get_running_loop()
        with anyio.CancelScope() as wait:
            if self.is_near:
                wait.cancel()
            self.waits.add(wait)
            try:
                yield
            finally:
                self.waits.discard(wait)
        if wait.cancelled_caught:
            raise stopping()

    def announce(self) -> None:
        """End all waits, in any thread, and those that begin later."""
        self.is_near = True
        if self.loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and nothing waits
                self.loop.call_soon_threadsafe(self.end_waits)

    def end_waits(self) -> None:
        for wait in self.waits:
            wait.cancel()


def raise_error(request: Request, error: Exception) -> Response:
    """Let `Gatekeeper` answer errors."""
    raise error


def application(
    router: APIRouter,
    guard: Guard,
    public: Collection[str] = ("/", "/health"),
    error_object: Callable[[str, Refused], Mapping[str, Any]] = lambda path, refused: refused.body(),
    answered: Callable[[str, int], None] = lambda path, status: None,
    limits: Callable[[], RequestLimits] = RequestLimits,
    **about: Any,
) -> FastAPI:
    """Return the application of these routes; arguments as for `Gatekeeper`, and `about` as for FastAPI."""
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False, **about)
    app.state.stop, app.state.limits, app.state.threads = Stop(), limits, anyio.CapacityLimiter(MAX_THREADS)
    app.include_router(router)
    for kind in (HTTPException, RequestValidationError):
        app.add_exception_handler(kind, raise_error)
    gate: dict[str, Any] = {"error_object": error_object, "answered": answered, "limits": limits}
    app.add_middleware(Gatekeeper, guard=guard, public=public, **gate)
    return app


def event_stream(events: AsyncIterable[str | bytes]) -> StreamingResponse:
    """Return an answer of server-sent events, each sent at once."""
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, headers=headers)


def also(media_type: str, schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return what the description says of an answer that is not JSON."""
    return {200: {"content": {media_type: {"schema": schema}}}}


# The page.

front = APIRouter()


@front.head("/", include_in_schema=False)
@front.get("/", response_class=Response, responses=also("text/html", {"type": "string"}))
async def show_the_page() -> Response:
    return page()


@functools.cache
def page() -> Response:
    """Return the page at `/`: one file, of which a browser keeps nothing and runs nothing that is not in it."""
    text = files("gearbx_mlx.serving").joinpath("page.html").read_bytes()
    headers = {"Content-Security-Policy": policy(text), "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


def policy(text: bytes) -> str:
    """Return the policy of a page: its own scripts and styles, by their hashes; pictures in it; its own server."""
    found: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for kind, inside in INLINE.findall(text):
        found[kind].append(f"'sha256-{b64encode(hashlib.sha256(inside).digest()).decode()}'")
    return (
        f"default-src 'none'; script-src {' '.join(found[b'script'])}; style-src {' '.join(found[b'style'])}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


MAX_CONNECTIONS = 256
STOPPED = 0.5  # seconds by which a timer is late where the process was stopped
LAST_LOOK = 0.02  # seconds
SWITCH = 0.001  # seconds after which a thread of Python makes room for another
LAST_WORDS = 2  # seconds in which answers may end once the server stops
TOO_SLOW = Refused(408, "the request came too slowly", "timeout")


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP, for clients that send or take too slowly: they are let go after `patience` seconds."""

    patience = PATIENCE

    def connection_made(self, transport: Any) -> None:
        self.waits: dict[Any, asyncio.TimerHandle] = {}  # by what happens at their end
        super().connection_made(transport)
        self.wait(True, self.let_go)
        self.since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS - 16:  # as long as others are idle, some are free for new ones
            idle = [each for each in self.connections if isinstance(each, PatientProtocol) and each.is_idle]
            min(idle, key=lambda each: each.since).transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.wait(self.is_incomplete, self.let_go)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = self.loop.time()
        self.wait(self.is_incomplete, self.let_go)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.wait(True, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.wait(False, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for handle in self.waits.values():
            handle.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Let a client go that sends no more, as far as anything shows; it gets what can be said at once."""
        self.loop.call_later(0.2, self.transport.close)  # seconds
        return True

    @property
    def is_idle(self) -> bool:
        """True if no request is there, whole or with its head."""
        return self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and not self.transport.is_closing()

    @property
    def is_incomplete(self) -> bool:
        """True if a request has begun to come, and not all of it is there."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def wait(self, more: bool, otherwise: Callable[[], None]) -> None:
        """Wait for more of the client, or not; `otherwise` is called when patience ends."""
        if not more and otherwise in self.waits:
            self.waits.pop(otherwise).cancel()
        elif more and otherwise not in self.waits:
            due = self.loop.time() + self.patience
            self.waits[otherwise] = self.loop.call_at(due, self.lose_patience, otherwise, due)

    def lose_patience(self, otherwise: Callable[[], None], due: float) -> None:
        """Call `otherwise` after a last look at what has come; patience begins anew if the server was stopped (Ctrl-Z).

        After a stop the loop may call a timer before it reads.
        """
        if self.loop.time() < due + STOPPED:
            self.waits[otherwise] = self.loop.call_later(LAST_LOOK, otherwise)
        else:
            del self.waits[otherwise]
            self.wait(True, otherwise)

    def let_go(self) -> None:
        """Say that the request came too slowly, where nothing was said yet."""
        if self.is_incomplete and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.refuse(TOO_SLOW)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 cannot read."""
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
    """Listens from the beginning, and answers from `start` to `stop`, in a thread.

    Args:
        host, port: port 0: any that is free.
        patience: seconds that a client has to send a request, or to take what was sent.

    Raises:
        GearbxError: an address that does not exist or is taken.
    """

    def __init__(self, host: str, port: int, patience: float = PATIENCE):
        self.patience = patience
        self.serves = ""  # what it serves, in a few words
        self.app: Any = None
        self.uvicorn: uvicorn.Server | None = None
        self.ended = threading.Event()
        try:
            family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            self.socket = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
            # Otherwise an answer's body waits 40 ms for the client to acknowledge the headers.
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = (getattr(error, "strerror", None) or one_line(error)).partition(" (while")[0]
            raise GearbxError(f"cannot listen on {host}, port {port} ({reason}); give another") from error

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.socket.close()

    @property
    def where(self) -> str:
        """The address as a URL."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self, app: ASGIApp) -> None:
        """Answer from now on."""
        sys.setswitchinterval(SWITCH)  # for the event loop, while other threads read bodies or compute
        self.app = app
        config = uvicorn.Config(
            app,
            http=type("Protocol", (PatientProtocol,), {"patience": self.patience}),
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
            timeout_graceful_shutdown=LAST_WORDS,
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
        """Return when the server has ended; a signal's exception comes through.

        It waits for an event: Python takes a thread for ended where an exception has interrupted a join. It looks up
        now and then: where a signal came while the server was stopped, another thread may have got it.
        """
        while not self.ended.wait(STOPPED):
            pass

    def stop(self) -> None:
        """End. Every answer that is on its way says that the server stops, within LAST_WORDS seconds."""
        if self.uvicorn is not None:
            self.app.state.stop.announce()
            self.uvicorn.should_exit = True
            self.ended.wait()
            self.thread.join()


class Escaping(logging.Formatter):
    """Writes records so that no text in them makes a line of its own or steers a terminal. Tracebacks are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        first, *traceback = super().format(record).split("\n")
        return "\n".join([first, *(f"  {escaped(line)}" for line in traceback)])
