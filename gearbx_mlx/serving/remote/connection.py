"""Requests to servers of others. Every way in which they fail is one line that names the URL and the remedy."""

import ipaddress
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlunsplit

import httpx

from ...errors import GearbxError, one_line
from ...files.reading import parse_json
from ..http_client import (
    LINE_END,
    Clock,
    Failure,
    TooLong,
    brief,
    failures,
    hidden,
    parsed_url,
    pieces,
    with_rest,
)
from ..names import DEFAULT_TIMEOUT

LARGEST = 2**26  # bytes of one line, or of an answer that is not streamed
BEGINNING = 2**16  # bytes that show what an answer is
JSON = "application/json"


class RemoteError(GearbxError):
    """A server cannot be used: the message is one line with its URL and the remedy."""


class RefusedError(RemoteError):
    """A server answered with a status of 400 or more.

    Attributes:
        status: of HTTP.
        reason: the server's words.
    """

    def __init__(self, message: str, status: int, reason: str):
        super().__init__(message)
        self.status, self.reason = status, reason


class Connection:
    """Requests to one server; a context that closes its sockets.

    Args:
        url: of the API, such as http://127.0.0.1:8080/v1. A proxy of the environment is used, except for loopback.
        api_key: sent as a bearer token, and in no message.
        timeout: seconds to wait for the connection, for an answer's next bytes, and from one token to the next.

    Raises:
        GearbxError: a URL that is none, or a key that no header can have.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = DEFAULT_TIMEOUT):
        self.base, self.shown, loopback = checked_url(url)
        self.api_key, self.timeout = api_key or "", timeout
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise GearbxError("the API key has characters that no HTTP header can have; check it")
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self.client = httpx.Client(timeout=timeout, headers=headers, trust_env=not loopback)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @property
    def root(self) -> str:
        """The URL without the version at its end: where a server has APIs of its own."""
        return self.base.removesuffix("/v1")

    @contextmanager
    def opened(self, url: str, body: Mapping[str, Any] | None = None) -> Iterator["Reply"]:
        """The answer to a request: POST with a JSON body, or GET without one.

        Raises:
            RemoteError: no answer, or one that ends early; also while it is read inside.
            RefusedError: a status of 400 or more.
        """
        request = self.client.build_request("GET", url)
        if body is not None:  # as ASCII: a name may contain half of a surrogate pair
            content = json.dumps(body).encode()
            request = self.client.build_request("POST", url, content=content, headers={"Content-Type": JSON})
        with failures(self.described), closing(self.client.send(request, stream=True)) as response:
            reply = Reply(self, response)
            if response.status_code >= 300:
                raise self.refused(response.status_code, reply)
            yield reply

    def json(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that a request is answered with. Raises as `opened`, and RemoteError for what is no JSON."""
        with self.opened(url, body) as reply:
            return self.parsed(reply.text(), parse_json, reply.kind)

    def parsed(self, text: str, parse: Callable[[str], Any], kind: str = "") -> Any:
        """What `parse` makes of a part of an answer; a GearbxError of it becomes a RemoteError with the URL."""
        try:
            return parse(text)
        except GearbxError as error:
            raise self.error(f"answers {kind or 'something'} that is no answer of this API ({error})") from error

    def error(self, what: str, remedy: str = "check the address, which usually ends in /v1") -> RemoteError:
        return RemoteError(hidden(f"{self.shown}: {what}; {remedy}", self.api_key))

    def refused(self, status: int, reply: "Reply") -> RefusedError:
        reason = hidden(refusal(reply.beginning()), self.api_key)
        key = "give --server-api-key"
        remedies = {401: key, 403: key, 404: "check --server-model and the URL", 429: "wait, and ask for less"}
        remedy = remedies.get(status, "look at the server's log" if status >= 500 else "change what it refuses")
        return RefusedError(f"{self.shown}: answers {status} ({reason}); {remedy}", status, reason)

    def described(self, failure: Failure, error: Exception) -> RemoteError:
        """Why a request came to nothing."""
        start = "start the server, or check --server"
        if failure is Failure.SLOW_CONNECTION:
            return self.error(f"no connection within {self.timeout:g} s", start)
        if failure is Failure.NO_CONNECTION:
            return self.error(f"no connection ({one_line(error)})", start)
        return self.silent() if failure is Failure.SILENT else self.cut(one_line(error))

    def silent(self) -> RemoteError:
        return self.error(f"no token for {self.timeout:g} s", "give it more time with --server-timeout")

    def cut(self, why: str) -> RemoteError:
        return self.error(f"cut its answer short ({why})", "look at the server's log and run this again")


class Reply:
    """An answer while it comes."""

    def __init__(self, connection: Connection, response: httpx.Response):
        self.connection, self.response = connection, response
        self.kind = brief(response.headers.get("content-type", "")).partition(";")[0].lower()
        self.clock = Clock(connection.timeout)

    def heard(self) -> None:
        """A token came: the time to wait begins again."""
        self.clock.heard()

    def parts(self) -> Iterator[bytes]:
        """The bytes as they come. Raises RemoteError where they come, but no token among them."""
        for part in self.response.iter_bytes():
            if self.clock.over:
                raise self.connection.silent()
            yield part

    def text(self) -> str:
        """The whole answer. Raises RemoteError for one that is too long."""
        found = bytearray()
        for part in self.parts():
            found += part
            if len(found) > LARGEST:
                raise self.connection.error(f"sends more than {LARGEST} bytes")
        return found.decode("utf-8", "replace")

    def beginning(self) -> str:
        """The first bytes of the answer: enough of an error, or of a page, to say what it is."""
        found = bytearray()
        for part in self.parts():
            found += part
            if len(found) >= BEGINNING:
                break
        return found[:BEGINNING].decode("utf-8", "replace")

    def lines(self) -> Iterator[str]:
        """The lines of the answer, each as soon as it is there. Raises RemoteError for one that is too long."""
        try:
            for line in with_rest(pieces(self.parts(), LINE_END, LARGEST)):
                yield line.decode("utf-8", "replace").rstrip("\r\n")
        except TooLong as error:
            raise self.connection.error(f"sends a line of more than {LARGEST} bytes") from error


def events(lines: Iterable[str]) -> Iterator[str]:
    """The data of server-sent events, from the lines of a stream."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[len("data:") :].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)


def refusal(text: str) -> str:
    """Why a server refuses a request, in its own words: OpenAI's error object, mlx-lm's text, or the body's begin."""
    try:
        content = parse_json(text)
    except GearbxError:
        return "no reason given" if "<" in text or not text.strip() else brief(text)
    found = content.get("error", content) if isinstance(content, dict) else content
    found = found.get("message", found) if isinstance(found, dict) else found
    return brief(str(found))


def checked_url(text: str) -> tuple[str, str, bool]:
    """A URL without a slash at its end, the same without name and password, and whether it is on loopback.

    Raises:
        GearbxError: no URL of HTTP.
    """
    parts = parsed_url(text, "--server")
    host, path = parts.hostname or "", parts.path.rstrip("/")
    place = (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else "")
    base = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
    return base, urlunsplit((parts.scheme, place, path, "", "")), on_loopback(host)


def on_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
