"""One of the servers between which the proxy routes: requests to it, and every way in which they fail.

What goes wrong is `Failed`, with a reason for the client; a request that the server itself refuses is `Declined`, whose
words go to the client as they are. Neither has the API key in it.
"""

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from ...errors import GearbxError
from ...files.reading import parse_json, parse_python_json
from ..remote import Clock, brief, data_of, events_in, failures, hidden, parsed_url, said_in
from ..web import Refused

LARGEST_ANSWER, LARGEST_EVENT = 2**26, 2**24  # bytes
CONNECTIONS = 256  # as many as the proxy's own clients can be
NOT_OURS = (401, 403, 407)  # the proxy's key is wrong, which a client cannot mend
HEALTH_PATIENCE = 2.0  # seconds
EVENTS, JSON = "text/event-stream", "application/json"
DONE = b"[DONE]"


class Failed(Refused):
    """A server gave no answer that can be used; the message is one line.

    Args:
        status: of HTTP, where its models were asked for.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(502, message, "server_error", code="bad_gateway")
        self.status = status


class Declined(Exception):
    """A server refused the request itself: its answer of 4xx.

    Args:
        said: its body.
        retry_after: seconds or a date, as the server says; "" where it does not.
    """

    def __init__(self, status: int, said: str, retry_after: str = ""):
        super().__init__(f"answers {status}")
        self.status, self.said, self.retry_after = status, said, retry_after

    @property
    def kind(self) -> str:
        """JSON or plain text: nothing that a browser would run, whatever the server calls it."""
        try:
            parse_python_json(self.said)
        except GearbxError:
            return "text/plain; charset=utf-8"
        return JSON


@dataclass(frozen=True)
class Event:
    """A server-sent event: its bytes, with the blank line that ends it, and the chunk of an answer in it.

    A comment has no chunk, nor has the last event of a stream, which `is_end`.
    """

    raw: bytes
    chunk: dict[str, Any] | None = None
    is_end: bool = False


@dataclass(eq=False)
class Upstream:
    """Requests to a server, over connections that are kept open; those whose client leaves are cancelled.

    name: "small" or "large". base: URL of the API, up to /v1. model: its name for the server; None: as clients say.
    key: sent as a bearer token. connect_timeout, timeout: seconds for the connection, and between two bytes. software:
    what the server calls itself, lower case; "" before its first answer.
    """

    name: str
    base: str
    model: str | None
    key: str | None = field(repr=False)
    connect_timeout: float
    timeout: float
    software: str = ""

    def __post_init__(self) -> None:
        headers = {"Accept-Encoding": "identity", "User-Agent": "gearbx-mlx"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        self.client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(self.timeout, connect=self.connect_timeout),
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS),
            verify=httpx.create_ssl_context(trust_env=False),
            trust_env=False,
            follow_redirects=False,
        )

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer.

        Args:
            path: below /v1.

        Raises:
            Failed: no answer, or no JSON object with choices.
            Declined: the server refuses the request.
        """
        async with self.opened(path, body) as response:
            return self.answer(await self.whole(response))

    def answer(self, content: bytes) -> dict[str, Any]:
        """A whole answer. Raises Failed for anything else."""
        answer = self.parsed(content, parse_python_json, "answers")
        if not isinstance(answer.get("choices"), list):
            raise self.failed("answers without choices")
        return answer

    @asynccontextmanager
    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[Event]]:
        """The server-sent events of an answer, each as soon as it is there, or of a whole one. Raises as `ask`."""
        async with self.opened(path, body) as response:
            streams = kind_of(response) == EVENTS
            yield self.split(response) if streams else as_events(self.answer(await self.whole(response)))

    @asynccontextmanager
    async def opened(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        sent = {**body, "model": self.model} if self.model else body
        content = json.dumps(sent).encode()  # as ASCII: a text may contain half of a surrogate pair
        request = self.client.stream("POST", self.base + path, content=content, headers={"Content-Type": JSON})
        with failures(self.described):
            async with request as response:
                await self.check(response)
                yield response

    async def check(self, response: httpx.Response) -> None:
        """Raises Failed or Declined for what is not an answer."""
        status = response.status_code
        self.software = response.headers.get("server", "").lower()
        if status < 300:
            return
        if status < 400:
            raise self.failed(f"redirects ({status}), which is not followed; give the address where it leads")
        content = await self.whole(response)
        if status in NOT_OURS or status >= 500 or kind_of(response) == "text/html":
            raise self.failed(f"answers {status}" + (", so check its key" if status in NOT_OURS else ""))
        said = hidden(content.decode("utf-8", "replace"), self.key)
        later = hidden(response.headers.get("retry-after", ""), self.key)
        raise Declined(status, said, later if later.isascii() and later.isprintable() else "")

    async def parts(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The bytes of an answer as they come. Raises Failed where they end early."""
        with failures(self.described):
            async for part in response.aiter_raw():
                yield part

    async def whole(self, response: httpx.Response, seconds: float = math.inf) -> bytes:
        content, clock = bytearray(), Clock(seconds)
        async for part in self.parts(response):
            if clock.over:
                raise self.failed(f"takes more than {seconds:g} s")
            content += part
            if len(content) > LARGEST_ANSWER:
                raise self.failed(f"sends more than {LARGEST_ANSWER} bytes")
        return bytes(content)

    async def split(self, response: httpx.Response) -> AsyncIterator[Event]:
        """The events of a stream; what has no blank line at its end when the stream ends is dropped.

        Raises:
            Failed: an event does not belong to this API or is too long, or only comments came in time.
        """
        clock, rest, comments = Clock(self.timeout), bytearray(), 0
        async for part in self.parts(response):
            if clock.over:
                raise self.failed(f"sent no data for {clock.seconds:g} s")
            for raw in events_in(rest, part):
                event = self.event(raw)
                yield event
                comments += len(raw)
                if event.chunk is not None or event.is_end:
                    clock.heard()
                    comments = 0
            if max(comments, len(rest)) > LARGEST_EVENT:
                raise self.failed(f"sends an event of more than {LARGEST_EVENT} bytes")

    def event(self, raw: bytes) -> Event:
        """An event by its bytes. Raises Failed for one that reports an error, or has no chunk."""
        data = data_of(raw)
        if not data or data == DONE:
            return Event(raw, is_end=data == DONE)
        chunk = self.parsed(data, parse_json, "streams")
        if "choices" not in chunk:
            raise self.failed("streams no answer")
        return Event(raw, chunk)

    def parsed(self, content: bytes, parse: Callable[[str], Any], does: str) -> dict[str, Any]:
        """Raises Failed for what is not a JSON object, or one that reports an error."""
        try:
            found = parse(content.decode("utf-8"))
        except (GearbxError, UnicodeError) as error:
            raise self.failed(f"{does} what is not JSON") from error
        if not isinstance(found, dict):
            raise self.failed(f"{does} what is not a JSON object")
        if found.get("error") and not found.get("choices"):
            raise self.failed(f"reports an error: {brief(hidden(said_in(found['error']), self.key))}")
        return found

    def failed(self, why: str) -> Failed:
        return Failed(f"the {self.name} server {why}")

    def described(self, error: Exception) -> Failed:
        """Why a request came to nothing."""
        match error:
            case httpx.ConnectTimeout():
                return self.failed(f"takes no connection within {self.connect_timeout:g} s")
            case httpx.TimeoutException():
                return self.failed(f"sent nothing for {self.timeout:g} s")
            case httpx.ConnectError() | UnicodeError():
                return self.failed("is not there (no connection)")
        return self.failed(f"cut its answer short ({type(error).__name__})")

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server lists. Raises Failed."""
        status, content = await self.get(self.base + "/models")
        if status != 200:
            raise Failed(f"the {self.name} server answers {status} where its models are", status)
        rows = self.parsed(content, parse_python_json, "answers").get("data")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    async def why_not_well(self) -> str | None:
        """Why the server is not well; None if it answers. One that has no /health, and says so, is well."""
        try:
            status, _ = await self.get(self.base.removesuffix("/v1") + "/health")
        except Failed as error:
            return error.message
        return f"the {self.name} server answers {status}" if status >= 500 else None

    async def get(self, url: str) -> tuple[int, bytes]:
        """Status and content. Raises Failed."""
        with failures(self.described):
            async with self.client.stream("GET", url, timeout=HEALTH_PATIENCE) as response:
                self.software = response.headers.get("server", "").lower()
                return response.status_code, await self.whole(response, HEALTH_PATIENCE)


def kind_of(response: httpx.Response) -> str:
    """The media type of an answer."""
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


async def as_events(answer: dict[str, Any]) -> AsyncIterator[Event]:
    """A whole answer as a stream: what a server sends that does not know streams."""
    choices = [choice for choice in answer["choices"] if isinstance(choice, dict)]
    streamed = [{"delta" if name == "message" else name: value for name, value in one.items()} for one in choices]
    chunk = answer | {"choices": streamed}
    yield Event(b"data: " + json.dumps(chunk).encode() + b"\n\n", chunk)
    yield Event(b"data: " + DONE + b"\n\n", is_end=True)


def checked_url(url: str, flag: str) -> str:
    """The URL of an API: `/v1` is added where there is no path. Raises GearbxError, without what may be a password."""
    parts = parsed_url(url, flag)
    if parts.userinfo:
        raise GearbxError(f"{flag} has a name or a password in it; give its key in the environment")
    base = str(parts).rstrip("/")
    return base if parts.path.rstrip("/") else f"{base}/v1"
