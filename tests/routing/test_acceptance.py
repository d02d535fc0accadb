import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx import GearbxError
from gearbx_mlx.routing.acceptance import (
    BIN_NAMES,
    MOST_DRAFTED,
    FixedLength,
    LearnedAgreement,
    margin_worth,
    pool_adjacent_violators,
    usual_agreement,
)
from gearbx_mlx.routing.calibration import kickdown_thresholds

bits = st.floats(0, 17, allow_nan=False)
tokens = st.lists(st.tuples(bits, st.booleans()), min_size=1, max_size=200)
values = st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 50)), min_size=1, max_size=30)


def lengths(rule, entropies):
    """How many tokens of a recorded draft a rule takes."""
    rule.begin()
    for place, entropy in enumerate(entropies, 1):
        if not rule.goes_on(entropy):
            return place
    return len(entropies)


class TestIsotonicRegression:
    @given(values)
    def test_isotonic_regression_falls_and_keeps_the_weighted_mean(self, pairs):
        y, w = zip(*pairs)
        smooth = pool_adjacent_violators(y, w)
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(smooth))
        assert np.dot(smooth, w) == pytest.approx(np.dot(y, w))
        assert min(y) - 1e-12 <= min(smooth) <= max(smooth) <= max(y) + 1e-12

    @given(values)
    def test_isotonic_regression_leaves_what_falls_already(self, pairs):
        y = sorted((value for value, _ in pairs), reverse=True)
        assert pool_adjacent_violators(y, [1.0] * len(y)) == pytest.approx(y)

    @settings(deadline=None)
    @given(st.lists(st.floats(0, 1), min_size=2, max_size=7), st.lists(st.floats(0, 1), min_size=7, max_size=7))
    def test_no_falling_sequence_is_closer(self, y, other):
        smooth = pool_adjacent_violators(y, [1.0] * len(y))
        falling = sorted(other[: len(y)], reverse=True)
        assert sum((a - b) ** 2 for a, b in zip(smooth, y)) <= sum((a - b) ** 2 for a, b in zip(falling, y)) + 1e-9


class TestLearned:
    """a(m) from the drafts of texts."""

    def test_begins_as_if_errors_were_normal(self):
        assert [LearnedAgreement()(m) for m in (0.9, 1.75, 2.25)] == pytest.approx([0.87, 0.986, 0.998], abs=0.001)

    def test_comes_to_what_the_drafts_show(self):
        random, learned = np.random.default_rng(0), LearnedAgreement()
        for margin in random.exponential(2.0, 4000):
            learned.add([margin], int(random.random() < min(0.4 + 0.2 * margin, 0.9)))
        assert [learned(m) for m in (0.1, 0.7, 1.4, 3.5)] == pytest.approx([0.42, 0.54, 0.68, 0.9], abs=0.08)

    @given(st.lists(st.tuples(st.lists(st.floats(0, math.inf), max_size=5), st.integers(0, 5)), max_size=30))
    def test_rises_with_the_margin_and_stays_a_probability(self, drafts):
        learned = LearnedAgreement()
        for margins, accepted in drafts:
            learned.add(margins, min(accepted, len(margins)))
        found = [learned(m) for m in np.linspace(0, 20, 100)]
        assert found == sorted(found)
        assert 0 < found[0] <= found[-1] <= 1

    def test_what_follows_a_rejected_token_says_nothing(self):
        one, other = LearnedAgreement(), LearnedAgreement()
        one.add([1.1, 0.5, 3.0, 3.0], 1)
        other.add([1.1, 0.5], 1)
        assert one.state == other.state
        assert one.drafted == 2
        assert one(1.1) > LearnedAgreement()(1.1)
        assert one(0.5) < LearnedAgreement()(0.5)

    def test_goes_on_from_its_state(self):
        one = LearnedAgreement()
        one.add([1.1, 0.5, 3.0], 1)
        again = LearnedAgreement(one.state)
        assert again.state == pytest.approx(one.state)
        assert again(0.5) == pytest.approx(one(0.5))

    def test_a_state_is_positive_as_the_file_wants_it(self):
        learned = LearnedAgreement({f"count {name}": 1e-300 for name in BIN_NAMES})
        learned.add([0.1] * 5000, 0)
        for _ in range(5000):
            learned.add([0.1], 0)
        assert min(learned.state.values()) > 0

    @given(bits)
    def test_an_entropy_is_worth_the_margin_with_the_same_agreement(self, entropy):
        assert usual_agreement(margin_worth(entropy)) == pytest.approx(max(2 ** -(entropy / 4), 0.5), abs=1e-5)


class TestRules:
    @given(st.integers(1, MOST_DRAFTED), st.lists(bits, min_size=20, max_size=20))
    def test_a_fixed_length_is_that_long(self, length, entropies):
        assert lengths(FixedLength(length), entropies) == length

    @pytest.mark.parametrize("length", [0, -1, 16])
    def test_a_draft_must_fit_a_check(self, length):
        with pytest.raises(GearbxError, match="1 to 15"):
            FixedLength(length)


class TestKickdownThresholds:
    def test_leave_the_wanted_share_to_each_gear(self):
        rng = np.random.default_rng(0)
        climbs = np.sort(rng.uniform(0, 8, (4000, 2)), axis=1)
        thresholds, reached = kickdown_thresholds(climbs.tolist(), [0.6, 0.3, 0.1])
        assert reached == pytest.approx([0.6, 0.3, 0.1], abs=0.01)
        assert thresholds[0] < thresholds[1]
        low = np.mean(climbs[:, 0] <= thresholds[0])
        assert low == pytest.approx(0.6, abs=0.01)

    def test_shares_are_parts_of_one(self):
        with pytest.raises(GearbxError, match="parts of 1"):
            kickdown_thresholds([[1.0, 2.0]] * 9, [0.5, 0.2, 0.1])
