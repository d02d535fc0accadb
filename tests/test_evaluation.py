"""The report of evaluate: its rows, its table and picture, and how an interrupted run continues."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import tiny_model
from rich.console import Console
from test_bad_input import assert_refused
from test_commands import save_model

from gearbx_mlx import GearbxError
from gearbx_mlx.cli import terminal
from gearbx_mlx.evaluate import POLICIES
from gearbx_mlx.evaluate import evaluate as run_evaluation
from gearbx_mlx.evaluate.run import report_table
from gearbx_mlx.evaluation.report import COLUMNS, FIRST, STYLES

HELD_OUT = Path(__file__).parent / "data" / "gsm8k_held_out.jsonl"
ROW = {
    "policy",
    "share_top",
    "effective_bits",
    "weight_bytes_per_token",
    "perplexity",
    "kl_mean",
    "kl_median",
    "kl_p99",
    "top1_agreement",
    "buckets",
}


def evaluate(command, out: Path, *more: object, data: Path = HELD_OUT):
    return command("evaluate", "--data", data, "--out", out, "--kernels", "auto", *more)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run of every policy on the demo model, from a program."""
    out = tmp_path_factory.mktemp("report")
    found = run_evaluation(HELD_OUT, out=out, tokens=160, share="0.25", gears="3,8,16")
    assert json.loads((out / "evaluation.json").read_text()) == json.loads(json.dumps(found))
    return found | {"out": out}


@pytest.mark.slow
class TestReport:
    def test_every_policy_is_in_it_with_all_its_numbers(self, report):
        names = [row["name"] for row in report["policies"]]
        shifting = [f"{p}-0.25" for p in ("random", "route", "kickdown", "inverted", "oracle")]
        assert sorted(names) == sorted(["static-3", "static-8", "static-16", *shifting, "lossless"])
        for row in report["policies"]:
            assert row.keys() >= ROW
            assert sum(bucket["tokens"] for bucket in row["buckets"]) == report["tokens"] == 160
            assert row["perplexity_ratio"] == pytest.approx(row["perplexity"] / report["reference"]["perplexity"])
        assert report["complete"]

    def test_the_top_gear_is_exact_and_costs_one_pass(self, report):
        rows = {row["name"]: row for row in report["policies"]}
        top = rows["static-16"]
        assert (top["kl_mean"], top["kl_max"], top["top1_agreement"], top["share_top"]) == (0, 0, 1, 1)
        assert top["effective_bits"] == 16
        assert rows["static-3"]["weight_bytes_per_token"] < rows["static-8"]["weight_bytes_per_token"]
        assert rows["static-8"]["weight_bytes_per_token"] < top["weight_bytes_per_token"]

    def test_bytes_of_a_token_computed_again_are_counted_twice(self, report):
        rows = {row["name"]: row for row in report["policies"]}
        low, top = (rows[name]["weight_bytes_per_token"] for name in ("static-3", "static-16"))
        for name in ("kickdown-0.25", "oracle-0.25", "inverted-0.25"):
            assert rows[name]["weight_bytes_per_token"] == pytest.approx(low + rows[name]["share_top"] * top)
        for name in ("random-0.25", "route-0.25"):
            share = rows[name]["share_top"]
            assert rows[name]["weight_bytes_per_token"] == pytest.approx((1 - share) * low + share * top)

    def test_oracle_kickdown_chance_and_inverted_are_in_that_order(self, report):
        change = {
            row["policy"]: row["against_random_same_share"]["kl_mean_change"]
            for row in report["policies"]
            if row["against_random_same_share"]
        }
        assert change["oracle"] < change["kickdown"] < -0.1
        assert change["inverted"] > 0.05

    def test_shares_are_what_was_asked_for(self, report):
        for row in report["policies"]:
            if row["policy"] in ("random", "kickdown", "inverted"):
                assert row["share_top"] == pytest.approx(0.25, abs=0.04)

    def test_lossless_loses_nothing_and_reads_less(self, report):
        rows = {row["name"]: row for row in report["policies"]}
        assert rows["lossless"]["kl_max"] < 1e-6
        assert rows["lossless"]["top1_agreement"] == 1
        assert rows["lossless"]["weight_bytes_per_token"] < 0.7 * rows["static-16"]["weight_bytes_per_token"]

    def test_the_noise_floor_is_far_under_three_bits(self, report):
        low = next(row for row in report["policies"] if row["name"] == "static-3")
        assert 1e-7 < report["noise_floor"]["kl_mean"] < low["kl_mean"] / 100

    def test_policies_differ_in_shape_and_colour_in_the_picture(self):
        colors, markers, _ = zip(*STYLES.values())
        assert len(set(markers)) == len(set(colors)) == len(STYLES)
        assert set(STYLES) == set(POLICIES) - {"static"}

    def test_a_page_and_a_picture(self, report):
        page = (report["out"] / "evaluation.md").read_text()
        assert "| kickdown-0.25 |" in page
        assert "Noise floor" in page
        assert (report["out"] / "evaluation.png").read_bytes().startswith(b"\x89PNG")


class TestTables:
    """The terminal shows every header and every value completely, at any width."""

    @staticmethod
    def printed(rows, columns, first, width: int) -> list[str]:
        console = Console(width=width, file=io.StringIO())
        console.print(report_table(rows, columns, first, width))
        text = console.file.getvalue()
        assert "…" not in text
        return text.splitlines()

    def test_at_80_columns_what_matters_is_shown(self, report):
        lines = self.printed(report["policies"], COLUMNS, FIRST, 80)
        header = " ".join(lines[: next(i for i, line in enumerate(lines) if "──" in line)]).split()
        assert {word for name in FIRST for word in name.split()} <= set(header)
        for row in report["policies"]:
            cells = [COLUMNS[name](row) for name in FIRST]
            assert any(all(cell in line for cell in cells) for line in lines), cells

    @pytest.mark.parametrize(("width", "shown"), [(20, 1), (50, 4), (300, len(COLUMNS))])
    def test_a_wider_terminal_shows_more_columns(self, report, width, shown):
        lines = self.printed(report["policies"], COLUMNS, FIRST, width)
        assert all(len(line) <= width for line in lines)
        row = report["policies"][-1]
        (line,) = (line for line in lines if COLUMNS["policy"](row) in line.split())
        assert len(re.split(r"\s{2,}", line.strip())) <= shown
        assert (COLUMNS["perplexity"](row) in line) == (width == 300)


@pytest.fixture
def small(tmp_path) -> Path:
    """A small random model."""
    save_model(tiny_model(vocab_size=4096), tmp_path / "small")
    return tmp_path / "small"


class TestSession:
    def run(self, command, small, out, *more):
        return evaluate(command, out, "--model", small, "--tokens", 40, "--context", 16, "--q-group-size", 32, *more)

    @pytest.mark.slow
    def test_a_rerun_computes_nothing_again_and_may_add_to_the_report(self, command, small, tmp_path):
        out = tmp_path / "out"
        assert self.run(command, small, out, "--policy", "random", "--share", "0.5").status == 0
        first = {file: file.stat().st_mtime_ns for file in (out / "recordings").iterdir()}
        assert self.run(command, small, out, "--policy", "kickdown", "--share", "0.5").status == 0
        assert {file: file.stat().st_mtime_ns for file in first} == first
        names = [row["name"] for row in json.loads((out / "evaluation.json").read_text())["policies"]]
        assert names == ["static-4", "static-8", "static-16", "random-0.5", "kickdown-0.5"]

    @pytest.mark.slow
    def test_a_log_says_how_far_a_long_run_is(self, command, small, tmp_path, monkeypatch):
        monkeypatch.setattr(terminal, "SHORT", 0)
        monkeypatch.setattr(terminal, "BETWEEN_LINES", 0)
        lines = self.run(command, small, tmp_path / "out", "--policy", "random", "--share", "0.5").err.splitlines()
        assert {"reference: 40 of 40", "static-4: 20 of 40", "random-0.5: 40 of 40"} <= set(lines)

    @pytest.mark.slow
    def test_changed_inputs_are_refused_and_nothing_is_lost(self, command, small, tmp_path):
        out = tmp_path / "out"
        assert self.run(command, small, out, "--policy", "random").status == 0
        before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
        assert_refused(self.run(command, small, out, "--seed", 7), out, "seed 0", "now it is 7")
        assert_refused(self.run(command, small, out, "--gears", "4,16"), out, "gears 4,8,16", "4,16")
        other = tmp_path / "other.jsonl"
        other.write_text(HELD_OUT.read_text().split("\n", 1)[1])
        assert_refused(evaluate(command, out, "--model", small, "--context", 16, data=other), out, "data contents")
        assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before

    @pytest.mark.slow
    def test_another_model_in_the_same_place_is_refused(self, command, small, tmp_path):
        out = tmp_path / "out"
        assert self.run(command, small, out, "--policy", "random").status == 0
        shutil.rmtree(small)
        save_model(tiny_model(vocab_size=4096, seed=1), small)
        assert_refused(self.run(command, small, out), out, "model contents")

    @pytest.mark.slow
    def test_an_interrupt_keeps_what_is_complete_and_the_rerun_goes_on(self, command, small, tmp_path, monkeypatch):
        from gearbx_mlx.evaluation import runs

        made = runs.make_policy

        def interrupted(entry, setting):
            if entry.policy == "kickdown":
                raise KeyboardInterrupt
            return made(entry, setting)

        monkeypatch.setattr(runs, "make_policy", interrupted)
        out = tmp_path / "out"
        result = self.run(command, small, out, "--policy", "kickdown", "--share", "0.5")
        assert result.status == 130
        report = json.loads((out / "evaluation.json").read_text())
        assert [row["name"] for row in report["policies"]] == ["static-4", "static-8", "static-16", "random-0.5"]
        assert not report["complete"]
        assert not list(out.rglob("*.part"))
        monkeypatch.setattr(runs, "make_policy", made)
        assert self.run(command, small, out, "--policy", "kickdown", "--share", "0.5").status == 0
        assert json.loads((out / "evaluation.json").read_text())["complete"]


class TestMistakes:
    def test_a_programs_keywords(self, tmp_path):
        with pytest.raises(GearbxError, match="no setting 'temperature'; choose from activations, adapter_path"):
            run_evaluation(HELD_OUT, out=tmp_path, temperature=1)
        with pytest.raises(GearbxError, match="--tokens is many; give 1 or more"):
            run_evaluation(HELD_OUT, out=tmp_path, tokens="many")
        with pytest.raises(GearbxError, match="--format is zip; choose from planes"):
            run_evaluation(HELD_OUT, out=tmp_path, format="zip")
        with pytest.raises(GearbxError, match="--policy is hope; choose from static"):
            run_evaluation(HELD_OUT, out=tmp_path, policy=["hope"])
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--share", "0.5,1.5"], ["--share", "parts of 1"]),
            (["--share", "half"], ["--share", "half"]),
            (["--between", "16,4"], ["--between", "lower one first"]),
            (["--between", "5,16"], ["5", "4,8,16"]),
            (["--gears", "16"], ["--gears 16", "two or more"]),
            (["--context", "1000000"], ["--context", "1000000"]),
            (["--context", "1"], ["--context is 1; give 2 or more"]),
            (["--context", "0"], ["--context is 0; give 2 or more"]),
            (["--tokens", "0"], ["--tokens is 0; give 1 or more"]),
            (["--num-shots", "-1"], ["--num-shots is -1; give 0 or more"]),
            (["--num-problems", "-1"], ["--num-problems is -1; give 1 or more"]),
            (["--share", "nan"], ["--share 'nan'", "parts of 1"]),
            (["--answers-only"], ["--answers-only goes with --small-model"]),
            (["--out", ""], ["--out is empty"]),
            (["--task", "gsm8k", "--policy", "oracle"], ["oracle", "needs a text"]),
            (["--task", "gsm8k", "--num-shots", "40"], ["40", "examples"]),
        ],
    )
    def test_flags(self, command, tmp_path, flags, words):
        assert_refused(evaluate(command, tmp_path / "out", *flags), *words, folder=tmp_path)

    def test_texts(self, command, tmp_path):
        out = tmp_path / "out"
        short, empty, tasks = tmp_path / "short.txt", tmp_path / "empty.txt", tmp_path / "tasks.jsonl"
        short.write_text("Only a few words.")
        for file in (empty, tasks):
            file.write_text(" \n")
        assert_refused(evaluate(command, out, data=short), short, "fewer than a window of 256", "--context")
        assert_refused(evaluate(command, out, data=empty), empty, "is empty")
        assert_refused(evaluate(command, out, data=tasks), tasks, "is empty")
        assert_refused(evaluate(command, out, "--task", "gsm8k", data=tasks), tasks, "is empty")
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
