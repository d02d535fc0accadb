"""The socket that a server listens on: uvicorn in a thread of its own, and no more patience than is good for it."""

import asyncio
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import GearbxError, one_line
from .web import PATIENCE, Refused, escaped

MOST_CONNECTIONS = 256
ROOM = 16  # connections that are kept free for new ones as long as others are idle
LONGEST_HEAD = 2**16  # bytes of a request before its body
LINGER = 0.2  # seconds for an answer to a client that has said that it will send no more
LAST_WORDS = 2  # seconds in which answers may end once the server stops
LOOK = 0.005  # seconds
SLOW = Refused(408, "the request came too slowly", "timeout")


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP, for clients that send or take too slowly: they are let go after `patience` seconds."""

    patience = PATIENCE

    def connection_made(self, transport: Any) -> None:
        self.waits: dict[Any, asyncio.TimerHandle] = {}  # by what happens at their end
        super().connection_made(transport)
        self.wait(True, self.let_go)
        self.since = self.loop.time()
        if len(self.connections) > MOST_CONNECTIONS - ROOM:
            close_oldest(self.connections)

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
        """A client that sends no more has left, as far as anything shows; it gets what can be said at once."""
        self.loop.call_later(LINGER, self.transport.close)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no request is there, whole or with its head."""
        return self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and not self.transport.is_closing()

    @property
    def is_incomplete(self) -> bool:
        """Whether a request has begun to come, and not all of it is there."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def wait(self, more: bool, otherwise: Callable[[], None]) -> None:
        """Whether more of the client is waited for; `otherwise` is called when patience ends."""
        if not more and otherwise in self.waits:
            self.waits.pop(otherwise).cancel()
        elif more and otherwise not in self.waits:
            self.waits[otherwise] = self.loop.call_later(self.patience, otherwise)

    def let_go(self) -> None:
        """Say that the request came too slowly, where nothing was said yet."""
        if self.is_incomplete and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.refuse(SLOW)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What h11 cannot read."""
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


def close_oldest(connections: Iterable[Any]) -> None:
    """Close the connection that has been idle for the longest time."""
    idle = [each for each in connections if isinstance(each, PatientProtocol) and each.is_idle]
    min(idle, key=lambda each: each.since).transport.close()


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
        self.app = app
        config = uvicorn.Config(
            app,
            http=type("Protocol", (PatientProtocol,), {"patience": self.patience}),
            ws="none",
            lifespan="auto",
            loop="asyncio",
            log_config=None,
            log_level="critical",  # Gatekeeper logs requests and errors
            access_log=False,
            server_header=False,
            headers=[("server", "gearbx-mlx"), ("x-content-type-options", "nosniff")],
            limit_concurrency=MOST_CONNECTIONS,
            h11_max_incomplete_event_size=LONGEST_HEAD,
            timeout_graceful_shutdown=LAST_WORDS,
        )
        self.uvicorn = server = uvicorn.Server(config)

        def run() -> None:
            try:
                server.run([self.socket])
            finally:
                self.ended.set()

        threading.Thread(target=run, daemon=True).start()
        while not (server.started or self.ended.is_set()):
            time.sleep(LOOK)

    def wait(self) -> None:
        """Return when the server has ended; a signal's exception comes through.

        It waits for an event: Python takes a thread for ended where an exception has interrupted a join.
        """
        self.ended.wait()

    def stop(self) -> None:
        """End. Every answer that is on its way says that the server stops, within LAST_WORDS seconds."""
        if self.uvicorn is not None:
            self.app.state.stop.announce()
            self.uvicorn.should_exit = True
            self.ended.wait()


class Escaping(logging.Formatter):
    """Writes records so that no text in them makes a line of its own or steers a terminal. Tracebacks are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return indented(super().formatStack(stack_info))


def indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))
