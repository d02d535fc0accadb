import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gearbx_mlx import GearbxError, Monitor, ThresholdGate
from gearbx_mlx.routing import calibration
from gearbx_mlx.routing.gates import Reading, default_thresholds, difficulty, first_gear, policy_named, replay

VOCABULARY = 32768
bits = st.floats(0, 15, allow_nan=False)
sequences = st.lists(bits, min_size=1, max_size=80)
ladders = st.lists(st.floats(0.1, 14), min_size=1, max_size=6, unique=True).map(sorted)


def steady(level: float) -> Reading:
    return Reading(level, level, 0.0, level, False)


class TestMonitor:
    @given(sequences, st.integers(1, 8))
    def test_mean_covers_last_window(self, values, window):
        monitor = Monitor(VOCABULARY, window)
        for i, value in enumerate(values):
            reading = monitor.update(value)
            assert reading.mean == pytest.approx(statistics.fmean(values[max(0, i + 1 - window) : i + 1]))
            assert reading.value == value

    def test_slope_and_forecast(self):
        monitor = Monitor(VOCABULARY, window=3)
        assert monitor.update(1.0).slope == 0.0
        assert monitor.update(2.0).slope == 1.0
        reading = monitor.update(6.0)
        assert reading.slope == pytest.approx((6 - 1) / 2)
        assert reading.forecast == pytest.approx((1 + 2 + 6) / 3 + 2 * 2.5)

    @pytest.mark.parametrize("window", [1, 3])
    def test_catastrophe_needs_two_values_in_a_row(self, window):
        monitor = Monitor(VOCABULARY, window)
        ceiling = 0.9 * 15
        values = (ceiling + 0.1, 1.0, ceiling + 0.1, ceiling + 0.2, ceiling)
        assert [monitor.update(value).catastrophe for value in values] == [False, False, False, True, False]

    def test_reset_monitor_forgets_readings(self):
        monitor = Monitor(VOCABULARY)
        monitor.update(14.9)
        monitor.reset()
        reading = monitor.update(14.0)
        assert (reading.mean, reading.catastrophe) == (14.0, False)

    def test_window_below_one_is_refused(self):
        with pytest.raises(GearbxError, match="window: must be 1 token or more, got 0"):
            Monitor(VOCABULARY, 0)


class TestGate:
    def test_the_papers_three_gears(self):
        gate = ThresholdGate((1.8, 3.5), hysteresis=0.1, min_gear_duration=1)
        levels = [1.8, 1.85, 1.95, 3.49, 3.5, 3.45, 3.39, 1.81, 1.8]
        assert [gate.update(steady(level)) for level in levels] == [0, 0, 1, 1, 2, 2, 1, 1, 0]

    def test_level_on_a_threshold_keeps_one_gear(self):
        gate = ThresholdGate((1.8, 3.5), hysteresis=0, min_gear_duration=1)
        assert [gate.update(steady(level)) for level in (1.8, 1.8, 3.5, 3.5, 3.5, 1.8, 1.8)] == [0, 0, 2, 2, 2, 0, 0]

    def test_jumps_over_a_gear(self):
        gate = ThresholdGate((1.8, 3.5), min_gear_duration=1)
        assert [gate.update(steady(level)) for level in (9.0, 0.1)] == [2, 0]

    @given(sequences, ladders, st.integers(1, 10), st.floats(0, 1))
    def test_holds_a_gear_for_its_duration(self, values, thresholds, duration, hysteresis):
        monitor = Monitor(VOCABULARY)
        gate = ThresholdGate(thresholds, hysteresis, duration)
        gear, since = 0, 0
        for value in values:
            reading = monitor.update(value)
            chosen = gate.update(reading)
            since += 1
            if chosen != gear:
                to_the_top = reading.catastrophe and chosen == len(thresholds)
                assert since >= duration or to_the_top
                gear, since = chosen, 0

    @given(bits, bits, ladders, st.floats(0, 1), st.integers(0, 6))
    def test_is_monotone_in_the_signal(self, a, b, thresholds, hysteresis, gear):
        gate = ThresholdGate(thresholds, hysteresis, 1, initial_gear=min(gear, len(thresholds)))
        assert gate.peek(min(a, b)) <= gate.peek(max(a, b))

    @given(bits, ladders, st.floats(0, 1), st.integers(0, 6))
    def test_a_steady_signal_settles(self, level, thresholds, hysteresis, gear):
        gate = ThresholdGate(thresholds, hysteresis, 1, initial_gear=min(gear, len(thresholds)))
        settled = gate.update(steady(level))
        assert [gate.update(steady(level)) for _ in range(5)] == [settled] * 5

    @given(bits, ladders, st.floats(0.01, 1))
    def test_signal_trembling_within_margin_shifts_once(self, level, thresholds, hysteresis):
        assume(all(b - a > 2 * hysteresis for a, b in itertools.pairwise(thresholds)))
        gate = ThresholdGate(thresholds, hysteresis, 1)
        gears = [gate.update(steady(max(0, level + hysteresis * (0.49 if i % 2 else -0.49)))) for i in range(12)]
        assert sum(a != b for a, b in itertools.pairwise(gears)) <= 1

    def test_catastrophe_engages_top_gear_at_once(self):
        gate = ThresholdGate((1.8, 3.5), min_gear_duration=50)
        assert replay([14.0, 14.0, 0.1, 0.1], Monitor(VOCABULARY), gate) == [0, 2, 2, 2]

    def test_peeking_changes_no_state(self):
        gate = ThresholdGate((1.8, 3.5), min_gear_duration=1)
        assert gate.peek(5.0) == 2
        assert gate.gear == 0

    @pytest.mark.parametrize(
        ("thresholds", "settings", "complaint"),
        [
            ((3.5, 1.8), {}, "ascend"),
            ((1.8, 1.8), {}, "ascend"),
            ((1.8, math.nan), {}, "finite"),
            ((1.8, math.inf), {}, "finite"),
            ((1.0,), {"hysteresis": -1}, "hysteresis"),
            ((1.0,), {"min_gear_duration": 0}, "duration"),
        ],
    )
    def test_bad_settings_are_refused(self, thresholds, settings, complaint):
        with pytest.raises(GearbxError, match=complaint):
            ThresholdGate(thresholds, **settings)


class TestThresholds:
    def test_defaults_scale_with_the_vocabulary(self):
        assert default_thresholds(3, 32768) == pytest.approx((1.8, 3.5))
        assert default_thresholds(3, 4096) == pytest.approx((1.8 * 12 / 15, 3.5 * 12 / 15))
        assert default_thresholds(2, 32768) == pytest.approx((1.8,))
        assert default_thresholds(1, 32768) == ()
        assert default_thresholds(4, 32768) == pytest.approx((1.8, 2.65, 3.5))

    @pytest.mark.parametrize(
        ("samples", "vocabulary", "thresholds"),
        [
            ([i / 10 for i in range(1, 11)], 2**40, (0.3, 0.7)),  # n = 10: e[2] and e[6]
            ([9.0 + i for i in range(10)], VOCABULARY, (0.06 * 15, 0.12 * 15)),  # capped
            ([0.5] * 10, VOCABULARY, (0.4, 0.6)),  # widened around its centre
        ],
    )
    def test_percentiles_set_the_thresholds(self, samples, vocabulary, thresholds):
        assert calibration.percentile_thresholds(samples, 3, vocabulary) == pytest.approx(thresholds)

    def test_median_sets_the_thresholds(self):
        assert calibration.median_thresholds([0.5, 1.0, 1.0, 1.0, 7.0], 3) == pytest.approx((1.0, 2.5))
        low, high = calibration.median_thresholds([0.1] * 5, 3)
        assert high - low == pytest.approx(0.3)

    def test_too_few_samples_are_refused(self):
        with pytest.raises(GearbxError, match="got 4;"):
            calibration.median_thresholds([0.0, 1.0, 1.0, 1.0, 1.0], 3)

    @pytest.mark.slow
    @pytest.mark.parametrize("shares", [(0.5, 0.3, 0.2), (0.8, 0.2), (0.0, 0.5, 0.5), (0.25, 0.25, 0.25, 0.25)])
    def test_shares_are_reached_on_the_recorded_tokens(self, shares):
        import random

        draw = random.Random(0)
        recorded = [[abs(draw.gauss(2, 1.5)) for _ in range(100)] for _ in range(20)]
        thresholds, reached = calibration.share_thresholds(recorded, shares, VOCABULARY)
        assert reached == pytest.approx(shares, abs=0.06)
        gears = [gear for text in recorded for gear in replay(text, Monitor(VOCABULARY), ThresholdGate(thresholds))]
        assert reached == [gears.count(gear) / len(gears) for gear in range(len(shares))]

    @pytest.mark.parametrize("shares", [(0.5, 0.3, 0.2), (0.8, 0.2), (0.0, 0.5, 0.5), (1.0, 0.0, 0.0)])
    def test_kickdown_leaves_its_share_to_each_gear(self, shares):
        recorded = np.random.default_rng(0).exponential(2.0, (2000, len(shares) - 1))
        thresholds, reached = calibration.kickdown_thresholds(recorded, shares)
        assert reached == pytest.approx(shares, abs=0.001)
        assert [*thresholds] == sorted({*thresholds})
        stays = np.column_stack([recorded <= thresholds, np.ones(len(recorded), bool)]).argmax(axis=1)
        assert reached == [np.mean(stays == gear) for gear in range(len(shares))]

    @pytest.mark.parametrize("shares", [(0.5, 0.1, 0.1), (1.5, -0.5), (math.nan, 0.5)])
    def test_shares_not_summing_to_one_are_refused(self, shares):
        with pytest.raises(GearbxError, match="parts of 1"):
            calibration.share_thresholds([[1.0] * 10], shares, VOCABULARY)


class TestPrompt:
    def test_difficulty_counts_symbols_and_words(self):
        assert difficulty("") == 0.0
        assert difficulty("hello there") == pytest.approx(0.3 * 2 / 50)
        assert difficulty("a + b = c") == pytest.approx(2 * 2 + 0.3 * 5 / 50)
        assert difficulty("solve it") == pytest.approx(1.5 + 0.3 * 2 / 50)
        assert difficulty("extraordinarily complicated") == pytest.approx(1.5 + 0.3 * 2 / 50)
        assert difficulty("word " * 1000) == pytest.approx(0.9)
        assert difficulty("a well-known two-step") < 1  # a hyphen is no minus
        assert difficulty("7 - 5") > 2

    def test_first_gear_follows_difficulty(self):
        assert [first_gear("hello", n) for n in (1, 2, 3, 4)] == [0, 0, 0, 0]
        assert [first_gear("solve it", n) for n in (1, 2, 3, 4)] == [0, 0, 1, 1]
        assert [first_gear("2 + 2 = 4 and 3 * 3 = 9", n) for n in (1, 2, 3, 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "wishes", "gear"),
    [
        ("highest", [0, 2, 1, 0], 2),
        ("most", [0, 2, 0, 1], 0),
        ("most", [0, 2, 2, 0, 1], 2),  # a tie goes to the higher
        ("quantile:0.5", [0, 0, 2, 1], 0),
        ("quantile:0.75", [0, 0, 2, 1], 1),
        ("quantile:0.76", [0, 0, 2, 1], 2),
        ("quantile:0", [1, 2, 1], 1),
        ("quantile:1", [0, 1, 2], 2),
        ("quantile:0.7", [0] * 7 + [1] * 3, 0),  # 0.7 times 10 is a little more than 7 in floating point
        ("quantile:0.5", [1], 1),
    ],
)
def test_the_gear_of_a_step(name, wishes, gear):
    assert policy_named(name)(wishes) == gear


@pytest.mark.parametrize("name", ["", "high", "quantile", "quantile:", "quantile:1.1", "quantile:-1", "quantile:nan"])
def test_unknown_policy_name_is_refused(name):
    with pytest.raises(
        GearbxError, match=r"^batch policy: must be a known name, got .*; choose highest, most, or quantile:Q"
    ):
        policy_named(name)
