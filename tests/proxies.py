"""A proxy in a thread, between two servers, for tests of it."""

import contextlib
import json
import math
from collections.abc import Iterator

import httpx
from fake_server import answer, chat_entry, chat_event, events, one_model

from gearbx_mlx.cli.gears import RoutingSettings
from gearbx_mlx.server import ProxySettings
from gearbx_mlx.server.run import serving_proxy
from gearbx_mlx.serving.web import Guard

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EASY = {"messages": [{"role": "user", "content": "Good morning!"}]}
HARD = {"messages": [{"role": "user", "content": "Prove the theorem: a + b = c, and solve x = 2 * y."}]}


@contextlib.contextmanager
def proxy(
    small: str,
    large: str,
    thresholds: str = "1",
    window: int = 2,
    duration: int = 3,
    guard: Guard | None = None,
    **flags,
) -> Iterator[httpx.Client]:
    """A client of a proxy between two servers; `flags` are fields of ProxySettings."""
    settings = ProxySettings(small_server=small, large_server=large, **flags)
    routing = RoutingSettings(window=window, min_gear_duration=duration, thresholds=thresholds)
    with (
        serving_proxy(settings, routing, guard or Guard(), ("127.0.0.1", 0)) as server,
        httpx.Client(base_url=server.where, trust_env=False, timeout=60) as client,
    ):
        yield client


def chunks(text: str) -> list[dict]:
    """The objects of a stream."""
    data = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]


def written(text: str) -> str:
    """The text of a stream, of either kind."""
    choices = [choice for chunk in chunks(text) for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


SURE = [math.log(0.999), math.log(0.0009)]
STREAM = "text/event-stream"
LINGERING = 20.0  # seconds: longer than any test waits


def good(name):
    """A server that is sure of what it writes."""

    def answers(path, body):
        if body is None:
            return one_model() if path == "/v1/models" else None
        entry = chat_entry(SURE) if body.get("logprobs") else None
        if body.get("stream"):
            words = [chat_event(entry, f"{name}{i} ") for i in range(3)]
            return events(*words, chat_event(None, finish="stop"))
        logprobs = {"content": [entry] * 3} if entry else None
        message = {"role": "assistant", "content": name}
        return answer({"choices": [{"message": message, "logprobs": logprobs, "finish_reason": "stop"}]})

    return answers


def always(found):
    return lambda path, body: found


def word(text):
    return b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % text


def error_of(got):
    return got.json()["error"]
