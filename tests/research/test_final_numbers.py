"""The final numbers of grade-school problems."""

import json
from pathlib import Path

import pytest

from research.evaluation.answers import Attempt, final_number, number_finished, score
from research.final_answers import final_answers

HELD_OUT = Path(__file__).parents[1] / "data" / "gsm8k_held_out.jsonl"


class TestFinalNumbers:
    @pytest.mark.parametrize(
        ("written", "number"),
        [
            ("so 6.\n#### 6", 6),
            ("#### $1,200 dollars", 1200),
            ("#### -3.50", -3.5),
            ("#### 7\n\nQuestion: next\n#### 8", 7),
            ("\nQuestion: next\nAnswer: #### 8", None),
            ("the answer is 6", None),
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
        assert rows[0]["weight_bytes_per_token"] == 5

    @pytest.mark.slow
    def test_the_demo_model_writes_answers(self, tmp_path):
        out = tmp_path / "out"
        final_answers(HELD_OUT, out, gears="4,16", num_problems=1, max_tokens=160)
        rows = json.loads((out / "evaluation.json").read_text())["policies"]
        assert [row["policy"] for row in rows] == ["static-16", "static-4", "route", "kickdown", "lossless"]
        top, low, _, _, lossless = rows
        assert top["answered"] > 0
        assert top["same_answer_as_reference"] == lossless["same_answer_as_reference"] == 1
        assert lossless["tokens"] == top["tokens"]
        assert low["weight_bytes_per_token"] < lossless["weight_bytes_per_token"] < top["weight_bytes_per_token"]
