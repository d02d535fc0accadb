"""EAD's Table 1: the sweep, its controls, and its command."""

import json
import math

import numpy as np
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx import stream_generate
from gearbx_mlx.decoding.pair import Pair
from gearbx_mlx.evaluation.pair import Coin, by_coin, mixed, record_pair, share_by_position, sweep, turns
from gearbx_mlx.routing.pair import LARGE, parameter_ratio

TOKENS = 4096
TALE = "Once upon a time there was a king who"


@pytest.fixture(scope="module")
def small():
    return tiny_model(seed=1, vocab_size=TOKENS)


@pytest.fixture(scope="module")
def recording(small, demo):
    rng = np.random.default_rng(0)
    windows = [(rng.integers(1, TOKENS, size).tolist(), 0) for size in (60, 41, 20)]
    return record_pair(small, demo.model, windows, TOKENS)


@pytest.fixture(scope="module")
def path(small, tmp_path_factory):
    path = tmp_path_factory.mktemp("pair") / "small"
    save_model(small, path)
    return path


class TestReplay:
    @pytest.mark.slow
    def test_it_takes_the_turns_that_generation_took(self, small, demo):
        prompt = demo.tokenizer.encode(TALE)
        mode = Pair(small, threshold=5.0, window=3, min_gear_duration=4)
        responses = list(stream_generate(demo.model, demo.tokenizer, TALE, 60, mode=mode))
        text = [*prompt, *(r.token for r in responses)]
        recording = record_pair(small, demo.model, [(text, len(prompt))], TOKENS)
        gears = turns(recording, 5.0, 3, 4)
        assert [["small", "large"][g] for g in gears] == [r.gear for r in responses]
        run = mixed(recording, gears)
        assert np.allclose(run.entropy, [r.entropy for r in responses], atol=0.02)  # bfloat16, in one pass and in many
        assert run.passes.sum(axis=0).tolist() == np.sum([r.passes for r in responses], axis=0).tolist()

    def test_every_text_begins_again(self, recording):
        gears = turns(recording, 5.0, 3, 4)
        for window in range(3):
            assert gears[recording.small.window == window][:4].tolist() == [0, 0, 0, 0]

    def test_a_prompt_is_read_and_not_counted(self, small, demo):
        text = list(range(10, 40))
        whole = record_pair(small, demo.model, [(text, 0)], TOKENS)
        part = record_pair(small, demo.model, [(text, 12)], TOKENS)
        assert len(whole.small.nll) == 29
        assert np.array_equal(whole.small.nll[11:], part.small.nll)
        assert np.array_equal(whole.large.entropy[11:], part.large.entropy)


class TestSweep:
    def test_its_ends_are_the_models_alone(self, recording):
        low, high = sweep(recording, (math.inf, 0.0), 5, 10, (1, 4), (100, 700))
        assert (low["share_top"], high["share_top"]) == (0.0, 1.0)
        assert low["perplexity"] == pytest.approx(np.exp(recording.small.nll.mean()))
        assert high["perplexity"] == pytest.approx(np.exp(recording.large.nll.mean()))
        assert (low["weight_bytes_per_token"], high["weight_bytes_per_token"]) == (100, 700)
        assert (low["parameter_ratio"], high["parameter_ratio"]) == (0.25, 1.0)
        assert high["kl_mean"] == pytest.approx(0.0, abs=1e-12)
        assert high["top1_agreement"] == 1.0
        assert (low["switches"], high["switches"]) == (0, 0)

    def test_between_them(self, recording):
        (row,) = sweep(recording, (7.0,), 3, 4, (1, 4), (100, 700))
        gears = turns(recording, 7.0, 3, 4)
        share = row["share_top"]
        assert 0 < share < 1
        assert share == np.mean(gears == LARGE)
        nll = np.where(gears == LARGE, recording.large.nll, recording.small.nll)
        assert row["perplexity"] == pytest.approx(np.exp(nll.mean()))
        assert row["weight_bytes_per_token"] == pytest.approx(100 + 600 * share)
        assert row["parameter_ratio"] == pytest.approx(0.25 + 0.75 * share)
        control = row["against_random_same_share"]
        assert control["kl_mean"] == pytest.approx((1 - share) * recording.small.kl.mean())
        assert control["top1_agreement"] == pytest.approx(share + (1 - share) * recording.small.agree.mean())

    def test_the_control_is_the_mean_of_many_random_choices(self, recording):
        rng = np.random.default_rng(1)
        n = len(recording.small.kl)
        drawn = [mixed(recording, (rng.random(n) < 0.3).astype(int)).kl.mean() for _ in range(400)]
        expected = by_coin(recording, 0.3, "kl").mean()
        assert np.mean(drawn) == pytest.approx(expected, abs=4 * np.std(drawn) / 20)

    def test_shares_by_position_by_hand(self):
        gears, window = np.array([0, 1, 1, 1, 1, 0]), np.array([0, 0, 0, 1, 1, 2])
        assert share_by_position(gears, window).tolist() == [1 / 3, 1.0, 1.0, 1 / 3, 1.0, 1 / 3]

    def test_the_papers_own_figure(self):
        # Table 1, Llama 3.2 3B and 1B: 45 % of the large model, 63.5 % of its parameters.
        assert parameter_ratio(0.45, (1_000_000, 3_000_000)) == pytest.approx(0.633, abs=0.003)


class TestCommand:
    @pytest.fixture
    def data(self, held_out, tmp_path):
        file = tmp_path / "gsm8k.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in held_out[:3]))
        return file

    @pytest.mark.slow
    def test_along_a_text(self, command, path, data, tmp_path):
        flags = ["--small-model", path, "--data", data, "--out", tmp_path / "out"]
        result = command("evaluate", *flags, "--thresholds", "inf,5,0", "--answers-only")
        assert result.status == 0, result.err
        report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
        rows = report["policies"]
        assert [row["threshold"] for row in rows] == ["inf", 5.0, 0.0]
        assert [row["share_top"] for row in rows][::2] == [0.0, 1.0]
        assert 0 < rows[1]["share_top"] < 1
        assert report["gate"] == {"window": 5, "min_duration": 10}
        page = (tmp_path / "out" / "evaluation.md").read_text()
        assert "| inf | 0.0 % |" in page
        assert "| entropy threshold, bits | large model usage |" in page
        assert (tmp_path / "out" / "evaluation.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (tmp_path / "out" / "evaluation.svg").read_bytes()
        assert result.out.splitlines()[-1] == str(tmp_path / "out" / "evaluation.svg")
        whole = command("evaluate", *flags[:-1], tmp_path / "whole", "--thresholds", "0")
        assert whole.status == 0, whole.err
        assert json.loads((tmp_path / "whole" / "evaluation.json").read_text())["tokens"] > report["tokens"]

    @pytest.mark.slow
    def test_the_papers_sweep_is_the_default(self, command, path, data, tmp_path):
        result = command("evaluate", "--small-model", path, "--data", data, "--out", tmp_path / "out")
        assert result.status == 0, result.err
        rows = json.loads((tmp_path / "out" / "evaluation.json").read_text())["policies"]
        expected = ["inf", *(bits * 12 / 17 for bits in (1, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0))]
        assert [row["threshold"] for row in rows] == [
            bits if isinstance(bits, str) else pytest.approx(bits) for bits in expected
        ]

    @pytest.mark.slow
    def test_writing(self, command, path, data, tmp_path):
        flags = ["--task", "gsm8k", "--small-model", path, "--data", data, "--out", tmp_path / "out", "-m", 30]
        result = command("evaluate", *flags, "--thresholds", "5")
        assert result.status == 0, result.err
        rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "evaluation.json").read_text())["policies"]}
        assert list(rows) == ["pair-0", "pair-5", "random-5"]
        assert rows["pair-0"]["share_top"] == rows["pair-0"]["parameter_ratio"] == 1.0
        assert 0 < rows["pair-5"]["share_top"] < 1
        assert rows["pair-5"]["caught_up_per_token"] > 0
        lines = (tmp_path / "out" / "recordings" / "pair-5.jsonl").read_text().splitlines()
        kept = [json.loads(line)["found"] for line in lines[1:]]
        assert sum(a["large"] for a in kept) / sum(a["tokens"] for a in kept) == rows["pair-5"]["share_top"]
        # Run again with one more threshold: only that one is computed.
        before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "recordings").iterdir()}
        assert command("evaluate", *flags, "--thresholds", "5,inf").status == 0
        assert all(file.stat().st_mtime_ns == at for file, at in before.items())

    @pytest.mark.slow
    def test_changed_inputs_are_refused(self, command, path, data, tmp_path):
        flags = ["--small-model", path, "--data", data, "--out", tmp_path / "out", "--thresholds", "0"]
        assert command("evaluate", *flags).status == 0
        result = command("evaluate", *flags, "--window", 7)
        assert result.status == 2
        assert "window 5, and now it is 7" in result.err

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--policy", "route"], ["--policy", "one model"]),
            (["--answers-only", "--context", "2"], ["gsm8k.jsonl", "no question leaves room", "--context"]),
            (["--thresholds", "1,x"], ["--thresholds 1,x", "give bits"]),
            (["--thresholds", "-1"], ["the threshold between two models is -1"]),
        ],
    )
    def test_what_does_not_fit_is_one_line(self, command, path, data, tmp_path, flags, words):
        result = command("evaluate", "--small-model", path, "--data", data, "--out", tmp_path / "out", *flags)
        assert result.status == 2
        assert len(result.err.splitlines()) == 1
        assert all(word in result.err for word in words)
        assert not (tmp_path / "out").exists()


class TestCoin:
    def test_the_same_seed_is_the_same_coin(self):
        one, other = (Coin(0.5, 3, seed=7) for _ in range(2))
        assert [one.update(None) for _ in range(50)] == [other.update(None) for _ in range(50)]
