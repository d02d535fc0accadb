"""Servers: what the proxy adds."""

import contextlib
import json
import math
import multiprocessing
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
from rich.progress import track

from .studies import Found, spread, study, table_here

WORDS = 40
PAUSE = 0.002  # seconds between two words of the server that answers at once
MESSAGES = [{"role": "user", "content": "Good morning!"}]
TOP = [{"token": f"t{i}", "logprob": math.log(0.98 if i == 0 else 0.001)} for i in range(20)]
PATIENCE = 60  # seconds
WARM = 5  # requests that do not count


class AtOnce(BaseHTTPRequestHandler):
    """Answers every chat at once: with log-probabilities where they are asked for, in a stream or whole."""

    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.send("application/json", [b'{"data": []}'])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = bool(body.get("logprobs"))
        if body.get("stream"):
            self.send("text/event-stream", events(asked))
        else:
            words = min(WORDS, body["max_tokens"])
            logprobs = {"content": [{**TOP[0], "top_logprobs": TOP}] * words} if asked else None
            message = {"content": "word " * words}
            choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "stop"}
            self.send("application/json", [json.dumps({"choices": [choice]}).encode()])

    def send(self, kind: str, parts) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # of a client that has seen enough
            for part in parts:
                self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


def events(asked: bool) -> Iterator[bytes]:
    """A stream whose words come with pauses, so that a reader sees each alone."""
    logprobs = {"content": [{**TOP[0], "top_logprobs": TOP}]} if asked else None
    for number in range(WORDS):
        if number:
            time.sleep(PAUSE)
        last = "stop" if number == WORDS - 1 else None
        choice = {"index": 0, "delta": {"content": "word "}, "logprobs": logprobs, "finish_reason": last}
        yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
    yield b"data: [DONE]\n\n"


def serve(ready) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), AtOnce)
    ready.put(server.server_port)
    server.serve_forever()


@contextlib.contextmanager
def server_at_once() -> Iterator[str]:
    """The URL of the server that answers at once."""
    ready: multiprocessing.Queue = multiprocessing.Queue()
    process = multiprocessing.Process(target=serve, args=(ready,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ready.get(timeout=PATIENCE)}"
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def proxy(url: str, thresholds: str) -> Iterator[str]:
    """The URL of the proxy, as the command starts it, with one server as the small and the large one."""
    flags = ["--small-server", url, "--large-server", url, "--thresholds", thresholds, "--port", "0"]
    command = [sys.executable, "-m", "gearbx_mlx.server", *flags, "--log-level", "ERROR"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"(http://\S+)/v1: ", process.stderr.readline())
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            assert found is not None, "the proxy did not start"
            yield found[1]
        finally:
            process.terminate()


@dataclass(frozen=True)
class Kind:
    """A kind of request. event: of a direct answer, counted from 0; no server's answer can begin before it."""

    name: str
    thresholds: str
    streamed: bool
    event: int = 0


KINDS = (
    Kind("the threshold decides", "inf", True),
    Kind("the threshold decides", "inf", False),
    Kind("the first ten tokens decide", "5", True, event=9),
    Kind("the first ten tokens decide", "5", False),
)


def ask(client: httpx.Client, url: str, streamed: bool, model: str | None, event: int) -> tuple[float, float]:
    """Milliseconds to an event of an answer, or to a whole answer, and between the last events."""
    body = {"messages": MESSAGES, "max_tokens": WORDS, "stream": streamed} | ({"model": model} if model else {})
    times: list[float] = []
    start = time.perf_counter()
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for part in response.iter_raw():
            times += [time.perf_counter()] * (part.count(b"data: ") if streamed else 1)
    gaps = [1000 * (b - a) for a, b in zip(times[-20:], times[-19:])]
    return 1000 * (times[event] - start), statistics.median(gaps or [0.0])


def measure(direct: str, trials: int, model: str | None) -> list[list[str]]:
    """A row for each kind of request: medians, and the median and the quartiles of what the proxy adds."""
    rows = []
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=PATIENCE))
        proxies = {bits: stack.enter_context(proxy(direct, bits)) for bits in {kind.thresholds for kind in KINDS}}
        for kind in KINDS:
            url, found = proxies[kind.thresholds], []
            events = {direct: kind.event, url: 0}
            for number in track(range(trials + WARM), kind.name):
                order = (direct, url) if number % 2 else (url, direct)
                times = {place: ask(client, place, kind.streamed, model, events[place]) for place in order}
                found.append((*times[direct], *times[url]))
            rows.append(row_of(kind, found[WARM:]))
    return rows


def row_of(kind: Kind, found: Sequence[tuple[float, ...]]) -> list[str]:
    """A row of the table, from both sides' times to the answer and between its events."""
    added = spread((through - directly for directly, _, through, _ in found), quartiles=True)
    directly, gap, through, other_gap = (f"{statistics.median(values):.2f}" for values in zip(*found))
    form, between = ("stream", f"{gap} / {other_gap}") if kind.streamed else ("whole", "-")
    return [kind.name, form, directly, through, added, between]


@study("docs/server.md", minutes=2)
def proxy_time(trials: int = 200, server: str | None = None, model: str | None = None) -> Found:
    """What the proxy adds to an answer: a server asked directly and through the proxy, in turn.

    Args:
        server: URL without /v1 of a server to ask; if not given, one in a process of its own answers at once, so that
            what is left is the proxy's own time.
        model: The model's name there.
    """
    with contextlib.nullcontext(server) if server else server_at_once() as direct:
        rows = measure(direct, trials, model)
    head = ["who decides", "answer", "directly", "through the proxy", "added (quartiles)"]
    return Found({"proxy": table_here([*head, "between events, directly / through the proxy"], rows)})
