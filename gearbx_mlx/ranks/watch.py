"""A thread that ends this rank when the run ends elsewhere, where MLX would block forever or print ten lines.

Rank 0 is the hub. It receives every error, shows it, and sends the end of the run to all ranks. A reported error is
shown once; every rank shows the loss of a rank that died without a report.

Messages are JSON objects, one per line, over separate TCP connections. A process that dies closes its sockets, even
during a computation. For a machine that loses power, TCP keepalive probes every two seconds, up to eight.

All ranks meet before MLX connects them, at rank 0's address in the hostfile. MLX uses it right after. MLX's ring
would block forever, or fail without a rank's name. The connections stay open.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from select import select
from types import FrameType
from typing import Any

from ..errors import GearbxError, one_line
from ..files.writing import drop_unfinished
from .place import Address, Place, host_port

MAX_MESSAGE_CHARS = 1 << 16
KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPALIVE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # macOS: KEEPALIVE for IDLE


class Channel:
    """One end of a connection. Several threads may send, only one may receive."""

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
        """Send a message. The receiver, not the sender, detects a closed connection."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None after the end of the connection, or for invalid data.

        Raises:
            TimeoutError: no message within the connection's time limit.
        """
        while b"\n" not in self._rest:
            try:
                data = self.connection.recv(4096)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not data or len(self._rest) > MAX_MESSAGE_CHARS:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def has_message(self) -> bool:
        """Return whether the buffer has a complete message."""
        return b"\n" in self._rest

    def close(self) -> None:
        self.connection.close()


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at an address of this machine. Raises GearbxError."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise GearbxError(f"{host_port(address)}: unknown host ({one_line(error)}); set it in the hostfile") from error
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        raise GearbxError(
            f"{host_port(address)}: cannot be used ({error.strerror}); "
            "use an address of this rank's machine with a free port (mlx.launch --starting-port)"
        ) from error
    return listener


def connect(address: Address, seconds: float) -> Channel | None:
    """Return a connection to an address, or None without a listener. Raises GearbxError for an unknown host."""
    try:
        return Channel(socket.create_connection(address, max(seconds, 0.01)))
    except (socket.gaierror, UnicodeError) as error:
        raise GearbxError(f"{host_port(address)}: unknown host ({one_line(error)}); set it in the hostfile") from error
    except OSError:
        return None


DIED = 1  # exit status
LOST = "[ring] connection to a peer was lost"
ANSWER_SECONDS = 3.0  # seconds for an ended run to stop by itself
SAME_ERROR = 0.5  # seconds for rank 0 to find a different rank's error by itself


class RunEnded(BaseException):
    """The end of the run by a different rank, already reported."""


@dataclass(frozen=True)
class Verdict:
    """The end of a run by a different rank: exit status, and the message for this rank to show, or None."""

    status: int
    text: str | None = None


class RankWatch:
    """A thread that ends this process when a different rank ends or disappears. It runs as long as the process.

    Args:
        channels: from `meet`; empty if the launcher has to end all ranks.
        show: shows an error in one line.
        interrupt: interrupts this process's work like a signal, unless a signal already has.
        ending: numbers of the signals that end a run.

    Attributes:
        verdict: end of the run by a different rank; None during the run.
    """

    def __init__(
        self,
        place: Place,
        channels: dict[int, Channel],
        show: Callable[[str], None],
        interrupt: Callable[[int], None],
        ending: Set[int],
    ):
        self.place, self.channels, self.show, self.interrupt, self.ending = place, channels, show, interrupt, ending
        self.verdict: Verdict | None = None
        self._finished = threading.Event()  # this rank has reported its end
        self._status = 0  # the reported exit status
        self._left: set[int] = set()  # ranks that have reported their end
        self._all_left = threading.Event()
        self._deadline: tuple[float, int] | None = None  # when a signal ends this process, and its number
        # Python's signal handlers wait for MLX, which may block forever. The wakeup socket does not wait.
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._leave)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def fail(self, text: str, status: int) -> bool:
        """Report an error that ends this rank; return whether it, or an earlier end of the run, has been shown."""
        if LOST in text:  # MLX reports a lost rank without its number
            time.sleep(SAME_ERROR)
        if self.verdict is not None:
            return True
        self._finish(status)
        if self.place.rank == 0:
            self._send_all(Verdict(status))
            return False
        if self.channels:
            self.channels[0].send(error=text, status=status)
            time.sleep(ANSWER_SECONDS)  # meanwhile rank 0 shows it and ends this process
        self.show(f"rank {self.place.rank}: {text}")
        return True

    def finish(self, status: int) -> None:
        """Report the end of this rank; on all ranks except 0, wait for rank 0's.

        After success, rank 0 waits for the other ranks' reports; they may be errors.
        """
        self._finish(status)
        if self.place.rank == 0:
            if status == 0 and self.channels:
                self._all_left.wait(ANSWER_SECONDS)
            self._send_all(Verdict(status))
        elif self.channels:
            self.channels[0].send(bye=status)
            threading.Event().wait()  # until rank 0 ends this process

    def end_at_once(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal before the work starts, on rank 0 or without channels."""
        self.finish(128 + number)
        os._exit(128 + number)

    def leave_to_first(self, number: int, frame: FrameType | None) -> None:
        """Ignore a signal on all other ranks: the thread reports it to rank 0, which ends the run."""

    def _finish(self, status: int) -> None:
        self._status = status
        self._finished.set()

    def _run(self) -> None:
        while True:
            ready = [rank for rank, channel in self.channels.items() if channel.has_message()]
            if not ready:
                sources: list[socket.socket | Channel] = [self._signals, *self.channels.values()]
                found = select(sources, [], [], self._time_left())[0]
                ready = [rank for rank, channel in self.channels.items() if channel in found]
                if self._signals in found:
                    self._report_signals(self._signals.recv(64))
            for rank in ready:
                message = self.channels[rank].receive()
                if message is None:
                    self._remove(rank)
                elif self.place.rank == 0:
                    self._handle(rank, message)
                elif "status" in message:
                    self._end(Verdict(message["status"], message.get("text")))

    def _report_signals(self, numbers: bytes) -> None:
        """Send signals to rank 0, and set a deadline for the interrupted work. Rank 0 has the earlier one."""
        for number in self.ending & {*numbers}:
            if self.place.rank != 0 and self.channels:
                self.channels[0].send(signal=number)
            if self._deadline is None:
                seconds = ANSWER_SECONDS if self.place.rank == 0 else 2 * ANSWER_SECONDS
                self._deadline = time.monotonic() + seconds, number

    def _time_left(self) -> float | None:
        """Return the seconds until a signal's deadline (None without a signal), and end the process then."""
        if self._deadline is None:
            return None
        until, number = self._deadline
        if until <= time.monotonic():
            self._send_all(Verdict(128 + number))
            drop_unfinished()
            os._exit(128 + number)
        return until - time.monotonic()

    def _handle(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a message on rank 0."""
        if "bye" in message:
            self._mark_left(rank)
        elif "signal" in message:
            self.interrupt(message["signal"])
        elif "error" in message:
            if self._finished.wait(SAME_ERROR) and (self._status or not message["status"]):
                self._mark_left(rank)  # rank 0 has shown an error of its own, presumably the same
                return
            status = message["status"] or DIED
            self._send_all(Verdict(status))
            self._end(Verdict(status, f"rank {rank}: {message['error']}"))

    def _mark_left(self, rank: int) -> None:
        self._left.add(rank)
        if len(self._left) == self.place.size - 1:
            self._all_left.set()

    def _remove(self, rank: int) -> None:
        """Handle the end of a connection."""
        channel = self.channels.pop(rank)
        channel.close()
        if self.place.rank == 0 and (rank in self._left or self._finished.is_set()):
            self._mark_left(rank)
            return
        verdict = Verdict(DIED, f"{self.place.name_of(rank)} is gone, and the run has ended; start all ranks again")
        self._send_all(verdict)
        self._end(verdict)

    def _send_all(self, verdict: Verdict) -> None:
        """Send the end of the run from rank 0 to all other ranks."""
        if self.place.rank == 0:
            for channel in list(self.channels.values()):
                channel.send(status=verdict.status, text=verdict.text)

    def _end(self, verdict: Verdict) -> None:
        """End this process. Only rank 0 may have unfinished files: its work gets time to remove them."""
        self.verdict = verdict
        if verdict.text is not None:
            self.show(verdict.text)
        if self.place.rank == 0 and not self._finished.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(ANSWER_SECONDS)
        drop_unfinished()
        os._exit(verdict.status)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        raise RunEnded

    @staticmethod
    def number_of(raised: type[BaseException]) -> int | None:
        """Return the signal whose handler raised an exception, or None."""
        return signal.SIGUSR1 if issubclass(raised, RunEnded) else None


WAIT = "GEARBX_RANKS_WAIT"


class MeetingRefused(Exception):
    """The refusal of a run by rank 0, with the reason on its stderr."""


def meeting_timeout() -> float:
    """Return seconds to wait for the other ranks. Raises GearbxError for an invalid variable."""
    text = os.environ.get(WAIT, "8")
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 86400:
            return float(text)
    raise GearbxError(f"{WAIT}: not a time, got {text!r}; use seconds")


def meet(place: Place) -> dict[int, Channel]:
    """Wait for all ranks, and return channels by rank: on rank 0 to all others, elsewhere to rank 0.

    Raises:
        GearbxError: an unusable address, a missing rank, or one with a different hostfile.
        MeetingRefused: rank 0 raised one of these errors.
    """
    until = time.monotonic() + meeting_timeout()
    return gather_all(place, until) if place.rank == 0 else {0: report_to_first(place, until)}


def hosts_hash(place: Place) -> str:
    return hashlib.sha256(repr(place.addresses).encode()).hexdigest()


def check_addresses(place: Place) -> None:
    """Validate that this rank can listen at MLX's addresses. Raises GearbxError."""
    for address in place.addresses[place.rank]:
        listen(address).close()


def gather_all(place: Place, until: float) -> dict[int, Channel]:
    """Return rank 0's channels to all other ranks."""
    check_addresses(place)
    found: dict[int, Channel] = {}
    with listen(place.addresses[0][0]) as listener:
        try:
            while len(found) < place.size - 1:
                if not select([listener], [], [], max(0, until - time.monotonic()))[0]:
                    absent = ", ".join(place.name_of(rank) for rank in range(1, place.size) if rank not in found)
                    remedy = f"use all {place.size} ranks of the hostfile, or a different hostfile"
                    raise GearbxError(f"{absent}: no connection within {meeting_timeout():g} seconds; {remedy}")
                channel = Channel(listener.accept()[0])
                hello = first_message(channel)
                if hello is None:
                    channel.close()  # an unrelated client
                    continue
                found[check_hello(place, hello, found, channel)] = channel
        except GearbxError:
            for channel in found.values():
                channel.send(refused=True)
            raise
    for channel in found.values():
        channel.send(go=True)
    return found


def first_message(channel: Channel) -> dict[str, Any] | None:
    channel.connection.settimeout(1)
    try:
        hello = channel.receive()
    except TimeoutError:
        return None
    channel.connection.settimeout(None)
    return hello if hello is not None and type(hello.get("rank")) is int else None


def check_hello(place: Place, hello: dict[str, Any], found: dict[int, Channel], channel: Channel) -> int:
    """Return the rank in a first message. Raises GearbxError for one that cannot take part."""
    rank, problem = hello["rank"], hello.get("problem")
    if problem is None and hello.get("hosts") != hosts_hash(place):
        problem = f"has a different hostfile, of {hello.get('size')} ranks; use the same one on all ranks"
    elif problem is None and (rank in found or not 0 < rank < place.size):
        problem = "two processes have this number; set a different one for each"
    if problem is None:
        return rank
    channel.send(refused=True)
    raise GearbxError(f"rank {rank}: {problem}")


def report_to_first(place: Place, until: float) -> Channel:
    """Return the channel to rank 0 of any other rank."""
    problem = None
    try:
        check_addresses(place)
    except GearbxError as error:
        problem = str(error)
    channel = None
    while channel is None:
        channel = connect(place.addresses[0][0], until - time.monotonic())
        if channel is None and time.monotonic() > until:
            name = place.name_of(0)
            raise GearbxError(problem or f"{name}: no answer within {meeting_timeout():g} seconds; use all ranks")
        if channel is None:
            time.sleep(0.05)
    channel.send(rank=place.rank, size=place.size, hosts=hosts_hash(place), problem=problem)
    channel.connection.settimeout(max(0.0, until - time.monotonic()) + 1)  # longer than rank 0 waits
    with contextlib.suppress(TimeoutError):
        answer = channel.receive()
        if answer is not None and "go" in answer:
            channel.connection.settimeout(None)
            return channel
        if answer is not None and "refused" in answer:
            raise MeetingRefused
    channel.close()
    raise GearbxError(f"{place.name_of(0)}: it did not start the run; see its error")
