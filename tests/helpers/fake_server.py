"""A server that answers as a test likes, in a thread: right, wrong, late, never or half."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from gearbx_mlx.cli.flags import OtherServerSettings
from gearbx_mlx.server.run import serving_others
from gearbx_mlx.server.web import Guard

EVENTS, JSON, HTML = "text/event-stream", "application/json", "text/html"


@dataclass
class Answer:
    """Holds what is sent, in parts. length: announced; None: the end of the connection ends it."""

    parts: Iterable[bytes] = ()
    status: int = 200
    kind: str = JSON
    length: int | None = None


Answers = Callable[[str, Any], Answer | None]


def answer(content: Any, status: int = 200) -> Answer:
    return Answer([json.dumps(content).encode()], status)


def events(*contents: Any) -> Answer:
    """A stream of server-sent events, with OpenAI's last one."""
    data = [*map(json.dumps, contents), "[DONE]"]
    return Answer([f"data: {item}\n\n".encode() for item in data], kind=EVENTS)


def refused(message: str, status: int = 400) -> Answer:
    return answer({"error": {"message": message, "type": "invalid_request_error"}}, status)


def chat_entry(logprobs: Sequence[float], names: Sequence[str] | None = None, chosen: int = 0) -> dict[str, Any]:
    """A token of chat's format."""
    names = names or [f"t{i}" for i in range(len(logprobs))]
    top = [{"token": name, "logprob": value} for name, value in zip(names, logprobs)]
    return {**top[chosen], "top_logprobs": top}


def chat_event(entry: dict[str, Any] | None, text: str | None = None, finish: str | None = None) -> dict[str, Any]:
    """An event of chat with one token."""
    delta = {"content": entry["token"] if text is None and entry else text or ""}
    logprobs = {"content": [entry]} if entry else None
    return {"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]}


def whole(entries: Sequence[dict[str, Any]], text: str | None = None) -> dict[str, Any]:
    """A whole answer of chat with these tokens."""
    said = "".join(entry["token"] for entry in entries) if text is None else text
    choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    return {"choices": [{**choice, "logprobs": {"content": list(entries)} if entries else None}]}


def chat_answer(*lists: Sequence[float]) -> Answer:
    """A whole answer of chat with these log-probabilities, one list for each token."""
    return answer(whole([chat_entry(values) for values in lists]))


def text_answer(names: list[str], tops: list[dict | None]) -> Answer:
    """A text completion, whose log-probabilities are lists and objects."""
    logprobs = {"tokens": names, "token_logprobs": [None] * len(names), "top_logprobs": tops}
    return answer({"choices": [{"index": 0, "text": "".join(names), "logprobs": logprobs, "finish_reason": "stop"}]})


def slowly(parts: Iterable[bytes], seconds: float) -> Iterator[bytes]:
    for part in parts:
        yield part
        time.sleep(seconds)


class Fake:
    """A running server: its `url`, the `requests` that came (path, body), and their `headers`."""

    def __init__(self, answers: Answers):
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.reply(self, None)

            def do_POST(self) -> None:
                fake.reply(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_: object) -> None:
                pass

        self.answers = answers
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        self.requests.append((handler.path, body))
        self.headers.append(dict(handler.headers))
        found = self.answers(handler.path, body) or answer({"error": "not found"}, 404)
        with contextlib.suppress(OSError):  # the client has gone
            handler.send_response(found.status)
            handler.send_header("Content-Type", found.kind)
            if found.length is not None:
                handler.send_header("Content-Length", str(found.length))
            handler.end_headers()
            for part in found.parts:
                handler.wfile.write(part)
                handler.wfile.flush()
        handler.close_connection = True


@contextlib.contextmanager
def fake_server(answers: Answers) -> Iterator[Fake]:
    """A server that answers each (path, body; None of a GET) as the function says; None: 404."""
    fake = Fake(answers)
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.server.shutdown()
        fake.server.server_close()
        thread.join()


def one_model(fields: dict[str, Any] | None = None) -> Answer:
    return answer({"object": "list", "data": [{"id": "m", "object": "model", **(fields or {})}]})


def chatting(reply: Callable[[Any], Answer], fields: dict[str, Any] | None = None) -> Answers:
    """A server with one model, which answers chats as `reply` does to their bodies."""

    def answers(path: str, body: Any) -> Answer | None:
        if path == "/v1/models":
            return one_model(fields)
        return reply(body) if path == "/v1/chat/completions" else None

    return answers


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EASY = {"messages": [{"role": "user", "content": "Good morning!"}]}
HARD = {"messages": [{"role": "user", "content": "Prove the theorem: a + b = c, and solve x = 2 * y."}]}


@contextlib.contextmanager
def routed(url: str, guard: Guard | None = None, models: str = "small,large", **flags) -> Iterator[httpx.Client]:
    """A client of a server that passes requests on to one of two models; `flags` are fields of OtherServerSettings."""
    settings = OtherServerSettings(server=url, server_model=models, **{"vocab_size": 64, **flags})
    with (
        serving_others(settings, guard or Guard(), ("127.0.0.1", 0)) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        client.server = server
        yield client


def chunks(text: str) -> list[dict]:
    """The objects of a stream."""
    data = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]
