"""The proxy's other paths, and its addresses and keys."""

import json
import logging
from urllib.parse import quote

import httpx
import pytest
from fake_server import JSON, Answer, answer, fake_server, refused
from proxies import CHAT, EASY, HARD, TEXT, always, error_of, good, proxy
from servers import free_port, our_process

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

    @pytest.mark.some(2)
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
        ("ftp://host/v1", "is not an http or https URL"),
        ("host:80", "is not an http or https URL"),
        ("http://", "is not an http or https URL"),
        ("http://host:99999/v1", "is not a URL"),
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


KEY = 'sk-se/cr"et\\7'
TIGHT = "".join(f"\\u{ord(char):04X}" for char in KEY)


@pytest.mark.some(8)
@pytest.mark.parametrize(
    "written",
    [
        json.dumps(KEY)[1:-1],
        json.dumps(KEY)[1:-1].replace("/", "\\/"),
        TIGHT,
        TIGHT.lower(),
        json.dumps(json.dumps(KEY))[3:-3],
        json.dumps(TIGHT)[1:-1],
        quote(KEY, safe=""),
    ],
)
@pytest.mark.parametrize("shape", ['{"error": {"message": "bad key %s."}}', '{"%s": [1, "x%sx"]}', "bad key %s, see {"])
def test_a_key_is_known_however_an_error_spells_it(well, monkeypatch, written, shape):
    monkeypatch.setenv("GEARBX_SMALL_SERVER_KEY", KEY)
    body = shape.replace("%s", written)
    said = Answer([body.encode()], 400, further={"Retry-After": f"3 {KEY}", "X-Key": KEY, "Set-Cookie": KEY})
    with fake_server(always(said)) as small, proxy(small.url, well.url) as client:
        got = client.post(CHAT, json=EASY)
    assert (got.status_code, got.text) == (400, shape.replace("%s", "***"))
    assert got.headers["retry-after"] == "3 ***"
    assert KEY not in str(got.headers)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "kind", ["image/svg+xml", "application/xhtml+xml", "text/xml", "text/javascript", JSON, "", "x"]
)
def test_no_error_is_sent_on_as_what_a_browser_runs(well, kind):
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'
    for body, sent in ((svg, "text/plain; charset=utf-8"), (b'{"error": "<b>"}', JSON)):
        with fake_server(always(Answer([body], 400, kind))) as small, proxy(small.url, well.url) as client:
            got = client.post(CHAT, json=EASY)
        assert (got.status_code, got.content, got.headers["content-type"]) == (400, body, sent)
        assert got.headers.get_list("x-content-type-options") == ["nosniff"]


def test_a_log_of_everything_has_no_headers_of_servers():
    said = answer({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]})
    said.further = {"X-Echo": "sk-echo"}
    with fake_server(always(said)) as fake:
        urls = ["--small-server", fake.url, "--large-server", fake.url]
        with our_process(*urls, "--log-level", "DEBUG", "--thresholds", "inf") as server:
            assert httpx.post(server.url + CHAT, json=EASY, trust_env=False).status_code == 200
            log = server.log()
    assert "the small server answers" in log
    assert "sk-echo" not in log


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
