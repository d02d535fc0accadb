"""Messages between two ranks beside MLX's own connections: JSON objects, one per line, over TCP.

A process that dies closes its sockets, whatever it computes at that moment. A machine that is switched off does not:
so the system asks every two seconds whether the other end is still there, and gives up after eight.
"""

import json
import socket
from typing import Any

from ..errors import GearbxError, one_line
from .place import Address, written

LONGEST = 1 << 16  # characters of a message
KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPALIVE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # macOS: KEEPALIVE for IDLE


class Channel:
    """One end of a connection. Several threads may send, one receives."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._rest = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; nothing happens where the other end is gone, which whoever receives will notice."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self) -> dict[str, Any] | None:
        """The next message; None: the other end is gone, or talks about something else.

        Raises:
            TimeoutError: none within the connection's time limit.
        """
        while b"\n" not in self._rest:
            try:
                data = self.connection.recv(4096)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not data or len(self._rest) > LONGEST:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def waiting(self) -> bool:
        """Whether a message has come already, with an earlier one."""
        return b"\n" in self._rest

    def close(self) -> None:
        self.connection.close()


def listen(address: Address) -> socket.socket:
    """A socket that listens at an address of this machine. Raises GearbxError where that is not possible."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise GearbxError(f"{written(address)}: unknown host ({one_line(error)}); correct the hostfile") from error
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        raise GearbxError(
            f"{written(address)}: cannot be used ({error.strerror}); "
            "give this rank an address of its own machine with a free port (mlx.launch --starting-port)"
        ) from error
    return listener


def connect(address: Address, seconds: float) -> Channel | None:
    """A connection to an address, or None where nobody listens. Raises GearbxError for an unknown host."""
    try:
        return Channel(socket.create_connection(address, max(seconds, 0.01)))
    except (socket.gaierror, UnicodeError) as error:
        raise GearbxError(f"{written(address)}: unknown host ({one_line(error)}); correct the hostfile") from error
    except OSError:
        return None
