"""The server's answers to clients of OpenAI, Anthropic and Prometheus, and to what its own description allows."""

import contextlib
import json
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import jsonschema
import pytest
import schemathesis
from http_server import (
    MESSAGES,
    TEMPLATE,
    TOOL,
    WORD_PROBLEM,
    at_once,
    by_openai,
    chat,
    complete,
    error_of,
    is_idle,
    served,
    text_of,
)
from hypothesis import HealthCheck, settings
from schemas import CHOICE, PERSON, TOO_MUCH
from schemathesis import checks
from scripted_model import save_scripted

from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.server.app import server_application
from gearbx_mlx.server.web import Guard

pytestmark = pytest.mark.processes

FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
MODES = ({"gear": "high"}, {"gear": "low"}, {"mode": "lossless"}, {"mode": "route"}, {"mode": "kickdown"})
ASKED = {"model": "default_model", "max_tokens": 16, "messages": MESSAGES}


@pytest.fixture(scope="module")
def client():
    with served(gears="4,16", log_level="ERROR") as client:
        yield client


@pytest.fixture(scope="module")
def ours(client):
    return by_openai(client)


@pytest.fixture(scope="module")
def theirs(client):
    return anthropic.Anthropic(base_url=client.server.url, api_key="none", max_retries=0)


class TestResponses:
    """OpenAI's newer API, as its client reads it."""

    def test_response_equals_chat_output(self, ours):
        chat = ours.chat.completions.create(**ASKED)
        answer = ours.responses.create(model="default_model", input=WORD_PROBLEM, max_output_tokens=16)
        assert answer.output_text == chat.choices[0].message.content
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert (answer.usage.output_tokens, answer.usage.total_tokens) == (16, chat.usage.total_tokens)
        assert sum(answer.gearbx["gear_tokens"].values()) + answer.gearbx.get("lookup_accepted", 0) == 16

    def test_items_and_instructions_are_messages(self, ours):
        said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}, *MESSAGES]
        parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}, *said[1:]]
        chat = ours.chat.completions.create(**ASKED | {"messages": [{"role": "system", "content": "Count."}, *said]})
        answer = ours.responses.create(model="demo", input=parts, instructions="Count.", max_output_tokens=16)
        assert answer.output_text == chat.choices[0].message.content

    def test_stream_equals_whole_response(self, ours):
        asked = {"model": "demo", "input": WORD_PROBLEM, "max_output_tokens": 16}
        whole = ours.responses.create(**asked)
        with ours.responses.stream(**asked) as stream:
            seen = list(stream)
        read = seen[-1].response
        assert read.output_text == whole.output_text
        kinds = list(dict.fromkeys(event.type for event in seen))
        assert kinds == [
            *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
            *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
            *("response.output_item.done", "response.incomplete"),
        ]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert "".join(event.delta for event in seen if event.type.endswith("delta")) == whole.output_text
        assert read.usage.output_tokens == 16

    def test_tool_calls_fit_their_schema(self, caller):
        ours = by_openai(caller)
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        asked = {"model": "demo", "input": WORD_PROBLEM, "tools": tools, "max_output_tokens": 80}
        (call,) = ours.responses.create(**asked, tool_choice={"type": "function", "name": "now"}).output
        assert (call.type, call.name, call.arguments) == ("function_call", "now", "{}")
        with ours.responses.stream(**asked, tool_choice={"type": "function", "name": "add"}) as stream:
            (call,) = stream.get_final_response().output
        jsonschema.validate(json.loads(call.arguments), ADD)
        said = [{"role": "user", "content": WORD_PROBLEM}, call.to_dict() | {"parsed_arguments": None}]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
        assert ours.responses.create(model="demo", input=[*said, output], max_output_tokens=8).usage.output_tokens


ADD = TOOL["function"]["parameters"] | {"required": ["a", "b"], "additionalProperties": False}
NOTHING = {"type": "object", "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("add", ADD), ("now", NOTHING))
]
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    path = tmp_path_factory.mktemp("caller") / "demo"
    shutil.copytree(DEMO_MODEL, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    with served(model=str(path), gears="4,16", log_level="ERROR") as client:
        yield client


class TestForcedCalls:
    """The demo model has never seen a tool: the grammar alone makes it call one."""

    @pytest.mark.parametrize("gearbx", [{"gear": "high"}, {"mode": "lossless"}], ids=str)
    def test_any_tool_or_named_tool_is_called(self, caller, gearbx):
        for tools, wanted, name, schema in ((TOOLS[:1], "required", "add", ADD), (TOOLS, NOW, "now", NOTHING)):
            asked = {"tools": tools, "tool_choice": wanted, "max_tokens": 80, "gearbx": gearbx}
            (choice,) = chat(caller, **asked)["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            assert call["function"]["name"] == name
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)

    def test_as_anthropic_asks(self, caller):
        theirs = anthropic.Anthropic(base_url=caller.server.url, api_key="none", max_retries=0)
        tools = [{"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in TOOLS]
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            answer = theirs.messages.create(**ASKED | {"tools": tools, "tool_choice": choice, "max_tokens": 80})
            assert answer.stop_reason == "tool_use"
            assert {block.type for block in answer.content} == {"tool_use"}

    @pytest.mark.parametrize(
        "asked",
        [
            {"tool_choice": "required"},
            {"tools": TOOLS[:1], "tool_choice": NOW},
            {"tools": [{}], "tool_choice": "required"},
        ],
        ids=str,
    )
    def test_uncallable_tools_are_refused(self, caller, asked):
        answer = caller.post("/v1/chat/completions", json={"messages": MESSAGES, **asked})
        assert "tool_choice" in error_of(answer)


class TestSchemas:
    @pytest.mark.parametrize("gearbx", MODES, ids=str)
    def test_an_answer_fits_its_schema_in_every_mode(self, ours, gearbx):
        asked = ASKED | {"max_tokens": 200, "response_format": FORMAT, "extra_body": {"gearbx": gearbx}}
        whole = ours.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "stop"
        jsonschema.validate(json.loads(whole.message.content), PERSON)
        chunks = ours.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content

    def test_answers_at_once_have_schemas_of_their_own(self, client):
        schemas = [PERSON, CHOICE, {"type": "integer", "minimum": 0, "maximum": 9}, None] * 2
        formats = [s and {"type": "json_schema", "json_schema": {"schema": s}} for s in schemas]
        gears = [{"gear": "high"}] * 4 + [{"mode": "lossless"}] * 4

        def ask(place):
            body = {"max_tokens": 200, "response_format": formats[place], "gearbx": gears[place]}
            return complete(client, **body)["choices"][0]["text"]

        alone = [ask(place) for place in range(8)]
        together = at_once(ask, range(8))
        assert together == alone
        for text, schema in zip(together, schemas):
            if schema is not None:
                jsonschema.validate(json.loads(text), schema)

    @pytest.mark.parametrize("gearbx", [{"gear": "high"}, {"mode": "lossless"}], ids=str)
    def test_unfinishable_answer_fails_and_others_continue(self, client, gearbx):
        response_format = {"type": "json_schema", "json_schema": {"schema": TOO_MUCH}}
        failed = {"prompt": WORD_PROBLEM, "gearbx": gearbx, "response_format": response_format}
        alone = complete(client, gearbx=gearbx, max_tokens=40)["choices"]
        others = []
        thread = threading.Thread(
            target=lambda: others.append(complete(client, gearbx=gearbx, max_tokens=40)["choices"])
        )
        thread.start()
        message = error_of(client.post("/v1/completions", json=failed))
        assert "cannot be finished" in message
        assert "use a smaller schema" in message
        with client.stream("POST", "/v1/completions", json=failed | {"stream": True}) as answer:
            data = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        assert "cannot be finished" in data[-1]["error"]["message"]
        thread.join()
        assert others == [alone]


class TestMessages:
    def test_a_message_is_the_chat_completion(self, ours, theirs):
        expected = ours.chat.completions.create(**ASKED)
        message = theirs.messages.create(**ASKED)
        assert message.content[0].text == expected.choices[0].message.content
        assert message.stop_reason == "max_tokens"
        assert message.usage.output_tokens == 16
        prompt = message.usage.input_tokens + message.usage.cache_read_input_tokens
        assert prompt == expected.usage.prompt_tokens
        assert sum(message.gearbx["gear_tokens"].values()) + message.gearbx.get("lookup_accepted", 0) == 16

    @pytest.mark.parametrize("gearbx", MODES, ids=str)
    def test_a_stream_is_the_message(self, theirs, gearbx):
        asked = ASKED | {"extra_body": {"gearbx": gearbx}}
        whole = theirs.messages.create(**asked)
        seen = []
        with theirs.messages.stream(**asked) as stream:
            for event in stream:
                if event.type == "message_start":
                    counts = event.message.usage
                if event.type == "content_block_delta":
                    seen += event.gearbx["tokens"]
            message = stream.get_final_message()
        assert message.content[0].text == whole.content[0].text
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 16)
        prompt = counts.input_tokens + counts.cache_read_input_tokens
        assert prompt == theirs.messages.count_tokens(model="default_model", messages=MESSAGES).input_tokens
        assert (counts.output_tokens, message.usage.input_tokens) == (0, counts.input_tokens)
        assert seen
        assert all(token["gear"] in ("low", "high") and token["entropy"] >= 0 for token in seen)

    def test_a_stop_sequence_is_named(self, theirs):
        whole = theirs.messages.create(**ASKED).content[0].text
        word = whole.split()[3]
        message = theirs.messages.create(**ASKED, stop_sequences=["never", word])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
        assert message.content[0].text == whole[: whole.index(word)]
        with theirs.messages.stream(**ASKED, stop_sequences=[word]) as stream:
            assert stream.get_final_message().stop_sequence == word

    def test_a_schema_and_a_conversation(self, theirs):
        messages = [*MESSAGES, {"role": "assistant", "content": "12"}, {"role": "user", "content": "Sure?"}]
        output = {"format": {"type": "json_schema", "schema": PERSON}}
        asked = ASKED | {"max_tokens": 200, "messages": messages, "output_config": output}
        further = {"top_k": 5, "temperature": 0.2}  # the client has no arguments for these
        message = theirs.messages.create(**asked, system="Be brief.", extra_body=further)
        assert message.stop_reason == "end_turn"
        jsonschema.validate(json.loads(message.content[0].text), PERSON)

    def test_errors_are_anthropics(self, theirs):
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0"):
            theirs.messages.create(**ASKED | {"max_tokens": 0})
        with pytest.raises(anthropic.NotFoundError, match="not served here") as error:
            theirs.messages.create(**ASKED | {"model": "claude"})
        assert error.value.body["error"]["type"] == "not_found_error"
        output = {"format": {"type": "json_schema", "schema": TOO_MUCH}}
        with (
            pytest.raises(anthropic.APIStatusError, match="cannot be finished"),
            theirs.messages.stream(**ASKED, output_config=output) as stream,
        ):
            stream.until_done()


OPENAPI = server_application(Guard()).openapi()

CHECKED = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def described():
    with served(gears="4,16", log_level="CRITICAL", max_tokens=2) as client:
        yield client


def shorten(body):
    """Bodies that ask for long answers ask for short ones: the shape of an answer does not depend on its length."""
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body, dict) and isinstance(body.get(name), int) and 2 < body[name] <= 2**31:
            body[name] = 2


@schemathesis.openapi.from_dict(OPENAPI).exclude(path="/chat/completions").parametrize()
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(described, case):
    shorten(case.body)
    case.call_and_validate(base_url=described.server.url, checks=CHECKED, timeout=20)


GREEDY = {"model": "demo", "max_tokens": 24, "temperature": 0}
CALL = ["<tool_call>", '{"name": "add", "arguments": {"a": 5,', ' "b": 7}}', "</tool_call>"]


class TestOpenAI:
    def test_completion_in_its_own_gear(self, client, ours):
        gear = {"gearbx": {"gear": "low"}}
        answer = ours.completions.create(prompt=WORD_PROBLEM, extra_body=gear, **GREEDY)
        assert answer.choices[0].text == text_of(client, **gear)
        assert answer.model_extra["gearbx"]["gear_tokens"]["low"] == 24

    def test_a_chat_and_its_stream(self, client, ours):
        whole = ours.chat.completions.create(messages=MESSAGES, **GREEDY)
        assert whole.choices[0].message.content == chat(client, temperature=0)["choices"][0]["message"]["content"]
        assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 24)
        assert whole.model_extra["gearbx"]["mode"] == "lossless"
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = ours.chat.completions.create(messages=MESSAGES, **GREEDY, **options)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert (last.choices, last.usage.completion_tokens) == ([], 24)

    @pytest.mark.parametrize("stream", [False, True])
    def test_logprobs_of_a_chat(self, ours, stream):
        wanted = {"logprobs": True, "top_logprobs": 3, "stream": stream}
        answer = ours.chat.completions.create(messages=MESSAGES, **GREEDY, **wanted)
        parts = list(answer) if stream else [answer]
        tokens = [token for part in parts for token in part.choices[0].logprobs.content]
        assert len(tokens) == 24
        for token in tokens:
            found = [one.logprob for one in token.top_logprobs]
            assert found == sorted(found, reverse=True)
            assert token.top_logprobs[0].token == token.token  # greedy
            assert token.logprob == token.top_logprobs[0].logprob <= 0
            assert bytes(token.bytes).decode(errors="replace") == token.token


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    """A model that calls a tool, as OpenAI's client asks it."""
    path = tmp_path_factory.mktemp("scripted") / "model"
    save_scripted(path, CALL, TEMPLATE)
    with served(model=str(path), gears="16", log_level="ERROR") as client:
        yield by_openai(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool(calling, stream):
    asked = {"messages": MESSAGES, "tools": [TOOL], "model": "default_model", "temperature": 0, "stream": stream}
    answer = calling.chat.completions.create(**asked)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    parts = [choice.delta if stream else choice.message for choice in choices]
    calls = [call for part in parts for call in part.tool_calls or []]
    assert choices[-1].finish_reason == "tool_calls"
    assert not "".join(part.content or "" for part in parts)
    assert [call.type for call in calls if call.type] == ["function"]
    assert "".join(call.function.name or "" for call in calls) == "add"
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"a": 5, "b": 7}


@pytest.mark.parametrize("gearbx", [{"gear": "high"}, {"mode": "lossless"}], ids=str)
def test_clients_leave_at_random_moments_and_others_stay(client, gearbx):
    """The clients that stay get the same text as alone, and nothing is left of the others."""
    drawn = random.Random(0)
    body = {"temperature": 0, "max_tokens": 40, "gearbx": gearbx}

    def leave(number):
        asked = body | {"prompt": f"{number}. {WORD_PROBLEM}", "stream": number % 2 == 0}
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{client.base_url}/v1/completions", json=asked, timeout=drawn.uniform(0.001, 0.3))

    def stay(number):
        return text_of(client, f"Number {number}: {WORD_PROBLEM}", **body)

    with ThreadPoolExecutor(12) as pool:
        leaving = [pool.submit(leave, number) for number in range(16)]
        together = list(pool.map(stay, range(4)))
        for one in leaving:
            one.result()
    assert is_idle(client)
    assert together == [stay(number) for number in range(4)]
