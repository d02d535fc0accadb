"""What every server here has in common: the access log, and an end of which every answer hears."""

import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import chat, complete, error_of, events, hears_of_the_end, in_the_making, served

from gearbx_mlx.server.app import MAX_NAME_LENGTH
from gearbx_mlx.server.web import quoted

LINE = re.compile(r'(?P<client>\S+) "(?P<asked>[^"]+)" (?P<status>\d+)(?P<told>( \w+=\S+)*)')


@pytest.fixture(scope="module")
def client():
    with served(gears="4,16") as client:
        yield client


def logged(caplog, path: str) -> dict[str, str]:
    """What the log tells of the last answer of a route."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        lines = [LINE.fullmatch(r.getMessage()) for r in caplog.records if r.name == "gearbx_mlx.server"]
        found = [line for line in lines if line is not None and line["asked"].split()[1] == path]
        if found:
            told = dict(pair.split("=") for pair in found[-1]["told"].split())
            return told | {"status": found[-1]["status"]}
        time.sleep(0.01)
    raise AssertionError(f"no line for {path}: {caplog.records}")


class TestAccessLog:
    @pytest.fixture(autouse=True)
    def informed(self, caplog):
        caplog.set_level(logging.INFO)

    @pytest.mark.parametrize("stream", [False, True])
    def test_tokens_seconds_and_mode_of_an_answer(self, client, caplog, stream):
        asked = {"prompt": ["Tom has", "Ann"], "gearbx": {"gear": "low"}, "max_tokens": 5}
        if stream:
            events(client, "/v1/completions", **asked)
        else:
            usage = complete(client, **asked)["usage"]
        told = logged(caplog, "/v1/completions")
        assert (told["status"], told["mode"], told["tokens"]) == ("200", "static", "10")
        assert 0 < float(told["first"]) <= float(told["seconds"])
        if not stream:
            assert int(told["prompt"]) == usage["prompt_tokens"]
            assert int(told["cached"]) == usage["prompt_tokens_details"]["cached_tokens"]

    def test_unknown_fields_are_named_together(self, client, caplog):
        answer = chat(client, temprature=1, user="x")
        assert logged(caplog, "/v1/chat/completions")["ignored"] == "temprature,user"
        assert answer["gearbx"]["ignored"] == ["temprature", "user"]

    @pytest.mark.parametrize("name", ["a b", "a\nb", "a=b", "\x1b[31m", "é", '"', "x" * 10**5])
    def test_client_name_forges_no_field(self, name):
        line = quoted(name[:MAX_NAME_LENGTH])
        assert len(line) <= MAX_NAME_LENGTH
        assert line.isascii()
        assert line.isprintable()
        assert line == name[: len(line)] or json.loads(line) == name

    def test_client_leaving_early_is_logged(self, client, caplog):
        with client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 4000, "stream": True}) as one:
            next(one.iter_lines())
        assert logged(caplog, "/v1/completions")["left"] == "early"

    def test_what_is_refused(self, client, caplog):
        client.get("/v1/models", headers={"Host": "elsewhere.example"})
        assert logged(caplog, "/v1/models")["status"] == "403"


class TestChoiceBesideGearbx:
    """`extra_body` of OpenAI's client adds fields to the body itself."""

    @pytest.mark.parametrize("beside", [{"mode": "kickdown"}, {"gear": "low"}, {"gear": 16}], ids=str)
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
    def test_it_is_as_within(self, client, path, beside):
        said = [{"role": "user", "content": "Hello"}]
        asked = {"prompt": "Hello", "messages": said, "input": "Hello"}
        name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
        most = "max_output_tokens" if name == "input" else "max_tokens"
        found = []
        for choice in (beside, {"gearbx": beside}):
            answer = client.post(path, json={name: asked[name], most: 6, **choice})
            assert answer.status_code == 200, answer.text
            found.append({key: answer.json()["gearbx"][key] for key in ("mode", "gear_tokens")})
        assert found[0] == found[1]
        assert found[0]["mode"] == beside.get("mode", "static")

    def test_choice_repeated_in_both_places_must_agree(self, client):
        assert complete(client, gear="low", gearbx={"gear": "low"})["gearbx"]["mode"] == "static"
        body = {"prompt": "x", "mode": "route", "gearbx": {"mode": "static"}}
        message = error_of(client.post("/v1/completions", json=body))
        assert '"route"' in message
        assert '"static"' in message
        wrong = client.post("/v1/completions", json={"prompt": "x", "mode": "statik"})
        assert "mode 'statik'" in error_of(wrong)


@pytest.mark.parametrize("flags", [{"mode": "static"}, {"mode": "kickdown"}, {"mode": "lossless"}], ids=str)
def test_all_clients_hear_of_server_stop(flags):
    with served(gears="4,16", log_level="ERROR", decode_concurrency=2, **flags) as client:
        with ThreadPoolExecutor(6) as pool:
            ended = pool.map(lambda number: hears_of_the_end(client.server.url, number, number % 2 == 0), range(6))
            while in_the_making(client, waiting=True) < 6:
                time.sleep(0.01)
            client.server.stop()
        ended = list(ended)
    assert [said for _, said in ended] == [True] * 6
    assert {status for status, _ in ended} <= {200, 503}
    assert [status for status, _ in ended].count(503) >= 3
