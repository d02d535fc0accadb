"""The server and the clients that people use: the openai package, and httpx."""

import contextlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from http_server import MESSAGES, TEMPLATE, TOOL, WORD_PROBLEM, chat, in_the_making, served, text_of
from scripted_model import save_scripted

pytestmark = pytest.mark.processes

GREEDY = {"model": "demo", "max_tokens": 24, "temperature": 0}
CALL = ["<tool_call>", '{"name": "add", "arguments": {"a": 5,', ' "b": 7}}', "</tool_call>"]


@pytest.fixture(scope="module")
def server():
    with served(gears="4,8,16", log_level="ERROR", request_timeout=2.0) as client:
        yield client


def client_of(server, **keywords):
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60, **keywords)


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as client:
        yield client


def is_idle(server, seconds=2.0):
    """Whether, within some seconds, nothing is computed and nothing waits."""
    deadline = time.monotonic() + seconds
    while in_the_making(server, waiting=True) and time.monotonic() < deadline:
        time.sleep(0.02)
    return in_the_making(server, waiting=True) == 0


class TestOpenAI:
    def test_a_chat(self, server, client):
        answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
        expected = chat(server, temperature=0)["choices"][0]["message"]["content"]
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 24
        assert answer.model_extra["gearbx"]["mode"] == "lossless"

    def test_a_completion_in_a_gear_of_its_own(self, server, client):
        gear = {"gearbx": {"gear": "low"}}
        answer = client.completions.create(prompt=WORD_PROBLEM, extra_body=gear, **GREEDY)
        assert answer.choices[0].text == text_of(server, **gear)
        assert answer.model_extra["gearbx"]["gear_tokens"]["low"] == 24

    def test_the_stream_of_a_chat(self, client):
        whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(messages=MESSAGES, **GREEDY, **options)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert (last.choices, last.usage.completion_tokens) == ([], 24)

    @pytest.mark.parametrize("stream", [False, True])
    def test_logprobs_of_a_chat(self, client, stream):
        wanted = {"logprobs": True, "top_logprobs": 3, "stream": stream}
        answer = client.chat.completions.create(messages=MESSAGES, **GREEDY, **wanted)
        parts = list(answer) if stream else [answer]
        tokens = [token for part in parts for token in part.choices[0].logprobs.content]
        assert len(tokens) == 24
        for token in tokens:
            assert [one.logprob for one in token.top_logprobs] == sorted(
                (one.logprob for one in token.top_logprobs), reverse=True
            )
            assert token.top_logprobs[0].token == token.token  # greedy
            assert token.logprob == token.top_logprobs[0].logprob <= 0
            assert bytes(token.bytes).decode(errors="replace") == token.token


class TestErrors:
    def test_a_wrong_key_is_an_authentication_error(self):
        with served(gears="16", api_key="secret", log_level="ERROR") as server, client_of(server) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            with pytest.raises(openai.AuthenticationError):
                client.completions.create(prompt="A", **GREEDY)
            assert client.with_options(api_key="secret").completions.create(prompt="A", **GREEDY).choices[0].text


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A client of a model that calls a tool."""
    path = tmp_path_factory.mktemp("scripted") / "model"
    save_scripted(path, CALL, TEMPLATE)
    with served(model=str(path), gears="16", log_level="ERROR") as server, client_of(server) as client:
        yield client


class TestTools:
    def test_a_call(self, caller):
        asked = {"messages": MESSAGES, "tools": [TOOL], "model": "default_model", "temperature": 0}
        choice = caller.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == {"a": 5, "b": 7}

    def test_a_streamed_call(self, caller):
        asked = {"messages": MESSAGES, "tools": [TOOL], "model": "default_model", "temperature": 0}
        choices = [chunk.choices[0] for chunk in caller.chat.completions.create(stream=True, **asked)]
        assert choices[-1].finish_reason == "tool_calls"
        calls = [call for choice in choices for call in choice.delta.tool_calls or []]
        assert "".join(call.function.name or "" for call in calls) == "add"
        assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"a": 5, "b": 7}
        assert not "".join(choice.delta.content or "" for choice in choices)


class TestCancelling:
    @pytest.mark.parametrize("gearbx", [{"gear": "high"}, {"mode": "lossless"}], ids=str)
    def test_at_a_random_moment_among_others_that_stay(self, server, gearbx):
        """The clients that stay get the same text as alone, and nothing is left of the others."""
        drawn = random.Random(0)
        body = {"temperature": 0, "max_tokens": 40, "gearbx": gearbx}

        def leave(number):
            asked = body | {"prompt": f"{number}. {WORD_PROBLEM}", "stream": number % 2 == 0}
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(f"{server.base_url}/v1/completions", json=asked, timeout=drawn.uniform(0.001, 0.3))

        def stay(number):
            return text_of(server, f"Number {number}: {WORD_PROBLEM}", **body)

        with ThreadPoolExecutor(12) as pool:
            leaving = [pool.submit(leave, number) for number in range(16)]
            together = list(pool.map(stay, range(4)))
            for one in leaving:
                one.result()
        assert is_idle(server)
        assert together == [stay(number) for number in range(4)]
