"""Our server in front of models of another, for tests of it."""

import contextlib
import json
from collections.abc import Iterator

import httpx

from gearbx_mlx.cli.flags import OtherServerSettings
from gearbx_mlx.server.run import serving_others
from gearbx_mlx.serving.web import Guard

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EASY = {"messages": [{"role": "user", "content": "Good morning!"}]}
HARD = {"messages": [{"role": "user", "content": "Prove the theorem: a + b = c, and solve x = 2 * y."}]}


@contextlib.contextmanager
def routed(url: str, guard: Guard | None = None, models: str = "small,large", **flags) -> Iterator[httpx.Client]:
    """A client of a server that passes requests on to one of two models; `flags` are fields of OtherServerSettings."""
    settings = OtherServerSettings(server=url, server_model=models, **{"vocab_size": 64, **flags})
    with (
        serving_others(settings, guard or Guard(), ("127.0.0.1", 0)) as server,
        httpx.Client(base_url=server.where, trust_env=False, timeout=60) as client,
    ):
        client.server = server
        yield client


def chunks(text: str) -> list[dict]:
    """The objects of a stream."""
    data = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]
