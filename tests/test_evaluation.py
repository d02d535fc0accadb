"""The report of evaluate: its rows, its table and picture, and what it refuses."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from test_bad_input import assert_refused

from gearbx_mlx import GearbxError
from gearbx_mlx.evaluate import evaluate as run_evaluation
from gearbx_mlx.evaluate.run import COLUMNS, STYLES, enough, table_of
from gearbx_mlx.gone import GONE, SINCE

HELD_OUT = Path(__file__).parent / "data" / "gsm8k_held_out.jsonl"


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
            assert 0 <= row["kl_median"] <= row["kl_p99"] <= row["kl_p999"] <= row["kl_max"]
            assert sum(row["gear_shares"].values()) == pytest.approx(1)

    def test_the_top_gear_is_exact_and_costs_one_pass(self, report):
        low, mid, top = report["rows"][:3]
        assert (top["kl_mean"], top["kl_max"], top["top1_agreement"], top["perplexity_ratio"]) == (0, 0, 1, 1)
        assert top["effective_bits"] == 16
        assert low["weight_bytes_per_token"] < mid["weight_bytes_per_token"] < top["weight_bytes_per_token"]
        assert low["kl_mean"] > 100 * mid["kl_mean"] > 0

    def test_modes_are_between_the_gears_and_kickdown_reads_tokens_twice(self, report):
        low, _, top, route, kickdown = report["rows"]
        for row in (route, kickdown):
            assert 0 < row["gear_shares"]["high"] < 1
            assert row["kl_mean"] < low["kl_mean"]
        shares = kickdown["gear_shares"]
        assert kickdown["weight_bytes_per_token"] > shares["high"] * top["weight_bytes_per_token"]
        assert kickdown["effective_bits"] > 3 * shares["low"] + 8 * shares["mid"] + 16 * shares["high"]

    def test_a_picture(self, report):
        assert (report["out"] / "evaluation.png").read_bytes().startswith(b"\x89PNG")
        colors, markers = zip(*STYLES.values())
        assert len(set(markers)) == len(set(colors)) == len(STYLES)

    def test_the_table_is_whole_at_80_columns(self, report):
        console = Console(width=80, file=io.StringIO())
        console.print(table_of(report["rows"]))
        text = console.file.getvalue()
        assert "…" not in text
        for row in report["rows"]:
            assert any(all(show(row) in line for show in COLUMNS.values()) for line in text.splitlines())


def test_the_gear_that_is_enough_reads_least_of_those_that_agree():
    rows = [
        {"kind": "gear", "name": f"{bits} bits", "top1_agreement": share, "weight_bytes_per_token": bits}
        for bits, share in ((4, 0.9), (6, 0.985), (8, 1.0), (16, 1.0))
    ]
    assert enough(rows) == 6
    assert enough(rows[:1]) is None


class TestMistakes:
    def test_a_programs_keywords(self, tmp_path):
        with pytest.raises(GearbxError, match="no setting 'temperature'; choose from adapter_path, base"):
            run_evaluation(HELD_OUT, out=tmp_path, temperature=1)
        with pytest.raises(GearbxError, match="--tokens is many; give 1 or more"):
            run_evaluation(HELD_OUT, out=tmp_path, tokens="many")
        with pytest.raises(GearbxError, match="--format is zip; choose from planes"):
            run_evaluation(HELD_OUT, out=tmp_path, format="zip")
        with pytest.raises(GearbxError, match="--modes is hope; choose from route, kickdown"):
            run_evaluation(HELD_OUT, out=tmp_path, modes=["hope"])
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--gears", "16"], ["--gears 16", "two or more"]),
            (["--context", "1000000"], ["--context", "1000000"]),
            (["--context", "1"], ["--context is 1; give 2 or more"]),
            (["--tokens", "0"], ["--tokens is 0; give 1 or more"]),
            (["--thresholds", "1"], ["thresholds"]),
            (["--out", ""], ["--out is empty"]),
        ],
    )
    def test_flags(self, command, tmp_path, flags, words):
        assert_refused(evaluate(command, tmp_path / "out", *flags), *words, folder=tmp_path)

    @pytest.mark.parametrize("flag", ["--policy", "--share", "--seed", "--task", "--small-model", "--answers-only"])
    def test_flags_of_what_is_a_study_now(self, command, tmp_path, flag):
        instead = GONE.get(f"evaluate {flag}") or GONE[flag]
        refused = evaluate(command, tmp_path / "out", flag, "x")
        assert refused.status == 2
        (line,) = refused.err.splitlines()
        assert f"{flag} is gone since gearbx-mlx {SINCE}; {instead}" in line

    def test_texts(self, command, tmp_path):
        out = tmp_path / "out"
        short, empty, tasks = tmp_path / "short.txt", tmp_path / "empty.txt", tmp_path / "tasks.jsonl"
        short.write_text("Only a few words.")
        for file in (empty, tasks):
            file.write_text(" \n")
        assert_refused(evaluate(command, out, data=short), short, "fewer than a window of 256", "--context")
        assert_refused(evaluate(command, out, data=empty), empty, "is empty")
        assert_refused(evaluate(command, out, data=tasks), tasks, "is empty")
        assert_refused(evaluate(command, out, data=tmp_path / "none.txt"), "none.txt", "cannot be read")
        tasks.write_text('{"question": "2 + 2?"}\n')
        assert_refused(evaluate(command, out, data=tasks), tasks, "line 1", "'question' and 'answer'")
        assert not out.exists()

    def test_a_quantized_model(self, command, tmp_path):
        import mlx_lm

        from gearbx_mlx.loading import DEMO_MODEL

        path = tmp_path / "four"
        mlx_lm.convert(str(DEMO_MODEL), str(path), quantize=True, q_bits=4, q_group_size=64)
        assert_refused(evaluate(command, tmp_path / "out", "--model", path), path, "is quantized already")
