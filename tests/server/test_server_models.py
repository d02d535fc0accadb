"""What the server can serve: pairs, quantized and geared checkpoints, draft models, controllers, other models."""

import math
import shutil
import time
from types import SimpleNamespace

import pytest
from conftest import save_model, tiny_model
from http_server import complete, error_of, events, served, text_of

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.server import parse_span
from gearbx_mlx.server.app import model_entries
from gearbx_mlx.server.model import serve_pair
from gearbx_mlx.server.requests import Options

QUIET = {"log_level": "ERROR"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A directory of two small models."""
    path = tmp_path_factory.mktemp("shelf")
    for name in ("one", "two"):
        save_model(tiny_model(vocab_size=4096), path / name)
    (path / "none").mkdir()
    return path


@pytest.fixture(scope="module")
def small(shelf):
    return str(shelf / "one")


def test_only_the_loaded_model_has_gears():
    served = SimpleNamespace(modes=("route",), gears=("low",), bits=(4,), default_mode="route", context=9, vocabulary=5)
    provider = SimpleNamespace(catalog=("one", "two"), created=0, name_of=lambda key: key)
    here = SimpleNamespace(scheduler=SimpleNamespace(provider=provider))
    for provider.model_key, provider.served, loaded in (("two", served, ["two"]), ("two", None, []), (None, None, [])):
        assert [entry["id"] for entry in model_entries(here) if "gearbx" in entry] == loaded


def test_request_replaces_thresholds_of_a_pair():
    pair = SimpleNamespace(large=None, small=None, tokenizer=None, config={}, vocab_size=9, mode=lambda flags: flags)
    mode = serve_pair(pair, {"thresholds": (4.0,), "window": 2}).mode
    assert mode(Options(thresholds=[0.5]), "") == {"thresholds": (0.5,), "window": 2}
    assert mode(Options(), "") == {"thresholds": (4.0,), "window": 2}


@pytest.mark.slow
def test_a_pair_takes_turns(small):
    with served(small_model=small, thresholds="4", **QUIET) as client:
        seen = complete(client)["gearbx"]
        assert seen["mode"] == "pair"
        assert sum(seen["gear_tokens"].values()) == 24
        large = text_of(client, gearbx={"thresholds": [0.0]})
        assert complete(client, gearbx={"thresholds": [0.0]})["gearbx"]["gear_tokens"] == {"small": 0, "large": 24}
        assert large != text_of(client, gearbx={"thresholds": [60.0]})
        refused = client.post("/v1/completions", json={"prompt": "x", "gearbx": {"mode": "route"}})
        assert "take turns" in error_of(refused)
        chunks = events(client, "/v1/completions", prompt="Once")
        assert chunks[0]["gearbx"]["thresholds"] == [4.0]
        assert {token["gear"] for chunk in chunks for token in chunk["gearbx"]["tokens"]} <= {"small", "large"}


@pytest.mark.slow
def test_a_draft_model_drafts(small):
    with served(gears="16", **QUIET) as client:
        expected = text_of(client)
    with served(draft_model=str(DEMO_MODEL), gears="16", **QUIET) as client:
        answer = complete(client)
        assert answer["choices"][0]["text"] == expected
        assert answer["gearbx"]["mode"] == "lossless"
        assert answer["gearbx"]["drafted"] > 0
        assert client.get("/v1/models").json()["data"][0]["gearbx"]["modes"] == ["lossless"]


@pytest.mark.slow
def test_other_models_load_only_if_allowed(small):
    body = {"prompt": "Once", "max_tokens": 8, "model": small}
    with served(gears="4,16", **QUIET) as client:
        assert error_of(client.post("/v1/completions", json=body), 404).endswith("choose from demo")
    with served(gears="4,16", allow_models=True, **QUIET) as client:
        own = text_of(client, "Once", max_tokens=8)
        other = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert other != own
        assert text_of(client, "Once", max_tokens=8) == own
        error_of(client.post("/v1/completions", json={**body, "model": "/nowhere/at/all"}))
        assert text_of(client, "Once", max_tokens=8) == own


UNUSABLE = {"host": "no.such.host.invalid", "model": "/nowhere/at/all", "mode": "pair", "api_key": " "}


@pytest.mark.parametrize(("flag", "value"), [*UNUSABLE.items(), ("chat_template_args", "[]")])
def test_invalid_server_options_are_refused(flag, value):
    with pytest.raises(GearbxError), served(**{flag: value}):
        pass


def test_occupied_port_is_named():
    with served(gears="16", **QUIET) as client:
        port = client.server.socket.getsockname()[1]
        with pytest.raises(GearbxError, match=f"port {port}"), served(port=port):
            pass


def loaded(client):
    """The models about which the server reports more than their names."""
    return [model["id"] for model in client.get("/v1/models").json()["data"] if "gearbx" in model]


@pytest.mark.slow
def test_directory_models_load_by_name_singly(shelf):
    body = {"prompt": "Once", "max_tokens": 4}
    with served(models=str(shelf), keep_alive=1.0, **QUIET) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"]
        assert loaded(client) == []
        for name in ("two", "one"):
            assert complete(client, "Once", model=name, max_tokens=4)["model"] == name
            assert loaded(client) == [name]
        for name in ("none", "three", "../shelf/one", str(shelf / "one")):
            assert "one, two" in error_of(client.post("/v1/completions", json=body | {"model": name}), 404)
        assert "model: missing" in error_of(client.post("/v1/completions", json=body))
        deadline = time.monotonic() + 30
        while loaded(client) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert loaded(client) == []
        assert complete(client, "Once", model="one", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_keep_alive_duration_follows_ollama():
    assert [parse_span(text) for text in ("90", "90s", "5m", "1.5h", "0", "-1")] == [90, 90, 300, 5400, 0, math.inf]
    for text in ("", "m", "soon", "nan", "5d"):
        with pytest.raises(GearbxError, match="use seconds, 5m or 1h"):
            parse_span(text)


def test_kv_cache_is_not_shared_with_other_weights(tmp_path):
    model = tmp_path / "model"
    save_model(tiny_model(vocab_size=4096), model)
    with served(models=str(tmp_path), gears="16", keep_alive=math.inf, **QUIET) as client:
        first, again = (complete(client, model="model") for _ in range(2))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        shutil.rmtree(model)
        save_model(tiny_model(seed=1, vocab_size=4096), model)
        client.scheduler.provider.model_key = None  # as after an answer by another model
        other = complete(client, model="model")
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert other["choices"] != first["choices"]
