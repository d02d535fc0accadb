"""The study `server` at sizes that say nothing of speed: its output, and the mistakes that it finds."""

import pytest
from asked_servers import Client, ClientRequest, listens
from http_server import WORD_PROBLEM, served

from gearbx_mlx.errors import GearbxError
from research.server import server

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def url():
    with served(gears="4,16", mode="static", log_level="ERROR") as client:
        yield str(client.base_url).rstrip("/")


def test_one_client_beside_mlx_lms_server():
    rows = server(trials=1, tokens=8, kernels=["mlx"]).data
    assert {row["part"] for row in rows} == {"whole", "stream", "stream, cached prompt"}
    assert {row["kernels"] for row in rows} == {"mlx"}
    for found in rows:
        assert found["value"] > 0
        assert found["count"] == 1
        assert found["reached"] == ((found["least"] or 0) <= found["value"] <= (found["most"] or 1e9))
    equal = [row["value"] for row in rows if row["measure"].startswith("outputs equal")]
    assert equal == [1, 1, 1]  # both compute with MLX's kernels


def test_failing_server_gives_reason():
    with pytest.raises(GearbxError, match=r"gearbx_mlx\.server does not serve: .*nowhere"):
        server(model="nowhere", kernels=["mlx"])


def test_loopback_server_is_found_despite_proxy(url, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert listens(url)
    with Client(url) as client:
        assert client.ask(ClientRequest(WORD_PROBLEM, 2)).tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_refused_request_repeats_server_error(url, stream):
    with Client(url) as client, pytest.raises(GearbxError, match=r"/v1/completions answers 400: .* context") as caught:
        client.ask(ClientRequest(WORD_PROBLEM * 100, 4, stream))
    assert "\n" not in str(caught.value)
