"""EAD's Table 1: the sweep, its controls, and its study."""

import json
import math
import re

import numpy as np
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx import stream_generate
from gearbx_mlx.decoding.pair import Pair
from gearbx_mlx.routing.pair import LARGE
from research.evaluation.pair import (
    both_ways,
    by_coin,
    draw_pair,
    mixed,
    points,
    ratio_of_small,
    record_pair,
    sweep,
    table_1,
    turns,
)
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
    def test_writing_goes_on_where_it_ended(self, path, data, tmp_path):
        out = tmp_path / "out"
        how = {"task": "gsm8k", "thresholds": "inf,0", "num_problems": 2, "max_tokens": 8, "kernels": "mlx"}
        first = pair_sweep(str(path), data, out, **how)
        rows = {row["name"]: row for row in first.data["policies"]}
        assert [*rows] == ["pair-0", "pair-inf", "draft-model"]
        assert [row["tokens"] for row in rows.values()] == [16, 16, 16]
        assert rows["draft-model"]["same_answer_as_reference"] == 1
        assert rows["draft-model"]["parameter_ratio"] > rows["pair-0"]["parameter_ratio"] == 1
        attempts = (out / "attempts.jsonl").read_text()
        (out / "attempts.jsonl").write_text("".join(attempts.splitlines(keepends=True)[:-1]))
        again = pair_sweep(str(path), data, out, **how)
        assert [row["found"] for row in again.data["policies"][0]["attempts"]] == [
            row["found"] for row in rows["pair-0"]["attempts"]
        ]
        assert (out / "attempts.jsonl").read_text().splitlines()[:-1] == attempts.splitlines()[:-1]


ABOUT = {"small_model": "models/1B", "model": "3B", "data": "math.jsonl"}
# EAD, Table 1, Llama 3.2 3B and 1B: threshold, large model usage, score, parameter ratio.
PAPER = ((0.0, 1.0, 0.464, 1.0), (0.0625, 0.45, 0.452, 0.635), (1.0, 0.16, 0.36, 0.44), (math.inf, 0.0, 0.304, 1 / 3))


def written(threshold: float, share: float, score: float, ratio: float, policy: str = "pair") -> dict:
    return {
        **{"name": f"{policy}-{threshold:g}", "policy": policy, "threshold": threshold, "share_top": share},
        **{"parameter_ratio": ratio, "accuracy": score, "standard_error": 0.01, "same_answer_as_reference": score},
    }


@pytest.fixture
def writing() -> dict:
    coin = written(0.0625, 0.46, 0.4, 0.64, "random")
    return {**ABOUT, "policies": [*(written(*row) for row in PAPER), coin]}


@pytest.fixture
def along_a_text() -> dict:
    def row(threshold, share, agreement, perplexity):
        control = {"perplexity": perplexity + 0.5, "top1_agreement": agreement - 0.1}
        place = {"name": f"pair-{threshold:g}", "policy": "pair", "threshold": threshold, "share_top": share}
        scores = {"top1_agreement": agreement, "perplexity": perplexity, "against_random_same_share": control}
        return {**place, "parameter_ratio": 0.2 + 0.8 * share, **scores}

    return {**ABOUT, "policies": [row(math.inf, 0.0, 0.7, 6.0), row(2.0, 0.5, 0.9, 5.0), row(0.0, 1.0, 1.0, 4.0)]}


class TestTable1:
    def test_the_papers_rows_come_out_as_printed(self, writing):
        head, _, *rows = table_1(writing).splitlines()
        assert head.split(" | ")[1:3] == ["large model usage", "right answers"]
        assert rows == [
            "| inf | 0.0 % | 30.4 % | 65.5 % | 33.3 % |  |",
            "| 1 | 16.0 % | 36.0 % | 77.6 % | 44.0 % |  |",
            "| 0.0625 | 45.0 % | 45.2 % | 97.4 % | 63.5 % | 40.0 % |",  # 97.4 % of the maximum: section 4
            "| 0 | 100.0 % | 46.4 % | 100.0 % | 100.0 % |  |",
        ]


class TestFigure1:
    @pytest.mark.parametrize("kind", ["writing", "along_a_text"])
    def test_labels_are_the_thresholds_and_axes_the_papers(self, kind, request, tmp_path, monkeypatch):
        pyplot = pytest.importorskip("matplotlib.pyplot")
        monkeypatch.setitem(pyplot.rcParams, "svg.fonttype", "none")  # words stay words
        draw_pair(request.getfixturevalue(kind), tmp_path / "figure.svg")
        words = re.findall(r">([^<>]+)</text>", (tmp_path / "figure.svg").read_text())
        assert {"inf", "0", "entropy", "a coin", "tokens by the large model, %"} <= set(words)
        assert ("perplexity" in words) == (kind == "along_a_text")
        assert ("right answers, %" in words) == (kind == "writing")

    def test_parameters_by_the_share(self, writing):
        found = points(writing, "accuracy")
        assert ratio_of_small(found) == pytest.approx(1 / 3)
        assert ratio_of_small(found[2:]) == pytest.approx((0.635 - 0.45) / 0.55)
        there, back = both_ways(1 / 3)
        assert there(45.0) == pytest.approx(63.3, abs=0.1)
        assert back(there(45.0)) == pytest.approx(45.0)
