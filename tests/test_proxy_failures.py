"""A proxy between two servers, one of which fails."""

import contextlib
import math
import time

import pytest
from fake_server import Answer, answer, chat_entry, chat_event, events, fake_server, refused
from proxies import (
    CHAT,
    EASY,
    HARD,
    LINGERING,
    always,
    chunks,
    error_of,
    good,
    proxy,
    written,
)
from servers import free_port


def lying(*logprobs):
    def answers(path, body):
        entry = chat_entry(logprobs)
        if body and body.get("stream"):
            return events(*[chat_event(entry)] * 3)
        return answer({"choices": [{"message": {"content": "x"}, "logprobs": {"content": [entry] * 3}}]})

    return answers


def late(path, body):
    time.sleep(2.0)
    return good("late")(path, body)


BAD = {
    "down": (None, "is not there"),
    "slow": (late, "sent nothing for 0.8 s"),
    "HTML": (always(Answer([b"<html>hello</html>"], kind="text/html")), "not JSON"),
    "500": (always(answer({"error": "broken"}, 500)), "answers 500"),
    "401": (always(refused("wrong key sk-secret", 401)), "answers 401, so check its key"),
    "redirect": (always(answer({}, 302)), "redirects"),
    "cut": (always(Answer([b'{"choices": [{"mess'], length=400)), "short"),
    "no JSON": (always(Answer([b"{"])), "not JSON"),
    "no UTF-8": (always(Answer([b'{"choices": [], "id": "\xff"}'])), "not an answer of this API"),
    "a list": (always(answer([1])), "not a JSON object"),
    "no choices": (always(answer({"choices": None})), "without choices"),
    "an error with 200": (
        always(answer({"error": {"message": "out of memory"}})),
        "out of memory",
    ),
}


@contextlib.contextmanager
def bad_server(name):
    """The URL of a server that fails in the given way."""
    answers, _ = BAD[name]
    if answers is None:
        yield f"http://127.0.0.1:{free_port()}"
        return
    with fake_server(answers) as fake:
        yield fake.url


@pytest.fixture(scope="module")
def well():
    with fake_server(good("W")) as fake:
        yield fake


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("failing", ["small", "large"])
@pytest.mark.parametrize("name", BAD)
class TestOneServerFails:
    def ask(self, name, failing, streamed, well, **flags):
        with bad_server(name) as url:
            urls = (url, well.url) if failing == "small" else (well.url, url)
            with proxy(*urls, server_timeout=0.8 if name == "slow" else LINGERING, **flags) as client:
                return client.post(CHAT, json=(EASY if failing == "small" else HARD) | {"stream": streamed})

    @pytest.mark.some(2)
    def test_the_other_one_answers_and_says_so(self, name, failing, streamed, well):
        got = self.ask(name, failing, streamed, well)
        assert got.status_code == 200
        found = chunks(got.text)[0]["gearbx"] if streamed else got.json()["gearbx"]
        assert found["server"] == ("large" if failing == "small" else "small")
        assert found["why"] == "fallback"
        assert any(words in found["reason"] for words in BAD[name][1].split("|"))
        assert found["reason"].startswith(f"the {failing} server ")
        assert "W" in got.text

    @pytest.mark.some(2)
    def test_or_it_is_a_502_with_the_reason(self, name, failing, streamed, well):
        got = self.ask(name, failing, streamed, well, no_fallback=True)
        assert got.status_code == 502
        assert any(words in error_of(got)["message"] for words in BAD[name][1].split("|"))
        assert error_of(got)["code"] == "bad_gateway"
        assert "sk-secret" not in got.text


@pytest.mark.some(3)
@pytest.mark.parametrize("logprobs", [(0.5, -1.0), (math.log(0.9), math.log(0.8)), ("x",), (-1.0, None, [])])
@pytest.mark.parametrize("streamed", [False, True])
def test_impossible_logprobs_are_a_failure_of_the_small_server(logprobs, streamed, well):
    with fake_server(lying(*logprobs)) as small, proxy(small.url, well.url) as client:
        got = client.post(CHAT, json=EASY | {"stream": streamed})
        found = chunks(got.text)[0]["gearbx"] if streamed else got.json()["gearbx"]
        assert (found["server"], found["why"]) == ("large", "fallback")
        assert "logprob" in found["reason"]


def test_both_fail():
    with bad_server("500") as small, bad_server("down") as large, proxy(small, large) as client:
        got = client.post(CHAT, json=EASY)
        assert got.status_code == 502
        assert error_of(got)["message"] == "the small server answers 500; the large server is not there (no connection)"


def test_without_logprobs_the_large_server_answers(well):
    def blind(path, body):
        return good("B")(path, body and {name: value for name, value in body.items() if name != "logprobs"})

    with fake_server(blind) as small, proxy(small.url, well.url) as client:
        for _ in range(2):
            found = client.post(CHAT, json=EASY).json()["gearbx"]
            assert (found["server"], found["why"]) == ("large", "no logprobs")
            tried = len(small.requests)
        assert client.post(CHAT, json=EASY).json()["gearbx"]["why"] == "no logprobs"
        assert len(small.requests) == tried


def test_a_server_that_streams_no_logprobs_is_asked_for_a_whole_beginning(well):
    """mlx_lm.server does so."""

    def half_blind(path, body):
        streamed = body and body.get("stream")
        return good("H")(path, {**body, "logprobs": None} if streamed else body)

    with fake_server(half_blind) as small, proxy(small.url, well.url) as client:
        got = client.post(CHAT, json=EASY | {"stream": True}).text
        assert (written(got), chunks(got)[0]["gearbx"]["why"]) == ("H0 H1 H2 ", "entropy")
        small.requests.clear()
        client.post(CHAT, json=EASY | {"stream": True, "max_tokens": 50})
        first, second = (body for _, body in small.requests)
        assert (first["stream"], first["max_tokens"]) == (False, 3)
        assert second == EASY | {"stream": True, "max_tokens": 50}


def test_fewer_logprobs_are_asked_for_where_so_many_are_refused(well):
    def fussy(path, body):
        if body and body.get("top_logprobs", 0) > 5:
            return refused("top_logprobs must be at most 5")
        return good("F")(path, body)

    with fake_server(fussy) as small, proxy(small.url, well.url) as client:
        for _ in range(2):
            found = client.post(CHAT, json=EASY).json()["gearbx"]
            assert (found["server"], found["why"]) == ("small", "entropy")
        assert small.requests[-2][1]["top_logprobs"] == 5


@pytest.mark.some(5)
@pytest.mark.parametrize("status", [400, 404, 422, 429])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("failing", ["small", "large"])
def test_what_a_server_says_of_a_wrong_request_goes_through_as_it_is(status, streamed, failing, well):
    said = refused("temperature is 'hot'", status)
    with fake_server(always(said)) as fussy:
        urls = (fussy.url, well.url) if failing == "small" else (well.url, fussy.url)
        with proxy(*urls) as client:
            got = client.post(CHAT, json=(EASY if failing == "small" else HARD) | {"stream": streamed})
            assert (got.status_code, got.content) == (status, said.parts[0])
            assert got.headers["content-type"] == "application/json"
