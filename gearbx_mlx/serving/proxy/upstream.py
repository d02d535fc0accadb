"""One of the servers between which the proxy routes: requests to it, and every way in which they fail.

What goes wrong is `Failed`, with a reason for the client; a request that the server itself refuses is `Declined`, whose
answer goes to the client as it is. Neither has the API key in it.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ...errors import GearbxError
from ...files.reading import parse_python_json
from ..http_client import (
    EVENT_END,
    HIDDEN,
    Clock,
    Failure,
    TooLong,
    brief,
    failures,
    hidden,
    parsed_url,
    pieces,
)
from .failed import Declined, Failed
from .hang_up import WatchingTransport

LARGEST_ANSWER, LARGEST_EVENT = 2**26, 2**24  # bytes
CONNECTIONS = 256  # as many as the proxy's own clients can be
NOT_OURS = (401, 403, 407)  # the proxy's key is wrong, which a client cannot mend
LISTING = (200, 404)  # the answers of a server that has its models listed, or has no list
HEALTH_PATIENCE = 2.0  # seconds
EVENTS, JSON = "text/event-stream", "application/json"


@dataclass(frozen=True)
class Place:
    """Where a server is.

    name: "small" or "large". base: URL of the API, up to /v1. model: its name for the server; None: as clients say.
    key: sent as a bearer token. connect_timeout, timeout: seconds for the connection, and between two bytes.
    """

    name: str
    base: str
    model: str | None = None
    key: str | None = None
    connect_timeout: float = 5.0
    timeout: float = 600.0


class Upstream:
    """Requests to a server, over connections that are kept open; threads share it.

    Attributes:
        software: what the server calls itself, lower case; "" before its first answer.
    """

    def __init__(self, place: Place):
        self.place, self.name, self.software = place, place.name, ""
        headers = {"Accept-Encoding": "identity", "User-Agent": "gearbx-mlx"}
        if place.key:
            headers["Authorization"] = f"Bearer {place.key}"
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS, keepalive_expiry=30)
        self.client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(place.timeout, connect=place.connect_timeout),
            transport=WatchingTransport(limits),
            trust_env=False,
            follow_redirects=False,
        )

    def close(self) -> None:
        self.client.close()

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer.

        Args:
            path: below /v1.

        Raises:
            Failed: no answer, or no JSON object with choices.
            Declined: the server refuses the request.
        """
        with self.opened(path, body) as response:
            content = self.whole(response)
        answer = self.parsed(content)
        if not isinstance(answer.get("choices"), list):
            raise self.failed("answers without choices")
        return answer

    @contextmanager
    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Iterator[bytes]]:
        """The server-sent events of an answer, each as soon as it is there, bytes as they came. Raises as `ask`."""
        with self.opened(path, body) as response:
            kind = kind_of(response)
            if kind != EVENTS:
                self.whole(response)
                raise self.failed(f"answers {kind} in place of a stream")
            yield self.split(response)

    @contextmanager
    def opened(self, path: str, body: Mapping[str, Any]) -> Iterator[httpx.Response]:
        sent = {**body, "model": self.place.model} if self.place.model else body
        content = json.dumps(sent).encode()  # as ASCII: a text may contain half of a surrogate pair
        request = self.client.stream("POST", self.place.base + path, content=content, headers={"Content-Type": JSON})
        with failures(self.described), request as response:
            self.check(response)
            yield response

    def check(self, response: httpx.Response) -> None:
        """Raises Failed or Declined for an answer that is none."""
        status = response.status_code
        self.heard(response)
        if status < 300:
            return
        if status < 400:
            raise self.failed(f"redirects ({status}), which is not followed; give the address where it leads")
        content = self.whole(response)
        if status in NOT_OURS or status >= 500 or kind_of(response) == "text/html":
            raise self.failed(f"answers {status}" + (", so check its key" if status in NOT_OURS else ""))
        shown = content.replace(self.place.key.encode(), HIDDEN.encode()) if self.place.key else content
        later = response.headers.get("retry-after", "")
        raise Declined(status, kind_of(response), shown, later if later.isascii() and later.isprintable() else "")

    def whole(self, response: httpx.Response, seconds: float = math.inf) -> bytes:
        parts, length, clock = [], 0, Clock(seconds)
        for part in response.iter_raw():
            if clock.over:
                raise self.failed(f"takes more than {seconds:g} s")
            parts.append(part)
            length += len(part)
            if length > LARGEST_ANSWER:
                raise self.failed(f"sends more than {LARGEST_ANSWER} bytes")
        return b"".join(parts)

    def split(self, response: httpx.Response) -> Iterator[bytes]:
        """The events of a stream, with the blank line that ends each; what has none when the stream ends is dropped.

        Raises:
            Failed: an event is too long, or for the time to wait no data came, whatever else did.
        """
        clock = Clock(self.place.timeout)

        def parts() -> Iterator[bytes]:
            for part in response.iter_raw():
                if clock.over:
                    raise self.failed(f"sent no data for {clock.seconds:g} s")
                yield part

        try:
            comments = 0
            for event in pieces(parts(), EVENT_END, LARGEST_EVENT):
                yield event
                if data_of(event):
                    clock.heard()
                comments = 0 if data_of(event) else comments + len(event)
                if comments > LARGEST_EVENT:
                    raise TooLong
        except TooLong as error:
            raise self.failed(f"sends an event of more than {LARGEST_EVENT} bytes") from error

    def with_tokens(self, events: Iterator[bytes], seen: Callable[[], int]) -> Iterator[bytes]:
        """The events, which somebody keeps. Raises Failed where they are too many, or no token is seen for too long."""
        clock, known, size = Clock(self.place.timeout), 0, 0
        for event in events:
            yield event
            size += len(event)
            if seen() > known:
                known = seen()
                clock.heard()
            if clock.over:
                raise self.failed(f"sent no token for {clock.seconds:g} s")
            if size > LARGEST_ANSWER:
                raise self.failed(f"sends more than {LARGEST_ANSWER} bytes before its first tokens are there")

    def parsed(self, content: bytes | str) -> dict[str, Any]:
        """Raises Failed for what is no JSON object, or one that reports an error."""
        try:
            text = content if isinstance(content, str) else content.decode("utf-8")
            found = parse_python_json(text)
        except (GearbxError, UnicodeError) as error:
            raise self.failed("answers what is no JSON") from error
        if not isinstance(found, dict):
            raise self.failed("answers what is no JSON object")
        if found.get("error") and not found.get("choices"):
            raise self.reported(found["error"])
        return found

    def reported(self, error: Any) -> Failed:
        """What a server says of itself in an answer of 200, without the key, which it may repeat."""
        said = error.get("message", error) if isinstance(error, dict) else error
        return self.failed(f"reports an error: {hidden(brief(str(said)), self.place.key)}")

    def failed(self, why: str) -> Failed:
        return Failed(f"the {self.name} server {why}")

    def described(self, failure: Failure, error: Exception) -> Failed:
        """Why a request came to nothing."""
        words = {
            Failure.SLOW_CONNECTION: f"takes no connection within {self.place.connect_timeout:g} s",
            Failure.SILENT: f"sent nothing for {self.place.timeout:g} s",
            Failure.NO_CONNECTION: "is not there (no connection)",
            Failure.CUT: f"cut its answer short ({type(error).__name__})",
        }
        return self.failed(words[failure])

    def models(self) -> list[dict[str, Any]]:
        """The models that the server lists. Raises Failed."""
        status, content = self.get(self.place.base + "/models")
        if status != 200:
            raise Failed(f"the {self.name} server answers {status} where its models are", status)
        rows = self.parsed(content).get("data")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    def why_not_well(self) -> str | None:
        """Why the server is not well; None if it answers. One that has no /health, and says so, is well."""
        try:
            status, _ = self.get(root(self.place.base) + "/health")
        except Failed as error:
            return str(error)
        return f"the {self.name} server answers {status}" if status >= 500 else None

    def get(self, url: str) -> tuple[int, bytes]:
        """Status and content. Raises Failed."""
        with failures(self.described), self.client.stream("GET", url, timeout=HEALTH_PATIENCE) as response:
            self.heard(response)
            return response.status_code, self.whole(response, HEALTH_PATIENCE)

    def heard(self, response: httpx.Response) -> None:
        self.software = response.headers.get("server", "").lower()


def kind_of(response: httpx.Response) -> str:
    """The media type of an answer, one short line."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind[:80] if kind.isascii() and kind.isprintable() and kind else "something"


def data_of(event: bytes) -> bytes | None:
    """The data of an event; None of a comment."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def root(base: str) -> str:
    return base.removesuffix("/v1")


def checked_url(url: str, flag: str) -> str:
    """The URL of an API: `/v1` is added where there is no path. Raises GearbxError, without what may be a password."""
    parts = parsed_url(url, flag)
    if parts.username is not None or parts.password is not None:
        raise GearbxError(f"{flag} has a name or a password in it; give its key in the environment")
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"
