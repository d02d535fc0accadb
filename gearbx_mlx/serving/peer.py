"""Requests to other servers: what `analyze --server`, which waits, and the proxy, which does not, have in common.

A `Peer` is a server and the errors for what it does; a `Reply` is an answer of it, which is read within limits.
"""

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import httpx
from httpx_sse import EventSource

from ..errors import GearbxError, one_line

S = TypeVar("S")
T = TypeVar("T")

LARGEST_ANSWER, LARGEST_EVENT = 2**26, 2**24  # bytes
EVENTS, JSON = "text/event-stream", "application/json"
DONE = "[DONE]"  # the data of a stream's last event
START = "start the server, or check --server"
SUCH_AS = "give one such as http://127.0.0.1:8080/v1"

# Addresses and words


def parsed_url(url: str, flag: str) -> httpx.URL:
    """A server's URL, which has a host and a path alone.

    Raises:
        GearbxError: no such URL; without what may be a password.
    """
    url = url.strip()
    shown = flag if set("@?#") & set(url) else f"{flag} {url[:100]!a}"
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise GearbxError(f"{shown} is not a URL; {SUCH_AS}") from error
    if parts.port is not None and not 0 < parts.port < 2**16:
        raise GearbxError(f"{shown} is not a URL; {SUCH_AS}")
    if parts.scheme not in ("http", "https") or not parts.host:
        raise GearbxError(f"{shown} is not an http or https URL; {SUCH_AS}")
    if set("?#\\ ") & set(url):
        raise GearbxError(f"{shown} has more than an address and a path; {SUCH_AS}")
    return parts


def hidden(text: str, key: str | None) -> str:
    """The text without the key, which a server may repeat, also as JSON or a URL escapes it."""
    return spellings(key).sub("***", text) if key else text


@cache
def spellings(key: str) -> re.Pattern[str]:
    """The ways to write a key of ASCII, each character as itself or escaped; JSON may stand inside JSON."""
    ways = ((re.escape(char), f"{ord(char):02x}") for char in key)
    return re.compile("".join(rf"(?:\\{{0,7}}{char}|(?i:\\{{1,7}}u00{code}|%{code}))" for char, code in ways))


def brief(text: str) -> str:
    """A server's words on one line, shortened."""
    return " ".join(text.split())[:300]


def said_in(error: Any) -> str:
    """The words of OpenAI's error object, or of what stands in its place."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


# Streams

LINE_END, EVENT_END = re.compile(rb"\n"), re.compile(rb"\r?\n\r?\n")
LONGEST_END = 4  # bytes
BYTES = {"Content-Type": f"{EVENTS}; charset=latin-1"}  # in which each byte is a character


def pieces_in(rest: bytearray, part: bytes, end: re.Pattern[bytes]) -> Iterator[bytes]:
    """The lines or events that a part of a stream completes, each with its end; what has no end yet stays in `rest`.

    httpx_sse keeps neither the bytes of an event nor comments, which the proxy sends on as they came.
    """
    searched = max(0, len(rest) - LONGEST_END)  # what came before has no end
    rest += part
    while found := end.search(rest, searched):
        yield bytes(rest[: found.end()])
        del rest[: found.end()]
        searched = 0


def data_of(event: bytes) -> bytes:
    """The data of an event; nothing where it is a comment, or has no end."""
    source = EventSource(httpx.Response(200, headers=BYTES, content=event))
    return "\n".join(found.data for found in source.iter_sse()).encode("latin-1").strip()


# Servers


class Peer(ABC):
    """Another server.

    base: URL of its API. key: sent as a bearer token, and in no message. connect_timeout, timeout: seconds for the
    connection, and until something of use comes. absent, silent: what is said of it where that does not happen, for
    the reason and the seconds.
    """

    absent: str
    silent: str

    def __init__(self, base: str, key: str | None, connect_timeout: float, timeout: float):
        self.base, self.key, self.connect_timeout, self.timeout = base, key, connect_timeout, timeout

    @property
    def options(self) -> dict[str, Any]:
        """What a client of httpx is made with."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "gearbx-mlx"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        return {"headers": headers, "timeout": httpx.Timeout(self.timeout, connect=self.connect_timeout)}

    def request(self, url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """What httpx's `stream` is called with: POST with a JSON body, or GET without one."""
        if body is None:
            return {"method": "GET", "url": url}
        content = json.dumps(body).encode()  # as ASCII: a text may contain half of a surrogate pair
        return {"method": "POST", "url": url, "content": content, "headers": {"Content-Type": JSON}}

    @abstractmethod
    def failed(self, what: str, remedy: str = "") -> Exception:
        """The error for what the server does: one line without the key."""

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise this peer's error in place of httpx's, and of the UnicodeError for a name that no host can have."""
        try:
            yield
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, UnicodeError) as error:
            raise self.described(error) from error

    def described(self, error: Exception) -> Exception:
        """The error that says why a request failed."""
        match error:
            case httpx.ConnectTimeout():
                return self.failed(f"takes no connection within {self.connect_timeout:g} s", START)
            case httpx.TimeoutException():
                return self.silence(self.timeout)
            case httpx.ConnectError() | UnicodeError():
                return self.failed(self.absent.format(one_line(error)), START)
        return self.failed(f"cut its answer short ({one_line(error)})", "look at the server's log and run this again")

    def silence(self, seconds: float) -> Exception:
        return self.failed(self.silent.format(seconds), "give it more time with --server-timeout")


class Reply:
    """The bytes of an answer as they come, with or without `async`.

    They raise the peer's errors: where they end early, and where nothing of use is `heard` among them for too long, or
    among too many. kind: the media type. streams: whether it is a stream of events.
    """

    def __init__(self, peer: Peer, response: httpx.Response):
        self.peer, self.response = peer, response
        self.kind = brief(response.headers.get("content-type", "")).partition(";")[0].strip().lower()
        self.streams = "event-stream" in self.kind
        self.most = LARGEST_EVENT if self.streams else LARGEST_ANSWER
        self.patience = peer.timeout  # seconds
        self.heard()

    def heard(self) -> None:
        """Something of use came: the time to wait begins again."""
        self.until = time.monotonic() + self.patience
        self.unheard = 0

    def __iter__(self) -> Iterator[bytes]:
        with self.peer.failures():
            for part in self.response.iter_bytes():
                yield self.checked(part)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self.peer.failures():
            async for part in self.response.aiter_bytes():
                yield self.checked(part)

    def checked(self, part: bytes) -> bytes:
        """A part that comes in time, and is not too much."""
        self.unheard += len(part)
        if time.monotonic() > self.until:
            raise self.peer.silence(self.patience)
        if self.unheard > self.most:
            raise self.peer.failed(f"sends more than {self.most} bytes")
        return part

    def parsed(self, content: S, parse: Callable[[S], T]) -> T:
        """What `parse` makes of a part of the answer; the peer's error where that fails."""
        try:
            return parse(content)
        except (GearbxError, UnicodeError) as error:
            what = f"answers {self.kind or 'something'} that is not an answer of this API ({error})"
            raise self.peer.failed(what) from error
