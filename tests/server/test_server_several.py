"""Several texts in one answer: `n`, and lists of prompts."""

import contextlib
import json
import logging
import math

import pytest
from conftest import save_model, tiny_model
from http_server import (
    MESSAGES,
    TEMPLATE,
    TOOL,
    WORD_PROBLEM,
    by_openai,
    chat,
    complete,
    error_of,
    events,
    served,
    text_of,
)
from scripted_model import save_scripted

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.server.bodies import parse
from gearbx_mlx.server.job import logprob_entry
from gearbx_mlx.server.requests import ChatRequest

WARM = {"temperature": 1.0, "seed": 7}
MODES = ({"gear": "high"}, {"mode": "lossless"}, {"mode": "route"}, {"mode": "kickdown"})
PROMPTS = [WORD_PROBLEM, "Once", "Jane has 7 apples and eats one."]


@pytest.fixture(scope="module")
def client():
    with served(gears="4,16", log_level="ERROR") as client:
        yield client


def texts_of(answer):
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]


def streamed(chunks):
    """The texts of a stream by index, and how many times each of them ended."""
    texts, ends = {}, {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + said
        ends[choice["index"]] = ends.get(choice["index"], 0) + (choice["finish_reason"] is not None)
    return [texts[index] for index in sorted(texts)], [ends[index] for index in sorted(ends)]


@pytest.mark.some(2)
@pytest.mark.parametrize("gearbx", MODES, ids=str)
def test_seeded_outputs_differ_repeat_and_start_alike(client, gearbx):
    whole = [complete(client, n=4, gearbx=gearbx, **WARM) for _ in range(2)]
    texts = texts_of(whole[0])
    assert len(set(texts)) == 4
    assert texts_of(whole[1]) == texts
    assert texts[0] == text_of(client, gearbx=gearbx, **WARM)
    assert whole[0]["gearbx"]["mode"] == gearbx.get("mode", "static")
    assert sum(whole[0]["gearbx"]["gear_tokens"].values()) == whole[0]["usage"]["completion_tokens"]


def test_prompt_of_several_outputs_counts_once(client):
    one, three = (complete(client, n=n, **WARM)["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * 24
    assert three["total_tokens"] == three["prompt_tokens"] + three["completion_tokens"]


@pytest.mark.some(2)
@pytest.mark.parametrize("gearbx", MODES, ids=str)
def test_listed_prompts_equal_single_prompts(client, gearbx):
    alone = [complete(client, prompt, gearbx=gearbx) for prompt in PROMPTS]
    together = complete(client, PROMPTS, gearbx=gearbx)
    assert texts_of(together) == [texts_of(one)[0] for one in alone]
    for count in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][count] == sum(one["usage"][count] for one in alone)


def test_outputs_are_ordered_by_prompt(client):
    answer = complete(client, PROMPTS[:2], n=2, logprobs=1)
    alone = [text_of(client, prompt) for prompt in PROMPTS[:2]]
    assert texts_of(answer) == [alone[0], alone[0], alone[1], alone[1]]
    for choice in answer["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPTS}),
        ("/v1/completions", {"prompt": WORD_PROBLEM, "n": 3, **WARM}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORD_PROBLEM}], "n": 3, **WARM}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_stream_has_same_outputs(client, path, body):
    whole = client.post(path, json=body | {"max_tokens": 24}).json()
    chunks = events(client, path, **body, stream_options={"include_usage": True})
    assert streamed(chunks) == (texts_of(whole), [1, 1, 1])
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    reports = [chunk["gearbx"] for chunk in chunks if "gear_tokens" in chunk.get("gearbx", {})]
    written = [sum(report["gear_tokens"].values()) + report.get("lookup_accepted", 0) for report in reports]
    assert written == [chunks[-1]["usage"]["completion_tokens"]]


def test_too_many_outputs_are_refused(client):
    said = error_of(client.post("/v1/completions", json={"prompt": ["x"] * 65, "n": 2}))
    assert said == "prompt: too many outputs, got 130; use 128 at most"


YES_OR_NO = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}


def test_an_impossible_token_has_minus_9999():
    assert logprob_entry(2, -math.inf, b"b") == {"id": 2, "token": "b", "logprob": -9999.0, "bytes": [98]}


@pytest.mark.parametrize(("asked", "found"), [(3, 3), (1, 1), (True, 0)])
def test_chat_may_request_number_of_logprobs(client, asked, found):
    entries = chat(client, logprobs=asked, max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [found] * 2


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("stream", [False, True])
def test_alternatives_under_a_schema_are_json(client, stream):
    body = {"prompt": "Late?", "max_tokens": 8, "logprobs": 5, "response_format": YES_OR_NO, "stream": stream}
    answer = client.post("/v1/completions", json=body)
    lines = answer.text.split("\n")
    texts = [line[6:] for line in lines if line.startswith("data: {")] if stream else [answer.text]
    best = [best for text in texts for best in strict(text)["choices"][0]["logprobs"]["top_logprobs"]]
    assert 0 < min(map(len, best)) < 5


def asked(**further):
    return {"messages": MESSAGES, "tools": [TOOL], "temperature": 0, "max_tokens": 20, **further}


def in_parts(client, **further):
    """Text, tool calls and the end of a stream."""
    choices = [chunk["choices"][0] for chunk in events(client, "/v1/chat/completions", **asked(**further))]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    return "".join(choice["delta"].get("content", "") for choice in choices), calls, choices[-1]["finish_reason"]


NO_CALLS = ("[1]", '"add"', '{"name": 5, "arguments": {}}', '{"name": "add", "arguments": [1]}')
NO_CALLS += ('{"name": \x1b[31m"add', '{"name": "ad')


@contextlib.contextmanager
def writing(path, *texts):
    """A client of a model that writes the given texts as tool calls."""
    pieces = ["<tool_call>", "</tool_call><tool_call>".join(texts), "</tool_call>"]
    save_scripted(path / "model", pieces, TEMPLATE)
    with served(model=str(path / "model"), gears="16", log_level="ERROR") as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("text", NO_CALLS)
def test_invalid_call_is_text_and_not_logged(tmp_path, caplog, text):
    with writing(tmp_path, text) as client:
        choice = chat(client, **asked())["choices"][0]
        assert choice["message"]["content"] == text
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert in_parts(client) == (text, [], "stop")
        cut = chat(client, **asked(max_tokens=2))["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == (text, "length")
        tools = [{"name": "add", "input_schema": {}}]
        message = client.post("/v1/messages", json=asked(tools=tools)).json()
        assert message["content"] == [{"type": "text", "text": text}]
        assert message["stop_reason"] == "end_turn"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_calls_are_numbered_and_invalid_one_voids_all(tmp_path):
    one, none = {"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": math.nan}}
    texts = [json.dumps(calls) for calls in ([one, one | {"id": "call_2"}], [one, none], one)]
    with writing(tmp_path, *texts) as client:
        text, (first, second, third), reason = in_parts(client)
    assert (text, reason) == (texts[1], "tool_calls")
    assert [call["index"] for call in (first, second, third)] == [0, 1, 2]
    assert second["id"] == "call_2"


@pytest.mark.some(2)
@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% for x in y %}", "{{ messages | nothing }}", "chat.jinja"])
def test_invalid_template_is_reported_at_start(template):
    with pytest.raises(GearbxError, match="--chat-template"), served(gears="16", chat_template=template):
        pass


def test_tools_are_shown_unless_none_may_be_called():
    named = {"type": "function", "function": {"name": "add"}}
    for choice, shown in (("none", None), ("auto", [TOOL]), ("required", [TOOL]), (named, [TOOL])):
        assert parse(ChatRequest, asked(tool_choice=choice)).prompt_tools == shown
    assert parse(ChatRequest, asked(tools=[])).prompt_tools is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["owner/name", None])
def test_model_is_found_by_listed_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    save_model(tiny_model(vocab_size=4096), tmp_path / "owner" / "name")
    with served(model=name or str(tmp_path / "owner" / "name"), gears="16", log_level="ERROR") as client:
        ours = by_openai(client)
        listed = ours.models.list().data[0]
        assert "/" in listed.id
        assert ours.models.retrieve(listed.id) == listed
        assert client.get(f"/v1/models/{listed.id}").json()["id"] == listed.id
        error_of(client.get("/v1/models/owner%2Fother"), 404)
        error_of(client.post("/v1/models/owner%2Fname", json={}), 405)
        counts = client.get("/metrics").text
    assert 'gearbx_requests_total{route="/v1/models",status="200"} 3.0' in counts
    assert 'gearbx_requests_total{route="/v1/models",status="404"} 1.0' in counts
