"""EAD's Table 1 and Figure 1 from a report: the points, and that the picture shows them."""

import math
import re

import pytest

from research.evaluation.pair import both_ways, draw_pair, points, ratio_of_small, table_1

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

    def test_nothing_right_is_no_share_of_anything(self, writing):
        for row in writing["policies"]:
            row["accuracy"] = 0.0
        assert table_1(writing).splitlines()[-1] == "| 0 | 100.0 % | 0.0 % |  | 100.0 % |  |"

    def test_along_a_text_the_coin_has_the_same_share(self, along_a_text):
        middle = points(along_a_text, "perplexity")[1]
        assert (middle.share, middle.score, middle.coin) == (0.5, 5.0, (0.5, 5.5))

    def test_a_coin_that_was_not_tossed_is_none(self, writing):
        coins = [point.coin for point in points(writing, "accuracy")]
        assert coins == [None, None, (0.46, 0.4), None]


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

    @pytest.mark.slow
    def test_the_same_report_is_the_same_picture(self, writing, tmp_path):
        for name in ("one.svg", "two.svg", "one.png", "two.png"):
            draw_pair(writing, tmp_path / name)
        assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
        assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()

    def test_parameters_by_the_share(self, writing):
        found = points(writing, "accuracy")
        assert ratio_of_small(found) == pytest.approx(1 / 3)
        assert ratio_of_small(found[2:]) == pytest.approx((0.635 - 0.45) / 0.55)
        there, back = both_ways(1 / 3)
        assert there(45.0) == pytest.approx(63.3, abs=0.1)
        assert back(there(45.0)) == pytest.approx(45.0)
