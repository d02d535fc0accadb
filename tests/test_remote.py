"""Other servers as sources of tokens with log-probabilities: the requests, and how answers are read."""

import itertools
import json
import math

import pytest
from fake_server import (
    JSON,
    LINES,
    Answer,
    answer,
    chat_entry,
    chat_event,
    chat_stream,
    chatting,
    events,
    fake_server,
    one_model,
    refused,
    text_event,
)

from gearbx_mlx import GearbxError
from gearbx_mlx.serving import peer
from gearbx_mlx.serving.remote import Connection, Question, RemoteError, RemoteServer

PAIR = [-0.1, -2.5]


def ask(fake, question: Question | None = None, model="m", api="auto", base="/v1", key=None, tokens=8):
    """The chunks of an answer, and the server that got the request."""
    with Connection(fake.url + base, key, timeout=5) as connection:
        server = RemoteServer(connection, model, api)
        return list(server.answer(question or Question("Hello"), tokens)), server


def tokens(chunks) -> list[tuple[str, tuple[float, ...]]]:
    return [(token.text, token.logprobs) for chunk in chunks for token in chunk.tokens]


def test_a_stream_of_chat():
    with fake_server(chatting(lambda body: chat_stream(PAIR, [-0.2, -3.0]))) as fake:
        chunks, server = ask(fake, Question("Hello", system="Be brief.", template={"thinking": False}), tokens=7)
    assert tokens(chunks) == [("t0", (-0.1, -2.5)), ("t0", (-0.2, -3.0))]
    assert "".join(chunk.text for chunk in chunks) == "t0t0"
    assert [chunk.finished for chunk in chunks] == [False, False, True]
    body = fake.requests[-1][1]
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (body["stream"], body["logprobs"], body["top_logprobs"], body["max_tokens"]) == (True, True, 20, 7)
    assert (body["temperature"], body["chat_template_kwargs"], body["model"]) == (0.0, {"thinking": False}, "m")
    assert server.way.api == "openai"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_come_in_any_parts_with_other_ends_fields_and_comments(size):
    event = json.dumps(chat_event(chat_entry(PAIR, ["caf\u00e9\u0085", "x"])), ensure_ascii=False)
    head, tail = event.split(", ", 1)
    lines = [": hello", "", "id: 1", "event: message", f"data:{head},", f"data: {tail}", "", "retry: 5", ""]
    sent = "\r\n".join([*lines, f"data: {event}", "", "data:  [DONE] ", "", ""]).encode()
    parts = [sent[i : i + size] for i in range(0, len(sent), size)]
    with fake_server(chatting(lambda body: Answer(parts, kind="text/event-stream; charset=utf-8"))) as fake:
        assert tokens(ask(fake)[0]) == [("caf\u00e9\u0085", (-0.1, -2.5))] * 2


def test_text_completions_have_lists_and_objects():
    def answers(path, body):
        return path == "/v1/completions" and events(
            text_event([" a", " b"], [-0.1, -0.2], [{" a": -0.1, " c": -2.5}, {" b": -0.2}])
        )

    with fake_server(answers) as fake:
        chunks, _ = ask(fake, Question("Hello", chat=False))
    assert tokens(chunks) == [(" a", (-0.1, -2.5)), (" b", (-0.2,))]
    assert fake.requests[-1][1]["prompt"] == "Hello"
    assert fake.requests[-1][1]["logprobs"] == 20


def test_a_token_of_a_text_completion_may_lack_its_log_probabilities():
    """The list is null or too short: the token is there, but nothing is known of it."""
    event = text_event(["a", "b", "c"], [-0.1, None], [{"a": -0.1, "x": -2.5}, None])
    with fake_server(lambda path, body: path == "/v1/completions" and events(event)) as fake:
        chunks, _ = ask(fake, Question("Hello", chat=False))
    assert tokens(chunks) == [("a", (-0.1, -2.5)), ("b", ()), ("c", ())]


def test_fewer_are_asked_for_where_a_server_refuses_so_many():
    def reply(body):
        most = 5
        return chat_stream(PAIR) if body["top_logprobs"] <= most else refused(f"top_logprobs must be at most {most}")

    with fake_server(chatting(reply)) as fake:
        _, server = ask(fake)
    assert server.way.asked == 5


def test_a_flag_is_given_where_a_server_refuses_a_number():
    """mlx_lm.server does so in text completions, for which 11 is the most."""

    def answers(path, body):
        if path != "/v1/completions":
            return None
        if not isinstance(body.get("logprobs"), bool):
            return refused("logprobs must be of type bool")
        most = 11
        return refused(f"top_logprobs must be at most {most}") if body["top_logprobs"] > most else chat_stream(PAIR)

    with fake_server(answers) as fake:
        _, server = ask(fake, Question("Hello", chat=False))
    assert (server.way.asked, server.way.form) == (11, "flag")


def test_llama_cpp_is_asked_by_its_own_name():
    def answers(path, body):
        return path == "/v1/completions" and (
            chat_stream(PAIR) if "n_probs" in body else events(chat_event(None, "text", finish="stop"))
        )

    with fake_server(answers) as fake:
        _, server = ask(fake, Question("Hello", chat=False))
    assert server.way.form == "n_probs"


def test_a_whole_answer_is_asked_for_where_streams_have_no_log_probabilities():
    entry = chat_entry(PAIR)
    whole = {"choices": [{"message": {"content": "t0"}, "logprobs": {"content": [entry]}, "finish_reason": "stop"}]}
    silent = events(chat_event(None, "t0"), chat_event(None, finish="stop"))
    with fake_server(chatting(lambda body: silent if body["stream"] else answer(whole))) as fake:
        chunks, server = ask(fake)
    assert tokens(chunks) == [("t0", (-0.1, -2.5))]
    assert not server.way.streamed


def test_a_server_without_log_probabilities_is_named():
    silent = events(chat_event(None, "hello"), chat_event(None, finish="stop"))
    with fake_server(chatting(lambda body: silent)) as fake, pytest.raises(RemoteError, match="no log-prob") as failed:
        ask(fake)
    assert fake.url in str(failed.value)


@pytest.mark.parametrize("content", [None, "a page"])
def test_what_refuses_log_probabilities_says_why(content):
    words = "logprobs are not supported"
    with fake_server(chatting(lambda body: refused(words))) as fake, pytest.raises(RemoteError, match=words):
        ask(fake)


class TestOllama:
    """Its own API: one JSON object per line, with the log-probabilities beside the text."""

    def answers(self, path, body):
        if path == "/":
            return Answer([b"Ollama is running"], kind="text/plain")
        if path == "/api/show":
            return answer({"model_info": {"general.architecture": "llama", "llama.vocab_size": 32000}})
        texts = {
            "/api/chat": lambda text: {"message": {"role": "assistant", "content": text}},
            "/api/generate": lambda text: {"response": text},
        }
        if path not in texts:
            return None
        rows = [{**texts[path](name), "logprobs": [chat_entry(PAIR, [name, "x"])], "done": False} for name in "ab"]
        return Answer([json.dumps(row).encode() + b"\n" for row in [*rows, {"done": True}]], kind=LINES)

    @pytest.mark.parametrize("base", ["", "/v1", "/v1/"])
    @pytest.mark.parametrize(("chat", "path"), [(True, "/api/chat"), (False, "/api/generate")])
    def test_it_is_recognised_and_asked_by_its_own_api(self, base, chat, path):
        with fake_server(self.answers) as fake:
            chunks, server = ask(fake, Question("Hello", chat=chat), base=base, tokens=9)
        assert tokens(chunks) == [("a", (-0.1, -2.5)), ("b", (-0.1, -2.5))]
        assert fake.requests[-1][0] == path
        assert fake.requests[-1][1]["options"] == {"num_predict": 9, "temperature": 0.0}
        assert server.way.api == "ollama"

    def test_it_says_how_large_the_vocabulary_is(self):
        with fake_server(self.answers) as fake, Connection(fake.url) as connection:
            assert RemoteServer(connection, "m").vocab_size() == 32000

    def test_a_stream_without_its_last_line_was_cut(self):
        def answers(path, body):
            found = self.answers(path, body)
            return found and Answer(list(found.parts)[:-1], kind=found.kind) if path == "/api/chat" else found

        with fake_server(answers) as fake, pytest.raises(RemoteError, match="without its last line"):
            ask(fake)

    def test_an_old_one_without_log_probabilities_is_asked_as_any_server(self):
        def answers(path, body):
            if path == "/api/chat":
                return Answer([b'{"message": {"content": "a"}, "done": true}\n'], kind=LINES)
            return chat_stream(PAIR) if path == "/v1/chat/completions" else self.answers(path, body)

        with fake_server(answers) as fake:
            _, server = ask(fake)
        assert server.way.api == "openai"


@pytest.mark.parametrize("fields", [{"meta": {"n_vocab": 4096}}, {"vocab_size": 4096}])
def test_a_list_of_models_may_say_how_large_the_vocabulary_is(fields):
    with fake_server(lambda path, body: one_model(fields)) as fake, Connection(fake.url + "/v1") as connection:
        server = RemoteServer(connection)
        assert (server.model, server.vocab_size()) == ("m", 4096)


@pytest.mark.parametrize("fields", [{}, {"vocab_size": "many"}, {"vocab_size": -1}, {"meta": None}, {"meta": [1]}])
def test_what_is_no_size_is_none(fields):
    with fake_server(lambda path, body: one_model(fields)) as fake, Connection(fake.url + "/v1") as connection:
        assert RemoteServer(connection).vocab_size() is None


def test_one_of_several_models_has_to_be_named():
    rows = {"data": [{"id": "a"}, {"id": "b"}]}
    with (
        fake_server(lambda path, body: answer(rows)) as fake,
        Connection(fake.url + "/v1") as connection,
        pytest.raises(RemoteError, match="its models are a, b; name one with --server-model"),
    ):
        RemoteServer(connection)


def limits(found) -> list[float]:
    return [token.unlisted for chunk in found for token in chunk.tokens]


class TestUnlisted:
    """An upper limit for every token that is not listed."""

    def chunks(self, entry, most=3):
        def reply(body):
            return events(chat_event(entry)) if body["top_logprobs"] <= most else refused("top_logprobs")

        with fake_server(chatting(reply)) as fake:
            return ask(fake)[0]

    def test_the_smallest_of_as_many_as_were_asked_for(self):
        assert limits(self.chunks(chat_entry([-0.5]))) == [-0.5]

    def test_nothing_is_known_where_fewer_came(self):
        assert limits(self.chunks(chat_entry(PAIR), most=5)) == [0.0]

    def test_the_last_of_those_asked_for_where_more_came(self):
        assert limits(self.chunks(chat_entry([-0.5, -1.5, -2.5]))) == [-0.5]

    def test_a_chosen_token_beyond_the_listed_ones_is_known_and_no_limit(self):
        entry = {**chat_entry([-0.5]), "token": "rare", "logprob": -3.0}
        (chunk,) = [chunk for chunk in self.chunks(entry) if chunk.tokens]
        assert chunk.tokens[0].logprobs == (-0.5, -3.0)
        assert chunk.tokens[0].unlisted == -0.5

    def test_how_unlikely_openai_does_not_say(self):
        entry = {**chat_entry([-0.5]), "token": "rare", "logprob": -9999.0}
        assert [logprobs for _, logprobs in tokens(self.chunks(entry))] == [(-0.5,)]

    def test_an_object_can_lack_a_token_if_it_ends_with_the_chosen_one(self):
        """Tokens with the same text share a key, and the chosen token may come on top of the requested ones."""
        tops = [{"a": -0.5, "b": -1.0, "c": -4.0, "d": -4.5, "e": -5.0}] * 2

        def answers(path, body):
            if path != "/v1/completions":
                return None
            return (
                events(text_event(["a", "e"], [-0.5, -5.0], tops)) if body.get("logprobs") == 5 else refused("logprobs")
            )

        with fake_server(answers) as fake:
            assert limits(ask(fake, Question("Hello", chat=False))[0]) == [-5.0, 0.0]


def test_mlx_lm_names_the_first_of_an_unordered_list_where_the_greedy_token_is_another():
    entry = {**chat_entry([-2.5, -0.1, -3.0], ["a", "b", "c"])}
    with fake_server(chatting(lambda body: events(chat_event(entry)))) as fake:
        assert tokens(ask(fake)[0]) == [("b", (-0.1, -2.5, -3.0))]


def test_a_probability_of_zero_is_one():
    with fake_server(chatting(lambda body: events(chat_event(chat_entry([0.0, -math.inf]))))) as fake:
        assert tokens(ask(fake)[0]) == [("t0", (0.0, -math.inf))]


def test_an_answer_in_place_of_a_stream_is_taken():
    whole = {"choices": [{"message": {"content": "t0"}, "logprobs": {"content": [chat_entry(PAIR)]}}]}
    with fake_server(chatting(lambda body: Answer([json.dumps(whole).encode()], kind=JSON))) as fake:
        assert tokens(ask(fake)[0]) == [("t0", (-0.1, -2.5))]


def test_an_answer_without_an_end_is_one_of_too_many_bytes(monkeypatch):
    monkeypatch.setattr(peer, "LARGEST_ANSWER", 1000)
    endless = Answer(itertools.repeat(b"x" * 100), kind=JSON)
    with fake_server(chatting(lambda body: endless)) as fake, pytest.raises(RemoteError, match="more than 1000 bytes"):
        ask(fake)


def test_a_key_is_sent_and_never_shown():
    def reply(body):
        return refused("the key sk-secret is wrong", 401)

    with fake_server(chatting(reply)) as fake, pytest.raises(RemoteError) as failed:
        ask(fake, key="sk-secret")
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer sk-secret"}
    assert "sk-secret" not in str(failed.value)
    assert "give --server-api-key" in str(failed.value)


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://host/v1", "http://", "http://host:99999/v1", "http://h/v1?a=b"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(GearbxError, match=r"--server .*(not a URL|not an http or https URL|more than an address)"):
        Connection(url)


def test_a_name_that_no_host_can_have_is_no_connection():
    with Connection(f"http://{'x' * 70}/v1") as connection, pytest.raises(RemoteError, match="label too long"):
        RemoteServer(connection, "m")


def test_a_password_in_a_url_is_not_shown():
    with Connection("http://me:secret@127.0.0.1:9/v1/") as connection:
        assert connection.shown == "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    "url", ["http://me:secret@host:99999/v1", "https://me:secret@host/v1?x=1", "ftp://me:secret@h/"]
)
def test_nor_is_it_where_the_url_is_refused(url):
    with pytest.raises(GearbxError, match="--server") as refused:
        Connection(url)
    assert "secret" not in str(refused.value)


def test_a_key_that_no_header_can_have_is_refused():
    with pytest.raises(GearbxError, match="API key has characters"):
        Connection("http://127.0.0.1:9", "sk\nInjected: yes")


@pytest.mark.parametrize(
    ("names", "text", "texts"),
    [
        (["Once", "Ġupon", "Ċ", "<|endoftext|>"], "Once upon\n", ["Once", " upon", "\n", "<|endoftext|>"]),
        (["caf", "Ã", "©"], "café", ["caf", "\ufffd", "\ufffd"]),
        (["▁Once", "▁upon"], "Once upon", [" Once", " upon"]),
        ([" a", "Ġ"], " aĠ", [" a", "Ġ"]),
        (["a", "b"], "c", ["a", "b"]),
    ],
)
def test_entries_of_a_vocabulary_become_the_text_of_the_answer(names, text, texts):
    entries = [chat_entry(PAIR, [name, "x"]) for name in names]
    whole = {"choices": [{"message": {"content": text}, "logprobs": {"content": entries}, "finish_reason": "stop"}]}
    with fake_server(chatting(lambda body: answer(whole))) as fake:
        assert [name for name, _ in tokens(ask(fake)[0])] == texts
