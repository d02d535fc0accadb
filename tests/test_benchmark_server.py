"""`benchmark server` at sizes that say nothing of speed: what it writes, and that it sees what is wrong."""

import json
import time

import httpx
import pytest
from http_server import WORD_PROBLEM, served

from gearbx_mlx.benchmark.server import latency_rows, memory_rows, parts_of, requests_of, row, unlike_row
from gearbx_mlx.benchmark.server_clients import (
    Client,
    ClientAnswer,
    ClientRequest,
    CrowdOutcome,
    crowd,
    leave,
    listens,
    prompts,
    random_requests,
)

pytestmark = pytest.mark.processes

WORDS = WORD_PROBLEM.split() * 20


@pytest.fixture(scope="module")
def url():
    with served(gears="4,16", mode="static", log_level="ERROR") as client:
        yield str(client.base_url).rstrip("/")


def test_one_client_beside_mlx_lms_server(command, tmp_path):
    sizes = "--trials", 1, "--tokens", 8, "--kernels", "mlx"
    result = command("benchmark", "server", *sizes, "--json", tmp_path / "s.json")
    assert result.status == 0, result.err
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"whole", "stream", "stream, cached prompt"}
    assert {row["kernels"] for row in rows} == {"mlx"}
    for found in rows:
        assert found["value"] > 0
        assert found["count"] == 1
        assert found["machine"]
        assert found["reached"] == ((found["least"] or 0) <= found["value"] <= (found["most"] or 1e9))
    equal = [row["value"] for row in rows if row["measure"].startswith("texts equal")]
    assert equal == [1, 1, 1]  # both compute with MLX's kernels


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kernels", "native,fast"), ("--kernels is fast",)),
        (("--cancel", 3), ("--cancel is 3",)),
        (("--tokens", 1), ("--tokens is 1",)),
        (("--model", "nowhere", "--kernels", "mlx"), ("gearbx_mlx.server does not serve", "nowhere")),
    ],
)
def test_what_cannot_be_measured_is_one_line(command, flags, words):
    result = command("benchmark", "server", *flags)
    assert result.status == 2
    assert all(word in result.err for word in words)


def test_a_stream_is_the_whole_answer_and_times_its_pieces(url):
    with Client(url) as client:
        whole, stream = (client.ask(ClientRequest(WORD_PROBLEM, 12, stream)) for stream in (False, True))
    assert (whole.text, whole.tokens) == (stream.text, stream.tokens)
    assert whole.tokens == 12
    assert 0 < stream.first < stream.seconds
    assert stream.tokens_per_second == 11 / (stream.seconds - stream.first)
    assert whole.tokens_per_second == 12 / whole.seconds


def test_a_crowd_gets_every_answer_and_another_text_is_seen(url):
    requests = requests_of(WORDS, 6)
    with Client(url) as client:
        alone = {asked: client.ask(asked) for asked in requests}
    outcome = crowd(url, 3, requests)
    assert {asked for asked, _ in outcome.answers} == set(requests)
    assert unlike_row("", outcome, alone)["value"] == 0
    swapped = dict(zip(requests, [alone[asked] for asked in requests[1:] + requests[:1]]))
    assert not unlike_row("", outcome, swapped)["reached"]


def test_an_answer_that_is_an_error_is_counted(url):
    outcome = crowd(url, 2, [ClientRequest(WORD_PROBLEM, 0), ClientRequest(WORD_PROBLEM, 4)])
    assert (len(outcome.answers), len(outcome.errors)) == (1, 1)
    assert "400" in outcome.errors[0]


def test_a_crowd_ends_when_its_time_is_over(url):
    begun = time.monotonic()
    assert crowd(url, 2, random_requests([ClientRequest(WORD_PROBLEM, 2)], 0.2, 0)).answers
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("abruptly", [False, True])
def test_a_client_that_leaves(url, abruptly):
    leave(url, ClientRequest(WORD_PROBLEM, 400, stream=True), 0.05, abruptly)
    with Client(url) as client:
        assert client.ask(ClientRequest(WORD_PROBLEM, 4)).tokens == 4


@pytest.mark.parametrize(("count", "rounds"), [(20, 2), (21, 2), (99, 9), (1000, 10), (1009, 10)])
def test_each_round_has_requests_that_go_away_and_some_that_stay(count, rounds):
    parts = parts_of(range(count))
    assert [one for part in parts for one in part] == list(range(count))
    assert len(parts) == rounds
    assert min(map(len, parts)) >= 10


def test_latencies_are_ratios_round_by_round():
    asked = ClientRequest("", 1)
    rounds = [
        (CrowdOutcome([(asked, ClientAnswer("", 1, calm))]), CrowdOutcome([(asked, ClientAnswer("", 1, disturbed))]))
        for calm, disturbed in ((1.0, 2.0), (10.0, 10.0), (4.0, 2.0))
    ]
    median, longest = latency_rows("", rounds)
    assert (median["value"], median["spread"], median["reached"]) == (1, [0.5, 2], True)
    assert longest["value"] == 1


def test_a_server_of_loopback_is_found_where_the_environment_names_a_proxy(url, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert listens(url)
    with Client(url) as client:
        assert client.ask(ClientRequest(WORD_PROBLEM, 2)).tokens == 2


def test_a_server_that_is_not_there_is_an_error():
    with Client("http://127.0.0.1:9") as client, pytest.raises(httpx.ConnectError):
        client.ask(ClientRequest(WORD_PROBLEM, 4))


def test_prompts_are_unlike_from_the_beginning_and_the_same_in_every_run():
    made = prompts(WORDS, [3, 5, 3])
    assert made == prompts(WORDS, [3, 5, 3])
    assert [len(text.split()) for text in made] == [4, 6, 4]
    assert len({text.split()[0] for text in made}) == 3


def test_some_prompts_of_a_soak_begin_as_the_one_before():
    texts = [asked.prompt for asked in requests_of(WORDS, 6)]
    assert texts[3].startswith(" ".join(texts[2].split()[:2]))
    assert not texts[2].startswith(texts[1].split()[0])


def test_growth_is_the_slope_after_the_warm_up():
    flat = [(float(second), 100 + second % 2) for second in range(100)]
    growing = [(float(second), 100 + second) for second in range(100)]
    starting = [(float(second), 10 if second < 15 else 100) for second in range(100)]
    growths = {}
    for name, samples in (("flat", flat), ("growing", growing), ("starting", starting)):
        growths[name] = memory_rows("", samples)[1]
    assert [growths[name]["reached"] for name in growths] == [True, False, True]
    assert growths["growing"]["value"] == pytest.approx(79 / 159.5)


def test_a_row_says_whether_its_aim_was_reached():
    assert row("", "", [1, 3, 2], least=2)["reached"]
    assert not row("", "", [1, 3, 2], least=2.5)["reached"]
    assert not row("", "", [1, 3, 2], most=1)["reached"]
    assert row("", "", [1, 3, 2])["spread"] == [1, 3]
