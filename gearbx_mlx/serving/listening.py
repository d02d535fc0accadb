"""The socket that a server listens on: a thread for each connection, and no more threads than are good for it."""

import logging
import socket
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

from ..errors import GearbxError, one_line
from .guarded import GONE, refusal

MOST_CONNECTIONS = 256

log = logging.getLogger("gearbx_mlx.server")


class Server(ThreadingHTTPServer):
    """Listens where it is to, with a thread for each connection.

    Args:
        address: host and port; port 0: any that is free.
        handler: makes a handler, as of http.server.

    Raises:
        GearbxError: an address that does not exist or is taken.
    """

    daemon_threads = True
    request_queue_size = 128
    serves = ""
    """What it serves, in a few words."""

    def __init__(self, address: tuple[str, int], handler: Any):
        host, port = address
        self.address_family, place = resolved(host, port)
        self.slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__(place, handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise GearbxError(f"cannot listen on {host}, port {port} ({reason}); give another") from error

    @property
    def where(self) -> str:
        """The address as a URL."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            log.warning("%d connections at once; one more is refused", MOST_CONNECTIONS)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def finish(self, seconds: float) -> None:
        """Wait until every connection has its answer, so long at most."""
        until = time.monotonic() + seconds
        for _ in range(MOST_CONNECTIONS):
            if not self.slots.acquire(timeout=max(0.0, until - time.monotonic())):
                return

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a handler did not foresee, in one line; a client that left is nothing to log."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, GONE):
            refusal(error)


def resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Family and address to bind. Raises GearbxError for a host that does not exist."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise GearbxError(f"--host {host}: no such address ({one_line(error)}); give 127.0.0.1, say") from error
    return family, place
