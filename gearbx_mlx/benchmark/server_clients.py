"""Clients of OpenAI-style servers that time what they get, one or many at once, and the processes of servers."""

import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import httpx
from httpx_sse import EventSource

from ..errors import GearbxError, one_line

PATH = "/v1/completions"
PATIENCE = 600.0  # seconds for an answer
SAMPLE_SECONDS = 1.0  # between two samples of memory
START_PATIENCE = 300.0  # seconds until a server listens: it loads a model before
GRACE = 20.0  # seconds until it has ended
POLL = 0.05  # seconds

OURS = ("gearbx_mlx.server",)
MLX_LM = ("mlx_lm", "server")


@dataclass(frozen=True, eq=False)
class ClientRequest:
    """A request: greedy, unless `further` says otherwise. further: fields of its body."""

    prompt: str
    tokens: int
    stream: bool = False
    further: dict[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        streams = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return {"prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0.0, **streams, **self.further}


@dataclass(frozen=True)
class ClientAnswer:
    """An answer. first, seconds: from the request to the first text and to the end; first is None for a whole one."""

    text: str
    tokens: int
    seconds: float
    first: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of a stream after its first token, of a whole answer altogether."""
        if self.first is None:
            return self.tokens / self.seconds
        return (self.tokens - 1) / max(self.seconds - self.first, 1e-9)


class Client:
    """Asks one server, a request after the other. Raises httpx.HTTPError for an answer that is none."""

    def __init__(self, url: str):
        self.http = httpx.Client(base_url=url, trust_env=False, verify=False, timeout=PATIENCE)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, asked: ClientRequest) -> ClientAnswer:
        return self.stream(asked) if asked.stream else self.whole(asked)

    def whole(self, asked: ClientRequest) -> ClientAnswer:
        start = time.perf_counter()
        answer = self.http.post(PATH, json=asked.body)
        seconds = time.perf_counter() - start
        content = answer.raise_for_status().json()
        return ClientAnswer(content["choices"][0]["text"], content["usage"]["completion_tokens"], seconds)

    def stream(self, asked: ClientRequest) -> ClientAnswer:
        start = time.perf_counter()
        text, tokens, first = "", 0, None
        with self.http.stream("POST", PATH, json=asked.body) as answer:
            answer.raise_for_status()
            for event in EventSource(answer).iter_sse():
                if event.data == "[DONE]":
                    continue  # to the end of the stream, which keeps the connection
                chunk = event.json()
                if "error" in chunk:
                    raise httpx.RemoteProtocolError(chunk["error"]["message"])
                if written := "".join(choice["text"] for choice in chunk["choices"]):
                    first = time.perf_counter() - start if first is None else first
                    text += written
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        seconds = time.perf_counter() - start
        return ClientAnswer(text, tokens, seconds, seconds if first is None else first)


def leave(url: str, asked: ClientRequest, after: float, abruptly: bool) -> None:
    """Ask, and go away `after` seconds without reading the answer. abruptly: with a reset of the connection."""
    place, body = urlsplit(url), json.dumps(asked.body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((place.hostname or "", place.port or 80), timeout=PATIENCE) as connection:
        if abruptly:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(head + body)
        time.sleep(after)


def prompts(words: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """Unlike prompts, one for each number of words, none of which begins as another; the same in every run."""
    place, found = 0, []
    for number, length in enumerate(lengths):
        picked = [words[(place + step) % len(words)] for step in range(length)]
        found.append(" ".join([f"{number}.", *picked]))
        place += length + 1
    return found


@dataclass
class CrowdOutcome:
    """What many clients got: answers with their requests, and a sentence for each that failed."""

    answers: list[tuple[ClientRequest, ClientAnswer]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def unlike(self, alone: dict[ClientRequest, ClientAnswer]) -> list[tuple[ClientRequest, ClientAnswer]]:
        """Those whose text is another than the one given alone, where that was given."""
        return [
            (asked, answer) for asked, answer in self.answers if asked in alone and answer.text != alone[asked].text
        ]


def random_requests(requests: Sequence[ClientRequest], seconds: float, seed: int) -> Iterator[ClientRequest]:
    """Some of the requests at random, until so many seconds have passed."""
    until, drawn = time.monotonic() + seconds, random.Random(seed)
    while time.monotonic() < until:
        yield drawn.choice(requests)


def crowd(url: str, clients: int, requests: Iterable[ClientRequest]) -> CrowdOutcome:
    """Ask with so many clients at once, each one request after the other, until there are none."""
    outcome, left, lock = CrowdOutcome(), iter(requests), threading.Lock()

    def take() -> ClientRequest | None:
        with lock:
            return next(left, None)

    def work() -> None:
        with Client(url) as client:
            while (asked := take()) is not None:
                try:
                    outcome.answers.append((asked, client.ask(asked)))
                except httpx.HTTPError as error:
                    outcome.errors.append(f"{type(error).__name__}: {one_line(error)}")

    with ThreadPoolExecutor(clients) as pool:
        for worker in [pool.submit(work) for _ in range(clients)]:
            worker.result()
    return outcome


def process_of(pid: int) -> Any:
    """psutil's view of a process. Raises GearbxError without psutil."""
    try:
        return import_module("psutil").Process(pid)
    except ImportError as error:
        raise GearbxError("this needs psutil: pip install psutil") from error


class MemoryLog:
    """Samples the memory of a process while the context lasts: seconds, and bytes in `samples`."""

    def __init__(self, pid: int):
        self.process, self.samples = process_of(pid), list[tuple[float, int]]()
        self._end, self._thread = threading.Event(), threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "MemoryLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        start = time.monotonic()
        while not self._end.wait(SAMPLE_SECONDS):
            self.samples.append((time.monotonic() - start, self.process.memory_info().rss))


@dataclass(frozen=True)
class ServerProcess:
    """A server that listens. url: http://127.0.0.1:PORT."""

    url: str
    pid: int


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def started(program: tuple[str, ...], *flags: object) -> Iterator[ServerProcess]:
    """A server while its process runs. Raises GearbxError for one that ends or does not listen."""
    port = free_port()
    command = [sys.executable, "-m", *program, "--host", "127.0.0.1", "--port", str(port), *map(str, flags)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--log-level", "WARNING"], stdout=log, stderr=log)
        server = ServerProcess(f"http://127.0.0.1:{port}", process.pid)
        until = time.monotonic() + START_PATIENCE
        try:
            while not listens(server.url):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    said = " ".join(log.read().decode(errors="replace").split())[-500:] or "it said nothing"
                    raise GearbxError(f"{' '.join(program)} does not serve: {said}")
                time.sleep(POLL)
            yield server
        finally:
            end(process)


def listens(url: str) -> bool:
    """Whether a server answers; loopback needs no proxy."""
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
