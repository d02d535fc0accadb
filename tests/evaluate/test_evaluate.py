"""The report of evaluate: its rows, its table and picture, and what it refuses."""

import json
from pathlib import Path

import pytest
from conftest import HELD_OUT
from refusals import assert_refused

from gearbx_mlx.evaluate import evaluate as run_evaluation
from gearbx_mlx.evaluate.run import STYLES, enough
from gearbx_mlx.evaluation.predictions import three_digits


def evaluate(command, out: Path, *more: object, data: Path = HELD_OUT):
    return command("evaluate", "--data", data, "--out", out, "--kernels", "auto", *more)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run of every gear and mode on the demo model, from a program."""
    out = tmp_path_factory.mktemp("report")
    found = run_evaluation(HELD_OUT, out=out, tokens=160, gears="3,8,16")
    assert json.loads((out / "evaluation.json").read_text()) == json.loads(json.dumps(found))
    return found | {"out": out}


@pytest.mark.slow
class TestReport:
    def test_every_gear_and_mode_is_in_it(self, report):
        rows = {row["name"]: row for row in report["rows"]}
        assert [*rows] == ["3 bits", "8 bits", "16 bits", "route", "kickdown"]
        assert report["tokens"] == 160
        for row in rows.values():
            assert 0 <= row["kl_median"] <= row["kl_p90"] <= row["kl_p99"] <= row["kl_p999"] <= row["kl_max"]
            assert sum(row["gear_shares"].values()) == pytest.approx(1)

    def test_top_gear_is_exact_in_single_pass(self, report):
        low, mid, top = report["rows"][:3]
        assert (top["kl_mean"], top["kl_max"], top["top1_agreement"], top["perplexity_ratio"]) == (0, 0, 1, 1)
        assert top["effective_bits"] == 16
        assert low["weight_bytes_per_token"] < mid["weight_bytes_per_token"] < top["weight_bytes_per_token"]
        assert low["kl_mean"] > 100 * mid["kl_mean"] > 0

    def test_modes_lie_between_gears_and_kickdown_rereads(self, report):
        low, _, top, route, kickdown = report["rows"]
        for row in (route, kickdown):
            assert 0 < row["gear_shares"]["high"] < 1
            assert row["kl_mean"] < low["kl_mean"]
        shares = kickdown["gear_shares"]
        assert kickdown["weight_bytes_per_token"] > shares["high"] * top["weight_bytes_per_token"]
        assert kickdown["effective_bits"] > 3 * shares["low"] + 8 * shares["mid"] + 16 * shares["high"]

    def test_report_has_a_picture(self, report):
        assert (report["out"] / "evaluation.png").read_bytes().startswith(b"\x89PNG")
        colors, markers = zip(*STYLES.values())
        assert len(set(markers)) == len(set(colors)) == len(STYLES)


@pytest.mark.slow
def test_kld_counts_the_second_half_of_windows(command, tmp_path):
    plain, kld = tmp_path / "plain", tmp_path / "kld"
    how = "--gears", "4,16", "--modes", "none", "--context", 64
    assert evaluate(command, plain, *how, "--tokens", 63).status == 0
    result = evaluate(command, kld, *how, "--tokens", 31, "--kld")
    assert result.status == 0
    assert all(header in result.err for header in ("PPL", "KL", "90", "99.9", "max", "same"))
    whole, half = (json.loads((out / "evaluation.json").read_text()) for out in (plain, kld))
    assert (whole["uncounted"], whole["tokens"], half["uncounted"], half["tokens"]) == (0, 63, 32, 31)
    assert half["rows"][0]["kl_max"] <= whole["rows"][0]["kl_max"]
    assert half["rows"][0]["kl_mean_error"] > 0


def test_sufficient_gear_reads_least_among_agreeing():
    rows = [
        {"kind": "gear", "name": f"{bits} bits", "top1_agreement": share, "weight_bytes_per_token": bits}
        for bits, share in ((4, 0.9), (6, 0.985), (8, 1.0), (16, 1.0))
    ]
    assert enough(rows) == 6
    assert enough(rows[:1]) is None


def test_divergence_has_three_digits_above_float32_resolution():
    assert [three_digits(value) for value in (0.0, 3e-10, 2e-9, 0.123456, 2.0)] == ["0", "0", "2e-09", "0.123", "2"]


def test_invalid_text_files(command, tmp_path):
    out = tmp_path / "out"
    short, empty, tasks = tmp_path / "short.txt", tmp_path / "empty.txt", tmp_path / "tasks.jsonl"
    short.write_text("Only a few words.")
    for file in (empty, tasks):
        file.write_text(" \n")
    assert_refused(evaluate(command, out, data=short), short, "must have a window of 256 tokens", "--context")
    assert_refused(evaluate(command, out, data=empty), empty, "must not be empty")
    assert_refused(evaluate(command, out, data=tasks), tasks, "must not be empty")
    assert_refused(evaluate(command, out, data=tmp_path / "none.txt"), "none.txt", "cannot be read")
    tasks.write_text('{"question": "2 + 2?"}\n')
    assert_refused(evaluate(command, out, data=tasks), tasks, "line 1", "'question' and 'answer'")
    assert not out.exists()
