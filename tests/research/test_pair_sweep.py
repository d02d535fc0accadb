"""EAD's Table 1: the sweep, its controls, and its study."""

import json

import numpy as np
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx import stream_generate
from gearbx_mlx.decoding.pair import Pair
from gearbx_mlx.routing.pair import LARGE
from research.evaluation.pair import mixed, record_pair, sweep, turns
from research.pair import pair_sweep

TOKENS = 4096
TALE = "Once upon a time there was a king who"


@pytest.fixture(scope="module")
def small():
    return tiny_model(seed=1, vocab_size=TOKENS)


class TestReplay:
    @pytest.mark.slow
    def test_replay_repeats_turns_of_generation(self, small, demo):
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

    def test_a_prompt_is_read_and_not_counted(self, small, demo):
        text = list(range(10, 40))
        whole = record_pair(small, demo.model, [(text, 0)], TOKENS)
        part = record_pair(small, demo.model, [(text, 12)], TOKENS)
        assert len(whole.small.nll) == 29
        assert np.array_equal(whole.small.nll[11:], part.small.nll)
        assert np.array_equal(whole.large.entropy[11:], part.large.entropy)


class TestSweep:
    def test_threshold_between_extremes_mixes_models(self, small, demo):
        rng = np.random.default_rng(0)
        windows = [(rng.integers(1, TOKENS, size).tolist(), 0) for size in (60, 41, 20)]
        recording = record_pair(small, demo.model, windows, TOKENS)
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


class TestStudy:
    @pytest.mark.slow
    def test_along_an_output(self, small, held_out, tmp_path):
        path, data = tmp_path / "small", tmp_path / "gsm8k.jsonl"
        save_model(small, path)
        data.write_text("".join(json.dumps(row) + "\n" for row in held_out[:3]))
        found = pair_sweep(str(path), data, tmp_path / "out", thresholds="inf,5,0", answers_only=True)
        report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
        rows = report["policies"]
        assert [row["threshold"] for row in rows] == ["inf", 5.0, 0.0]
        assert [row["share_top"] for row in rows][::2] == [0.0, 1.0]
        assert 0 < rows[1]["share_top"] < 1
        assert report["gate"] == {"window": 5, "min_duration": 10}
        assert "| inf | 0.0 % |" in found.tables["pair_read"]
        assert "| entropy threshold, bits | large model usage |" in found.tables["table_1"]
        assert (tmp_path / "out" / "evaluation.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (tmp_path / "out" / "evaluation.svg").read_bytes()
        assert pair_sweep(str(path), data, tmp_path / "whole", thresholds="0").data["tokens"] > report["tokens"]
