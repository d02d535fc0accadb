"""The study final-answers: answers in boxes, numbers and problems from files, and the study itself."""

import json
from pathlib import Path

import pytest
from conftest import HELD_OUT
from refusals import refuses

from gearbx_mlx.errors import GearbxError
from research.evaluation.answers import (
    Attempt,
    box_finished,
    boxed_answer,
    final_number,
    normalised,
    number_finished,
    read_problems,
    score,
)
from research.final_answers import final_answers

SAMPLE = Path(__file__).parents[1] / "data" / "math_sample.jsonl"
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
    def test_the_sample(self):
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


WAYS = ["16", "4", "route"]
HOW = {"task": "math", "ways": WAYS, "num_problems": 2, "num_shots": 1, "max_tokens": 12}


@pytest.mark.slow
class TestStudy:
    def test_resumes_and_rebuilds_table(self, compiled, tmp_path):
        out, copy = tmp_path / "answers", tmp_path / "copy"
        found = final_answers(SAMPLE, out, **HOW)
        before = {way: (out / f"{way}.jsonl").read_text() for way in WAYS}
        copy.mkdir()
        for way in WAYS:
            lines = before[way].splitlines(keepends=True)
            (copy / f"{way}.jsonl").write_text("".join(lines[: 2 if way == "4" else 3]))
        with pytest.raises(GearbxError, match="no problem that all ways"):
            final_answers(SAMPLE, copy, **HOW | {"only_table": True, "ways": ["16", "8"]})
        assert final_answers(SAMPLE, copy, **HOW).tables == found.tables
        assert {way: (copy / f"{way}.jsonl").read_text() for way in WAYS} == before
        assert final_answers(SAMPLE, copy, **HOW | {"only_table": True}).tables == found.tables

    def test_unknown_method_is_named(self, tmp_path):
        with pytest.raises(GearbxError, match="--ways 7: choose from 16, 8"):
            final_answers(SAMPLE, tmp_path, ways=["7"])

    def test_calibration_problems_are_not_scored(self, tmp_path):
        with pytest.raises(GearbxError, match="has 40, of which the last 12 are examples or find"):
            final_answers(HELD_OUT, tmp_path, ways=["16", "route-5"], num_problems=29)


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
    def test_found(self, written, number):
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
