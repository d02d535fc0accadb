"""Servers of others: how they are asked, how answers are read, and which model a prompt goes to."""

import asyncio
import itertools
import math
import os
import signal
import subprocess
import sys

import httpx
import pytest
from fake_server import (
    CHAT,
    EASY,
    EVENTS,
    HARD,
    TEXT,
    Answer,
    answer,
    chat_answer,
    chat_entry,
    chat_event,
    chatting,
    chunks,
    events,
    fake_server,
    one_model,
    refused,
    routed,
    slowly,
    text_answer,
    whole,
)
from http_server import served

from gearbx_mlx import GearbxError
from gearbx_mlx.routing.bounds import bits
from gearbx_mlx.server import others
from gearbx_mlx.server.logprobs import RemoteError, decoded_names
from gearbx_mlx.server.others import Question, RemoteServer
from gearbx_mlx.server.web import Guard

PAIR = [math.log(0.9), math.log(0.05)]


def ask(fake, question: Question | None = None, key=None, tokens=8, timeout=5.0):
    """The tokens of an answer, and the server as asked."""
    server = RemoteServer(fake.url, key, timeout)
    return asyncio.run(server.answer(question or Question("Hello"), "m", tokens)), server


def known(tokens) -> list[tuple[str, tuple[float, ...]]]:
    return [(token.text, token.logprobs) for token in tokens]


class TestQuestions:
    def test_chat_request_asks_for_logprobs(self):
        with fake_server(chatting(lambda body: chat_answer(PAIR, [-0.2, -3.0]))) as fake:
            question = Question("Hello", system="Be brief.", template={"thinking": False})
            tokens, server = ask(fake, question, tokens=7)
        assert known(tokens) == [("t0", tuple(PAIR)), ("t0", (-0.2, -3.0))]
        (body,) = [body for _, body in fake.requests]
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        expected = {"model": "m", "max_tokens": 7, "temperature": 0.0, "logprobs": True, "top_logprobs": 20}
        assert body == expected | {"chat_template_kwargs": {"thinking": False}, "messages": messages}
        assert server.num_logprobs == 20

    def test_completion_has_partial_lists_and_objects(self):
        tops = [{" a": -0.1, " c": -2.5}, None]
        with fake_server(lambda path, body: text_answer([" a", " b", " c"], tops)) as fake:
            tokens, _ = ask(fake, Question("Hello", chat=False))
        assert known(tokens) == [(" a", (-0.1, -2.5)), (" b", ()), (" c", ())]
        assert fake.requests[-1][0] == TEXT
        assert (fake.requests[-1][1]["prompt"], fake.requests[-1][1]["logprobs"]) == ("Hello", 20)

    def test_smaller_request_follows_refusal_and_is_remembered(self):
        def reply(body):
            return chat_answer(PAIR) if body["top_logprobs"] <= 5 else refused("top_logprobs must be at most 5")

        with fake_server(chatting(reply)) as fake:
            _, server = ask(fake)
            asyncio.run(server.answer(Question("Again"), "m", 8))
        assert [body["top_logprobs"] for _, body in fake.requests] == [20, 11, 10, 5, 5]

    @pytest.mark.parametrize(
        ("reply", "words"),
        [
            (lambda: answer(whole([], "bare")), "no log-probabilities for m; start it with log-probabilities"),
            (lambda: refused("logprobs are not supported"), r"for m \(logprobs are not supported\)"),
            (lambda: refused("no such model", 404), r"answers 404 \(no such model\); set --server-model"),
            (lambda: refused("out of memory", 500), r"answers 500 \(out of memory\); see the server's log"),
            (lambda: answer({"detail": "?"}), "answers without choices"),
            (lambda: answer({"error": "kaput"}), "reports an error: kaput"),
            (lambda: Answer([b"[1]"]), r"is \[1\], not an object"),
        ],
    )
    def test_answer_without_logprobs_names_url(self, reply, words):
        with fake_server(chatting(lambda body: reply())) as fake, pytest.raises(RemoteError, match=words) as failed:
            ask(fake)
        assert fake.url in str(failed.value)
        assert "\n" not in str(failed.value)

    def test_endless_answer_is_limited_in_bytes(self, monkeypatch):
        monkeypatch.setattr(others, "MAX_ANSWER_BYTES", 1000)
        endless = Answer(itertools.repeat(b"x" * 100))
        with (
            fake_server(chatting(lambda body: endless)) as fake,
            pytest.raises(RemoteError, match="more than 1000 byt"),
        ):
            ask(fake)

    def test_a_key_is_sent_and_never_shown(self):
        reply = refused("the key sk-secret is wrong", 401)
        with fake_server(chatting(lambda body: reply)) as fake, pytest.raises(RemoteError) as failed:
            ask(fake, key="sk-secret")
        assert {headers["Authorization"] for headers in fake.headers} == {"Bearer sk-secret"}
        assert "sk-secret" not in str(failed.value)
        assert "pass --server-api-key" in str(failed.value)


class TestAddresses:
    WRONG = (
        "",
        "nonsense",
        "ftp://me:secret@host/v1",
        "http://",
        "http://me:secret@host:99999/v1",
        "http://h/v1?a=secret",
    )

    @pytest.mark.parametrize("url", WRONG)
    def test_invalid_url_is_refused_without_its_password(self, url):
        with pytest.raises(GearbxError, match=r"--server.*; use one such as http://") as refusal:
            RemoteServer(url)
        assert "secret" not in str(refusal.value)

    def test_password_is_hidden_and_missing_path_added(self):
        assert RemoteServer("http://me:secret@127.0.0.1:9/").shown == "http://127.0.0.1:9/v1"
        assert RemoteServer("http://127.0.0.1:9/api/").shown == "http://127.0.0.1:9/api"

    def test_key_invalid_in_header_is_refused(self):
        with pytest.raises(GearbxError, match="API key has characters"):
            RemoteServer("http://127.0.0.1:9", "sk\nInjected: yes")


class TestModels:
    @pytest.mark.parametrize(
        ("fields", "size"),
        [
            ({"meta": {"n_vocab": 4096}}, 4096),
            ({"vocab_size": 4096}, 4096),
            *(({"vocab_size": wrong}, None) for wrong in ("many", -1, True)),
            *(({"meta": wrong}, None) for wrong in (None, [1])),
        ],
    )
    def test_list_may_state_vocabulary_size(self, fields, size):
        with fake_server(lambda path, body: one_model(fields)) as fake:
            assert asyncio.run(RemoteServer(fake.url).model(None)) == ("m", size)

    def test_one_of_several_has_to_be_named(self):
        rows = {"data": [{"id": "a"}, {"id": "b"}, {"id": 3}, 4]}
        with fake_server(lambda path, body: answer(rows)) as fake:
            with pytest.raises(RemoteError, match="its models are a, b; choose one with --server-model"):
                asyncio.run(RemoteServer(fake.url).model(None))
            assert asyncio.run(RemoteServer(fake.url).model("b")) == ("b", None)

    def test_server_without_list_needs_named_model(self):
        with fake_server(lambda path, body: None) as fake:
            assert asyncio.run(RemoteServer(fake.url).model("m")) == ("m", None)


class TestUnlisted:
    """An upper limit for every token that is not listed."""

    def tokens(self, entry, most=3):
        def reply(body):
            return answer(whole([entry])) if body["top_logprobs"] <= most else refused("top_logprobs")

        with fake_server(chatting(reply)) as fake:
            return ask(fake)[0]

    @pytest.mark.parametrize(
        ("entry", "most", "unlisted"),
        [
            (chat_entry([-0.5]), 3, -0.5),  # as many as were asked for: the smallest
            (chat_entry(PAIR), 5, 0.0),  # fewer: nothing is known
            (chat_entry([-0.5, -1.5, -2.5]), 3, -0.5),  # more: the last of those asked for
        ],
    )
    def test_unlisted_bound_is_last_requested_token(self, entry, most, unlisted):
        assert [token.unlisted for token in self.tokens(entry, most)] == [unlisted]

    def test_chosen_token_beyond_list_is_no_limit(self):
        (token,) = self.tokens({**chat_entry([-0.5]), "token": "rare", "logprob": -3.0})
        assert (token.logprobs, token.unlisted) == ((-0.5, -3.0), -0.5)

    def test_object_ending_with_chosen_token_may_lack_one(self):
        """Tokens with the same text share a key, and the chosen token may come on top of the requested ones."""
        tops = [{"a": -0.5, "b": -1.0, "c": -4.0, "d": -4.5, "e": -5.0}] * 2

        def answers(path, body):
            return text_answer(["a", "e"], tops) if body.get("logprobs") == 5 else refused("logprobs")

        with fake_server(answers) as fake:
            assert [token.unlisted for token in ask(fake, Question("Hello", chat=False))[0]] == [-5.0, 0.0]

    def test_greedy_token_is_found_in_unordered_list(self):
        assert known(self.tokens(chat_entry([-2.5, -0.1, -3.0], ["a", "b", "c"]))) == [("b", (-0.1, -2.5, -3.0))]


@pytest.mark.parametrize(
    ("names", "text", "texts"),
    [
        (["Once", "Ġupon", "Ċ", "<|endoftext|>"], "Once upon\n", ["Once", " upon", "\n", "<|endoftext|>"]),
        (["caf", "Ã", "©"], "café", ["caf", "\ufffd", "\ufffd"]),
        (["▁Once", "▁upon"], "Once upon", [" Once", " upon"]),
        ([" a", "Ġ"], " aĠ", [" a", "Ġ"]),
        (["a", "b"], "c", ["a", "b"]),
        (["a"], "\ud800", ["a"]),
    ],
)
def test_vocabulary_entries_become_answer_text(names, text, texts):
    assert decoded_names(names, text) == texts


# Requests that are passed on.

LOW = bits(0.9) + bits(0.05)
BOUNDS = {"entropy_low": LOW + bits(0.05), "entropy_high": LOW + 0.05 * math.log2(62 / 0.05)}


def saying(body):
    """A server that says which model was asked; log-probabilities where they are asked for."""
    entry = chat_entry(PAIR, [body["model"], "x"])
    if body.get("stream"):
        words = [chat_event(entry if body.get("logprobs") else None, f"{body['model']} ")] * 2
        return events(*words, chat_event(None, finish="stop"), {"choices": [], "usage": {"completion_tokens": 2}})
    return answer(whole([entry] if body.get("logprobs") else [], body["model"]))


@pytest.fixture(scope="module")
def other():
    with fake_server(chatting(saying)) as fake:
        yield fake


@pytest.fixture(scope="module")
def client(other):
    with routed(other.url) as client:
        yield client


class TestRouting:
    @pytest.mark.parametrize(
        ("body", "model"),
        [
            (EASY, "small"),
            (HARD, "large"),
            ({**HARD, "model": "auto"}, "large"),
            ({**HARD, "model": "small"}, "small"),
            ({**EASY, "model": "large"}, "large"),
            ({"messages": [*HARD["messages"], *EASY["messages"]]}, "small"),  # the user's last message counts
        ],
    )
    def test_the_prompt_or_the_request_chooses_the_model(self, client, other, body, model):
        got = client.post(CHAT, json=body).json()
        assert got["choices"][0]["message"]["content"] == model
        assert got["choices"][0]["logprobs"] is None
        assert (got["gearbx"]["gear"], got["gearbx"]["mode"]) == (model, "prompt")
        (token,) = got["gearbx"]["tokens"]
        assert token == {"gear": model} | {name: pytest.approx(value, abs=5e-3) for name, value in BOUNDS.items()}
        assert other.requests[-1][1]["messages"] == body["messages"]

    def test_unknown_model_is_named_with_200_characters(self, client):
        got = client.post(CHAT, json=EASY | {"model": "m" * 300})
        assert (got.status_code, got.json()["error"]["param"]) == (404, "model")
        assert f"got '{'m' * 200}'; choose from auto, small" in got.json()["error"]["message"]

    def test_stream_events_have_text_entropy_and_gear(self, client):
        got = client.post(CHAT, json=EASY | {"stream": True})
        assert got.headers["content-type"] == "text/event-stream"
        assert got.text.endswith("data: [DONE]\n\n")
        *words, end, usage = chunks(got.text)
        assert [chunk["choices"][0]["delta"]["content"] for chunk in words] == ["small "] * 2
        for chunk in words:
            (token,) = chunk["gearbx"]["tokens"]
            assert token["gear"] == "small"
            assert token["entropy_low"] < token["entropy_high"]
            assert chunk["choices"][0]["logprobs"] is None
        assert (end["choices"][0]["finish_reason"], end["gearbx"]["tokens"]) == ("stop", [])
        assert usage["usage"] == {"completion_tokens": 2}

    @pytest.mark.parametrize("stream", [False, True])
    def test_requested_log_probabilities_reach_their_client(self, client, other, stream):
        got = client.post(CHAT, json=EASY | {"stream": stream, "logprobs": True, "top_logprobs": 2})
        first = chunks(got.text)[0] if stream else got.json()
        assert first["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert first["gearbx"]["tokens"][0]["entropy_low"] > 0
        assert other.requests[-1][1]["top_logprobs"] == 2

    def test_a_server_without_log_probabilities_answers_without_entropy(self):
        def reply(body):
            return refused("logprobs are not supported") if "logprobs" in body else saying(body)

        with fake_server(chatting(reply)) as fake, routed(fake.url) as client:
            got = [client.post(CHAT, json=EASY | {"stream": stream}) for stream in (False, True)]
        assert got[0].json()["gearbx"] == {"mode": "prompt", "gear": "small", "tokens": []}
        assert chunks(got[1].text)[0]["choices"][0]["delta"]["content"] == "small "
        assert (
            sum(path == CHAT for path, _ in fake.requests) == len(others.LOGPROB_COUNTS) + 2
        )  # it is asked for them once

    def test_client_error_changes_no_assumption_about_server(self):
        def reply(body):
            return refused("logit_bias is 'logprobs'") if "logit_bias" in body else saying(body)

        with fake_server(chatting(reply)) as fake, routed(fake.url) as client:
            assert client.post(CHAT, json=EASY | {"logit_bias": "logprobs"}).status_code == 400
            assert client.post(CHAT, json=EASY).json()["gearbx"]["tokens"]

    def test_text_completions_are_routed_by_prompt(self, client):
        def answers(path, body):
            return text_answer([body["model"]], [{"a": PAIR[0], "b": PAIR[1]}]) if path == TEXT else None

        with fake_server(answers) as fake, routed(fake.url, models="a,b,c") as client:
            prompts = {"a": "Good morning!", "b": "Prove it step by step.", "c": "Prove that x = y + 2."}
            for model, prompt in prompts.items():
                got = client.post(TEXT, json={"prompt": prompt}).json()
                assert (got["choices"][0]["text"], got["gearbx"]["gear"]) == (model, model)
                assert len(got["gearbx"]["tokens"]) == 1

    def test_models_and_health_come_from_server(self, client):
        rows = client.get("/v1/models").json()["data"]
        assert [row["id"] for row in rows] == ["auto", "small", "large"]
        assert rows[0]["gearbx"] == {"gears": ["small", "large"]}
        assert client.get("/health").json() == {"status": "ok"}
        assert "<title>gearbx-mlx</title>" in client.get("/").text
        with fake_server(lambda path, body: refused("busy", 503)) as fake, routed(fake.url) as sick:
            assert (sick.get("/health").status_code, sick.get("/health").json()["reason"]) == (503, "busy")

    @pytest.mark.parametrize(("field", "value", "status"), [("stream", "yes", 400), ("model", "gpt", 404)])
    def test_unsupported_fields_are_refused(self, client, field, value, status):
        got = client.post(CHAT, json=EASY | {field: value})
        assert (got.status_code, got.json()["error"]["param"]) == (status, field)

    def test_a_key_is_asked_for(self, other):
        with routed(other.url, Guard(api_key="secret")) as client:
            assert client.post(CHAT, json=EASY).status_code == 401
            assert client.post(CHAT, json=EASY, headers={"Authorization": "Bearer secret"}).status_code == 200
            assert other.headers[-1].get("Authorization") is None  # the client's key is not passed on


class TestFailures:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("reply", "status", "words"),
        [
            (lambda: refused("too long", 413), 413, "too long"),
            (lambda: refused("wrong key sk-secret", 401), 502, "wrong key ***"),
            (lambda: refused("kaput", 500), 502, "kaput"),
            (lambda: Answer([], 302), 502, "no reason given"),
            (lambda: Answer([b"<html>"], kind="text/html"), 502, "not an answer of OpenAI's API"),
            (lambda: Answer([b"{"], length=9), 502, "incomplete answer"),
            (lambda: Answer(slowly([b" "] * 9, 0.2)), 502, "no token for 0.5 s"),
        ],
    )
    def test_before_the_answer_the_client_gets_a_status(self, reply, status, words, stream):
        how = {"server_api_key": "sk-secret", "server_timeout": 0.5}
        with fake_server(chatting(lambda body: reply())) as fake, routed(fake.url, **how) as client:
            got = client.post(CHAT, json=EASY | {"stream": stream})
        assert got.status_code == status
        assert words in got.json()["error"]["message"]
        assert "sk-secret" not in got.text
        assert fake.url not in got.text

    @pytest.mark.parametrize(
        ("rest", "words"),
        [
            ([], "incomplete stream"),
            ([b'data: {"error": {"message": "out of memory"}}\n\n'], "out of memory"),
            ([b"data: {\n\n"], "not an answer of OpenAI's API"),
            (slowly(itertools.repeat(b": ping\n\n"), 0.1), "no token for 0.5 s"),
        ],
    )
    def test_error_in_stream_is_last_event(self, rest, words):
        first, _ = events(chat_event(chat_entry(PAIR))).parts
        parts = itertools.chain([first], rest)
        reply = chatting(lambda body: Answer(parts, kind=EVENTS))
        with fake_server(reply) as fake, routed(fake.url, server_timeout=0.5) as client:
            text = client.post(CHAT, json=EASY | {"stream": True}).text
        first, last = chunks(text)
        assert first["choices"][0]["delta"]["content"] == "t0"
        assert words in last["error"]["message"]
        assert "[DONE]" not in text


@pytest.mark.processes
def test_command_routes_to_own_server_until_signal():
    with served(gears="4,16", log_level="ERROR") as ours:
        url = ours.server.url
        command = [sys.executable, "-m", "gearbx_mlx", "server", "--server", url, "--server-model", "demo,demo"]
        with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
            try:
                said = process.stderr.readline()
                assert f": demo, demo of {url}/v1; the page is at " in said
                got = httpx.post(said.split(": ")[0] + "/chat/completions", json=EASY | {"max_tokens": 4}, timeout=60)
                assert len(got.json()["gearbx"]["tokens"]) == 4
            finally:
                os.kill(process.pid, signal.SIGINT)
            assert process.wait(20) == 130
