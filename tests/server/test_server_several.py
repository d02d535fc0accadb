"""Several texts in one answer: `n`, and lists of prompts."""

import time

import pytest
from http_server import WORD_PROBLEM, complete, error_of, events, in_the_making, served, text_of

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
def test_seeded_texts_differ_are_repeatable_and_the_first_is_that_of_one(client, gearbx):
    whole = [complete(client, n=4, gearbx=gearbx, **WARM) for _ in range(2)]
    texts = texts_of(whole[0])
    assert len(set(texts)) == 4
    assert texts_of(whole[1]) == texts
    assert texts[0] == text_of(client, gearbx=gearbx, **WARM)
    assert whole[0]["gearbx"]["mode"] == gearbx.get("mode", "static")
    assert sum(whole[0]["gearbx"]["gear_tokens"].values()) == whole[0]["usage"]["completion_tokens"]


def test_a_prompt_of_several_texts_counts_once(client):
    one, three = (complete(client, n=n, **WARM)["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * 24
    assert three["total_tokens"] == three["prompt_tokens"] + three["completion_tokens"]


@pytest.mark.some(2)
@pytest.mark.parametrize("gearbx", MODES, ids=str)
def test_every_prompt_of_a_list_gets_what_it_gets_alone(client, gearbx):
    alone = [complete(client, prompt, gearbx=gearbx) for prompt in PROMPTS]
    together = complete(client, PROMPTS, gearbx=gearbx)
    assert texts_of(together) == [texts_of(one)[0] for one in alone]
    for count in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][count] == sum(one["usage"][count] for one in alone)


def test_texts_of_several_prompts_stand_prompt_by_prompt(client):
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
def test_a_stream_has_the_same_texts(client, path, body):
    whole = client.post(path, json=body | {"max_tokens": 24}).json()
    chunks = events(client, path, **body, stream_options={"include_usage": True})
    assert streamed(chunks) == (texts_of(whole), [1, 1, 1])
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    reports = [chunk["gearbx"] for chunk in chunks if "gear_tokens" in chunk.get("gearbx", {})]
    assert [sum(report["gear_tokens"].values()) for report in reports] == [chunks[-1]["usage"]["completion_tokens"]]


def test_too_many_texts_are_refused(client):
    assert "n is 9" in error_of(client.post("/v1/completions", json={"prompt": "x", "n": 9}))
    said = error_of(client.post("/v1/completions", json={"prompt": ["x"] * 65, "n": 2}))
    assert said == "130 texts are asked for; ask for 128 at most"


def test_all_texts_end_where_the_client_leaves(client):
    body = {"prompt": WORD_PROBLEM, "n": 4, "max_tokens": 400, "stream": True, "gearbx": {"mode": "kickdown"}}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 30
    while in_the_making(client, waiting=True):
        assert time.monotonic() < deadline
        time.sleep(0.02)
