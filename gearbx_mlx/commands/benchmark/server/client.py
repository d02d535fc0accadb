"""A client of an OpenAI-style server that times what it gets."""

import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

PATIENCE = 600.0  # seconds for an answer
PATH = "/v1/completions"


@dataclass(frozen=True, eq=False)
class Asked:
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
class Answer:
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

    def ask(self, asked: Asked) -> Answer:
        return self.stream(asked) if asked.stream else self.whole(asked)

    def whole(self, asked: Asked) -> Answer:
        start = time.perf_counter()
        answer = self.http.post(PATH, json=asked.body)
        seconds = time.perf_counter() - start
        content = answer.raise_for_status().json()
        return Answer(content["choices"][0]["text"], content["usage"]["completion_tokens"], seconds)

    def stream(self, asked: Asked) -> Answer:
        start = time.perf_counter()
        text, tokens, first = "", 0, None
        with self.http.stream("POST", PATH, json=asked.body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise httpx.RemoteProtocolError(chunk["error"]["message"])
                if written := "".join(choice["text"] for choice in chunk["choices"]):
                    first = time.perf_counter() - start if first is None else first
                    text += written
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        seconds = time.perf_counter() - start
        return Answer(text, tokens, seconds, seconds if first is None else first)


def leave(url: str, asked: Asked, after: float, abruptly: bool) -> None:
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
