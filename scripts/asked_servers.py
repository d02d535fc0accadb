"""Servers in separate processes, and clients that send them requests; for tools and studies."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import httpx
from httpx_sse import EventSource

from gearbx_mlx.errors import GearbxError, one_line

# Clients

PATH = "/v1/completions"
PATIENCE = 600.0  # seconds for an answer


@dataclass(frozen=True)
class ClientRequest:
    """A greedy request."""

    prompt: str
    tokens: int
    stream: bool = False

    @property
    def body(self) -> dict[str, Any]:
        streams = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return {"prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0.0, **streams}


@dataclass(frozen=True)
class ClientAnswer:
    """An answer. first, seconds: from the request to the first text and to the end; first is None for a whole one.

    processor: seconds of the server's processor, the asking before it included.
    """

    text: str
    tokens: int
    seconds: float
    first: float | None = None
    processor: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of a stream after its first token, or of a whole answer."""
        if self.first is None:
            return self.tokens / self.seconds
        return (self.tokens - 1) / max(self.seconds - self.first, 1e-9)


def check_answer(answer: httpx.Response) -> None:
    """Raises GearbxError with the words of a server that refuses a request."""
    if answer.is_error:
        answer.read()
        raise GearbxError(f"{answer.request.url} answers {answer.status_code}: {' '.join(answer.text.split())[:500]}")


class Client(httpx.Client):
    """Asks one server, a request after the other. Raises GearbxError for what is not an answer."""

    def __init__(self, url: str):
        refusing: dict[str, Any] = {"response": [check_answer]}
        super().__init__(base_url=url, trust_env=False, verify=False, timeout=PATIENCE, event_hooks=refusing)

    def ask(self, asked: ClientRequest) -> ClientAnswer:
        try:
            return self._streamed(asked) if asked.stream else self._whole(asked)
        except httpx.HTTPError as error:
            raise GearbxError(f"{self.base_url}: {type(error).__name__}: {one_line(error)}") from error

    def _whole(self, asked: ClientRequest) -> ClientAnswer:
        start = time.perf_counter()
        answer = self.post(PATH, json=asked.body)
        seconds = time.perf_counter() - start
        content = answer.json()
        return ClientAnswer(content["choices"][0]["text"], content["usage"]["completion_tokens"], seconds)

    def _streamed(self, asked: ClientRequest) -> ClientAnswer:
        start = time.perf_counter()
        text, tokens, first = "", 0, None
        with self.stream("POST", PATH, json=asked.body) as answer:
            for event in EventSource(answer).iter_sse():
                if event.data == "[DONE]":
                    continue  # to the end of the stream, which keeps the connection
                chunk = event.json()
                if "error" in chunk:
                    raise GearbxError(f"{self.base_url}: {chunk['error']['message']}")
                if written := "".join(choice["text"] for choice in chunk["choices"]):
                    first = time.perf_counter() - start if first is None else first
                    text += written
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        seconds = time.perf_counter() - start
        return ClientAnswer(text, tokens, seconds, seconds if first is None else first)


# Servers in processes of their own

START_PATIENCE = 300.0  # seconds until a server listens: it loads a model before
GRACE = 20.0  # seconds until it has ended
POLL = 0.05  # seconds


def free_port() -> int:
    """Return a port of loopback without a listener."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def started(program: tuple[str, ...], *flags: object) -> Iterator[tuple[Client, Any]]:
    """Return a context with a client of a running server, and psutil's view of its process.

    Raises:
        GearbxError: a server that ends or does not listen; there is no psutil.
    """
    try:
        view_of = import_module("psutil").Process
    except ImportError as error:
        raise GearbxError("this needs psutil: pip install psutil") from error
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", *program, "--host", "127.0.0.1", "--port", str(port), *map(str, flags)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--log-level", "WARNING"], stdout=log, stderr=log)
        until = time.monotonic() + START_PATIENCE
        try:
            while not listens(url):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    said = " ".join(log.read().decode(errors="replace").split())[-500:] or "it said nothing"
                    raise GearbxError(f"{' '.join(program)} does not serve: {said}")
                time.sleep(POLL)
            with Client(url) as client:
                yield client, view_of(process.pid)
        finally:
            end(process)


def listens(url: str) -> bool:
    """Return whether a server answers; loopback needs no proxy."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", trust_env=False, timeout=5).is_success
    return False


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process, by force where it does not end by itself."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
