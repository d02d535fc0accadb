"""The study answers: boxes, numbers and functions, problems from files, the sandbox, power, and the study itself."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import save_model, tiny_model
from refusals import refuses

from gearbx_mlx.errors import GearbxError
from research.answers import METHODS as METHODS_OF_STUDY
from research.answers import Method, answers, kept_answers
from research.evaluation.answers import (
    Attempt,
    box_finished,
    boxed_answer,
    final_number,
    normalised,
    number_finished,
    read_functions,
    read_numeric,
    read_problems,
    score,
)
from research.evaluation.sandbox import code_finished, code_in, passes
from research.evaluation.statistics import holm, mcnemar, power, problems_needed

SAMPLE = Path(__file__).parents[1] / "data" / "math_sample.jsonl"
DATA = Path(__file__).parents[2] / "research" / "data"
GOOD = {"problem": "1 + 1?", "solution": r"$\boxed{2}$"}


class TestBoxes:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            (r"so $\boxed{5}$.", "5"),
            (r"$\boxed{\frac{1}{2}}$, or $\boxed{\frac{\sqrt{3}}{2}}$", r"\frac{\sqrt{3}}{2}"),
            (r"$\boxed{\{1, 2\}}$", r"\{1,2\}"),
            (r"$\boxed{[0, 1\}}$", r"[0,1\}"),
            (r"$\fbox{7}$", "7"),
            (r"$\boxed 8$ apples", "8"),
            (r"\boxed {9}", "9"),
            (r"\boxedness", None),
            (r"first $\boxed{3}$, then $\boxed{4", None),
            (r"\boxed{}", None),
            ("no box", None),
            ("\\boxed{1}\n\nQuestion: next\nAnswer: \\boxed{2}", "1"),
        ],
    )
    def test_the_last_one_is_the_answer(self, text, answer):
        assert boxed_answer(text) == answer

    def test_generation_ends_at_line_of_closed_box(self):
        assert not box_finished("\\boxed{\\frac{1}{2}")
        assert not box_finished("\\boxed{1}$.")
        assert box_finished("\\boxed{1}$.\n")
        assert not box_finished("\\boxed{1}\\boxed{\n")
        assert box_finished("\nQuestion:")


class TestEqualAnswers:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (r"\frac12", r"\dfrac{1}{2}"),
            (r"\tfrac{1}2", r"\frac{1}2"),
            (r"\frac1{72}", r"\frac{1}{72}"),
            ("3/4", r"\frac{3}{4}"),
            ("-3/4", r"\frac{-3}{4}"),
            ("0.5", r"\frac{1}{2}"),
            (".25", "0.25"),
            (r"\{ .5 , 1 \}", r"\{0.5,1\}"),
            (r"\left( 1, 2 \right)", "(1,2)"),
            (r"90^\circ", "90"),
            (r"90^{\circ}", "90"),
            (r"\$18", "18"),
            ("$18$", "18"),
            (r"50\%", "50"),
            (r"12\text{ square feet}", "12"),
            (r"12\mbox{ cm}^2", "12"),
            ("x = 7", "7"),
            (r"10\! 000", "10000"),
            (r"2\sqrt3", r"2\sqrt{3}"),
        ],
    )
    def test_they_are_equal_strings(self, one, other):
        assert normalised(one) == normalised(other)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("0.25", r"\frac{1}{4}"),
            (r"\text{Monday}", ""),
            ("x+y=7", "7"),
            (r"\leftarrow", "arrow"),
            ("2/03", r"\frac{2}{3}"),
        ],
    )
    def test_public_rule_distinguishes_other_answers(self, one, other):
        assert normalised(one) != normalised(other)


class TestReading:
    def test_sample_has_boxed_answers(self):
        rows = read_problems(SAMPLE)
        assert [boxed_answer(row["answer"]) for row in rows] == [r"\frac{7}{8}", r"3\sqrt{2}", "5", "12", "(-1,3)"]
        assert [row["level"] for row in rows] == [f"Level {n}" for n in (1, 2, 2, 3, 3)]

    def test_published_folder_is_read_in_numeric_order(self, tmp_path):
        for name in ("algebra/10", "algebra/2", "geometry/1"):
            file = tmp_path / f"{name}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(GOOD | {"problem": name}, indent=2))
        assert [row["question"] for row in read_problems(tmp_path)] == ["algebra/2", "algebra/10", "geometry/1"]

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            (json.dumps({"problem": "1?"}), "solution"),
            (json.dumps(GOOD | {"solution": "it is 2"}), r"no answer in \boxed"),
            (json.dumps(GOOD | {"solution": r"\boxed{2"}), r"no answer in \boxed"),
            (json.dumps(GOOD | {"problem": " "}), "its problem has no text"),
            (json.dumps(GOOD | {"level": [1]}), "level"),
            ("{", "JSON"),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path, line, words):
        file = tmp_path / "math.jsonl"
        file.write_text(json.dumps(GOOD) + "\n" + line + "\n")
        with refuses(f"{file}, line 2: ", words):
            read_problems(file)

    def test_an_answer_without_a_number_is_named(self, tmp_path):
        rows = [{"question": "1 + 1?", "answer": answer} for answer in ("#### 2", "#### two")]
        file = tmp_path / "gsm8k.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        with refuses(f"{file}, problem 2: its answer has no number"):
            read_numeric(file)


METHODS = ["16", "4", "route"]
HOW = {"model": "demo", "small_model": "none", "methods": METHODS, "num_problems": 2, "max_tokens": 12}


@pytest.mark.slow
class TestStudy:
    def test_resumes_and_rebuilds_table(self, compiled, tmp_path):
        out, copy = tmp_path / "answers", tmp_path / "copy"
        found = answers(out=out, **HOW)
        rows = {row["policy"]: row for row in found.data["answers"]}
        assert rows["16"]["equal_texts"] == 2
        assert rows["4"]["weight_bytes_per_token"] < rows["16"]["weight_bytes_per_token"] / 3
        assert rows["route"]["rival"]["method"] in ("4 bits", "16 bits")
        before = {name: (out / f"{name}.jsonl").read_text() for name in METHODS}
        copy.mkdir()
        for name in METHODS:
            lines = before[name].splitlines(keepends=True)
            (copy / f"{name}.jsonl").write_text("".join(lines[: 2 if name == "4" else 3]))
        with pytest.raises(GearbxError, match="no problem that all of 16, 8 have"):
            answers(out=copy, **HOW | {"only_table": True, "methods": ["16", "8"]})
        again = {row["policy"]: row for row in answers(out=copy, **HOW).data["answers"]}
        assert again["route"] == rows["route"]  # its times too: nothing was generated again
        assert (copy / "route.jsonl").read_text() == before["route"]
        assert [attempt["found"] for attempt in again["4"]["attempts"]] == [
            attempt["found"] for attempt in rows["4"]["attempts"]
        ]

    def test_answers_of_batches_equal_single_ones(self, compiled, tmp_path, monkeypatch):
        how = HOW | {"methods": ["16", "4"], "num_problems": 4}
        monkeypatch.setattr("research.answers.BATCH", 3)
        for timed in (4, 1):
            monkeypatch.setattr("research.answers.TIMED", timed)
            answers(out=tmp_path / str(timed), **how)
        single, batched = (kept_answers(tmp_path / str(timed) / "4.jsonl") for timed in (4, 1))
        assert batched.keys() == {0, 1, 2, 3}
        assert [batched[number].seconds is None for number in range(4)] == [False, True, True, True]
        assert {number: replace(made, seconds=None) for number, made in batched.items()} == {
            number: replace(made, seconds=None) for number, made in single.items()
        }

    def test_sequences_that_share_passes_have_the_same_answers(self, compiled, tmp_path, monkeypatch):
        small = tmp_path / "small"
        save_model(tiny_model(seed=1, vocab_size=4096), small)
        methods = ["route", "kickdown", "ead-2"]
        monkeypatch.setitem(METHODS_OF_STUDY, "ead-2", Method("", "pair", threshold=2.0))
        monkeypatch.setattr("research.answers.SEQUENCES", 3)
        how = HOW | {"small_model": str(small), "methods": methods, "num_problems": 6, "max_tokens": 40}
        for timed in (6, 1):
            monkeypatch.setattr("research.answers.TIMED", timed)
            answers(out=tmp_path / str(timed), **how)
        for name in methods:
            single, shared = (kept_answers(tmp_path / str(timed) / f"{name}.jsonl") for timed in (6, 1))
            assert all(0 < each.top < each.tokens for each in single.values())
            assert [shared[number].seconds is None for number in range(6)] == [False, *[True] * 5]
            for number in range(6):
                assert replace(shared[number], seconds=None) == replace(single[number], seconds=None)

    def test_two_models_have_shares_by_threshold(self, compiled, tmp_path):
        path = tmp_path / "small"
        save_model(tiny_model(seed=1, vocab_size=4096), path)
        methods = ["16", "ead-inf", "ead-0", "draft-model"]
        found = answers(out=tmp_path / "out", **HOW | {"small_model": str(path), "methods": methods})
        rows = {row["policy"]: row for row in found.data["ead"]}
        assert [rows[name]["share_top"] for name in ("ead-inf", "ead-0")] == [0, 1]
        assert rows["ead-0"]["equal_texts"] == 2
        assert rows["draft-model"]["equal_texts"] == 2
        small, large = rows["draft-model"]["passes"]
        assert small >= large > 0
        assert "| inf | 0.0 % |" in found.tables["ead"]
        found.pictures["answers.png"](tmp_path / "answers.png")
        assert (tmp_path / "answers.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"methods": ["7"]}, "--methods 7: choose from 16, 8"),
            ({"num_shots": 40}, "--num-shots: must be less than the 40 problems"),
            ({"task": "math"}, "--problems: needs a file for task math"),
        ],
    )
    def test_bad_flags_are_refused(self, tmp_path, changes, words):
        with refuses(words):
            answers(out=tmp_path, **HOW | changes)


class TestFunctions:
    def test_every_solution_passes_its_tests(self):
        rows = read_functions(DATA / "functions.jsonl")
        assert len(rows) == 50
        assert [row["question"] for row in rows if not passes(row["solution"], row["answer"])] == []

    @pytest.mark.parametrize(
        "code",
        [
            "import sys; sys.exit(0)",
            "import os; os._exit(0)",
            "open('file', 'w')",
            "import socket; socket.socket()",
            "import subprocess; subprocess.run(['ls'])",
            "import os; os.system('ls')",
            "bytearray(2 ** 34)",
            "def f(:",
        ],
    )
    def test_sandbox_fails_forbidden_code(self, code):
        assert not passes(code, "assert True")

    def test_endless_code_fails_within_limit(self, monkeypatch):
        monkeypatch.setattr("research.evaluation.sandbox.SECONDS", 1)
        assert not passes("while True: pass", "assert True")

    def test_code_is_first_fenced_block(self):
        text = "Here it is:\n```python\ndef f():\n    return 1\n```\nand ```def g(): ...```"
        assert code_in(text) == "def f():\n    return 1\n"
        assert code_finished(text)
        assert not code_finished(text[:40])
        assert code_in("def f():\n    return 1\nQuestion: next") == "def f():\n    return 1"
        assert code_in("no code") is None


class TestPower:
    def test_known_answers_of_mcnemar(self):
        first, second = np.array([1] * 8 + [0] * 2, bool), np.array([1] * 2 + [0] * 8, bool)
        assert mcnemar(first, second) == {"only_first": 6, "only_second": 0, "p_value": 2 / 64}

    @pytest.mark.parametrize(
        ("p_values", "significant"),
        [
            ([0.04], [True]),
            ([0.04, 0.04], [False, False]),
            ([0.04, 0.02], [True, True]),
            ([0.03, 0.2, 0.01, 0.9], [False, False, True, False]),
            ([], []),
        ],
    )
    def test_smaller_p_values_are_asked_of_more_tests(self, p_values, significant):
        assert holm(p_values) == significant

    def test_power_equals_simulation(self):
        rng = np.random.default_rng(0)
        found = 0
        for _ in range(1000):
            kind = rng.choice(3, 100, p=[0.15, 0.05, 0.8])
            found += mcnemar(kind == 0, kind == 1)["p_value"] <= 0.05
        assert power(100, 0.2, 0.1) == pytest.approx(found / 1000, abs=0.04)

    def test_more_disagreement_needs_more_problems(self):
        needed = [problems_needed(share, 0.05) for share in (0.06, 0.1, 0.2)]
        assert needed == sorted(needed)
        assert power(needed[1], 0.1, 0.05) >= 0.8 > power(needed[1] - 10, 0.1, 0.05)
        assert problems_needed(0.9, 0.03) is None


class TestFinalNumbers:
    @pytest.mark.parametrize(
        ("written", "number"),
        [
            ("so 6.\n#### 6", 6),
            ("#### $1,200 dollars", 1200),
            ("#### -3.50", -3.5),
            ("#### 7\n\nQuestion: next\n#### 8", 7),
            ("\nQuestion: next\nAnswer: #### 8", None),
            ("5 and 7 are 12, so she pays $1,200.", 1200),
            ("-4.5 degrees", -4.5),
            ("6 of them, which is \\(6.\\)", 6),
            ("no number", None),
        ],
    )
    def test_final_number_is_found(self, written, number):
        assert final_number(written) == number

    def test_writing_ends_with_the_line_of_the_number(self):
        assert not number_finished("#### 12")  # it may be the beginning of 120
        assert number_finished("#### 12\n")
        assert number_finished("\nQuestion:")

    def test_scores_are_compared_on_the_same_problems(self):
        def attempts(*right: int) -> list[Attempt]:
            return [Attempt(str(i), bool(r), 10, 50) for i, r in enumerate(right)]

        rows = score({"top": attempts(1, 1, 1, 0), "low": attempts(0, 0, 1, 0)}, "top")
        assert [row["accuracy"] for row in rows] == [0.75, 0.25]
        assert rows[1]["against_reference"]["difference"] == -0.5
        assert rows[1]["against_reference"]["only_first"] == 2
        assert rows[1]["against_reference"]["p_value"] == 0.5
        assert rows[1]["kept_of_reference"] == pytest.approx(1 / 3)
        assert rows[0]["weight_bytes_per_token"] == 5
