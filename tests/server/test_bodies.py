"""Bodies that are made to cost much: each is refused or answered, and nobody else waits for it.

Each row of `HOSTILE` is a path, the beginning of a body, what is repeated in it (`%d` is a number), and its end.
"""

import json
import multiprocessing
import select
import signal
import socket
import sys
import time
from contextlib import ExitStack

import httpx
import pytest
from http_server import complete, served
from hypothesis import given
from hypothesis import strategies as st
from servers import our_process

from gearbx_mlx.server import bodies
from gearbx_mlx.server.bodies import MAX_BLANKS, MAX_FIELDS, MAX_ITEMS, check_size
from gearbx_mlx.server.requests import MAX_TEXTS, MAX_TOOLS
from gearbx_mlx.server.web import MAX_BODIES, MAX_BODY_BYTES, Refused, RequestLimits

TEXT, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
HELLO = b'"messages":[{"role":"user","content":"Hi"}],"max_tokens":1'
HOSTILE = {
    "empty lists": (TEXT, b'{"prompt":[', b"[],", b"0]}"),
    "lists": (TEXT, b'{"prompt":[', b"[0],", b"0]}"),
    "empty texts": (TEXT, b'{"prompt":[', b'"",', b"0]}"),
    "texts": (TEXT, b'{"prompt":[', b'"a",', b'"a"]}'),
    "objects": (TEXT, b'{"prompt":[', b'{"a":0},', b"0]}"),
    "tokens": (TEXT, b'{"prompt":[', b"4095,", b"1]}"),
    "tokens, the last of which is none": (TEXT, b'{"prompt":[', b"1,", b'"x"]}'),
    "numbers that are slow to read": (TEXT, b'{"prompt":[', b"1.7976931348623157e308,", b"0]}"),
    "one text": (TEXT, b'{"prompt":"', b"king ", b'"}'),
    "one word": (TEXT, b'{"prompt":"', b"a", b'"}'),
    "spaces": (TEXT, b'{"prompt":"', b" ", b'"}'),
    "backslashes": (TEXT, b'{"prompt":"', rb"\\", b'"}'),
    "quotes": (TEXT, b'{"prompt":"', rb"\"", b'"}'),
    "escapes": (TEXT, b'{"prompt":"', rb"\u1234", b'"}'),
    "a text that grows by its last character": (TEXT, b'{"prompt":"', b"king ", '\U0001f600"}'.encode()),
    "stop words": (TEXT, b'{"prompt":"x","stop":[', b'"a",', b'"a"]}'),
    "biases": (TEXT, b'{"prompt":"x","logit_bias":{', b'"%d":"x",', b'"0":0}}'),
    "biases, the last of which is none": (TEXT, b'{"prompt":"x","logit_bias":{', b'"%d":0,', b'"a":0}}'),
    "thresholds": (TEXT, b'{"prompt":"x","gearbx":{"thresholds":[', b'"",', b"0]}}"),
    "options": (TEXT, b'{"prompt":"x","gearbx":{', b'"a%d":0,', b'"b":0}}'),
    "fields": (TEXT, b'{"prompt":"x",', b'"a%d":0,', b'"b":0}'),
    "messages": (CHAT, b'{"messages":[', b"[],", b"0]}"),
    "empty messages": (CHAT, b'{"messages":[', b'{"role":"user","content":""},', b"0]}"),
    "parts": (CHAT, b'{"messages":[{"role":"user","content":[', b"[],", b"0]}]}"),
    "parts of text": (CHAT, b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"},', b"0]}]}"),
    "calls": (CHAT, b'{"messages":[{"role":"assistant","tool_calls":[', b"[],", b"0]}]}"),
    "tools": (CHAT, b"{" + HELLO + b',"tools":[', b"[],", b"0]}"),
    "tools that are objects": (CHAT, b"{" + HELLO + b',"tools":[', b"{},", b"{}]}"),
    "arguments of the template": (CHAT, b"{" + HELLO + b',"chat_template_kwargs":{', b'"a%d":0,', b'"b":0}}'),
    "a schema": (
        *(CHAT, b"{" + HELLO + b',"response_format":{"type":"json_schema","json_schema":{"schema":{"enum":['),
        *(b'"%d",', b'""]}}}}'),
    ),
    "turns": (MESSAGES, b'{"max_tokens":1,"messages":[', b"[],", b"0]}"),
    "blocks": (MESSAGES, b'{"max_tokens":1,"messages":[{"role":"user","content":[', b"{},", b"0]}]}"),
    "stop sequences": (MESSAGES, b'{"max_tokens":1,' + HELLO[:-15] + b',"stop_sequences":[', b"0,", b"0]}"),
    "tools of messages": (MESSAGES, b'{"max_tokens":1,' + HELLO[:-15] + b',"tools":[', b"{},", b"{}]}"),
    "input": (RESPONSES, b'{"input":[', b"[],", b"0]}"),
    "items": (RESPONSES, b'{"input":[', b'{"role":"user","content":"a"},', b"0]}"),
    "tools of responses": (RESPONSES, b'{"input":"x","tools":[', b"{},", b"{}]}"),
    "nested lists": (TEXT, b"", b"[", b""),
    "nested objects": (TEXT, b"", b'{"a":', b""),
    "many nested lists": (TEXT, b'{"prompt":[', b"[" * 60 + b"]" * 60 + b",", b"0]}"),
    "a long number": (TEXT, b'{"prompt":"x","max_tokens":', b"9", b"}"),
    "a long fraction": (TEXT, b'{"prompt":"x","temperature":0.', b"9", b"}"),
    "long numbers": (TEXT, b'{"prompt":[', b"9" * 4000 + b",", b"0]}"),
    "a long exponent": (TEXT, b'{"prompt":"x","temperature":1e', b"9", b"}"),
    "a long name": (TEXT, b'{"prompt":"x","model":"', b"m", b'"}'),
    "a long name of a field": (TEXT, b'{"prompt":"x","gearbx":{"', b"m", b'":0}}'),
    "bytes that are no text": (TEXT, b'{"prompt":"', b"\xff", b'"}'),
    "halves of characters": (TEXT, b'{"prompt":"', rb"\ud800", b'"}'),
    "white space": (TEXT, b"", b" ", b""),
    "no JSON": (TEXT, b"", b"x", b""),
    "a list": (TEXT, b"[", b"[],", b"0]"),
}


def hostile(name: str, times: int) -> bytes:
    """The body of a row, in which something is repeated so often; at most as long as the longest that are read."""
    _, before, item, after = HOSTILE[name]
    times = min(times, (MAX_BODY_BYTES - len(before + after)) // (len(item) + 5 * (b"%d" in item)))
    repeated = b"".join(item % number for number in range(times)) if b"%d" in item else item * times
    return before + repeated + after


def values_in(content) -> int:
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return 1 + sum(map(values_in, inner))


@pytest.fixture(scope="module")
def client():
    with served(gears="4,16", log_level="ERROR", max_body_bytes=MAX_BODY_BYTES) as client:
        yield client


@pytest.mark.some(6)
@pytest.mark.parametrize("times", [2**17 - 4, MAX_BODY_BYTES], ids=["as many values as are read", "the largest body"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_body_is_refused_and_server_continues(client, name, times):
    answer = client.post(HOSTILE[name][0], content=hostile(name, times))
    assert answer.status_code == 400, answer.text[:200]
    assert len(answer.json()["error"]["message"]) < 1000
    assert complete(client, max_tokens=1)["usage"]["completion_tokens"] == 1


JSON = st.recursive(
    st.none() | st.integers(0, 99) | st.floats(0, 1) | st.text('a"\\,[]{}: \n\u00e9\U0001f600', max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,[{', max_size=4), inner, max_size=4),
)


@given(JSON, st.booleans(), st.sampled_from([None, 2]), st.sampled_from([1, 2, 3, 50]))
def test_values_are_counted_during_decoding(content, as_ascii, indent, piece):
    text, values = json.dumps(content, ensure_ascii=as_ascii, indent=indent).encode(), values_in(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE", piece)
        check_size(text, 2 * values)  # a list or an object without a value may count for two
        if values > 1:
            with pytest.raises(Refused):
                check_size(text, values - 1)


AT_MOST = {
    "texts": (TEXT, MAX_TEXTS, lambda n: {"prompt": ["x"] * n, "max_tokens": 1}),
    "tools": (CHAT, MAX_TOOLS, lambda n: {"messages": [{"role": "user", "content": "x"}], "tools": [{}] * n}),
    "messages": (CHAT, MAX_ITEMS, lambda n: {"messages": [{"role": "system", "content": ""}] * n}),
    "fields": (TEXT, MAX_FIELDS, lambda n: {"prompt": "x", "max_tokens": 1, **{f"a{i}": 0 for i in range(n - 2)}}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "most", "body"), AT_MOST.values(), ids=AT_MOST)
def test_excess_is_refused_with_limit(client, path, most, body):
    answer = client.post(path, json=body(most + 1))
    assert answer.status_code == 400
    assert str(most) in answer.json()["error"]["message"]
    assert str(most) not in client.post(path, json=body(most)).json().get("error", {}).get("message", "")


def test_answer_waits_for_no_acknowledgement_of_its_headers(client):
    """A client may acknowledge after 40 ms; on a busy machine one of 20 answers is quick."""
    seconds = []
    for _ in range(20):
        since = time.perf_counter()
        client.get("/health")
        seconds.append(time.perf_counter() - since)
    assert min(seconds) < 0.03


def test_white_space_between_values_has_a_limit(client):
    answer = client.post(TEXT, content=b'{"prompt":' + b" " * (MAX_BLANKS + 1) + b'"x","max_tokens":1}')
    assert answer.status_code == 400
    assert f"{MAX_BLANKS} bytes of white space" in answer.json()["error"]["message"]
    in_text = b'{"prompt":"' + b" " * (MAX_BLANKS + 1) + b'","max_tokens":1}'
    assert "white space" not in client.post(TEXT, content=in_text).json()["error"]["message"]


def test_a_compressed_body_is_refused(client):
    answer = client.post(TEXT, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415


def announced(client, size: int) -> socket.socket:
    """A connection on which a client announces a body, and sends none of it."""
    connection = socket.create_connection(client.server.socket.getsockname(), timeout=10)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


REFUSED_BY_ITS_HEAD = {
    413: f"Content-Length: {2**26}",
    415: f"Content-Encoding: gzip\r\nContent-Length: {2**26}",
    411: f"Transfer-Encoding: chunked\r\n\r\n{2**26:x}",
    403: f"Origin: https://example.org\r\nContent-Length: {2**26}",
}


@pytest.mark.parametrize("sent", [0, 2**26], ids=["none of the body", "all of the body"])
@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"], ids=["", "100-continue"])
@pytest.mark.parametrize("status", REFUSED_BY_ITS_HEAD)
def test_a_refused_body_whole_response_then_connection_closes(client, status, expect, sent):
    with socket.create_connection(client.server.socket.getsockname(), timeout=10) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n{expect}{REFUSED_BY_ITS_HEAD[status]}\r\n"
        connection.sendall(head.encode() + b"\r\n" * (status != 411))
        connection.sendall(bytes(sent))
        response = b""
        while piece := connection.recv(65536):  # a TimeoutError if the server waits for the body
            response += piece
    head, _, body = response.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert b"connection: close" in head.lower().split(b"\r\n")
    assert json.loads(body)["error"]["message"]


def test_refused_body_keep_alive_client_continues(client):
    for _ in range(3):
        assert client.post(TEXT, content=bytes(2**26)).status_code == 413
        assert complete(client, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_total_size_of_held_bodies_is_limited(client):
    """More of the largest bodies than are held are announced; small requests are answered meanwhile."""
    with ExitStack() as stack:
        waiting = [stack.enter_context(announced(client, MAX_BODY_BYTES)) for _ in range(MAX_BODIES + 1)]
        ready, _, _ = select.select(waiting, [], [], 10)
        assert [connection.recv(65536).split()[1] for connection in ready] == [b"503"]
        assert complete(client, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_the_largest_body_follows_from_the_model(client):
    limits = client.scheduler.provider.limits()
    assert limits.body < MAX_BODY_BYTES  # a context of 512 tokens
    assert limits.values == RequestLimits().values
    with served(gears="16", log_level="ERROR") as other:
        assert other.post(TEXT, content=b" " * (limits.body + 1)).status_code == 413
        assert other.post(TEXT, content=b" " * limits.body).status_code == 400


# In a process of its own, with the clock and the memory.

SECONDS, HEALTH, MEGABYTES = 5.0, 1.0, 300  # the first two with room for a machine that others use


def status_of(pid: int, name: str) -> float:
    """A number of megabytes that Linux knows of a process."""
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def watch_health(url: str, ended, longest) -> None:
    """Ask for /health until `ended`; note the longest time of an answer, seconds."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while not ended.is_set():
            since = time.perf_counter()
            assert client.get("/health").status_code == 200
            longest.value = max(longest.value, time.perf_counter() - since)


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_hostile_body_costs_little_and_delays_no_client():
    spawn = multiprocessing.get_context("spawn")
    with (
        our_process("--max-body-bytes", MAX_BODY_BYTES, "--log-level", "WARNING") as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        process = server.process
        complete(client, max_tokens=1)
        with open(f"/proc/{process.pid}/clear_refs", "w") as file:
            file.write("5")  # the peak counts from now on
        idle, ended, longest = status_of(process.pid, "VmRSS"), spawn.Event(), spawn.Value("d", 0.0)
        watcher = spawn.Process(target=watch_health, args=(server.url, ended, longest), daemon=True)
        watcher.start()
        seconds = {}
        for name in HOSTILE:
            for times in (2**17 - 4, MAX_BODY_BYTES):
                body, since = hostile(name, times), time.perf_counter()
                assert client.post(HOSTILE[name][0], content=body).status_code == 400
                seconds[name] = max(seconds.get(name, 0), time.perf_counter() - since)
        ended.set()
        watcher.join()
        assert watcher.exitcode == 0
        grown = status_of(process.pid, "VmHWM") - idle
        print(f"slowest {max(seconds.items(), key=lambda one: one[1])}, health {longest.value}, {grown} MB")
        assert max(seconds.values()) < SECONDS
        assert longest.value < HEALTH
        assert grown < MEGABYTES
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
