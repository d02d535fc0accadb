"""EAD's Table 1: the sweep, its controls, and its study."""

import json
import math

import numpy as np
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx import GearbxError, stream_generate
from gearbx_mlx.decoding.pair import Pair
from gearbx_mlx.routing.pair import LARGE, parameter_ratio
from research.evaluation.pair import Coin, by_coin, mixed, record_pair, share_by_position, sweep, turns
from research.pair import pair_sweep

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


class TestStudy:
    @pytest.fixture
    def data(self, held_out, tmp_path):
        file = tmp_path / "gsm8k.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in held_out[:3]))
        return file

    @pytest.mark.slow
    def test_along_a_text(self, path, data, tmp_path):
        found = pair_sweep(str(path), data, tmp_path / "out", thresholds="inf,5,0", answers_only=True)
        report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
        rows = report["policies"]
        assert [row["threshold"] for row in rows] == ["inf", 5.0, 0.0]
        assert [row["share_top"] for row in rows][::2] == [0.0, 1.0]
        assert 0 < rows[1]["share_top"] < 1
        assert report["gate"] == {"window": 5, "min_duration": 10}
        assert "| inf | 0.0 % |" in found.tables["pair"]
        assert "| entropy threshold, bits | large model usage |" in found.tables["table_1"]
        assert (tmp_path / "out" / "evaluation.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (tmp_path / "out" / "evaluation.svg").read_bytes()
        assert pair_sweep(str(path), data, tmp_path / "whole", thresholds="0").data["tokens"] > report["tokens"]

    @pytest.mark.slow
    def test_the_papers_sweep_is_the_default(self, path, data, tmp_path):
        rows = pair_sweep(str(path), data, tmp_path / "out").data["policies"]
        expected = [math.inf, *(bits * 12 / 17 for bits in (1, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0))]
        assert [row["threshold"] for row in rows] == pytest.approx(expected)

    @pytest.mark.slow
    def test_writing(self, path, data, tmp_path):
        found = pair_sweep(str(path), data, tmp_path / "out", task="gsm8k", thresholds="5", max_tokens=30)
        rows = {row["name"]: row for row in found.data["policies"]}
        assert list(rows) == ["pair-0", "pair-5", "random-5"]
        assert rows["pair-0"]["share_top"] == rows["pair-0"]["parameter_ratio"] == 1.0
        assert 0 < rows["pair-5"]["share_top"] < 1
        assert rows["pair-5"]["caught_up_per_token"] > 0

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ({"answers_only": True, "context": 2}, "no question leaves room for its answer in 2 tokens"),
            ({"thresholds": "1,x"}, "--thresholds"),
            ({"thresholds": "-1"}, "the threshold between two models is -1"),
        ],
    )
    def test_what_does_not_fit(self, path, data, tmp_path, flags, words):
        with pytest.raises(GearbxError, match=words):
            pair_sweep(str(path), data, tmp_path / "out", **flags)
        assert not (tmp_path / "out").exists()


class TestCoin:
    def test_the_same_seed_is_the_same_coin(self):
        one, other = (Coin(0.5, 3, seed=7) for _ in range(2))
        assert [one.update(None) for _ in range(50)] == [other.update(None) for _ in range(50)]
