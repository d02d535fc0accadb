"""Anthropic's messages and OpenAI's responses, which become chat completions, and answers, which become theirs.

What their clients read of whole answers and streams is in test_server_apis.py.
"""

import re

import pytest

from gearbx_mlx.server import dialects
from gearbx_mlx.server.bodies import parse
from gearbx_mlx.server.dialects import Messages, MessagesRequest, ResponseDialect, ResponsesRequest
from gearbx_mlx.server.web import Refused

PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
WEATHER = {"name": "weather", "description": "The weather of a town.", "input_schema": PARAMETERS}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
USAGE = {"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27}
USAGE |= {"prompt_tokens_details": {"cached_tokens": 12}}


def chat_of(**fields):
    """The chat completion body for a request of the Messages API."""
    said = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
    return dialects.chat_of_messages(parse(MessagesRequest, said | fields)).model_dump(exclude_unset=True)


def test_request_becomes_chat_request():
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stream": True, "gearbx": {"gear": 4}}
    expected = {"model": "demo", "max_tokens": 9, "stop": ["\n"], "stream_options": {"include_usage": True}, **same}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert chat_of(system="Be brief.", stop_sequences=["\n"], **same) == expected | {"messages": messages}


def test_ignored_fields_of_a_response_have_no_effect():
    asked = parse(ResponsesRequest, {"input": "Hello", "max_tokens": 3, "top_k": 1, "temperature": 0.5, "text": None})
    found = dialects.chat_of_response(asked).model_dump(exclude_unset=True)
    assert found == {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0.5}


def test_blocks_become_messages():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    linked = {"type": "image", "source": {"type": "url", "url": "data:,x"}}
    asked = [{"type": "text", "text": "Rain?"}, {"type": "text", "text": "Here.", "cache_control": None}]
    thought = [
        {"type": "thinking", "thinking": "I look.", "signature": ""},
        {"type": "redacted_thinking", "data": "eA=="},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"town": "Ulm"}},
    ]
    returned = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "call_2", "content": "no such town", "is_error": True},
    ]
    turns = [("user", asked), ("assistant", thought), ("user", [*returned, {"type": "text", "text": "So?"}])]
    turns += [("assistant", []), ("user", returned[:1]), ("user", [asked[0], image, linked])]
    found = chat_of(
        system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        messages=[{"role": role, "content": content} for role, content in turns],
    )["messages"]
    urls = [{"type": "image_url", "image_url": {"url": url}} for url in ("data:image/png;base64,eA==", "data:,x")]
    assert found == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "Rain?\nHere."},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I look."},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "Error: no such town"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}, *urls]},
    ]


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        (None, {}),
        ({"type": "auto"}, {}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
)
def test_tools_thinking_and_a_schema(choice, fields):
    body = chat_of(
        tools=[WEATHER],
        tool_choice=choice,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"format": {"type": "json_schema", "schema": {"type": "integer"}}},
    )
    function = {"name": "weather", "description": "The weather of a town.", "parameters": PARAMETERS}
    shown = None if fields.get("tool_choice") == "none" else [{"type": "function", "function": function}]
    assert body.get("tools") == shown
    assert {name: body[name] for name in body if name == "tool_choice"} == fields
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "integer"}
    assert chat_of(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}


def said_by_user(*content):
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "9"}, 'max_tokens is "9": input should be a valid integer'),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "robot", "content": ""}]}, 'messages[0].role is "robot"'),
        (said_by_user({"type": "document"}), 'unknown block type "document"; choose from text, image'),
        (said_by_user({"type": []}), "unknown block type []"),
        (said_by_user({"type": "text"}), "text of a text block: wrong type, got null; use a string"),
        (said_by_user({"type": "tool_result", "tool_use_id": "x", "content": [3]}), "unknown block type null"),
        (
            said_by_user({"type": "tool_result", "tool_use_id": "x", "content": 3}),
            "content of a tool_result block: wrong type",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].input_schema: field required"),
        ({"temperature": -1}, "temperature is -1"),
        ({"messages": [{"role": "assistant", "content": "So"}]}, "use the user's"),
    ],
)
def test_invalid_request_is_refused(fields, words):
    with pytest.raises(Refused, match=re.escape(words)):
        chat_of(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, "input is []"),
        ({"input": [{"role": "robot", "content": ""}]}, 'unknown role "robot"; choose from user'),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "name of a function_call block: wrong type, got null"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 'unknown block type "item_reference"'),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 'unknown block type "input_file"'),
        ({"tools": [{"type": "web_search"}]}, 'tools[0]: unknown block type "web_search"'),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not served"),
        ({"background": True}, "background is not served"),
    ],
)
def test_invalid_response_is_refused(fields, words):
    with pytest.raises(Refused, match=re.escape(words)):
        parse(ResponsesRequest, {"input": "x"} | fields)


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"town": "Ulm"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]},
    ]
    asked = parse(ResponsesRequest, {"input": items, "instructions": "Count.", "reasoning": {"effort": "none"}})
    found = dialects.chat_of_response(asked).model_dump(exclude_unset=True)
    assert found["chat_template_kwargs"] == {"enable_thinking": False}
    assert found["messages"] == [
        {"role": "system", "content": "Count."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]},
    ]


HEAD = {"id": "chatcmpl-7", "object": "chat.completion", "model": "demo", "created": 1}
DELTAS = [{"reasoning": "They ask "}, {"reasoning": "for rain."}, {"content": "I loo"}, {"content": "k."}]
DELTAS += [{"tool_calls": [CALL | {"index": 0}, CALL | {"index": 1, "id": "call_2"}]}, {}]
CHUNKS = [
    HEAD | {"choices": [{"index": 0, "finish_reason": None if delta else "tool_calls", "delta": delta}]}
    for delta in DELTAS
]
WHOLE = {"role": "assistant", "content": "I look.", "reasoning": "They ask for rain.", "tool_calls": [CALL]}


@pytest.mark.parametrize("dialect", [Messages, lambda: ResponseDialect(parse(ResponsesRequest, {"input": "Rain?"}))])
def test_blocks_are_same_in_stream_and_answer(dialect):
    streamed, whole = dialect(), dialect()
    streamed.begin(USAGE | {"completion_tokens": 0})
    events = [data for chunk in CHUNKS for _, data in streamed.events(chunk)]
    events += [data for _, data in streamed.events(HEAD | {"choices": [], "usage": USAGE})]
    events += [data for _, data in streamed.last()]
    choices = [{"index": 0, "finish_reason": "tool_calls", "message": WHOLE}]
    answer = whole.whole(HEAD | {"choices": choices, "usage": USAGE, "gearbx": {"mode": "route"}})
    assert answer["gearbx"] == {"mode": "route"}
    kinds = [event["type"].rpartition(".")[2].rpartition("_")[2] for event in events]
    blocks = answer.get("content") or answer["output"]
    if "content" in answer:
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        assert blocks[2] == {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"town": "Ulm"}}
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
        assert answer["usage"]["input_tokens"] == events[0]["message"]["usage"]["input_tokens"] == 8
        one = ["start", "delta", "delta", "stop"]
        assert kinds == ["start", "ping", *one, *one, *(["start", "delta", "stop"] * 2), "delta", "stop"]
        assert events[-2]["usage"]["output_tokens"] == 7
    else:
        assert [block["type"] for block in blocks] == ["reasoning", "message", "function_call"]
        assert (blocks[2]["call_id"], blocks[2]["arguments"]) == ("call_1", '{"town": "Ulm"}')
        assert (answer["status"], answer["usage"]["input_tokens_details"]["cached_tokens"]) == ("completed", 12)
        assert kinds.count("added") == 6  # items, and parts of the first two
        assert kinds[-1] == "completed"
        items = [item["type"] for item in events[-1]["response"]["output"]]
        assert items == ["reasoning", "message", "function_call", "function_call"]
        text = "".join(event["delta"] for event in events if isinstance(event.get("delta"), str))
        assert text == "They ask for rain.I look." + 2 * '{"town": "Ulm"}'


def test_stop_word_is_named_and_error_ends_stream():
    dialect = Messages()
    choices = [{"index": 0, "finish_reason": "stop", "stop_reason": "\n", "message": {"content": "Rain."}}]
    answer = dialect.whole(HEAD | {"choices": choices, "usage": USAGE})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "\n")
    name, data = dialect.failed(Refused(503, "busy"))
    assert (name, data["error"]) == ("error", {"type": "overloaded_error", "message": "busy"})
