"""A proxy between two processes of mlx_lm.server, with OpenAI's client."""

import shutil
from contextlib import ExitStack

import mlx.core as mx
import openai
import pytest
from conftest import normal
from proxies import proxy
from servers import mlx_lm_server

from gearbx_mlx.loading import DEMO_MODEL

pytestmark = pytest.mark.processes

CHAT = {"messages": [{"role": "user", "content": "Tom has 5 apples."}], "max_tokens": 24}
TEXT = {"prompt": "Tom has 5 apples.", "max_tokens": 24}
MODEL = "default_model"


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """The demo model with noise in its weights, so that it writes a different text."""
    path = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(DEMO_MODEL, path)
    weights = mx.load(str(path / "model.safetensors"))
    noisy = {name: (w + 0.02 * normal(*w.shape)).astype(w.dtype) for name, w in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), noisy)
    return path


@pytest.fixture(scope="module")
def servers(spoiled):
    with ExitStack() as stack:
        small, large = stack.enter_context(mlx_lm_server(model=spoiled)), stack.enter_context(mlx_lm_server())
        yield small, large


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(url: str, chat: bool, streamed: bool):
    """The text, and the answer's record of how it was made (None: nothing)."""
    api = client_of(url)
    create = api.chat.completions.create if chat else api.completions.create
    got = create(model=MODEL, stream=streamed, **(CHAT if chat else TEXT))
    if not streamed:
        choice = got.choices[0]
        return choice.message.content if chat else choice.text, getattr(got, "gearbx", None)
    text, marks = "", []
    for chunk in got:
        marks.append(getattr(chunk, "gearbx", None))
        text += (chunk.choices[0].delta.content if chat else chunk.choices[0].text) or ""
    assert marks[0] == marks[-1]
    return text, marks[0]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("chat", [False, True])
class TestTheirOwnText:
    @pytest.mark.parametrize(("threshold", "server"), [("inf", 0), ("0", 1)])
    def test_at_the_ends_of_the_threshold(self, threshold, server, chat, streamed, servers):
        with proxy(*servers, thresholds=threshold) as client:
            text, found = ask(str(client.base_url).rstrip("/"), chat, streamed)
        assert (text, None) == ask(servers[server], chat, streamed)
        assert found["server"] == ("small", "large")[server]
        assert text != ask(servers[1 - server], chat, streamed)[0]

    @pytest.mark.parametrize(("threshold", "server"), [("12", 0), ("0.001", 1)])
    def test_where_the_entropy_decides(self, threshold, server, chat, streamed, servers):
        """A vocabulary of 4096 tokens has 12 bits at most."""
        with proxy(*servers, thresholds=threshold, vocab_size=4096, window=5, duration=10) as client:
            text, found = ask(str(client.base_url).rstrip("/"), chat, streamed)
        assert (found["server"], found["why"]) == (("small", "large")[server], "entropy")
        assert 0.001 < found["entropy"][0] <= found["entropy"][1] <= 12
        assert found["handed_over"] == 0  # mlx_lm.server cannot continue a text
        assert (text, None) == ask(servers[server], chat, streamed)
