"""Requests to other servers that end as soon as the client in whose name they are made has left.

Whoever waits for bytes of a server waits for the client's socket as well, in the same thread. So a request is given up
at any moment: before the headers of its answer too, which of a whole answer come only when all of it is written.
"""

import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import httpcore
import httpx

MOMENT = 0.01  # seconds for bytes that are there
waiting = threading.local()  # .client: the socket of the client for whom this thread works


class ClientLeft(ConnectionError):
    """The client closed its connection."""


@contextmanager
def on_behalf_of(client: socket.socket) -> Iterator[None]:
    """Inside, this thread's requests over a `WatchingTransport` raise ClientLeft when the client closes its socket."""
    waiting.client = client
    try:
        yield
    finally:
        waiting.client = None


class WatchingTransport(httpx.HTTPTransport):
    """A pool of connections whose readers notice that the client has left; threads share it."""

    def __init__(self, limits: httpx.Limits):
        certificates = httpx.create_ssl_context(trust_env=False)
        super().__init__(verify=certificates)
        self._pool = httpcore.ConnectionPool(
            ssl_context=certificates,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=WatchingBackend(),
        )


class WatchingBackend(httpcore.NetworkBackend):
    """httpcore's sockets, watched."""

    def __init__(self) -> None:
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return WatchedStream(self._sockets.connect_tcp(host, port, timeout, local_address, socket_options))


class WatchedStream(httpcore.NetworkStream):
    """A stream of httpcore that stops reading when the client has left."""

    def __init__(self, stream: httpcore.NetworkStream):
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Raises ClientLeft, or httpcore's errors."""
        client = getattr(waiting, "client", None)
        if client is None:
            return self._stream.read(max_bytes, timeout)
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            if not self._decrypted():
                wait_for(self._stream.get_extra_info("socket"), client, until)
            try:
                return self._stream.read(max_bytes, MOMENT)
            except httpcore.ReadTimeout:  # what came was TLS's own, or the beginning of a record
                continue

    def _decrypted(self) -> bool:
        """Whether bytes wait in TLS, of which the socket knows nothing any more."""
        return bool(getattr(self._stream.get_extra_info("socket"), "pending", int)())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return WatchedStream(self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def wait_for(server: socket.socket, client: socket.socket, until: float) -> None:
    """Return when the server has sent something. Raises ClientLeft, or httpcore.ReadTimeout when the clock is there."""
    ready = wait([server, client], seconds_to(until))
    if client in ready and server not in ready:
        if not has_more(client):
            raise ClientLeft("the client left")
        ready = wait([server], seconds_to(until))  # a client that sends its next request already is not watched
    if not ready:
        raise httpcore.ReadTimeout("nothing came")


def seconds_to(until: float) -> float | None:
    """As `wait` takes it: None for ever."""
    return None if math.isinf(until) else max(0.0, until - time.monotonic())


def has_more(client: socket.socket) -> bool:
    """Whether what a readable socket has to say is more than that it is closed."""
    try:
        return bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False
