"""The server over HTTP: its answers in every mode, and what requests may choose."""

import contextlib
import threading

import httpx
import pytest
from http_server import WORD_PROBLEM, at_once, chat, complete, events, is_idle, served, text_of

from gearbx_mlx import Static, generate, load

PROMPTS = ("Once upon a time", WORD_PROBLEM, "A baker makes 36 rolls in the morning.", "Why does a train", "One, two,")
MODES = ({"gear": "high"}, {"gear": "low"}, {"mode": "lossless"}, {"mode": "route"}, {"mode": "kickdown"})


@pytest.fixture(scope="module")
def client():
    with served(gears="4,8,16", log_level="ERROR") as client:
        yield client


def test_output_equals_generate_output(client):
    model, tokenizer = load()
    expected = generate(model, tokenizer, WORD_PROBLEM, max_tokens=24, mode=Static("high"), gearbox=None)
    assert text_of(client, gearbx={"gear": "high"}) == expected


@pytest.mark.some(3)
@pytest.mark.parametrize("gearbx", MODES, ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_equals_answer_with_gears_and_entropies(client, path, gearbx):
    if path == "/v1/completions":
        body, whole = {"prompt": WORD_PROBLEM}, text_of(client, gearbx=gearbx)
    else:
        body = {"messages": [{"role": "user", "content": WORD_PROBLEM}]}
        whole = chat(client, gearbx=gearbx)["choices"][0]["message"]["content"]
    chunks = events(client, path, **body, gearbx=gearbx)
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice.get("text", choice.get("delta", {}).get("content") or "") for choice in choices]
    assert "".join(texts) == whole
    if path == "/v1/chat/completions":
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    tokens = [token for chunk in chunks for token in chunk["gearbx"]["tokens"]]
    assert len(tokens) == 24
    assert all(token["gear"] in ("low", "mid", "high") and token["entropy"] >= 0 for token in tokens)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    counted = chunks[-1]["gearbx"]["gear_tokens"]
    chosen = [token["gear"] for token in tokens if token["source"] != "lookup"]
    assert {gear: chosen.count(gear) for gear in counted} == counted


@pytest.mark.parametrize(
    ("changes", "status", "kind"),
    [({"model": "claude"}, 404, "not_found_error"), ({"max_tokens": 0}, 400, "invalid_request_error")],
)
def test_errors_of_messages_have_anthropics_types(client, changes, status, kind):
    asked = {"model": "default_model", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
    answer = client.post("/v1/messages", json=asked | changes)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


def test_lossless_equals_top_gear_and_counts_drafts(client):
    top = text_of(client, gearbx={"gear": "high"})
    answer = complete(client, gearbx={"mode": "lossless"})
    assert answer["choices"][0]["text"] == top
    assert answer["gearbx"]["drafted"] >= answer["gearbx"]["accepted"] > 0


def test_drafting_gear_may_be_chosen(client):
    seen = complete(client, gearbx={"mode": "lossless", "draft": 8})["gearbx"]
    assert seen["passes"]["low"] == 0
    assert seen["passes"]["mid"] == seen["drafted"] > 0


def test_thresholds_may_be_chosen(client):
    always, never = [0.0, 0.001], [60.0, 61.0]
    seen = [complete(client, gearbx={"mode": "kickdown", "thresholds": each})["gearbx"] for each in (always, never)]
    assert [report["gear_tokens"]["low"] for report in seen] == [0, 24]


@pytest.mark.some(2)
@pytest.mark.parametrize("gearbx", MODES, ids=str)
def test_concurrent_answers_equal_single_answers(client, gearbx):
    seed = 3 if gearbx == {"mode": "route"} else None  # without one, all requests of a batch share the gear of its step
    alone = [text_of(client, prompt, gearbx=gearbx, seed=seed) for prompt in PROMPTS]
    assert at_once(lambda prompt: text_of(client, prompt, gearbx=gearbx, seed=seed), PROMPTS) == alone


@pytest.mark.processes
@pytest.mark.parametrize("policy", ["highest", "quantile:0"])
def test_route_answers_share_passes_of_policy_gear(policy):
    """One of two requests wants the top gear as soon as its gate may shift; the other never does."""
    wishes = [[0.0, 0.001], [60.0, 61.0]]
    with served(gears="4,8,16", log_level="ERROR", batch_policy=policy, mode="route", gear="low") as client:

        def ask(thresholds):
            options = {"mode": "route", "thresholds": thresholds}
            return complete(client, max_tokens=400, gearbx=options)["gearbx"]

        found = at_once(ask, wishes)
        first, second = (each["gear_tokens"] for each in found)
        assert (second["high"] > 0) == (policy == "highest")
        assert (first["low"] == 5) == (policy == "highest")  # before a gate may shift


@pytest.mark.parametrize("gearbx", [{"mode": "route"}, {"mode": "lossless"}, {"gear": "high"}], ids=str)
def test_seed_repeats_answer_despite_concurrent_sampling(client, gearbx):
    body = {"temperature": 1.0, "seed": 7, "gearbx": gearbx}
    first = text_of(client, **body)
    others = threading.Thread(target=text_of, args=(client, "Once"), kwargs={"temperature": 1.0, "max_tokens": 60})
    others.start()
    assert text_of(client, **body) == first
    others.join()
    assert text_of(client, **{**body, "seed": 8}) != first


@pytest.mark.parametrize("gearbx", MODES, ids=str)
def test_a_stop_word_ends_the_answer_before_it(client, gearbx):
    whole = text_of(client, gearbx=gearbx, max_tokens=40)
    word = whole[10:14]
    answer = complete(client, gearbx=gearbx, stop=["never there", word], max_tokens=40)
    assert answer["choices"][0]["text"] == whole[: whole.index(word)]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_models_and_health(client):
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["demo"]
    modes = ["route", "kickdown", "lossless", "static"]
    about = listed[0]["gearbx"]
    assert (about["modes"], about["gears"], about["mode"]) == (modes, ["low", "mid", "high"], "lossless")
    assert client.get("/v1/models/demo").json()["id"] == "demo"
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.some(3)
@pytest.mark.parametrize(("stream", "texts"), [(True, 1), (False, 1), (True, 4)])
@pytest.mark.parametrize("gearbx", MODES, ids=str)
def test_work_stops_when_client_disconnects(client, gearbx, stream, texts):
    body = {"prompt": WORD_PROBLEM, "n": texts, "max_tokens": 400, "gearbx": gearbx, "stream": stream}
    body["logit_bias"] = {str(token): -100 for token in (0, 1, 2)}  # so the text does not end by itself
    patience = 60 if stream else 0.5
    with (
        contextlib.suppress(httpx.ReadTimeout),
        client.stream("POST", "/v1/completions", json=body, timeout=patience) as answer,
    ):
        next(answer.iter_lines())
    assert is_idle(client)
