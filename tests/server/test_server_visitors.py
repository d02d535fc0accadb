"""Pages in browsers: which of them may ask a server on this machine, and under which names it is reached."""

import pytest
from fake_server import CHAT, EASY, chat_answer, chatting, fake_server, routed
from http_server import served

from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.server import ServerSettings
from gearbx_mlx.server.run import guard_of
from gearbx_mlx.server.web import Guard

EVIL = "https://evil.example"


@pytest.fixture(scope="module", params=["model", "routed"])
def client(request):
    """A client of a server of a model, and of one that passes requests on, with those that reach the other server."""
    if request.param == "routed":
        guard = Guard(allowed_origins=("https://good.example",), allowed_hosts=("good.example",))
        with fake_server(chatting(lambda body: chat_answer([-0.1]))) as other, routed(other.url, guard) as client:
            client.upstream = other.requests
            yield client
    else:
        allowed = {"allowed_origins": "https://Good.example", "allowed_hosts": "good.example:80, other.example"}
        with served(gears="16", log_level="ERROR", **allowed) as client:
            yield client


def ask(client, **headers):
    """A simple request, in the form in which any page can send JSON."""
    names = {"Content-Type": "text/plain"} | headers
    return client.post(CHAT, json=EASY | {"max_tokens": 1}, headers=names)


@pytest.mark.some(4)
@pytest.mark.parametrize("origin", [EVIL, "null", "http://127.0.0.1", "http://localhost:1", "https://good.example.org"])
def test_page_of_other_origin_is_refused(client, origin):
    asked = len(getattr(client, "upstream", ()))
    for answer in (ask(client, Origin=origin), client.get("/v1/models", headers={"Origin": origin})):
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert "--allowed-origins" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert client.options(CHAT, headers=preflight).status_code == 403
    assert len(getattr(client, "upstream", ())) == asked


def test_own_and_allowed_pages_are_answered(client):
    assert ask(client, Origin=str(client.base_url).rstrip("/")).status_code == 200
    assert ask(client).status_code == 200
    answer = ask(client, Origin="https://good.example")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://good.example")
    preflight = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    assert client.options(CHAT, headers=preflight).status_code == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8080", "localhost.evil.example", "192.168.0.7", "[x", ""]
)
def test_foreign_host_name_is_refused(client, name):
    """A page sends such a name if it makes its own name lead to this machine."""
    answer = ask(client, Host=name, Origin=f"http://{name}")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert client.get("/health", headers={"Host": name}).status_code == 403


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:99", "localhost.", "127.0.0.1:8080", "127.1.2.3", "[::1]:80"])
def test_loopback_and_allowed_names_reach_server(client, name):
    assert client.get("/health", headers={"Host": name}).status_code == 200
    assert client.get("/health", headers={"Host": "good.example:1234"}).status_code == 200


def test_public_server_accepts_addresses_and_refuses_names():
    with served(gears="16", log_level="ERROR", host="0.0.0.0") as client:
        for name, status in {"192.168.0.7:8080": 200, "[fe80::1]": 200, "0.0.0.0": 200, "evil.example": 403}.items():
            assert client.get("/health", headers={"Host": name}).status_code == status


def test_messages_have_anthropics_error(client):
    if not hasattr(client, "upstream"):
        answer = client.post("/v1/messages", json={}, headers={"Origin": EVIL})
        assert answer.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("own", [{}, {"api_key": "mine"}])
def test_any_origin_with_keys_and_loading_is_refused(own, monkeypatch):
    any_page = {"allowed_origins": "https://a, *"} | own
    with pytest.raises(GearbxError, match="--allowed-origins"):
        guard_of(command_settings(ServerSettings, any_page | {"allow_models": True}))
    other = {"server": "http://127.0.0.1:1", "server_model": "a,b"}
    assert "*" in guard_of(command_settings(ServerSettings, any_page | other)).allowed_origins
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with pytest.raises(GearbxError, match="--allowed-origins"):
        guard_of(command_settings(ServerSettings, any_page | other))


def test_any_origin_may_be_allowed():
    with served(gears="16", log_level="ERROR", allowed_origins="*") as client:
        assert ask(client, Origin=EVIL).headers["access-control-allow-origin"] == "*"
