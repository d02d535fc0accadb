"""Who may come in, and how much of what they send is read: what every handler of HTTP here has in common.

A mixin for handlers of `http.server`. A request that is wrong gets OpenAI's error object with a status of 4xx, and the
server goes on; nothing that a client wrote reaches the log unescaped.
"""

import hmac
import io
import json
import logging
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

from ..errors import GearbxError, one_line
from ..files.reading import parse_json

LARGEST_BODY = 2**24  # bytes
PATIENCE = 30.0  # seconds that a client has to send its request
LINGER = 1.0  # seconds
SLOW = "the request came too slowly"
METHODS = "GET, POST, OPTIONS"
GONE = (ConnectionError, TimeoutError, BlockingIOError)  # what a client that left, or that takes nothing more, raises

log = logging.getLogger("gearbx_mlx.server")


@dataclass(frozen=True)
class Guard:
    """Who may come in.

    api_key: that requests must bring; None: none. allowed_origins: of pages in browsers, "*": any. largest_body: bytes.
    patience: seconds that a client has to send its request.
    """

    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ("*",)
    largest_body: int = LARGEST_BODY
    patience: float = PATIENCE


class Refused(Exception):
    """A request that is answered with an error object.

    Args:
        status: of HTTP.
        message: one line.
        kind: OpenAI's type of the error.
        param: the field that is wrong.
        code: OpenAI's code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refusal(error: BaseException) -> Refused:
    """What a client gets to know of an error: a mistake of its own in full, others by their kind alone."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, GearbxError):
        return Refused(400, one_line(error))
    log.error("%s: %s", type(error).__name__, escaped(one_line(error)), exc_info=log.isEnabledFor(logging.DEBUG))
    return Refused(500, f"the server failed ({type(error).__name__}); its log says why", "server_error")


def escaped(text: str) -> str:
    """Text that stays on one line of a log and cannot steer a terminal."""
    return text.encode("unicode_escape").decode() if not text.isprintable() else text


class Slow(TimeoutError):
    """A client that took too long to send its request."""


class Arriving(io.RawIOBase):
    """What a client sends, up to a moment. Raises Slow beyond it."""

    def __init__(self, connection: socket.socket, seconds: float):
        self.connection, self.until = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise Slow(SLOW)
        self.connection.settimeout(left)
        try:
            return self.connection.recv_into(buffer)
        except TimeoutError as error:
            raise Slow(SLOW) from error
        finally:
            self.connection.settimeout(None)


class Guarded(BaseHTTPRequestHandler):
    """A handler that reads requests with care. A subclass has `guard`, and answers in `get` and `post`."""

    guard: Guard
    headers = Message()  # until those of a request have come
    server_version = "gearbx-mlx"
    sys_version = ""
    disable_nagle_algorithm = True  # or an event may wait for the acknowledgement of the one before
    answered = False

    def get(self, path: str) -> None:
        """Answer a GET request. Raises Refused, or GearbxError for a mistake of the client's."""
        raise not_found(path)

    def post(self, path: str, body: dict[str, Any]) -> None:
        """Answer a POST request with a JSON object. Raises Refused, or GearbxError for a mistake of the client's."""
        raise not_found(path)

    def public(self, path: str) -> bool:
        """Whether a path may be read without the key."""
        return path == "/health"

    def do_GET(self) -> None:
        self.answer(lambda path: self.get(path))

    def do_POST(self) -> None:
        self.answer(lambda path: self.post(path, self.read_object()))

    def do_OPTIONS(self) -> None:
        self.start(204)
        self.end_headers()

    def do_HEAD(self) -> None:
        self.refuse(not_allowed("HEAD"))

    def answer(self, respond: Any) -> None:
        """Answer, with an error object where that fails before an answer has begun."""
        path = self.path.partition("?")[0]
        try:
            if not self.public(path):
                self.check_key()
            respond(path)
        except GONE as error:
            if isinstance(error, Slow):
                self.refuse(Refused(408, SLOW, "timeout"))
            self.close_connection = True
        except Exception as error:
            self.refuse(refusal(error))

    def refuse(self, refused: Refused) -> None:
        """Send an error, where nothing was sent yet, and close: what the client has not sent yet is not read."""
        self.close_connection = True
        if self.answered:
            return
        try:
            self.send_object(self.error_object(refused), refused.status)
            self.take_the_rest()
        except OSError:
            log.debug("a client left before its error reached it")

    def take_the_rest(self) -> None:
        """Read a little of what a client still sends: to close on it would take the answer away from the client."""
        self.connection.shutdown(socket.SHUT_WR)
        rest, left = Arriving(self.connection, LINGER), bytearray(2**16)
        for _ in range(LARGEST_BODY // len(left)):
            if not rest.readinto(left):
                return

    def error_object(self, refused: Refused) -> dict[str, Any]:
        return refused.body()

    def check_key(self) -> None:
        """Raises Refused without the key: `Authorization: Bearer KEY`, or `x-api-key: KEY`."""
        if self.guard.api_key is None:
            return
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        key = given if scheme.lower() == "bearer" else self.headers.get("x-api-key", "")
        sent = key.strip(" \t").encode(
            "latin-1", "replace"
        )  # the bytes that came: http.server reads headers as Latin-1
        if not hmac.compare_digest(sent, self.guard.api_key.encode("utf-8", "surrogateescape")):
            raise Refused(401, "no API key, or a wrong one", "authentication_error", code="invalid_api_key")

    def read_object(self) -> dict[str, Any]:
        """The request's body. Raises Refused for one that is too large, incomplete or no JSON object."""
        length = self.headers.get("Content-Length")
        if length is None:
            raise Refused(411, "the request has no Content-Length")
        if not (length.isascii() and length.isdigit()) or len(length) > 18:
            raise Refused(400, "Content-Length is no number of bytes")
        if int(length) > self.guard.largest_body:
            raise Refused(413, f"the body has {length} bytes; send {self.guard.largest_body} at most")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise Refused(400, f"the body ends after {len(body)} of {length} bytes")
        try:
            content = parse_json(body)
        except GearbxError as error:
            raise Refused(400, f"the body is no JSON: {one_line(error)}") from error
        if not isinstance(content, dict):
            raise Refused(400, "the body is no JSON object")
        return content

    def start(self, status: int, headers: Mapping[str, str] = {}) -> None:
        """Send the status and the headers that every answer has."""
        self.answered = True
        self.send_response(status)
        origins, origin = self.guard.allowed_origins, self.headers.get("Origin")
        if "*" in origins:
            self.send_header("Access-Control-Allow-Origin", "*")
        elif origin in origins:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Vary", "Origin")
        self.send_header("Access-Control-Allow-Methods", METHODS)
        if status == 405:
            self.send_header("Allow", METHODS)
        self.send_header("Access-Control-Allow-Headers", "*")
        for name, value in headers.items():
            self.send_header(name, value)

    def send_bytes(self, body: bytes, kind: str, status: int = 200) -> None:
        self.start(status, {"Content-Type": kind, "Content-Length": str(len(body))})
        self.end_headers()
        self.wfile.write(body)

    def send_object(self, content: Any, status: int = 200) -> None:
        self.send_bytes(json_text(content).encode("utf-8", "replace"), "application/json", status)

    def start_events(self) -> None:
        """Begin a stream of server-sent events, which ends with the connection."""
        self.start(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.end_headers()
        self.close_connection = True

    def send_event(self, content: Any, event: str | None = None) -> None:
        """Send one event at once; text is sent as it is."""
        text = content if isinstance(content, str) else json_text(content)
        name = f"event: {event}\n" if event else ""
        self.wfile.write(f"{name}data: {text}\n\n".encode("utf-8", "replace"))

    def client_left(self) -> bool:
        """Whether the client has closed the connection, or its half of it, which looks the same. Costs microseconds."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    # Of http.server's own.

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(Arriving(self.connection, self.guard.patience))
        blocked = struct.pack("ll", *divmod(round(self.guard.patience * 1e6), 10**6))  # as C's timeval
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, blocked)

    def parse_request(self) -> bool:
        try:
            return super().parse_request()
        except Slow:
            self.refuse(Refused(408, SLOW, "timeout"))
            return False

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """http.server's own errors: a request line or headers that it cannot read, a method that no handler has."""
        self.request_version = "HTTP/1.0"  # of a line that names none, http.server makes answers without a status
        unread = Refused(int(code), escaped(message or "the request is no HTTP"))
        self.refuse(not_allowed(self.command) if unread.status == 501 else unread)

    def log_message(self, format: str, *values: Any) -> None:
        log.info("%s %s", self.address_string(), escaped(format % values))


def json_text(content: Any) -> str:
    """Raises ValueError for numbers that JSON does not have."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


def not_allowed(method: str) -> Refused:
    return Refused(405, f"{method[:20]!a} is not served here; use one of {METHODS}")


def not_found(path: str) -> Refused:
    return Refused(404, f"there is no {path[:100]!a} here", code="not_found")
