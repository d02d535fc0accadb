"""The proxy's other paths, and its addresses and keys."""

import logging

import pytest
from fake_server import answer, fake_server, refused
from proxies import CHAT, EASY, HARD, TEXT, always, error_of, good, proxy
from servers import free_port

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.serving.web import Guard


@pytest.fixture(scope="module")
def well():
    with fake_server(good("W")) as fake:
        yield fake


class TestOtherPaths:
    def test_models_say_which_is_which(self, well):
        with proxy(well.url, well.url, large_server_model="big") as client:
            rows = client.get("/v1/models").json()["data"]
            assert [(row["id"], row["gearbx"]) for row in rows] == [
                ("m", {"server": "small"}),
                ("big", {"server": "large"}),
            ]

    def test_health_of_both(self, well):
        down = f"http://127.0.0.1:{free_port()}"
        for urls, flags, status, words in [
            ((well.url, well.url), {}, 200, "ok"),
            ((well.url, down), {}, 200, "degraded"),
            ((well.url, down), {"no_fallback": True}, 503, "unavailable"),
            ((down, down), {}, 503, "unavailable"),
        ]:
            with proxy(*urls, **flags) as client:
                got = client.get("/health")
                assert (got.status_code, got.json()["status"]) == (status, words)
                assert got.json()["servers"]["small"]["status"] == ("ok" if urls[0] == well.url else "unavailable")

    def test_metrics_count_who_answered_and_why(self, well):
        with fake_server(always(answer({}, 500))) as small, proxy(small.url, well.url) as client:
            client.post(CHAT, json=EASY)
            client.post(CHAT, json=HARD)
            lines = client.get("/metrics").text.splitlines()
            assert 'gearbx_proxy_answers_total{server="large",why="fallback"} 1.0' in lines
            assert 'gearbx_proxy_answers_total{server="large",why="prompt"} 1.0' in lines
            assert 'gearbx_proxy_failures_total{server="small"} 1.0' in lines
            assert "gearbx_proxy_first_bytes_seconds_count 2.0" in lines

    @pytest.mark.parametrize("path", ["/v1", "/v1/embeddings", "/v1/models/x", "/v1/chat"])
    def test_the_rest_is_not_there(self, path, well):
        with proxy(well.url, well.url) as client:
            assert client.get(path).status_code == 404
            assert client.post(path, json={}).status_code == 404

    def test_a_key_is_asked_for(self, well):
        with proxy(well.url, well.url, guard=Guard(api_key="secret")) as client:
            assert client.post(CHAT, json=EASY).status_code == 401
            assert client.get("/metrics").status_code == 401
            assert client.get("/health").status_code == 200
            assert client.post(CHAT, json=EASY, headers={"Authorization": "Bearer secret"}).status_code == 200

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"messages": None},
            {"messages": [1, {"role": "user"}, {"role": "user", "content": [{"text": 3}, None]}]},
            {"prompt": [1, 2, [3]]},
            {"messages": [], "stream": None, "max_tokens": "many", "n": {}, "stop": 3},
        ],
    )
    def test_any_object_is_handed_on(self, body, well):
        with proxy(well.url, well.url) as client:
            for path in (CHAT, TEXT):
                assert client.post(path, json=body).status_code == 200

    @pytest.mark.parametrize("stream", ["yes", [], {}, 1])
    def test_whether_to_stream_has_to_be_clear(self, stream, well):
        with proxy(well.url, well.url) as client:
            got = client.post(CHAT, json=EASY | {"stream": stream})
            assert (got.status_code, error_of(got)["param"]) == (400, "stream")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/v1", "no http or https URL"),
        ("host:80", "no http or https URL"),
        ("http://", "no http or https URL"),
        ("http://host:99999/v1", "no URL"),
        ("http://me:hidden@host/v1", "a name or a password"),
        ("http://host/v1?key=hidden", "more than an address"),
        ("http://ho st/v1", "more than an address"),
        ("http://host\n/v1", "no"),
    ],
)
def test_an_address_is_checked_at_the_start(url, words, well):
    with pytest.raises(GearbxError, match=words) as raised, proxy(url, well.url):
        pass
    assert "--small-server" in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_keys_are_in_no_log_and_no_answer(well, monkeypatch, caplog):
    monkeypatch.setenv("GEARBX_SMALL_SERVER_KEY", "sk-secret")
    caplog.set_level(logging.DEBUG)
    shown = []
    for said in (refused("bad key sk-secret", 400), answer({"error": "sk-secret"}), refused("sk-secret", 401)):
        with fake_server(always(said)) as small, proxy(small.url, well.url) as client:
            shown.append(client.post(CHAT, json=EASY).text)
    assert "sk-secret" not in "".join(shown) + caplog.text


def test_a_key_that_no_header_can_have_is_refused_at_the_start(well, monkeypatch):
    monkeypatch.setenv("GEARBX_LARGE_SERVER_KEY", "sk-\nsecret")
    with pytest.raises(GearbxError, match="GEARBX_LARGE_SERVER_KEY") as raised, proxy(well.url, well.url):
        pass
    assert "secret" not in str(raised.value)


def test_proxies_of_the_environment_are_not_used(well, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with proxy(well.url, well.url) as client:
        assert client.post(CHAT, json=EASY).status_code == 200


def test_a_name_that_no_host_can_have_is_a_server_that_is_not_there(well):
    with proxy(f"http://{'x' * 70}.com", well.url) as client:
        found = client.post(CHAT, json=EASY).json()["gearbx"]
        assert found["reason"] == "the small server is not there (no connection)"
        assert client.get("/health").json()["status"] == "degraded"
