"""The task math: answers in boxes, problems from files, and both studies that run it."""

import json
from pathlib import Path

import pytest
from conftest import save_model, tiny_model

from gearbx_mlx.errors import GearbxError
from research.evaluation.answers import box_finished, boxed_answer, by_group, normalised, read_problems
from research.final_answers import final_answers
from research.pair import pair_sweep

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

    def test_writing_ends_with_the_line_of_a_whole_box(self):
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
    def test_the_public_rule_goes_no_further(self, one, other):
        assert normalised(one) != normalised(other)


class TestReading:
    def test_the_sample(self):
        rows = read_problems(SAMPLE)
        assert [boxed_answer(row["answer"]) for row in rows] == [r"\frac{7}{8}", r"3\sqrt{2}", "5", "12", "(-1,3)"]
        assert [row["level"] for row in rows] == [f"Level {n}" for n in (1, 2, 2, 3, 3)]

    def test_a_folder_as_published_in_the_order_of_its_numbers(self, tmp_path):
        for name in ("algebra/10", "algebra/2", "geometry/1"):
            file = tmp_path / f"{name}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(GOOD | {"problem": name}, indent=2))
        assert [row["question"] for row in read_problems(tmp_path)] == ["algebra/2", "algebra/10", "geometry/1"]

    def test_math_500s_fields(self, tmp_path):
        file = tmp_path / "math500.jsonl"
        file.write_text(json.dumps(GOOD | {"level": 4, "subject": "Algebra", "unique_id": "a/1"}) + "\n")
        assert read_problems(file) == [
            {"question": "1 + 1?", "answer": r"$\boxed{2}$", "level": "Level 4", "type": "Algebra"}
        ]

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
        with pytest.raises(GearbxError) as error:
            read_problems(file)
        assert str(error.value).startswith(f"{file}, line 2: ")
        assert words in str(error.value)

    def test_nothing_to_solve_is_an_error(self, tmp_path):
        with pytest.raises(GearbxError, match=r"has no \.json file"):
            read_problems(tmp_path)
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(GearbxError, match="is empty"):
            read_problems(tmp_path / "empty.jsonl")


def test_right_answers_by_level():
    problems = [{"level": "Level 2"}, {"level": "Level 1"}, {"level": "Level 2"}, {"level": ""}]
    attempts = [{"right": right} for right in (True, False, False, True)]
    assert by_group(problems, attempts, "level") == {"Level 1": [0, 1], "Level 2": [1, 2]}


class TestStudies:
    HOW = {"task": "math", "num_shots": 1, "num_problems": 2, "max_tokens": 12}

    def test_one_model_in_gears(self, tmp_path):
        found = final_answers(SAMPLE, tmp_path / "out", gears="4,16", policy=["static"], **self.HOW)
        rows = json.loads((tmp_path / "out" / "evaluation.json").read_text())["policies"]
        assert [row["policy"] for row in rows] == ["static-16", "static-4"]
        assert rows[0]["by_level"] == {"Level 2": [0, 2]}
        assert rows[0]["by_type"] == {"Algebra": [0, 1], "Geometry": [0, 1]}
        assert "| policy | Algebra | Geometry |" in found.tables["by_type"]

    @pytest.mark.slow
    def test_two_models(self, tmp_path):
        save_model(tiny_model(seed=1, vocab_size=4096), tmp_path / "small")
        found = pair_sweep(str(tmp_path / "small"), SAMPLE, tmp_path / "out", thresholds="5", **self.HOW)
        rows = found.data["policies"]
        assert [row["name"] for row in rows] == ["pair-0", "pair-5", "random-5"]
        assert all(row["by_level"] == {"Level 2": [0, 2]} for row in rows)

    def test_nothing_left_but_examples(self, tmp_path):
        with pytest.raises(GearbxError, match="all of them examples; give fewer --num-shots"):
            final_answers(SAMPLE, tmp_path / "out", task="math", num_shots=40)
