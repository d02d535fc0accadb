"""Metrics against values worked out by hand, and against rules for any distribution."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gearbx_mlx.evaluation import predictions
from research.evaluation import statistics

LOGITS = arrays(np.float64, (5, 7), elements=st.floats(-60, 60))


def log(*probabilities: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities))


class TestDivergence:
    @pytest.mark.parametrize(
        ("p", "q", "nats"),
        [
            (log(0.5, 0.25, 0.25), log(0.25, 0.5, 0.25), 0.25 * math.log(2)),  # 1/2 log(2) + 1/4 log(1/2) + 0
            (log(1.0, 0.0), log(0.5, 0.5), math.log(2)),  # what the reference never says adds nothing
            (log(1.0, 0.0), log(1.0, 0.0), 0.0),
            (log(0.5, 0.5), log(1.0, 0.0), math.inf),
        ],
    )
    def test_divergence_equals_worked_values(self, p, q, nats):
        assert predictions.kl_divergence(p, q) == pytest.approx(nats)

    @given(LOGITS, LOGITS)
    def test_is_nonnegative_and_zero_for_equal(self, a, b):
        p, q = predictions.log_softmax(a), predictions.log_softmax(b)
        assert (predictions.kl_divergence(p, q) >= 0).all()
        assert (predictions.kl_divergence(p, p) == 0).all()

    def test_entropy_in_bits(self):
        assert predictions.entropy_of_logprobs(log(0.25, 0.25, 0.25, 0.25)) == pytest.approx(2)
        assert predictions.entropy_of_logprobs(log(0.5, 0.25, 0.25, 0.0)) == pytest.approx(1.5)
        assert predictions.entropy_of_logprobs(log(1.0, 0.0)) == 0


def tokens(kl: list[float], agree: list[bool], nll: list[float] | None = None) -> dict[str, np.ndarray]:
    kl, ones = np.array(kl), np.ones(len(kl))
    own = {"nll": ones if nll is None else np.array(nll), "kl": kl, "kl_reverse": 2 * kl}
    return own | {"agree": np.array(agree, bool), "reference_nll": ones}


class TestQuality:
    def test_quality_equals_worked_values(self):
        """Errors are those of llama.cpp."""
        result = predictions.quality(**tokens([0.0, 0.1, 0.2, 0.7], [True, True, False, True], [1.0, 1.0, 2.0, 4.0]))
        assert result["perplexity"] == pytest.approx(math.exp(2))
        assert result["perplexity_ratio"] == pytest.approx(math.exp(1))
        assert result["kl_mean"] == pytest.approx(0.25)
        assert result["kl_median"] == pytest.approx(0.15)
        assert result["kl_max"] == 0.7
        assert result["kl_reverse_mean"] == pytest.approx(0.5)
        assert result["top1_agreement"] == 0.75
        assert result["kl_mean_error"] == pytest.approx(math.sqrt((0.54 / 4 - 0.25**2) / 3))
        assert result["perplexity_ratio_error"] == pytest.approx(math.exp(1) * math.sqrt((10 / 4 - 1) / 3))
        assert result["top1_agreement_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
        assert math.isnan(predictions.quality(**tokens([0.1], [True]))["kl_mean_error"])

    def test_quality_has_far_quantiles(self):
        result = predictions.quality(**tokens([i / 1000 for i in range(1001)], [True] * 1001))
        assert [result[name] for name in ("kl_p90", "kl_p99", "kl_p999")] == pytest.approx([0.9, 0.99, 0.999])

    def test_token_on_edge_is_in_upper_bucket(self):
        rows = statistics.by_bucket(np.array([0.1, 0.25, 0.5, 0.95, 1.0]), tokens([1.0, 2, 3, 4, 5], [True] * 5))
        assert [row["tokens"] for row in rows] == [1, 1, 1, 0, 2]
        assert [row["top_probability"] for row in rows] == ["0-0.25", "0.25-0.5", "0.5-0.75", "0.75-0.95", "0.95-1"]
        assert rows[4]["kl_mean"] == 4.5
        assert "kl_mean" not in rows[3]


class TestErrors:
    def test_independent_tokens_have_the_usual_error(self):
        values = np.random.default_rng(0).normal(size=10_000)
        error = statistics.standard_error(values, np.arange(10_000))
        assert error == pytest.approx(values.std(ddof=1) / 100, rel=1e-6)

    def test_correlated_tokens_have_larger_error(self):
        blocks = np.repeat(np.arange(100), 100)
        values = np.random.default_rng(0).normal(size=100)[blocks]
        assert statistics.standard_error(values, blocks) == pytest.approx(values.std() / 10, rel=0.02)

    def test_mcnemar_by_hand(self):
        a = np.array([1, 1, 1, 1, 1, 0, 1], bool)
        b = np.array([0, 0, 0, 0, 0, 1, 1], bool)
        # Of 6 that differ, 1 or fewer for one side, twice: 2 (1 + 6) / 64.
        assert statistics.mcnemar(a, b) == {"only_first": 5, "only_second": 1, "p_value": pytest.approx(14 / 64)}
        assert statistics.mcnemar(a, a)["p_value"] == 1
