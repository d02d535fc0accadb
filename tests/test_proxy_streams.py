"""A server's streams that break or go wrong on their way through the proxy."""

import itertools
import threading
import time

import pytest
from fake_server import Answer, answer, chat_entry, chat_event, events, fake_server, refused
from proxies import CHAT, EASY, HARD, LINGERING, STREAM, SURE, always, chunks, error_of, good, proxy, word, written

from gearbx_mlx.serving import peer
from gearbx_mlx.serving.peer import EVENT_END, pieces_in


@pytest.fixture(scope="module")
def well():
    with fake_server(good("W")) as fake:
        yield fake


class TestStreamsThatHaveBegun:
    def test_a_cut_is_an_event_with_the_reason_and_no_end(self, well):
        with (
            fake_server(always(Answer([word(b"a"), word(b"b")], kind=STREAM))) as small,
            proxy(small.url, well.url, thresholds="inf") as client,
        ):
            got = client.post(CHAT, json=EASY | {"stream": True})
            assert got.status_code == 200
            assert "cut its stream short" in chunks(got.text)[-1]["error"]["message"]
            assert b"[DONE]" not in got.content

    def test_before_the_decision_a_cut_is_mended_by_the_other_one(self, well):
        cut = events(chat_event(chat_entry(SURE), "a"), end=False)
        with fake_server(always(cut)) as small, proxy(small.url, well.url) as client:
            got = client.post(CHAT, json=EASY | {"stream": True}).text
            assert written(got) == "W0 W1 W2 "
            assert chunks(got)[0]["gearbx"]["reason"] == "the small server cut its stream short"

    def test_so_is_one_of_a_length_that_was_announced(self, well):
        cut = events(chat_event(chat_entry(SURE), "a"), end=False)
        cut.length = 10_000
        with fake_server(always(cut)) as small, proxy(small.url, well.url) as client:
            got = client.post(CHAT, json=EASY | {"stream": True}).text
            assert written(got) == "W0 W1 W2 "
            assert chunks(got)[0]["gearbx"]["reason"].startswith("the small server cut its answer short")

    def test_an_error_in_place_of_the_first_event_is_mended_too(self, well):
        with fake_server(always(events({"error": {"message": "no"}}))) as large, proxy(well.url, large.url) as client:
            got = client.post(CHAT, json=HARD | {"stream": True}).text
            assert (written(got), chunks(got)[0]["gearbx"]["why"]) == ("W0 W1 W2 ", "fallback")

    @pytest.mark.parametrize("threshold", ["inf", "1", "0"])
    def test_a_server_that_knows_no_streams_has_its_words_sent_on(self, well, threshold):
        message = {"role": "assistant", "content": "all of it"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        if threshold == "1":
            choice["logprobs"] = {"content": [chat_entry(SURE)] * 3}
        with (
            fake_server(always(answer({"choices": [choice]}))) as fake,
            proxy(fake.url, fake.url, thresholds=threshold, no_fallback=True) as client,
        ):
            got = client.post(CHAT, json=EASY | {"stream": True})
        assert got.headers["content-type"] == "text/event-stream"
        assert written(got.text) == "all of it"
        assert got.text.endswith("data: [DONE]\n\n")

    def test_each_event_comes_at_once(self, well):
        goes_on = threading.Event()

        def parts():
            yield word(b"a")
            goes_on.wait(LINGERING)
            yield b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'

        with (
            fake_server(lambda path, body: Answer(parts(), kind=STREAM)) as small,
            proxy(small.url, well.url, thresholds="inf") as client,
            client.stream("POST", CHAT, json=EASY | {"stream": True}) as response,
        ):
            came = response.iter_raw()
            assert b'"a"' in next(came)
            goes_on.set()
            assert b"stop" in b"".join(came)

    def test_comments_wait_for_the_first_chunk_so_that_the_other_one_may_still_answer(self, well):
        early = always(Answer([b": reading\n\n", word(b"a"), b"data: [DONE]\n\n"], kind=STREAM))
        cut = always(Answer([b": reading the prompt\n\n"], kind=STREAM))
        with fake_server(early) as small, fake_server(cut) as large:
            with proxy(small.url, well.url, thresholds="inf") as client:
                assert client.post(CHAT, json=EASY | {"stream": True}).text.startswith(": reading\n\ndata: {")
            with proxy(well.url, large.url) as client:
                got = client.post(CHAT, json=HARD | {"stream": True}).text
                assert got.startswith("data: ")
                assert (written(got), chunks(got)[0]["gearbx"]["why"]) == ("W0 W1 W2 ", "fallback")
                assert 'gearbx_proxy_answers_total{server="small",why="fallback"} 1.0' in client.get("/metrics").text

    def test_a_refusal_after_comments_is_one_answer(self, well):
        ill = always(Answer([b": ping\n\n", b'data: {"error": {"message": "x"}}\n\n'], kind=STREAM))
        with (
            fake_server(ill) as small,
            fake_server(always(refused("too long"))) as large,
            proxy(small.url, large.url, thresholds="inf") as client,
        ):
            got = client.post(CHAT, json=EASY | {"stream": True})
            assert (got.status_code, error_of(got)["message"]) == (400, "too long")

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        "part", [b'data: {"choices": [{"ind', b'data: {"choices": [{"ind\n\n', b"data: [1]\n\n", b"data: {}\n\n"]
    )
    @pytest.mark.parametrize("begun", [False, True])
    def test_what_is_no_chunk_never_reaches_the_client(self, part, begun, well):
        parts = [word(b"a"), part] if begun else [part]
        with (
            fake_server(always(Answer(parts, kind=STREAM))) as small,
            proxy(small.url, well.url, thresholds="inf") as client,
        ):
            got = client.post(CHAT, json=EASY | {"stream": True}).text
            found = chunks(got)
            if begun:
                assert [set(chunk) for chunk in found] == [{"choices", "gearbx"}, {"error"}]
                assert "the small server" in found[-1]["error"]["message"]
            else:
                assert (written(got), found[0]["gearbx"]["why"]) == ("W0 W1 W2 ", "fallback")

    def test_an_end_without_an_answer_is_a_failure(self, well):
        empty = always(Answer([b"data: [DONE]\n\n"], kind=STREAM))
        with fake_server(empty) as small, proxy(small.url, well.url, thresholds="inf") as client:
            got = client.post(CHAT, json=EASY | {"stream": True}).text
            assert (written(got), chunks(got)[0]["gearbx"]["why"]) == ("W0 W1 W2 ", "fallback")

    def test_an_error_in_the_midst_is_counted_and_hides_the_key(self, well, monkeypatch):
        monkeypatch.setenv("GEARBX_SMALL_SERVER_KEY", "sk-secret")
        ill = always(
            Answer([word(b"a"), b'data: {"error": {"message": "no sk-secret"}}\n\n', b"data: [DONE]\n\n"], kind=STREAM)
        )
        with fake_server(ill) as small, proxy(small.url, well.url, thresholds="inf") as client:
            got = client.post(CHAT, json=EASY | {"stream": True}).text
            assert chunks(got)[-1]["error"]["message"] == "the small server reports an error: no ***"
            assert "[DONE]" not in got
            assert 'gearbx_proxy_failures_total{server="small"} 1.0' in client.get("/metrics").text

    @pytest.mark.parametrize("part", [b": ping\n\n", b'data: {"choices": []}\n\n'])
    def test_a_server_that_only_stays_in_touch_is_given_up(self, part, well):
        def parts():
            for _ in range(200):
                yield part
                time.sleep(0.05)

        with (
            fake_server(lambda path, body: Answer(parts(), kind=STREAM)) as small,
            proxy(small.url, well.url, server_timeout=0.4) as client,
        ):
            found = chunks(client.post(CHAT, json=EASY | {"stream": True}, timeout=5).text)[0]["gearbx"]
            assert "for 0.4 s" in found["reason"]


@pytest.mark.parametrize("part", [b": ping\n\n", b"x"])
def test_a_stream_of_too_many_bytes_without_a_chunk_is_a_failure(part, well, monkeypatch):
    monkeypatch.setattr(peer, "LARGEST_EVENT", 1000)
    endless = Answer(itertools.repeat(part * 50), kind=STREAM)
    with fake_server(always(endless)) as small, proxy(small.url, well.url, thresholds="inf") as client:
        got = client.post(CHAT, json=EASY | {"stream": True}).text
        assert chunks(got)[0]["gearbx"]["reason"] == "the small server sends more than 1000 bytes"
        assert written(got) == "W0 W1 W2 "


def split(parts, end=EVENT_END):
    """The events of a stream that comes in these parts."""
    rest = bytearray()
    return [event for part in parts for event in pieces_in(rest, part, end)]


def test_a_long_event_in_small_parts_is_read_in_proportion_to_its_length():
    """The test counts the work: searching everything again at each part would read 2000 times as many bytes."""
    looked_at = []

    class Counting:
        def search(self, text, start):
            looked_at.append(len(text) - start)
            return EVENT_END.search(text, start)

    parts = [b"x" * 1000] * 2000
    assert split([*parts, b"\n", b"\n", b"rest"], Counting()) == [b"".join(parts) + b"\n\n"]
    assert sum(looked_at) < 2 * 2_000_000


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_an_event_ends_wherever_its_parts_do(size):
    text = b"data: a\n\ndata: b\r\n\r\n: c\n\nrest"
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    assert split(parts) == [b"data: a\n\n", b"data: b\r\n\r\n", b": c\n\n"]
