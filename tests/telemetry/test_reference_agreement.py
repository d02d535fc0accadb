"""Agreement with an original: bins, intervals, expectations, and the bundled curves."""

import numpy as np
import pytest

from gearbx_mlx.telemetry.agreement import Choices, agreement_of, borrowed, borrowed_sentence, curves, wilson

ABOUT = {"model": "a", "reference": "b", "bits": (4, 16), "data": "text.txt"}


def choices(entropies: list[float]) -> Choices:
    n = len(entropies)
    return Choices(np.arange(n), np.array(entropies), np.linspace(0, 3, n), np.linspace(0.05, 1.0, n))


class TestWilson:
    @pytest.mark.parametrize(
        ("count", "total", "low", "high"),
        [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
    )
    def test_interval_has_published_ends(self, count, total, low, high):
        assert wilson(count, total) == pytest.approx((low, high), abs=5e-5)


class TestBins:
    def test_every_token_is_in_one_bin(self):
        mine = choices([0.0, 0.05, 1.5, 2.0, 7.0, 9.0])
        found = agreement_of(mine, np.array([0, 1, 2, 9, 9, 5]), np.array([0, 0, 0, 0, 4, 5]), **ABOUT)
        for bins in (found.entropy, found.margin, found.probability):
            assert (sum(b.tokens for b in bins), sum(b.same for b in bins), sum(b.right for b in bins)) == (6, 4, 3)
        assert [(b.low, b.tokens, b.same) for b in found.entropy] == [(0, 2, 2), (1, 1, 1), (2, 1, 0), (6, 2, 1)]
        assert found.different_above(2.0) == (2, 3)
        assert found.sentence().startswith("in tokens above 2 bits, 4-bit and 16-bit weights choose differently in 67")

    def test_certain_text_counts_all_tokens(self):
        mine = choices([0.0, 0.5])
        found = agreement_of(mine, np.array([0, 5]), np.array([0, 1]), **ABOUT)
        assert "in all tokens, 4-bit and 16-bit weights choose differently in 50 of 100" in found.sentence()

    def test_expected_share_follows_the_run(self):
        mine = choices([0.0, 0.0, 5.0, 5.0])
        found = agreement_of(mine, np.array([0, 1, 2, 9]), np.zeros(4, int), **ABOUT)
        assert found.differing([0.05]) == 0
        assert found.differing([4.5, 5.5, 0.0, 0.01]) == pytest.approx(0.25)


class TestBundledCurves:
    def test_fewer_bits_differ_more_often(self):
        for model in {each.model for each in curves()}:
            counts = [each.different_above(0)[0] for each in curves() if each.model == model]
            assert counts == sorted(counts, reverse=True)

    def test_estimate_names_its_models(self):
        found = borrowed(4, [3.5, 0.01])
        assert found["measured_on"] == ["demo", "smollm2"]
        assert all(0 < share < 0.5 for share in found["expected_different"])
        assert "if this model were like demo and smollm2 at 4 bits" in borrowed_sentence(found)
        assert borrowed(3, [1.0]) is None
        assert borrowed(4, []) is None
