"""Policies replayed over a text: what must hold of each, and the report that the command writes."""

import io
import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from rich.console import Console
from test_bad_input import assert_refused
from test_commands import save_model

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.cli.parsers.evaluate import POLICIES
from gearbx_mlx.cli.report_table import report_table
from gearbx_mlx.commands.evaluate import evaluate as run_evaluation
from gearbx_mlx.decoding.kickdown_model import GearedModel
from gearbx_mlx.evaluation import metrics, replay, text
from gearbx_mlx.evaluation.drafting import drafted
from gearbx_mlx.evaluation.noise import noisy
from gearbx_mlx.evaluation.picture import STYLES
from gearbx_mlx.evaluation.policies import Planned, Route, SameToken, Static
from gearbx_mlx.evaluation.report import COLUMNS, FIRST
from gearbx_mlx.routing.acceptance import FixedLength
from gearbx_mlx.routing.gates import ThresholdGate
from gearbx_mlx.routing.monitor import Monitor

HELD_OUT = Path(__file__).parent / "data" / "gsm8k_held_out.jsonl"
WINDOWS = [[1, 5, 9, 2, 7, 33, 8, 4, 100, 3, 17, 6], [9, 9, 8, 1, 0, 2]]
TOKENS = 16
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


@pytest.fixture
def geared() -> Gearbox:
    return Gearbox(tiny_model(), "2,4,16", group_size=32)


@pytest.fixture
def reference(geared, tmp_path) -> replay.Reference:
    replay.Reference.write(
        tmp_path / "r.npy", replay.driven(geared, WINDOWS, Static(geared.ladder.top)), TOKENS, "float32"
    )
    return replay.Reference(tmp_path / "r.npy", replay.targets_of(WINDOWS))


def recorded(geared, policy, reference) -> replay.Recording:
    return replay.record(replay.driven(geared, WINDOWS, policy), reference)


class TestReplay:
    def test_the_top_gear_is_the_reference(self, geared, reference):
        result = recorded(geared, Static(geared.ladder.top), reference)
        assert (result.kl == 0).all()
        assert (result.kl_reverse == 0).all()
        assert result.agree.all()
        assert result.passes.tolist() == [[0, 0, 1]] * TOKENS

    def test_the_reference_is_mlx_lm(self, reference):
        model = tiny_model()
        logits = np.array(model(mx.array([WINDOWS[0][:-1]]))[0])
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(reference.stored[:11], expected, atol=1e-4)
        assert reference.nll[0] == pytest.approx(-expected[0, WINDOWS[0][1]], abs=1e-4)

    def test_what_a_low_gear_wrote_stays_in_the_cache(self, geared, reference):
        """The last token alone in the top gear, after low ones: not what the top gear says."""
        top, low = geared.ladder.top, geared.ladder[0]
        result = recorded(geared, Planned([low] * (TOKENS - 1) + [top]), reference)
        assert result.gear.tolist() == [0] * (TOKENS - 1) + [2]
        assert result.kl[-1] > 1e-6

    def test_everything_computed_again_is_the_top_gear(self, geared, reference):
        """Nothing of the low passes is left in the cache."""
        always = SameToken(geared.ladder[0], geared.ladder.top, lambda place, q: 1.0, 0.0)
        result = recorded(geared, always, reference)
        assert (result.kl == 0).all()
        assert result.passes.tolist() == [[1, 0, 1]] * TOKENS

    def test_a_route_acts_two_tokens_later_and_begins_anew_in_every_window(self, geared, reference):
        gate = ThresholdGate((1e-9, 2e-9), hysteresis=0, min_gear_duration=1)  # any entropy is too much
        result = recorded(geared, Route(geared.ladder, gate, Monitor(128)), reference)
        assert result.gear.tolist() == [0, 0] + [2] * 9 + [0, 0] + [2] * 3

    def test_several_tokens_in_a_pass_say_the_same(self, geared, reference):
        at_once = replay.record(replay.read_at_once(geared, WINDOWS, geared.ladder.top), reference)
        assert at_once.kl.max() < 1e-9
        assert at_once.window.tolist() == [0] * 11 + [1] * 5

    def test_noise_is_small_and_leaves_the_model_as_it_was(self, geared, reference):
        with noisy(geared, seed=0):
            floor = recorded(geared, Static(geared.ladder.top), reference)
        assert 0 < floor.kl.mean() < 1e-3
        assert (recorded(geared, Static(geared.ladder.top), reference).kl == 0).all()

    def test_lossless_is_the_top_gear_and_counts_its_passes(self, geared, reference):
        low, top = geared.ladder[1], geared.ladder.top
        result = replay.record(drafted(geared, WINDOWS, low, top, FixedLength(3)), reference)
        assert result.kl.max() < 1e-9
        assert result.agree.all()
        assert (result.gear == 2).all()
        drafts, checks = result.passes[:, 1].sum(), result.passes[:, 2].sum()
        assert TOKENS / 4 <= checks < TOKENS
        assert checks <= drafts <= 3 * checks

    def test_a_draft_of_the_top_gear_itself_is_always_accepted(self, geared, reference):
        top = geared.ladder.top
        result = replay.record(drafted(geared, [WINDOWS[0]], top, top, FixedLength(4)), reference)
        # 11 predictions: two drafts of 4 with 5 kept, and the last one needs no draft.
        assert result.passes[:, 2].sum() == 4 + 1 + 4 + 1 + 1
        assert result.kl.max() < 1e-9

    def test_kickdown_is_what_ships(self):
        """GearedModel and the replay of it come to the same."""

        def entropy(place: int, q: np.ndarray) -> float:
            return float(metrics.entropy_of_logprobs(metrics.log_softmax(q)))

        pair = Gearbox(tiny_model(), "2,16", group_size=32)
        low, top = pair.ladder
        threshold = float(np.median([entropy(0, s.logprobs) for s in replay.driven(pair, WINDOWS[:1], Static(low))]))
        steps = list(replay.driven(pair, WINDOWS[:1], SameToken(low, top, entropy, threshold)))
        model = GearedModel(pair, [threshold])
        cache = make_prompt_cache(model)
        for token, step in zip(WINDOWS[0], steps):
            logits = np.array(model(mx.array([[token]]), cache=cache)[0, 0])
            assert list(model.step.passes) == list(step.passes)
            np.testing.assert_allclose(metrics.log_softmax(logits), step.logprobs, atol=1e-6)
        assert 0 < sum(step.passes[1] for step in steps) < len(steps)

    @pytest.mark.parametrize("mode", ["kickdown", "lossless"])
    def test_a_cache_that_cannot_forget_is_named(self, geared, mode, monkeypatch):
        low, top = geared.ladder[0], geared.ladder.top
        monkeypatch.setattr(geared.model, "make_cache", lambda: [ArraysCache(2)], raising=False)
        again = SameToken(low, top, lambda place, q: 1.0, 0.0)
        steps = {
            "kickdown": replay.driven(geared, WINDOWS, again),
            "lossless": drafted(geared, WINDOWS, low, top, FixedLength(3)),
        }
        with pytest.raises(ValueError, match=f"{mode}.*ArraysCache"):
            next(steps[mode])


class TestWindows:
    class Tokenizer:
        bos_token_id = 0

        def encode(self, document: str, verbose: bool = True) -> list[int]:
            return [0, *map(ord, document)]

    def test_a_text_is_cut_and_every_window_begins_like_a_text(self):
        windows = text.windows_of(self.Tokenizer(), ["abcdefg"], 4, 100, "t")
        assert windows == [[0, *b"abc"], [0, *b"def"], [0, *b"g"]]

    def test_documents_are_windows_of_their_own(self):
        assert text.windows_of(self.Tokenizer(), ["abcdefg", "x"], 4, 100, "t") == [[0, *b"abc"], [0, *b"x"]]

    @pytest.mark.parametrize("tokens", [1, 3, 4, 7])
    def test_the_limit_is_kept_exactly(self, tokens):
        windows = text.windows_of(self.Tokenizer(), ["abcdefghijkl"], 4, tokens, "t")
        assert sum(len(window) - 1 for window in windows) == tokens

    def test_a_text_shorter_than_a_window(self):
        with pytest.raises(ValueError, match=r"t: 4 tokens are fewer than a window of 8.*--context 4"):
            text.windows_of(self.Tokenizer(), ["abc"], 8, 100, "t")


def evaluate(command, out: Path, *more: object, data: Path = HELD_OUT):
    return command("evaluate", "--data", data, "--out", out, "--kernels", "auto", *more)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run of every policy on the demo model, from a program."""
    out = tmp_path_factory.mktemp("report")
    found = run_evaluation(HELD_OUT, out=out, tokens=160, share="0.25", gears="3,8,16")
    assert json.loads((out / "evaluation.json").read_text()) == json.loads(json.dumps(found))
    return found | {"out": out}


class TestReport:
    def test_every_policy_is_in_it_with_all_its_numbers(self, report):
        names = [row["name"] for row in report["policies"]]
        shifting = [f"{p}-0.25" for p in ("random", "route", "kickdown", "inverted", "position", "oracle")]
        assert sorted(names) == sorted(["static-3", "static-8", "static-16", *shifting, "lossless", "lossless-fixed"])
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
        for name in ("random-0.25", "route-0.25", "position-0.25"):
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
            if row["policy"] in ("random", "kickdown", "inverted", "position"):
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
    """In the terminal every header and every value is whole, at any width."""

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
    """A random model that is quick."""
    save_model(tiny_model(vocab_size=4096), tmp_path / "small")
    return tmp_path / "small"


class TestSession:
    def run(self, command, small, out, *more):
        return evaluate(command, out, "--model", small, "--tokens", 40, "--context", 16, "--q-group-size", 32, *more)

    def test_a_rerun_computes_nothing_again_and_may_add_to_the_report(self, command, small, tmp_path):
        out = tmp_path / "out"
        assert self.run(command, small, out, "--policy", "random", "--share", "0.5").status == 0
        first = {file: file.stat().st_mtime_ns for file in (out / "recordings").iterdir()}
        assert self.run(command, small, out, "--policy", "kickdown", "--share", "0.5").status == 0
        assert {file: file.stat().st_mtime_ns for file in first} == first
        names = [row["name"] for row in json.loads((out / "evaluation.json").read_text())["policies"]]
        assert names == ["static-4", "static-8", "static-16", "random-0.5", "kickdown-0.5"]

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

    def test_another_model_in_the_same_place_is_refused(self, command, small, tmp_path):
        out = tmp_path / "out"
        assert self.run(command, small, out, "--policy", "random").status == 0
        shutil.rmtree(small)
        save_model(tiny_model(vocab_size=4096, seed=1), small)
        assert_refused(self.run(command, small, out), out, "model contents")

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
