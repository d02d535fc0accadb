import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx import GearbxError
from gearbx_mlx.routing.acceptance import (
    BIN_NAMES,
    MOST_DRAFTED,
    AcceptanceCurve,
    DraftFile,
    FixedLength,
    LearnedAgreement,
    ProductRule,
    best_bound,
    best_length,
    default_rule,
    fit_curve,
    margin_worth,
    parse_draft_file,
    pool_adjacent_violators,
    replay_drafts,
    typical_agreement,
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


def content(**change):
    return DraftFile(
        **{
            "gears": [4, 16],
            "draft": 4,
            "bound": 0.5,
            "edges": [1.0, 2.0],
            "agreement": [0.9, 0.6, 0.3],
            "vocab_size": 128,
            "fingerprint": "ab",
            "model": "m",
            "group_size": 64,
            "format": "planes",
            "tokens": 10,
            "agreement_overall": 0.8,
            "weight_bytes_per_token": 5.0,
            "weight_bytes_per_token_top": 10.0,
            "best_fixed_length": 4,
            "fixed_weight_bytes_per_token": 6.0,
        }
        | change
    )


class TestCurve:
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

    @given(tokens)
    def test_falls_with_entropy_and_stays_a_probability(self, recorded):
        curve = fit_curve(*zip(*recorded))
        grid = [curve(h) for h in np.linspace(0, 20, 101)]
        assert all(0 < value < 1 for value in grid)  # never certain, in either direction
        assert all(a >= b for a, b in itertools.pairwise(grid))

    def test_is_the_share_that_agrees_near_an_entropy(self):
        rng = np.random.default_rng(0)
        h = rng.uniform(0, 4, 20000)
        curve = fit_curve(h, rng.uniform(size=len(h)) < 1 - h / 5)
        for entropy in (0.5, 1.5, 2.5, 3.5):
            assert curve(entropy) == pytest.approx(1 - entropy / 5, abs=0.04)

    def test_equal_entropies_have_one_value(self):
        curve = fit_curve([1.0] * 40, [True] * 20 + [False] * 20)
        assert len(curve.edges) <= 1
        assert curve(1.0) <= 1

    @pytest.mark.parametrize(
        ("edges", "agreement"),
        [
            ((1.0,), (0.5,)),
            ((2.0, 1.0), (0.9, 0.8, 0.7)),
            ((1.0,), (0.5, 0.6)),
            ((1.0,), (1.5, 0.6)),
            ((math.nan,), (0.9, 0.6)),
        ],
    )
    def test_refuses_what_is_no_curve(self, edges, agreement):
        with pytest.raises(GearbxError):
            AcceptanceCurve(edges, agreement)

    def test_no_tokens_are_an_error(self):
        with pytest.raises(GearbxError, match="no tokens"):
            fit_curve([], [])


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
        assert usual_agreement(margin_worth(entropy)) == pytest.approx(max(typical_agreement(entropy), 0.5), abs=1e-5)


class TestRules:
    @given(st.integers(1, MOST_DRAFTED), st.lists(bits, min_size=20, max_size=20))
    def test_a_fixed_length_is_that_long(self, length, entropies):
        assert lengths(FixedLength(length), entropies) == length

    @given(st.lists(bits, min_size=1, max_size=30), st.floats(0.05, 0.95))
    def test_the_product_stops_at_the_first_token_under_the_bound(self, entropies, bound):
        curve = AcceptanceCurve((1.0, 3.0), (0.99, 0.8, 0.5))
        products = np.cumprod([curve(h) for h in entropies])
        under = np.flatnonzero(products < bound)
        assert lengths(ProductRule(curve, bound), entropies) == (under[0] + 1 if len(under) else len(entropies))

    @given(st.lists(bits, min_size=1, max_size=30))
    def test_uncalibrated_it_is_four_bits_over_the_draft(self, entropies):
        under = np.flatnonzero(np.cumsum(entropies) > 4 + 1e-9)
        most = under[0] + 1 if len(under) else len(entropies)
        assert lengths(default_rule(), entropies) <= most

    @pytest.mark.parametrize("length", [0, -1, 16])
    def test_a_draft_must_fit_a_check(self, length):
        with pytest.raises(GearbxError, match="1 to 15"):
            FixedLength(length)

    @pytest.mark.parametrize("bound", [0, 1, -0.5, math.nan])
    def test_the_bound_is_a_probability(self, bound):
        with pytest.raises(GearbxError, match="between 0 and 1"):
            ProductRule(lambda h: 0.5, bound)


class TestReplay:
    @given(tokens, st.integers(1, 15))
    def test_every_token_is_made_once(self, recorded, length):
        done = replay_drafts([tuple(zip(*recorded))], FixedLength(length))
        assert done.tokens == len(recorded) == done.accepted + done.verifications
        assert done.accepted <= done.drafted <= done.verifications * length

    def test_a_draft_that_always_agrees(self):
        done = replay_drafts([([0.0] * 50, [True] * 50)], FixedLength(4))
        assert (done.tokens, done.drafted, done.accepted, done.verifications) == (50, 40, 40, 10)
        assert done.weight_bytes_per_token(1, 10) == (40 + 100) / 50

    def test_a_draft_that_never_does(self):
        done = replay_drafts([([0.0] * 50, [False] * 50)], FixedLength(1))
        assert (done.tokens, done.drafted, done.accepted, done.verifications) == (50, 49, 0, 50)

    def test_what_is_best_is_found_by_trying(self):
        agrees = [bool(a) for a in np.random.default_rng(0).uniform(size=2000) < 0.9]
        sequences = [([0.0 if a else 5.0 for a in agrees], agrees)]
        curve = fit_curve(*sequences[0])
        length, fixed = best_length(sequences, 1, 4)
        _, read = best_bound(sequences, curve, 1, 4)
        costs = [replay_drafts(sequences, FixedLength(n)).weight_bytes_per_token(1, 4) for n in range(1, 16)]
        assert fixed == min(costs) == costs[length - 1]
        assert read < fixed  # the entropy predicts where the draft fails


class TestFile:
    def test_goes_out_and_in(self):
        assert parse_draft_file(content().text()) == content()

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"schema": "other"}, "schema"),
            ({"version": 2}, "version"),
            ({"bound": "0.5"}, 'bound is "0.5", not a number'),
            ({"bound": 2.0}, "between 0 and 1"),
            ({"edges": ["a", 2]}, r'edges\[0\] is "a", not a number'),
            ({"agreement": [0.1, 0.2, 0.3]}, "must not rise"),
            ({"draft": 16}, "draft is 16"),
            ({"gears": None}, "gears is null, not a list"),
        ],
    )
    def test_refuses_what_it_cannot_use(self, change, says):
        with pytest.raises(GearbxError, match=says):
            parse_draft_file(json.dumps(json.loads(content().text()) | change))

    @pytest.mark.parametrize("text", ["", "[1]", "{", "null", "[" * 100000])
    def test_refuses_what_is_something_else(self, text):
        with pytest.raises(GearbxError):
            parse_draft_file(text)

    def test_is_for_one_model_ladder_and_vocabulary(self):
        made = content()
        made.check([4, 16], 128, "ab")
        for arguments, says in [
            (([4, 8, 16], 128, "ab"), "made for gears 4,16, not 4,8,16"),
            (([4, 16], 100, "ab"), "vocabulary of 128, this model has 100"),
            (([4, 16], 128, "cd"), "another model"),
        ]:
            with pytest.raises(GearbxError, match=says):
                made.check(*arguments)


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
