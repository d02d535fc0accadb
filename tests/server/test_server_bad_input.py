"""The server's answers to bad input: an error object, and the server stays up."""

import contextlib
import logging
import socket
import sys
import time

import pytest
from http_server import complete, error_of, served

from gearbx_mlx.server.web import EscapingFormatter

BOTH = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def client():
    with served(gears="4,16", log_level="INFO", max_body_bytes=100_000, request_timeout=1.0) as client:
        yield client


@pytest.fixture(autouse=True)
def still_serving(client):
    yield
    assert complete(client, max_tokens=1)["usage"]["completion_tokens"] == 1


BODIES = {
    "max_tokens": (-1, 0, 1.5, "ten", 2**40),
    "temperature": (-0.1, "hot", 1e9),
    "top_p": (1.5, -1),
    "top_k": (-3, 2.5),
    "min_p": (2,),
    "logit_bias": ({"king": 1}, {"1": "x"}, [1], {"-1": 3}),
    "seed": ("x", 1.5, 2**70),
    "stop": ([""], 5, ["a"] * 65),
    "n": (9, 0),
    "best_of": (2, "x"),
    "suffix": ("end", 5),
    "draft_model": ("another/model",),
    "role_mapping": ({"user": "Q: "}, {}),
    "stream": ("yes", 1),
    "logprobs": (-1, 99),
    "model": (5, "gpt-4", "/etc/passwd", "../../secret", "x" * 5000),
    "adapters": ("another/adapter", ""),
    "response_format": (
        *({"type": "yaml"}, {"type": "json_schema"}),
        {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}},
    ),
    "gearbx": (
        *(5, {"mode": "fast"}, {"mode": "pair"}, {"gear": "turbo"}, {"gear": 5}, {"draft": 5}, {"wheels": 4}),
        *({"thresholds": wrong} for wrong in ([1.0, 2.0], [-1.0], ["x"])),
        *({"mode": "route", "draft": 4}, {"mode": "lossless", "draft": 16}, {"mode": "lossless", "gear": 4}),
    ),
}


@pytest.mark.some(6)
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BODIES for value in BODIES[field]])
def test_invalid_field_is_named(client, path, field, value):
    body = {"prompt": "Once", "messages": [{"role": "user", "content": "Once"}], field: value}
    answer = client.post(path, json=body)
    message = error_of(answer, 404 if field in ("model", "adapters") and value not in (5, "", "x" * 5000) else 400)
    assert field.removesuffix("s") in message or "gear" in message or "mode" in message


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"no", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"[" * 5000])
def test_body_other_than_json_object_is_refused(client, body):
    assert "JSON" in error_of(client.post("/v1/completions", content=body))


@pytest.mark.parametrize(
    "messages",
    [
        *([], "hello", [5], [{"content": "x"}]),
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost:1/x.png"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
    ],
    ids=str,
)
def test_invalid_messages_are_refused(client, messages):
    error_of(client.post("/v1/chat/completions", json={"messages": messages}))


@pytest.mark.parametrize("prompt", [5, None, [], [[]], [["a"]], ["a", 1], [1, "a"], [-1], [[1], -1], {}])
def test_invalid_prompts_are_refused(client, prompt):
    error_of(client.post("/v1/completions", json={"prompt": prompt}))


@pytest.mark.parametrize("body", [{"prompt": [5, 100_000]}, {"prompt": "x", "logit_bias": {"100000": 1}}], ids=str)
def test_tokens_beyond_the_vocabulary_are_refused(client, body):
    assert "4096" in error_of(client.post("/v1/completions", json=body))


def test_oversized_prompt_and_body_are_refused(client):
    answer = client.post("/v1/completions", json={"prompt": "king " * 600})
    assert "the model's context 512" in error_of(answer)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    error_of(client.post("/v1/completions", json={"prompt": "x" * 200_000}), 413)


def test_unknown_path_is_404(client):
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.post("/v1/nothing", json={}), 404)
    error_of(client.get("/v1/models/other"), 404)


def raw(client, *parts, pause=0.0):
    """The server's answer to these bytes."""
    with socket.create_connection(client.server.socket.getsockname(), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        found = b""
        while more := connection.recv(65536):
            found += more
        return found


def test_idle_connections_block_no_client(client):
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(client.server.socket.getsockname(), timeout=10))
        answer = raw(client, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.split()[1] == b"200"


@pytest.mark.slow
def test_slow_sender_is_disconnected(client):
    drops = [b"POST /v1/completions HTTP/1.1\r\n", *[b"x" for _ in range(3)]]
    start = time.monotonic()
    raw(client, *drops, pause=0.2)
    assert time.monotonic() - start < 3
    slow_body = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
    assert b" 408 " in raw(client, slow_body)


HEAD, LAST = b" HTTP/1.1\r\nHost: localhost\r\n", b"Connection: close\r\n"
POST = b"POST /v1/completions" + HEAD
IMPROPER = [
    (b"411", POST + LAST),
    *((b"400", POST + b"Content-Length: " + length) for length in (b"-5\r\n", b"1e3\r\n", b"9" * 20 + b"\r\n")),
    (b"400", POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    (b"411", POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}"),
    (b"400", b"nonsense\r\n"),
    (b"405", b"DELETE /v1/models" + HEAD + LAST),
    (b"414", b"GET /" + b"x" * 70_000 + HEAD + LAST),
    (b"431", b"GET /" + HEAD + LAST + b"a: b\r\n" * 200),
]


@pytest.mark.some(5)
@pytest.mark.parametrize(("status", "request_"), IMPROPER, ids=range(len(IMPROPER)))
def test_malformed_request_gets_error(client, status, request_):
    answer = raw(client, request_ + b"\r\n")
    assert answer.split()[1] == status
    assert b'"error"' in answer


def test_log_escapes_client_text(client, caplog):
    caplog.set_level(logging.DEBUG)
    raw(client, b"GET /\x1b[31mred\x07 HTTP/1.1\r\nHost: localhost\r\nX: \x1b]0;title\x07\r\n\r\n")
    client.post("/v1/completions", content=b'{"prompt": "\x1b[31m", "gearbx": {"mode": "\\u001b[31m"}}')
    client.post("/v1/completions", json={"prompt": "x", "model": "\x1b[31mevil\nline"})
    assert caplog.records
    for record in caplog.records:
        if record.name.startswith("gearbx"):
            assert record.getMessage().isprintable()


def test_every_record_is_escaped_with_its_traceback():
    bad = "\x1b[31mred\n2026-01-01 ERROR forged"
    try:
        raise ValueError(bad)
    except ValueError:
        record = logging.LogRecord("other", logging.ERROR, "", 1, "said: %s", (bad,), sys.exc_info(), sinfo=bad)
    first, *others = EscapingFormatter().format(record).split("\n")
    assert all(line.isprintable() for line in (first, *others))
    assert first.endswith(r"ERROR said: \x1b[31mred\n2026-01-01 ERROR forged")
    assert "  Traceback (most recent call last):" in others
    assert all(line.startswith("  ") for line in others)


@pytest.mark.some(1)
@pytest.mark.parametrize("key", ["sch\u00fcssel", "voil\u00e0", "\u00c5ngstr\u00f6m\u00c5", "\u93587"])
def test_key_is_required_and_takes_any_letters(key):
    with served(gears="16", api_key=key, log_level="ERROR") as client:
        sent = key.encode()
        for headers in ({"Authorization": b"Bearer " + sent}, {"x-api-key": sent}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        wrong = [{"x-api-key": each} for each in (sent[:-1], sent + b"\xa0", key.encode("latin-1", "replace"))]
        for headers in ({}, {"Authorization": sent}, *wrong):
            for path in ("/v1/models", "/metrics"):
                assert client.get(path, headers=headers).status_code == 401
            assert client.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 401
        assert client.get("/health").status_code == 200


@pytest.mark.slow
def test_nonreading_client_is_disconnected_after_request_timeout(client):
    """It asks for the page many times and reads no answer."""
    length, times = int(client.get("/").headers["content-length"]), 400
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(client.server.socket.getsockname())
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * times)
        time.sleep(2.5)
        taken = 0
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(2**20):
                taken += len(more)
    assert taken < length * times / 2
