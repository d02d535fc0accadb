"""What the proxy learns about a server from its answers, and what it does not."""

import math

import pytest
from fake_server import answer, chat_entry, chat_event, chatting, events, fake_server, one_model, refused
from proxies import CHAT, EASY, chunks, proxy

from gearbx_mlx.serving.proxy import route

SURE = [math.log(0.999), math.log(0.0009)]
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


def sure(body):
    """A server that is sure, and adds log-probabilities to its words on request."""
    entry = chat_entry(SURE) if body.get("logprobs") else None
    if body.get("stream"):
        return events(*[chat_event(entry, "s ")] * 3, chat_event(None, finish="stop"))
    message = {"role": "assistant", "content": "s s s "}
    logprobs = {"content": [entry] * 3} if entry else None
    return answer({"choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "stop"}]})


def silent(body, **said):
    """The same without log-probabilities."""
    if body.get("stream"):
        chunk = {"choices": [{"index": 0, "delta": said, "finish_reason": None}]}
        return events(chunk, chat_event(None, finish="stop"))
    return answer({"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]})


def gearbx(got) -> tuple[str, str]:
    """Who answered, and why."""
    streamed = got.headers["content-type"].startswith("text/event-stream")
    found = (chunks(got.text)[0] if streamed else got.json())["gearbx"]
    return found["server"], found["why"]


@pytest.fixture(scope="module")
def large():
    with fake_server(chatting(sure)) as fake:
        yield fake


@pytest.mark.some(2)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "said", [{"tool_calls": [{"index": 0}]}, {"reasoning_content": "Hm"}], ids=["calls", "thoughts"]
)
def test_calls_and_thoughts_without_logprobs_say_nothing_of_other_answers(said, streamed, large):
    def small(body):
        return silent(body, **said) if body.get("tools") else sure(body)

    with fake_server(chatting(small)) as fake, proxy(fake.url, large.url) as client:
        for own, why in [(TOOLS, "no logprobs"), ({}, "entropy"), (TOOLS, "no logprobs"), ({}, "entropy")]:
            server = "large" if own else "small"
            before = len(fake.requests)
            assert gearbx(client.post(CHAT, json=EASY | own | {"stream": streamed})) == (server, why)
        assert len(fake.requests) - before == 2 - streamed  # nothing is tried again


def test_what_a_server_could_not_do_is_tried_again_later(large, monkeypatch):
    able = []

    def small(body):
        return sure(body) if able or not body.get("stream") else silent(body, content="s")

    with fake_server(chatting(small)) as fake, proxy(fake.url, large.url) as client:
        client.post(CHAT, json=EASY | {"stream": True})
        able.append(True)
        for forget, asked in [(60.0, [False, True]), (0.0, [True])]:
            monkeypatch.setattr(route, "FORGET", forget)
            before = len(fake.requests)
            assert gearbx(client.post(CHAT, json=EASY | {"stream": True})) == ("small", "entropy")
            assert [body["stream"] for _, body in fake.requests[before:]] == asked


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_that_only_shows_the_request_is_the_clients(streamed, large):
    """Validation errors repeat the body of the request."""

    def small(body):
        if body.get("temperature") == "hot":
            return answer({"detail": [{"type": "float", "loc": ["temperature"], "input": body}]}, 422)
        return sure(body)

    with fake_server(chatting(small)) as fake, proxy(fake.url, large.url) as client:
        got = client.post(CHAT, json=EASY | {"stream": streamed, "temperature": "hot"})
        assert (got.status_code, "logprobs" in got.text) == (422, False)
        before = len(fake.requests)
        assert gearbx(client.post(CHAT, json=EASY | {"stream": streamed})) == ("small", "entropy")
        assert fake.requests[before][1]["top_logprobs"] == 20


def test_a_server_that_refuses_logprobs_at_all_is_found_out(large):
    def small(body):
        return refused("logprobs are not supported") if body.get("logprobs") else sure(body)

    with fake_server(chatting(small)) as fake, proxy(fake.url, large.url) as client:
        assert gearbx(client.post(CHAT, json=EASY)) == ("large", "no logprobs")
        before = len(fake.requests)
        assert gearbx(client.post(CHAT, json=EASY)) == ("large", "no logprobs")
        assert len(fake.requests) == before


class TestAnswersOfSeveralTexts:
    OWN = ({"n": 2}, {"best_of": 2}, {"echo": True}, {"suffix": "end"})

    @pytest.mark.parametrize("own", OWN, ids=lambda own: next(iter(own)))
    def test_they_are_judged_by_a_short_answer_of_one_text(self, own, large):
        with fake_server(chatting(sure)) as fake, proxy(fake.url, large.url) as client:
            asked = EASY | own | {"stream": True}
            assert gearbx(client.post(CHAT, json=asked)) == ("small", "entropy")
            judged, given = (body for path, body in fake.requests if path == CHAT)
            assert judged["stream"] is False
            assert not own.keys() & judged.keys()
            assert given.items() >= asked.items()


class TestFinished:
    """The answer is over: there is nothing left to decide."""

    @staticmethod
    def cut(body):
        """Two of three tokens have log-probabilities, and the answer ends because of its length."""
        logprobs = {"content": [chat_entry(SURE)] * 2} if body.get("logprobs") else None
        message = {"role": "assistant", "content": "s s s "}
        return answer({"choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "length"}]})

    @pytest.mark.parametrize(
        ("own", "found"),
        [({}, ("large", "no logprobs")), ({"max_tokens": 3}, ("small", "finished"))],
        ids=["more", "3"],
    )
    def test_a_length_is_an_end_where_it_is_the_clients(self, own, found, large):
        with fake_server(chatting(self.cut)) as fake, proxy(fake.url, large.url) as client:
            assert gearbx(client.post(CHAT, json=EASY | own)) == found


@pytest.mark.parametrize("length", [50, 50.0])
def test_a_length_may_be_a_whole_float(length, large):
    with fake_server(chatting(sure)) as fake, proxy(fake.url, large.url) as client:
        client.post(CHAT, json=EASY | {"max_tokens": length})
        judged = next(body for path, body in fake.requests if path == CHAT)
        assert judged["max_tokens"] == 3


@pytest.mark.parametrize(("status", "tokens"), [(503, 3), (404, 0)])
def test_who_owns_the_models_is_asked_again_until_the_server_says_it(status, tokens):
    said = [refused("loading", status), one_model({"owned_by": "llamacpp"})]
    unsure = [-math.log(20)] * 20

    def going_on(path, body):
        if path == "/v1/models":
            return said.pop(0) if len(said) > 1 else said[0]
        return sure(body)

    def small(body):
        return events(*[chat_event(chat_entry(unsure), "u ")] * 3, chat_event(None, finish="stop"))

    with fake_server(chatting(small)) as fake, fake_server(going_on) as large, proxy(fake.url, large.url) as client:
        for handed_over in (0, tokens):
            got = chunks(client.post(CHAT, json=EASY | {"stream": True}).text)[0]["gearbx"]
            assert got["handed_over"] == handed_over
