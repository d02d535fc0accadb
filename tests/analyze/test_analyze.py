"""analyze --server: bounds, gears and files from a server's answers; after a failure, one line and what came so far."""

import gzip
import itertools
import json
import math
import sys
import time

import pytest
from conftest import read_trace
from fake_server import (
    HTML,
    JSON,
    Answer,
    answer,
    chat_answer,
    chat_entry,
    chatting,
    fake_server,
    refused,
    slowly,
    whole,
)
from servers import mlx_lm_server

from gearbx_mlx.routing.bounds import bits
from gearbx_mlx.telemetry.trace import PICTURES

PROMPTS = "Tom has 5 apples and buys 7 more. How many does he have?\nOnce upon a time there was a king.\n"
PAIR = [math.log(0.9), math.log(0.05)]
VOCABULARY = {"vocab_size": 64}


@pytest.fixture
def asked(command, tmp_path):
    """Run analyze on two prompts: the command's result, its records and its summary."""
    file, out = tmp_path / "prompts.txt", tmp_path / "out"
    file.write_text(PROMPTS, encoding="utf-8")

    def run(url: str, *flags: object):
        begun = time.perf_counter()
        result = command("analyze", "--server", url, "--prompts", file, "--out", out, "--max-tokens", 8, *flags)
        result.seconds = time.perf_counter() - begun
        trace, summary = out / "trace.jsonl", out / "summary.json"
        result.records = read_trace(trace) if trace.exists() else None
        result.summary = json.loads(summary.read_text()) if summary.exists() else None
        result.files = sorted(path.name for path in out.iterdir()) if out.exists() else []
        return result

    return run


def errors(result) -> list[str]:
    return [line for line in result.err.splitlines() if line.startswith("error:")]


@pytest.mark.slow
def test_it_writes_trace_summary_and_pictures(asked):
    with fake_server(chatting(lambda body: chat_answer(PAIR, PAIR, PAIR), VOCABULARY)) as fake:
        result = asked(fake.url + "/v1")
    assert result.status == 0
    assert result.files == sorted(["trace.jsonl", "summary.json", *PICTURES])
    assert [(record["prompt"], record["index"]) for record in result.records] == [*itertools.product((0, 1), range(3))]
    low, high = result.records[0]["entropy_low"], result.records[0]["entropy_high"]
    assert low == pytest.approx(2 * bits(0.05) + bits(0.9), abs=5e-3)
    assert high == pytest.approx(bits(0.05) + bits(0.9) + 0.05 * math.log2(62 / 0.05), abs=5e-3)
    assert result.summary["tokens_per_second"] > len(result.records) / result.seconds
    assert result.summary["mean_entropy_low_bits"] == pytest.approx(low)
    assert result.summary["mean_entropy_high_bits"] == pytest.approx(high)
    assert (result.summary["vocab_size"], result.summary["vocab_size_source"]) == (64, "the server")
    assert f"{low:.2f} to {high:.2f} bits" in result.err


@pytest.mark.slow
def test_bounds_with_different_gears_are_undecided(asked, tmp_path):
    """A shift acts two tokens later, as in mode route."""
    with fake_server(chatting(lambda body: chat_answer(*[PAIR] * 6), VOCABULARY)) as fake:
        result = asked(fake.url + "/v1", "--thresholds", "0.7", "--gears", "4,16", "--gear", "low")
        wide = asked(fake.url + "/v1", "--thresholds", "5", "--gears", "4,16", "--gear", "low")
        gate = {"thresholds": [0.7], "min_gear_duration": 1}
        (tmp_path / "gate.json").write_text(json.dumps({"schema": "gearbx-mlx thresholds", "version": 1, **gate}))
        flags = "--thresholds", tmp_path / "gate.json", "--gears", "4,16", "--gear", "low"
        soon = asked(fake.url + "/v1", *flags)
    assert [record["gear"] for record in soon.records[:6]] == ["low", "low"] + 4 * ["undecided"]
    assert [record["gear_low"] for record in soon.records[:6]] == 6 * ["low"]
    assert [record["gear_high"] for record in soon.records[:6]] == ["low", "low"] + 4 * ["high"]
    assert [record["shifted"] for record in soon.records[:6]] == [False, False, True, False, False, False]
    assert soon.summary["undecided_share"] == pytest.approx(4 / 6)
    assert (soon.summary["shifts_low"], soon.summary["shifts_high"]) == (0, 2)
    assert soon.summary["gear_tokens"] == {"low": 4, "high": 0, "undecided": 8}
    assert "undecided 67%" in soon.err
    assert result.summary["undecided_share"] == pytest.approx(1 / 6)
    assert wide.summary["undecided_share"] == 0


LATE = "no token for 1 s; set a longer --server-timeout"


@pytest.mark.slow
@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("reply", "words", "came"),
    [
        (
            lambda: chat_answer(PAIR, [-0.1, -0.1]),
            "prompt 2, token 2: probabilities: must sum to at most 1, got 1.81",
            2,
        ),
        (lambda: chat_answer(PAIR, PAIR, [0.7, -1.0]), "token 3: log-probabilities: must be 0 or less, got 0.7", 3),
        (lambda: chat_answer(PAIR, [math.nan, -1.0]), "token 2: log-probabilities: must be 0 or less, got nan", 2),
        (lambda: chat_answer(PAIR, [-7.1] * 20), "token 2: probabilities: 44 unlisted tokens of at most ", 2),
        (lambda: chat_answer(PAIR, [-5.0] * 70), "token 2: log-probabilities: must be at most 64, got 70", 2),
        (lambda: answer(whole([chat_entry(PAIR), {"token": "b"}])), "token 2: log-probabilities: must not be empty", 2),
        (lambda: answer(whole([], "bare")), "no log-probabilities for m", 1),
        (lambda: Answer([b'{"choices": [{']), "not JSON", 1),
        (lambda: answer({"choices": [{"logprobs": {"content": 3}}]}), "content is 3, not a list", 1),
        (lambda: refused("overloaded", 503), "answers 503 (overloaded); see the server's log", 1),
        *((lambda sent=sent: Answer(slowly(itertools.repeat(sent), 0.02)), LATE, 1) for sent in (b"", b"x")),
    ],
)
def test_invalid_server_stream_keeps_received_tokens(asked, reply, words, came):
    replies = itertools.chain([chat_answer(PAIR)], iter(reply, None))
    with fake_server(chatting(lambda body: next(replies), VOCABULARY)) as fake:
        result = asked(fake.url + "/v1", "--server-timeout", 1)
    (line,) = errors(result)
    assert result.status == 2
    assert words in line
    assert fake.url in line
    assert len(result.records) == came
    assert (result.summary["complete"], result.summary["error"]) == (False, line.removeprefix("error: "))
    assert result.files == sorted(["trace.jsonl", "summary.json", *PICTURES])


def test_unreachable_server_is_refused_without_picture(asked):
    with fake_server(chatting(lambda body: Answer([b"<html>gone</html>"], 502, HTML))) as fake:
        cannot = asked(fake.url + "/v1")
    down = asked(fake.url + "/v1", "--server-model", "m")
    for result, words in ((cannot, "answers 502 (no reason given)"), (down, "no connection (")):
        assert result.status == 2
        assert f"{fake.url}/v1: {words}" in errors(result)[0]
        assert (result.files, result.records) == (["summary.json", "trace.jsonl"], [])
    assert "start the server, or set --server" in errors(down)[0]


def test_a_compressed_answer_is_not_unpacked(asked):
    packed = gzip.compress(chat_answer(PAIR).parts[0])
    with fake_server(
        chatting(lambda body: Answer([packed], kind=f"{JSON}\r\nContent-Encoding: gzip"), VOCABULARY)
    ) as fake:
        result = asked(fake.url + "/v1")
    assert result.status == 2


def test_reading_stops_at_requested_tokens(asked):
    with fake_server(chatting(lambda body: chat_answer(*[PAIR] * 50), VOCABULARY)) as fake:
        result = asked(fake.url + "/v1")
    assert (result.status, len(result.records)) == (0, 16)


@pytest.mark.slow
def test_bounds_bracket_entropies_of_same_output(asked, command, tmp_path):
    """The demo model, which lists 11 log-probabilities in bfloat16."""
    flags = "--ignore-chat-template", "--max-tokens", 40, "--gear", "low"
    with mlx_lm_server() as url:
        remote = asked(url + "/v1", *flags, "--vocab-size", 4096)
    assert remote.status == 0, remote.err
    prompts, out = tmp_path / "prompts.txt", tmp_path / "local"
    assert command("analyze", "--prompts", prompts, "--out", out, *flags, "--gears", "4,8,16").status == 0
    local = read_trace(out / "trace.jsonl")
    same = list(itertools.takewhile(lambda pair: pair[0]["token"] == pair[1]["token"], zip(remote.records, local)))
    assert len(same) >= 40
    for seen, known in same:
        assert seen["entropy_low"] <= known["entropy"] <= seen["entropy_high"]
        assert seen["mean_entropy_low"] <= known["mean_entropy"] <= seen["mean_entropy_high"]
    assert remote.summary["top_logprobs"] == 11
    assert "Answer: He has 5 apples" in "".join(record["text"] for record in remote.records)


@pytest.mark.usefixtures("compiled")
def test_default_kernels_are_mlx_native_differs_by_rounding(command, tmp_path):
    (tmp_path / "prompts.txt").write_text("Tom has 3 apples.\n")
    entropies = {}
    for name in ("auto", "mlx", "native"):
        flags = ("--prompts", tmp_path / "prompts.txt", "--out", tmp_path / name, "-m", 4, "--kernels", name)
        assert command("analyze", *flags).status == 0
        lines = (tmp_path / name / "trace.jsonl").read_text().splitlines()
        entropies[name] = [json.loads(line)["entropy"] for line in lines]
    assert entropies["auto"] == entropies["mlx"] != entropies["native"]
    assert entropies["native"] == pytest.approx(entropies["mlx"], abs=0.1)


def test_summary_names_missing_picture_packages(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "prompts.txt").write_text("Tom has 3 apples.\n")
    out = tmp_path / "report"
    done = command("analyze", "--prompts", tmp_path / "prompts.txt", "--out", out, "-m", 4)
    assert done.status == 0, done.err
    assert "no pictures are drawn: matplotlib: is not installed; use pip install matplotlib\n" in done.err
    assert done.out.split() == [str(out / "trace.jsonl"), str(out / "summary.json")]
    assert {path.name for path in out.iterdir()} == {"trace.jsonl", "summary.json"}
    assert json.loads((out / "summary.json").read_text())["tokens"] == 4
