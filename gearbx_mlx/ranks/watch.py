"""A thread that knows when another rank is gone, and ends this one: MLX alone would wait for ever, or write ten lines.

Rank 0 is in the middle. It hears of every error, shows it, and says to all other ranks how the run ended. What ends a
run is shown once if a rank could still say it, and by every rank where one died without a word.

Ranks talk beside MLX's own connections: JSON objects, one per line, over TCP. A process that dies closes its sockets,
whatever it computes at that moment. A machine that is switched off does not: so the system asks every two seconds
whether the other end is still there, and gives up after eight.

All ranks meet before MLX connects them, at rank 0's address in the hostfile, which MLX gets for itself right after:
MLX's ring would wait for ever, or fail without saying for whom. The connections stay.
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

LONGEST_MESSAGE = 1 << 16  # characters of a message
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
        """Send a message; nothing happens where the other end is gone, which the receiver will notice."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None: the other end is gone, or talks about something else.

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
            if not data or len(self._rest) > LONGEST_MESSAGE:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def waiting(self) -> bool:
        """Return whether a message has come already, with an earlier one."""
        return b"\n" in self._rest

    def close(self) -> None:
        self.connection.close()


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at an address of this machine. Raises GearbxError where that is not possible."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise GearbxError(f"{host_port(address)}: unknown host ({one_line(error)}); correct the hostfile") from error
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        raise GearbxError(
            f"{host_port(address)}: cannot be used ({error.strerror}); "
            "give this rank an address of its own machine with a free port (mlx.launch --starting-port)"
        ) from error
    return listener


def connect(address: Address, seconds: float) -> Channel | None:
    """Return a connection to an address, or None without a listener. Raises GearbxError for an unknown host."""
    try:
        return Channel(socket.create_connection(address, max(seconds, 0.01)))
    except (socket.gaierror, UnicodeError) as error:
        raise GearbxError(f"{host_port(address)}: unknown host ({one_line(error)}); correct the hostfile") from error
    except OSError:
        return None


DIED = 1  # exit status
LOST = "[ring] connection to a peer was lost"
ANSWER_SECONDS = 3.0  # seconds in which a run that is over has to end by itself
SAME_ERROR = 0.5  # seconds in which rank 0 may find the error of another rank by itself


class RunEnded(BaseException):
    """Another rank has ended the run: nothing is left to be said."""


@dataclass(frozen=True)
class Verdict:
    """How a run ended that another rank ended: exit status, and what this rank is to show (None: nothing)."""

    status: int
    text: str | None = None


class RankWatch:
    """Ends this process when another rank is gone or says so. Begins at once, and ends with the process.

    Args:
        channels: from `meet`; none where the launcher alone sees to it that all ranks end.
        show: shows an error in one line.
        interrupt: ends this process's work as a signal does, unless a signal has done so.
        ending: numbers of the signals that end a run.

    `verdict`: how another rank ended the run; None while it goes on.
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
        self._finished = threading.Event()  # this rank has said how it ends
        self._status = 0  # how, once it has said so
        self._left: set[int] = set()  # ranks that have said so
        self._all_left = threading.Event()
        self._last_moment: tuple[float, int] | None = None  # when a signal ends this process anyway, and its number
        # Handlers in Python wait until MLX is done, which may be never. The numbers come here at once.
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._leave)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def fail(self, text: str, status: int) -> bool:
        """Say that an error ends this rank; whether it has been shown, or another one that ended the run before."""
        if LOST in text:  # by which MLX says that a rank is gone, and not which one
            time.sleep(SAME_ERROR)
        if self.verdict is not None:
            return True
        self._finish(status)
        if self.place.rank == 0:
            self._tell_all(Verdict(status))
            return False
        if self.channels:
            self.channels[0].send(error=text, status=status)
            time.sleep(ANSWER_SECONDS)  # rank 0 shows it, and ends this process meanwhile
        self.show(f"rank {self.place.rank}: {text}")
        return True

    def finish(self, status: int) -> None:
        """Say that this rank has ended; on all ranks but 0 wait until rank 0 has too.

        Rank 0 that ends well waits for the others' last words: one of them may be an error.
        """
        self._finish(status)
        if self.place.rank == 0:
            if status == 0 and self.channels:
                self._all_left.wait(ANSWER_SECONDS)
            self._tell_all(Verdict(status))
        elif self.channels:
            self.channels[0].send(bye=status)
            threading.Event().wait()  # until rank 0 says how the run ended

    def end_at_once(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal while there is nothing to finish, on rank 0 or where ranks cannot hear of each other."""
        self.finish(128 + number)
        os._exit(128 + number)

    def leave_to_first(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal on every rank but 0: rank 0 hears of it, and ends the run as if the signal were its own."""

    def _finish(self, status: int) -> None:
        self._status = status
        self._finished.set()

    def _run(self) -> None:
        while True:
            ready = [rank for rank, channel in self.channels.items() if channel.waiting()]
            if not ready:
                sources: list[socket.socket | Channel] = [self._signals, *self.channels.values()]
                found = select(sources, [], [], self._patience())[0]
                ready = [rank for rank, channel in self.channels.items() if channel in found]
                if self._signals in found:
                    self._signalled(self._signals.recv(64))
            for rank in ready:
                message = self.channels[rank].receive()
                if message is None:
                    self._gone(rank)
                elif self.place.rank == 0:
                    self._heard(rank, message)
                elif "status" in message:
                    self._end(Verdict(message["status"], message.get("text")))

    def _signalled(self, numbers: bytes) -> None:
        """Let rank 0 hear of signals. What they interrupt gets a moment to end; rank 0 is to be the first to end."""
        for number in self.ending & {*numbers}:
            if self.place.rank != 0 and self.channels:
                self.channels[0].send(signal=number)
            if self._last_moment is None:
                moment = ANSWER_SECONDS if self.place.rank == 0 else 2 * ANSWER_SECONDS
                self._last_moment = time.monotonic() + moment, number

    def _patience(self) -> float | None:
        """Return seconds that a signal leaves this process (None: there was none). Ends it when they are over."""
        if self._last_moment is None:
            return None
        until, number = self._last_moment
        if until <= time.monotonic():
            self._tell_all(Verdict(128 + number))
            drop_unfinished()
            os._exit(128 + number)
        return until - time.monotonic()

    def _heard(self, rank: int, message: dict[str, Any]) -> None:
        """Do what rank 0 does with a message."""
        if "bye" in message:
            self._leaves(rank)
        elif "signal" in message:
            self.interrupt(message["signal"])
        elif "error" in message:
            if self._finished.wait(SAME_ERROR) and (self._status or not message["status"]):
                self._leaves(rank)  # rank 0 has shown what it takes for the same
                return
            status = message["status"] or DIED
            self._tell_all(Verdict(status))
            self._end(Verdict(status, f"rank {rank}: {message['error']}"))

    def _leaves(self, rank: int) -> None:
        self._left.add(rank)
        if len(self._left) == self.place.size - 1:
            self._all_left.set()

    def _gone(self, rank: int) -> None:
        """Take note that a connection has ended."""
        channel = self.channels.pop(rank)
        channel.close()
        if self.place.rank == 0 and (rank in self._left or self._finished.is_set()):
            self._leaves(rank)
            return
        verdict = Verdict(DIED, f"{self.place.name_of(rank)} is gone, which ends the run; start all ranks again")
        self._tell_all(verdict)
        self._end(verdict)

    def _tell_all(self, verdict: Verdict) -> None:
        """Say to all other ranks how the run ended; only rank 0 knows them."""
        if self.place.rank == 0:
            for channel in list(self.channels.values()):
                channel.send(status=verdict.status, text=verdict.text)

    def _end(self, verdict: Verdict) -> None:
        """End this process. Rank 0 alone has files that may be half written: its work gets a moment to remove them."""
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


WAIT = "GEARBX_RANKS_WAIT"


class MeetingRefused(Exception):
    """Rank 0 has shown why this run does not begin."""


def patience() -> float:
    """Return seconds to wait for the other ranks. Raises GearbxError for a variable that is not a number of seconds."""
    text = os.environ.get(WAIT, "8")
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 86400:
            return float(text)
    raise GearbxError(f"{WAIT} is {text!r}; give seconds")


def meet(place: Place) -> dict[int, Channel]:
    """Channels by rank, once all ranks are there: of rank 0 to every other one, of the others to rank 0.

    Raises:
        GearbxError: an address that cannot be used, a rank that does not come or has another hostfile.
        MeetingRefused: rank 0 raised one of these.
    """
    until = time.monotonic() + patience()
    return gather_all(place, until) if place.rank == 0 else {0: report_to_first(place, until)}


def hosts_hash(place: Place) -> str:
    return hashlib.sha256(repr(place.addresses).encode()).hexdigest()


def check_addresses(place: Place) -> None:
    """Raises GearbxError unless this rank can listen where MLX will."""
    for address in place.addresses[place.rank]:
        listen(address).close()


def gather_all(place: Place, until: float) -> dict[int, Channel]:
    """Rank 0's part of `meet`."""
    check_addresses(place)
    came: dict[int, Channel] = {}
    with listen(place.addresses[0][0]) as listener:
        try:
            while len(came) < place.size - 1:
                if not select([listener], [], [], max(0, until - time.monotonic()))[0]:
                    absent = ", ".join(place.name_of(rank) for rank in range(1, place.size) if rank not in came)
                    remedy = f"start all {place.size} ranks of the hostfile, or correct it"
                    raise GearbxError(f"{absent} did not come within {patience():g} seconds; {remedy}")
                channel = Channel(listener.accept()[0])
                hello = first_words(channel)
                if hello is None:
                    channel.close()  # who knows what that was
                    continue
                came[check_hello(place, hello, came, channel)] = channel
        except GearbxError:
            for channel in came.values():
                channel.send(refused=True)
            raise
    for channel in came.values():
        channel.send(go=True)
    return came


def first_words(channel: Channel) -> dict[str, Any] | None:
    channel.connection.settimeout(1)
    try:
        hello = channel.receive()
    except TimeoutError:
        return None
    channel.connection.settimeout(None)
    return hello if hello is not None and type(hello.get("rank")) is int else None


def check_hello(place: Place, hello: dict[str, Any], came: dict[int, Channel], channel: Channel) -> int:
    """Return the rank that says hello. Raises GearbxError for one that cannot take part."""
    rank, problem = hello["rank"], hello.get("problem")
    if problem is None and hello.get("hosts") != hosts_hash(place):
        problem = f"has another hostfile, of {hello.get('size')} ranks; give all ranks the same one"
    elif problem is None and (rank in came or not 0 < rank < place.size):
        problem = "two processes have this number; give each its own"
    if problem is None:
        return rank
    channel.send(refused=True)
    raise GearbxError(f"rank {rank}: {problem}")


def report_to_first(place: Place, until: float) -> Channel:
    """Return the part of `meet` of every rank but 0."""
    problem = None
    try:
        check_addresses(place)
    except GearbxError as error:
        problem = str(error)
    channel = None
    while channel is None:
        channel = connect(place.addresses[0][0], until - time.monotonic())
        if channel is None and time.monotonic() > until:
            raise GearbxError(
                problem or f"{place.name_of(0)} did not answer within {patience():g} seconds; start it too"
            )
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
    raise GearbxError(f"{place.name_of(0)} did not begin the run; see what it says")
