"""Timing of launches: what is counted, how often, and when a candidate is given up."""

import time

import mlx.core as mx
import pytest

from gearbx_mlx.kernels.tuner import MOST_CALLS, compare, enough_calls, seconds_of

SLOW, FAST = mx.ones((160, 160)), mx.ones((8, 8))


def product(matrix: mx.array):
    return lambda: [matrix @ matrix]


def test_the_graph_is_built_before_the_clock_starts():
    def make() -> list[mx.array]:
        time.sleep(0.2)
        return [FAST + 1]

    assert seconds_of(make) < 0.2


def test_everything_that_the_calls_build_is_evaluated():
    one, many = (min(seconds_of(product(SLOW), calls) for _ in range(3)) for calls in (1, 16))
    assert many > 4 * one


def test_small_launches_are_many_and_large_ones_few():
    least = 0.002
    calls = enough_calls(product(FAST), least)
    assert 1 < calls <= MOST_CALLS
    assert enough_calls(product(SLOW), least=0.0) == 1
    assert enough_calls(product(mx.ones((2, 2))), least=60) == MOST_CALLS


def test_candidates_are_compared_by_the_seconds_of_a_call():
    times = compare({"slow": product(SLOW), "fast": product(FAST)}, trials=3, least=0.001)
    assert [len(each) for each in times.values()] == [3, 3]
    assert min(times["slow"]) > 3 * min(times["fast"])


def test_a_candidate_that_is_too_slow_is_given_up():
    times = compare({"slow": product(SLOW), "fast": product(FAST)}, trials=4, least=0.001, give_up=3)
    assert (len(times["slow"]), len(times["fast"])) == (1, 4)


def test_no_candidates_take_no_time():
    assert compare({}, trials=2) == {}


def test_what_mlx_cannot_evaluate_is_an_error_of_mlx():
    with pytest.raises(ValueError, match="matmul"):
        compare({"wrong": lambda: [FAST @ SLOW]})
