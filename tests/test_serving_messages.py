import importlib
import json

import pytest
from fastapi import APIRouter
from fastapi.responses import JSONResponse, StreamingResponse

from gearbx_mlx.serving.answers import event_text
from gearbx_mlx.serving.listening import Server
from gearbx_mlx.serving.messages import Messages, MessagesRequest, arguments, chat_request, messages_error
from gearbx_mlx.serving.requests import parse
from gearbx_mlx.serving.web import Guard, Refused, application

WEATHER = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 7,
    "total_tokens": 27,
    "prompt_tokens_details": {"cached_tokens": 12},
}
HEAD = {"id": "chatcmpl-7", "object": "chat.completion", "model": "demo", "created": 1}


def chat_of(**fields):
    """The chat completion body for a request of the Messages API."""
    said = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
    return chat_request(parse(MessagesRequest, said | fields)).model_dump(exclude_unset=True)


def completion(finish_reason="stop", **written):
    message = {"role": "assistant", "content": None} | written
    return HEAD | {"choices": [{"index": 0, "finish_reason": finish_reason, "message": message}], "usage": USAGE}


def chunk(finish_reason=None, **delta):
    return HEAD | {"choices": [{"index": 0, "finish_reason": finish_reason, "delta": delta}]}


CHUNKS = [
    chunk(reasoning="They ask "),
    chunk(reasoning="for rain."),
    chunk(content="I loo"),
    chunk(content="k."),
    chunk(tool_calls=[{"index": 0} | CALL]),
    chunk("tool_calls"),
    HEAD | {"choices": [], "usage": USAGE},
]


def test_a_request_becomes_that_of_a_chat():
    assert chat_of(
        system="Be brief.", stop_sequences=["\n"], temperature=0.5, top_p=0.9, top_k=3, stream=True, gearbx={"gear": 4}
    ) == {
        "model": "demo",
        "max_tokens": 9,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "stop": ["\n"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "gearbx": {"gear": 4},
    }


def test_blocks_become_messages():
    blocks = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Rain?"}, {"type": "text", "text": "Here.", "cache_control": None}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": ""},
                {"type": "redacted_thinking", "data": "eA=="},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"town": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "call_2", "content": "no such town", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    assert chat_of(system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], messages=blocks)[
        "messages"
    ] == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "Rain?\nHere."},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I look."},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "Error: no such town"},
        {"role": "user", "content": "So?"},
    ]


def test_images_become_parts():
    source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
    content = [{"type": "text", "text": "What?"}, {"type": "image", "source": source}]
    assert chat_of(messages=[{"role": "user", "content": content}])["messages"][0]["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}},
    ]


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        (None, {}),
        ({"type": "auto"}, {}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ],
)
def test_tools(choice, fields):
    body = chat_of(tools=[WEATHER], tool_choice=choice)
    parameters = WEATHER["input_schema"]
    function = {"name": "weather", "description": "The weather of a town.", "parameters": parameters}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert {name: body[name] for name in body if name == "tool_choice"} == fields


def test_a_model_that_may_call_nothing_is_shown_no_tools():
    body = chat_of(tools=[WEATHER], tool_choice={"type": "none"})
    assert (body.get("tools"), body["tool_choice"]) == (None, "none")


def test_thinking_and_a_schema():
    body = chat_of(
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"format": {"type": "json_schema", "schema": {"type": "integer"}}},
    )
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "integer"}
    assert chat_of(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "9"}, 'max_tokens is "9": input should be a valid integer'),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "robot", "content": ""}]}, 'messages[0].role is "robot"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "input tag 'document' found using 'type' does not match any of the expected tags",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: field required",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content is 3: input should be a valid string or input should be a valid list",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].input_schema: field required"),
        ({"temperature": -1}, "temperature is -1"),
        ({"messages": [{"role": "assistant", "content": "So"}]}, "end with the user's"),
    ],
)
def test_a_request_that_is_wrong_is_refused(fields, said):
    with pytest.raises(Refused) as error:
        chat_of(**fields)
    assert said in error.value.message


def recorded_answers(recorded):
    """An application that answers the Messages API with a given chat completion."""
    router = APIRouter()

    @router.post("/v1/messages")
    async def answer(body: MessagesRequest):
        dialect = Messages()
        if not body.stream:
            return JSONResponse(dialect.whole(recorded["completion"]))
        events = [event for chunk in recorded["chunks"] for event in dialect.events(chunk)]
        events += [dialect.failed(recorded["failure"])] if "failure" in recorded else dialect.last()
        return StreamingResponse(map(event_text, events), media_type="text/event-stream")

    return application(router, Guard(), error_object=lambda path, refused: messages_error(refused))


@pytest.fixture(scope="module")
def anthropic():
    """The client's package; importing it takes a second."""
    return importlib.import_module("anthropic")


@pytest.fixture
def ask(anthropic):
    """Asks a server that gives recorded answers, through Anthropic's client."""

    given = {}
    server = Server("127.0.0.1", 0)
    server.start(recorded_answers(given))
    client = anthropic.Anthropic(base_url=server.where, api_key="none", max_retries=0)
    asked = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "Rain in Ulm?"}]}

    def ask(streamed=False, recorded=None, **fields):
        given.clear()
        given.update(recorded or {})
        messages = client.messages
        return messages.stream(**asked | fields) if streamed else messages.create(**asked | fields)

    yield ask
    server.stop()


@pytest.mark.processes
def test_the_client_reads_a_message(ask):
    read = ask(recorded={"completion": completion(content="Rain.") | {"gearbx": {"drafted": 3}}})
    assert [block.text for block in read.content] == ["Rain."]
    assert (read.id, read.model, read.stop_reason, read.stop_sequence) == ("msg_7", "demo", "end_turn", None)
    assert (read.usage.input_tokens, read.usage.cache_read_input_tokens, read.usage.output_tokens) == (8, 12, 7)
    assert read.gearbx == {"drafted": 3}


@pytest.mark.processes
def test_the_client_reads_thoughts_and_tool_calls(ask):
    said = completion("tool_calls", content="I look.", reasoning="Rain?", tool_calls=[CALL])
    thoughts, text, call = ask(recorded={"completion": said}).content
    assert (thoughts.thinking, text.text) == ("Rain?", "I look.")
    assert (call.id, call.name, call.input) == ("call_1", "weather", {"town": "Ulm"})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("finish_reason", "word", "stop_reason"),
    [("stop", None, "end_turn"), ("length", None, "max_tokens"), ("stop", "\n", "stop_sequence")],
)
def test_why_a_message_ended(ask, finish_reason, word, stop_reason):
    said = completion(finish_reason, content="Rain.")
    said["choices"][0]["stop_reason"] = word
    read = ask(recorded={"completion": said})
    assert (read.stop_reason, read.stop_sequence) == (stop_reason, word)
    chunks = [chunk(content="Rain."), chunk(finish_reason)]
    chunks[1]["choices"][0]["stop_reason"] = word
    with ask(streamed=True, recorded={"chunks": chunks}) as streamed:
        read = streamed.get_final_message()
    assert (read.stop_reason, read.stop_sequence) == (stop_reason, word)


@pytest.mark.processes
def test_the_client_reads_a_stream(ask):
    with ask(streamed=True, recorded={"chunks": CHUNKS}) as streamed:
        kinds = [event.type for event in streamed if event.type.startswith(("message", "content"))]
        read = streamed.get_final_message()
    assert kinds == [
        "message_start",
        *["content_block_start", *["content_block_delta"] * 2, "content_block_stop"] * 2,
        *["content_block_start", "content_block_delta", "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    thoughts, text, call = read.content
    assert (thoughts.thinking, text.text) == ("They ask for rain.", "I look.")
    assert (call.id, call.name, call.input) == ("call_1", "weather", {"town": "Ulm"})
    assert read.stop_reason == "tool_use"
    assert (read.usage.input_tokens, read.usage.cache_read_input_tokens, read.usage.output_tokens) == (8, 12, 7)


@pytest.mark.processes
def test_arguments_that_come_in_parts(ask):
    """Other servers stream them like this."""
    first = CALL | {"function": {"name": "weather", "arguments": ""}}
    parts = ({"function": {"arguments": text}} for text in ('{"to', 'wn": "Ulm"}'))
    chunks = [chunk(tool_calls=[first]), *(chunk(tool_calls=[part]) for part in parts), chunk("tool_calls")]
    with ask(streamed=True, recorded={"chunks": chunks}) as streamed:
        (call,) = streamed.get_final_message().content
    assert call.input == {"town": "Ulm"}


@pytest.mark.processes
def test_the_client_reads_errors(ask, anthropic):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0") as error:
        ask(max_tokens=0)
    assert error.value.body["error"]["type"] == "invalid_request_error"
    recorded = {"chunks": [chunk(content="Rain")], "failure": Refused(500, "the model is gone")}
    with (
        pytest.raises(anthropic.APIStatusError, match="the model is gone"),
        ask(streamed=True, recorded=recorded) as read,
    ):
        read.until_done()


def test_what_a_model_called_wrongly_has_no_arguments():
    assert [arguments(text) for text in ("", "{", "[1]", json.dumps({"a": 1}))] == [
        {},
        {},
        {},
        {"a": 1},
    ]
