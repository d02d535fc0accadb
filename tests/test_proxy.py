"""A proxy between two servers: who answers, why, and what the client gets. The servers are fakes."""

import math

import pytest
from documents import PAGES
from fake_server import Answer, answer, chat_entry, chat_event, events, fake_server, one_model, refused, text_event
from proxies import CHAT, EASY, HARD, TEXT, chunks, proxy, written

from gearbx_mlx.serving.proxy.route import Decision
from gearbx_mlx.serving.web import Guard

SURE, UNSURE = [math.log(0.999), math.log(0.0009)], [-math.log(20)] * 20  # nats: about 0 and 4.3 bits
HALF_KNOWN = [-0.3, -3.0]  # bounds of the entropy that are far apart, with 20 requested log-probabilities


def whole(text: str, tops=(), finish="stop", chat=True):
    """An answer that is not streamed."""
    entries = [chat_entry(values, [f"{text}{i}" for i in range(len(values))]) for values in tops]
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    logprobs = {"logprobs": {"content": entries}} if entries else {}
    return answer({"id": "1", "choices": [{"index": 0, **said, **logprobs, "finish_reason": finish}], "usage": {}})


def streaming(name: str, tops, ending=("!",)):
    """A server whose streams have log-probabilities: one word for each of `tops`; the words of `ending` have none."""

    def answers(path, body):
        if body is None:
            return one_model() if path == "/v1/models" else None
        if path != CHAT:
            return None
        if not body.get("stream"):
            asked = body.get("logprobs")
            return whole(f"{name} whole", tops if asked else (), "length" if asked else "stop")
        words = [
            chat_event(chat_entry(top) if body.get("logprobs") else None, f"{name}{i} ") for i, top in enumerate(tops)
        ]
        rest = [chat_event(chat_entry(SURE) if body.get("logprobs") else None, word) for word in ending]
        return events(*words, *rest, chat_event(None, finish="stop"))

    return answers


@pytest.fixture(scope="module")
def large():
    with fake_server(streaming("L", [SURE] * 3)) as fake:
        yield fake


def asked(fake, path=CHAT) -> list[dict]:
    return [body for where, body in fake.requests if where == path]


@pytest.mark.some(4)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("tops", "server", "why"),
    [
        ([SURE] * 3, "small", "entropy"),
        ([UNSURE] * 3, "large", "entropy"),
        ([UNSURE, SURE, SURE], "small", "entropy"),  # the mean of the last two
        ([SURE, UNSURE, UNSURE], "large", "entropy"),
        ([HALF_KNOWN] * 3, "large", "undecided"),
    ],
)
def test_the_first_tokens_decide(tops, server, why, streamed, large):
    with fake_server(streaming("S", tops)) as small, proxy(small.url, large.url) as client:
        got = client.post(CHAT, json=EASY | {"stream": streamed})
        found = chunks(got.text)[0]["gearbx"] if streamed else got.json()["gearbx"]
        assert (got.status_code, found["server"], found["why"], found["handed_over"]) == (200, server, why, 0)
        low, high = found["entropy"]
        assert low <= high
        assert (low > 1, high > 1) == {"small": (False, False), "large": (why == "entropy", True)}[server]
        first = "S" if server == "small" else "L"
        said = written(got.text) if streamed else got.json()["choices"][0]["message"]["content"]
        assert said == (f"{first}0 {first}1 {first}2 !" if streamed else f"{first} whole")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stream_says_who_answers_in_its_first_and_last_chunk_alone(streamed, large):
    with (
        fake_server(streaming("S", [SURE if streamed else UNSURE] * 3)) as small,
        proxy(small.url, large.url) as client,
    ):
        found = chunks(client.post(CHAT, json=EASY | {"stream": True}).text)
        marked = ["gearbx" in chunk for chunk in found]
        assert marked == [True, *[False] * (len(found) - 2), True]
        assert found[-1]["choices"][0]["finish_reason"] == "stop"
        assert found[0]["gearbx"] == found[-1]["gearbx"]


def test_a_hard_prompt_goes_to_the_large_server_at_once(large):
    with fake_server(streaming("S", [SURE] * 3)) as small, proxy(small.url, large.url) as client:
        found = client.post(CHAT, json=HARD).json()["gearbx"]
        assert found == {"server": "large", "why": "prompt", "handed_over": 0}
        assert not asked(small)


@pytest.mark.parametrize(("threshold", "server"), [("inf", "small"), ("0", "large")])
@pytest.mark.parametrize("body", [EASY, HARD])
def test_at_its_ends_the_threshold_decides_alone(threshold, server, body, large):
    with (
        fake_server(streaming("S", [UNSURE] * 3)) as small,
        proxy(small.url, large.url, thresholds=threshold) as client,
    ):
        got = client.post(CHAT, json=body).json()
        assert got["gearbx"] == {"server": server, "why": "threshold", "handed_over": 0}
        assert len(asked(small)) == (server == "small")


def test_an_answer_that_is_over_before_the_decision_is_the_small_ones(large):
    with (
        fake_server(streaming("S", [UNSURE], ending=())) as small,
        proxy(small.url, large.url) as client,
    ):
        got = client.post(CHAT, json=EASY | {"stream": True}).text
        assert written(got) == "S0 "
        assert chunks(got)[0]["gearbx"]["why"] == "finished"


def test_entropies_that_one_of_our_servers_reports_need_no_bounds(large):
    """The server's own report stays beside the proxy's."""

    def reporting(path, body):
        reports = [{"tokens": [{"gear": "low", "entropy": bits}]} for bits in (0.5, 0.25, 0.75)]
        words = [chat_event(chat_entry(UNSURE), "w") | {"gearbx": report} for report in reports]
        return events(*words, chat_event(None, finish="stop"))

    with fake_server(reporting) as small, proxy(small.url, large.url) as client:
        found = chunks(client.post(CHAT, json=EASY | {"stream": True}).text)
        own = {"server": "small", "why": "entropy", "entropy": [0.5, 0.5], "handed_over": 0}
        assert found[0]["gearbx"] == own | {"tokens": [{"gear": "low", "entropy": 0.5}]}
        assert found[1]["gearbx"] == {"tokens": [{"gear": "low", "entropy": 0.25}]}
        assert found[-1]["gearbx"] == own


@pytest.mark.parametrize("entropy", [-1, 99, "much", None])
def test_entropies_that_no_distribution_has_are_a_failure(entropy, large):
    chunk = chat_event(None, "w") | {"gearbx": {"tokens": [{"entropy": entropy}]}}
    with fake_server(lambda path, body: events(chunk)) as small, proxy(small.url, large.url) as client:
        found = chunks(client.post(CHAT, json=EASY | {"stream": True}).text)[0]["gearbx"]
        assert (found["server"], found["why"]) == ("large", "fallback")
        assert "entrop" in found["reason"]


def test_the_page_needs_no_key(large):
    with proxy(large.url, large.url, guard=Guard(api_key="sesame")) as client:
        answer = client.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert client.get("/v1/models").status_code == 401


def test_every_field_that_an_answer_carries_is_described():
    text = PAGES["docs/server.md"].read_text(encoding="utf-8").split("## What the proxy adds")[1].split("\n## ")[0]
    described = {row.split("`")[1] for row in text.splitlines() if row.startswith("| `") and "meaning" not in row}
    carried = Decision(0, "fallback", (0.0, 0.0), reason="x").as_json(0)
    assert carried.keys() == described


class TestWhatGoesThrough:
    FIELDS = {
        "temperature": 0.5,
        "seed": 3,
        "stop": ["x"],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "json_object"},
        "max_tokens": 50,
        "user": "ä",
    }

    @pytest.mark.parametrize("server", ["small", "large"])
    def test_other_fields_are_untouched(self, server, large):
        tops = [SURE if server == "small" else UNSURE] * 3
        with fake_server(streaming("S", tops)) as small, proxy(small.url, large.url) as client:
            client.post(CHAT, json=EASY | self.FIELDS)
            fake = small if server == "small" else large
            assert asked(fake)[-1] == EASY | self.FIELDS

    def test_logprobs_that_the_client_did_not_ask_for_are_taken_out(self, large):
        with fake_server(streaming("S", [SURE] * 3)) as small, proxy(small.url, large.url) as client:
            for streamed in (True, False):
                got = client.post(CHAT, json=EASY | {"stream": streamed})
                found = chunks(got.text) if streamed else [got.json()]
                assert all(choice.get("logprobs") is None for chunk in found for choice in chunk["choices"])
                assert "top_logprobs" not in got.text
            assert any(body.get("logprobs") for body in asked(small))

    def test_logprobs_that_the_client_asked_for_stay(self, large):
        own = {"logprobs": True, "top_logprobs": 2, "stream": True}
        with fake_server(streaming("S", [SURE] * 3)) as small, proxy(small.url, large.url) as client:
            found = chunks(client.post(CHAT, json=EASY | own).text)
            assert [chunk["choices"][0]["logprobs"] is not None for chunk in found] == [True] * 4 + [False]
            assert asked(small)[-1] == EASY | own

    def test_bytes_after_the_first_chunk_are_those_of_the_server(self, large):
        strange = b'data:  {"choices": [ {"index":0,"delta":{"content":"\\u00e9"}} ],  "more": 1e3}\r\n\r\n'
        comment = b": keepalive 1/2\n\n"
        parts = [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', comment, strange, b'data: {"choices":[]}\n\n']
        parts += [b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n"]
        with (
            fake_server(lambda path, body: Answer(parts, kind="text/event-stream")) as small,
            proxy(small.url, large.url, thresholds="inf") as client,
        ):
            got = client.post(CHAT, json=EASY | {"stream": True}).content
            assert b"".join([comment, strange, b'data: {"choices":[]}\n\n']) in got
            assert got.endswith(b"data: [DONE]\n\n")

    def test_the_chunk_with_the_usage_is_a_last_one_too(self, large):
        usage = {"choices": [], "usage": {"total_tokens": 9}}
        stream = events(chat_event(None, "a"), chat_event(None, finish="stop"), usage)
        with (
            fake_server(lambda path, body: stream) as small,
            proxy(small.url, large.url, thresholds="inf") as client,
        ):
            found = chunks(client.post(CHAT, json=EASY | {"stream": True}).text)
            assert found[-1] == usage | {"gearbx": found[0]["gearbx"]}

    def test_a_model_that_flags_name_replaces_the_clients(self, large):
        with (
            fake_server(streaming("S", [SURE] * 3)) as small,
            proxy(small.url, large.url, small_server_model="tiny") as client,
        ):
            client.post(CHAT, json=EASY | {"model": "gpt"})
            assert {body["model"] for body in asked(small)} == {"tiny"}

    def test_headers_of_clients_stay_here_and_keys_of_servers_go_there(self, large, monkeypatch):
        monkeypatch.setenv("GEARBX_SMALL_SERVER_KEY", "small-key")
        with fake_server(streaming("S", [SURE] * 3)) as small, proxy(small.url, large.url) as client:
            client.post(CHAT, json=EASY, headers={"Authorization": "Bearer mine", "Cookie": "a=b", "X-Own": "1"})
            sent = {name.lower(): value for name, value in small.headers[-1].items()}
            assert sent["authorization"] == "Bearer small-key"
            assert not {"cookie", "x-own", "origin"} & sent.keys()


def texting(name: str, tops, owner: str = "vllm"):
    """A server that continues with text completions, or with chats if it is the owner's kind."""

    def completion(body):
        words = [f"{name}{i} " for i in range(len(tops))]
        named = [{f"t{i}": value for i, value in enumerate(top)} for top in tops]
        if body.get("logprobs") and body.get("stream"):
            return events(*(text_event([word], [top["t0"]], [top]) for word, top in zip(words, named)))
        if body.get("logprobs"):
            logprobs = {"tokens": words, "token_logprobs": [top["t0"] for top in named], "top_logprobs": named}
            return answer({"choices": [{"text": "".join(words), "logprobs": logprobs, "finish_reason": "length"}]})
        if body.get("stream"):
            last = {"choices": [{"text": "", "finish_reason": "stop"}]}
            return events({"choices": [{"text": f"{name} goes on"}]}, last)
        return whole(f"{name} goes on", chat=False)

    def answers(path, body):
        if body is None:
            return one_model({"owned_by": owner}) if path == "/v1/models" else None
        return completion(body) if path == TEXT else streaming(name, tops)(path, body)

    return answers


class TestHandingOver:
    PROMPT = {"prompt": "Once", "max_tokens": 9}

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_text_completion_goes_on_where_the_small_server_stopped(self, streamed):
        with (
            fake_server(texting("S", [UNSURE] * 3)) as small,
            fake_server(texting("L", [])) as large,
            proxy(small.url, large.url) as client,
        ):
            got = client.post(TEXT, json=self.PROMPT | {"stream": streamed})
            assert (written(got.text) if streamed else got.json()["choices"][0]["text"]) == "S0 S1 S2 L goes on"
            assert (chunks(got.text)[0] if streamed else got.json())["gearbx"]["handed_over"] == 3
            sent = asked(large, TEXT)[-1]
            assert (sent["prompt"], sent["max_tokens"]) == ("OnceS0 S1 S2 ", 6)

    @pytest.mark.parametrize(
        ("owner", "fields"),
        [("vllm", {"continue_final_message": True, "add_generation_prompt": False}), ("llamacpp", {}), ("me", None)],
    )
    def test_a_chat_goes_on_where_the_server_is_known_to(self, owner, fields):
        with (
            fake_server(streaming("S", [UNSURE] * 3)) as small,
            fake_server(texting("L", [SURE] * 2, owner)) as large,
            proxy(small.url, large.url) as client,
        ):
            got = client.post(CHAT, json=EASY | {"stream": True}).text
            open_message = [{"role": "assistant", "content": "S0 S1 S2 "}]
            if fields is None:
                assert written(got) == "L0 L1 !"
                assert asked(large)[-1] == EASY | {"stream": True}
            else:
                assert written(got) == "S0 S1 S2 L0 L1 !"
                messages = EASY["messages"] + open_message
                assert asked(large)[-1] == {"messages": messages, "stream": True, **fields}

    @pytest.mark.parametrize(
        "own", [{"n": 2}, {"response_format": {"type": "json_object"}}, {"logprobs": True}, {"max_tokens": 3}]
    )
    def test_what_one_writer_has_to_make_is_begun_again(self, own):
        with (
            fake_server(streaming("S", [UNSURE] * 3)) as small,
            fake_server(texting("L", [SURE] * 3, "vllm")) as large,
            proxy(small.url, large.url) as client,
        ):
            got = client.post(CHAT, json=EASY | own).json()
            assert got["choices"][0]["message"]["content"] == "L whole"
            assert got["gearbx"]["handed_over"] == 0
            assert asked(large)[-1] == EASY | own

    def test_a_server_that_refuses_to_go_on_begins_again(self):
        def fussy(path, body):
            return (
                refused("no prefill") if "continue_final_message" in (body or ()) else texting("L", [SURE])(path, body)
            )

        with (
            fake_server(streaming("S", [UNSURE] * 3)) as small,
            fake_server(fussy) as large,
            proxy(small.url, large.url) as client,
        ):
            got = client.post(CHAT, json=EASY | {"stream": True}).text
            assert written(got) == "L0 !"
            assert chunks(got)[0]["gearbx"]["handed_over"] == 0

    def test_a_server_that_trims_spaces_begins_again(self):
        """mlx_lm.server removes the space at the beginning of an answer, which would join two words."""
        with (
            fake_server(texting("S", [UNSURE] * 3)) as small,
            fake_server(texting("L", [])) as large,
            proxy(small.url, large.url) as client,
        ):
            large.software = "BaseHTTP/0.6 Python/3.11.7"
            got = client.post(TEXT, json=self.PROMPT).json()
            assert (got["choices"][0]["text"], got["gearbx"]["handed_over"]) == ("L goes on", 0)

    def test_a_server_that_fails_to_go_on_hands_nothing_over(self):
        def broken(path, body):
            return answer({}, 500) if path == TEXT else texting("L", [])(path, body)

        with (
            fake_server(texting("S", [UNSURE] * 3)) as small,
            fake_server(broken) as large,
            proxy(small.url, large.url) as client,
        ):
            got = client.post(TEXT, json=self.PROMPT).json()
            assert got["choices"][0]["text"] == "S goes on"
            assert (got["gearbx"]["why"], got["gearbx"]["handed_over"]) == ("fallback", 0)
