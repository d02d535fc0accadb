"""All ranks meet before MLX connects them: MLX's ring would wait for ever, or fail without saying for whom.

They meet at rank 0's address in the hostfile, which MLX gets for itself right after. The connections stay: through them
every rank learns when another one is gone (watch.py).
"""

import contextlib
import hashlib
import os
import time
from select import select
from typing import Any

from ..errors import GearbxError
from .place import Place
from .watch import Channel, connect, listen

WAIT = "GEARBX_RANKS_WAIT"
DEFAULT_WAIT = 8.0  # seconds
ANSWER = 1.0  # seconds longer than rank 0 waits, for its answer
RETRY = 0.05  # seconds


class MeetingRefused(Exception):
    """Rank 0 has shown why this run does not begin."""


def patience() -> float:
    """Seconds to wait for the other ranks. Raises GearbxError for a variable that is not a number of seconds."""
    text = os.environ.get(WAIT, str(DEFAULT_WAIT))
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
    """The rank that says hello. Raises GearbxError for one that cannot take part."""
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
    """The part of `meet` of every rank but 0."""
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
            time.sleep(RETRY)
    channel.send(rank=place.rank, size=place.size, hosts=hosts_hash(place), problem=problem)
    channel.connection.settimeout(max(0.0, until - time.monotonic()) + ANSWER)
    with contextlib.suppress(TimeoutError):
        answer = channel.receive()
        if answer is not None and "go" in answer:
            channel.connection.settimeout(None)
            return channel
        if answer is not None and "refused" in answer:
            raise MeetingRefused
    channel.close()
    raise GearbxError(f"{place.name_of(0)} did not begin the run; see what it says")
