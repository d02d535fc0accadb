"""One of the servers between which the proxy routes: requests to it, and every way in which they fail.

What goes wrong is `Failed`, with a reason for the client; a request that the server itself refuses is `Declined`, whose
words go to the client as they are. Neither has the API key in it.
"""

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ...errors import GearbxError
from ...files.reading import parse_json, parse_python_json
from ..peer import DONE, EVENT_END, JSON, Peer, Reply, brief, data_of, hidden, parsed_url, pieces_in, said_in
from ..web import Refused

CONNECTIONS = 256  # as many as the proxy's own clients can be
NOT_OURS = (401, 403, 407)  # the proxy's key is wrong, which a client cannot mend
HEALTH_PATIENCE = 2.0  # seconds


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


class Upstream(Peer):
    """Requests to a server, over connections that are kept open; those whose client leaves are cancelled.

    Args:
        name: "small" or "large".
        base: URL of the API, up to /v1.
        model: its name for the server; None: as clients say.
        key, connect_timeout, timeout: as a Peer's.

    software: what the server calls itself, lower case; "" before its first answer.
    """

    absent, silent = "is not there (no connection)", "sent nothing for {:g} s"

    def __init__(
        self, name: str, base: str, model: str | None, key: str | None, connect_timeout: float, timeout: float
    ):
        super().__init__(base, key, connect_timeout, timeout)
        self.name, self.model, self.software = name, model, ""
        self.client = httpx.AsyncClient(
            **self.options,
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS),
            verify=httpx.create_ssl_context(trust_env=False),
            trust_env=False,
        )

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer.

        Args:
            path: below /v1.

        Raises:
            Failed: no answer, or no JSON object with choices.
            Declined: the server refuses the request.
        """
        async with self.opened(path, body) as reply:
            return await self.answer(reply)

    async def answer(self, reply: Reply) -> dict[str, Any]:
        """A whole answer. Raises Failed for anything else."""
        answer = self.object_in(reply, await whole(reply), parse_python_json)
        if not isinstance(answer.get("choices"), list):
            raise self.failed("answers without choices")
        return answer

    @asynccontextmanager
    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[Event]]:
        """The server-sent events of an answer, each as soon as it is there, or of a whole one. Raises as `ask`."""
        async with self.opened(path, body) as reply:
            yield self.split(reply) if reply.streams else as_events(await self.answer(reply))

    @asynccontextmanager
    async def opened(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Reply]:
        """The answer to a request, which is not refused."""
        async with self.replying(self.base + path, {**body, "model": self.model} if self.model else body) as reply:
            await self.check(reply)
            yield reply

    @asynccontextmanager
    async def replying(self, url: str, body: Mapping[str, Any] | None = None, **options: Any) -> AsyncIterator[Reply]:
        """The answer to a request, of whatever status."""
        with self.failures():
            async with self.client.stream(**self.request(url, body), **options) as response:
                self.software = response.headers.get("server", "").lower()
                yield Reply(self, response)

    async def check(self, reply: Reply) -> None:
        """Raises Failed or Declined for what is not an answer."""
        status = reply.response.status_code
        if status < 300:
            return
        if status < 400:
            raise self.failed(f"redirects ({status}), which is not followed; give the address where it leads")
        said = hidden((await whole(reply)).decode("utf-8", "replace"), self.key)
        if status in NOT_OURS or status >= 500 or reply.kind == "text/html":
            raise self.failed(f"answers {status}" + (", so check its key" if status in NOT_OURS else ""))
        later = hidden(reply.response.headers.get("retry-after", ""), self.key)
        raise Declined(status, said, later if later.isascii() and later.isprintable() else "")

    async def split(self, reply: Reply) -> AsyncIterator[Event]:
        """The events of a stream; what has no blank line at its end when the stream ends is dropped.

        Raises:
            Failed: an event does not belong to this API or is too long, or only comments came in time.
        """
        rest = bytearray()
        async for part in reply:
            for raw in pieces_in(rest, part, EVENT_END):
                event = self.event(reply, raw)
                yield event
                if event.chunk is not None or event.is_end:
                    reply.heard()

    def event(self, reply: Reply, raw: bytes) -> Event:
        """An event by its bytes. Raises Failed for one that reports an error, or has no chunk."""
        data = data_of(raw)
        if not data or data == DONE.encode():
            return Event(raw, is_end=bool(data))
        chunk = self.object_in(reply, data, parse_json)
        if "choices" not in chunk:
            raise self.failed("streams no answer")
        return Event(raw, chunk)

    def object_in(self, reply: Reply, content: bytes, parse: Callable[[str], Any]) -> dict[str, Any]:
        """The JSON object that a text is. Raises Failed for anything else, or one that reports an error."""
        found = reply.parsed(content, lambda content: parse(content.decode("utf-8")))
        if not isinstance(found, dict):
            raise self.failed("answers what is not a JSON object")
        if found.get("error") and not found.get("choices"):
            raise self.failed(f"reports an error: {brief(hidden(said_in(found['error']), self.key))}")
        return found

    def failed(self, what: str, remedy: str = "") -> Failed:
        """The error for the client, which can mend nothing."""
        return Failed(hidden(f"the {self.name} server {what}", self.key))

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server lists. Raises Failed."""
        async with self.replying(self.base + "/models", timeout=HEALTH_PATIENCE) as reply:
            content, status = await whole(reply, HEALTH_PATIENCE), reply.response.status_code
        if status != 200:
            raise Failed(f"the {self.name} server answers {status} where its models are", status)
        rows = self.object_in(reply, content, parse_python_json).get("data")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    async def why_not_well(self) -> str | None:
        """Why the server is not well; None if it answers. One that has no /health, and says so, is well."""
        try:
            async with self.replying(self.base.removesuffix("/v1") + "/health", timeout=HEALTH_PATIENCE) as reply:
                await whole(reply, HEALTH_PATIENCE)
        except Failed as error:
            return error.message
        status = reply.response.status_code
        return f"the {self.name} server answers {status}" if status >= 500 else None


async def whole(reply: Reply, seconds: float = math.inf) -> bytes:
    """A whole answer, which may take so many seconds."""
    reply.patience = seconds
    reply.heard()
    return b"".join([part async for part in reply])


async def as_events(answer: dict[str, Any]) -> AsyncIterator[Event]:
    """A whole answer as a stream: what a server sends that does not know streams."""
    choices = [choice for choice in answer["choices"] if isinstance(choice, dict)]
    streamed = [{"delta" if name == "message" else name: value for name, value in one.items()} for one in choices]
    chunk = answer | {"choices": streamed}
    yield Event(b"data: " + json.dumps(chunk).encode() + b"\n\n", chunk)
    yield Event(f"data: {DONE}\n\n".encode(), is_end=True)


def checked_url(url: str, flag: str) -> str:
    """The URL of an API: `/v1` is added where there is no path. Raises GearbxError, without what may be a password."""
    parts = parsed_url(url, flag)
    if parts.userinfo:
        raise GearbxError(f"{flag} has a name or a password in it; give its key in the environment")
    base = str(parts).rstrip("/")
    return base if parts.path.rstrip("/") else f"{base}/v1"
