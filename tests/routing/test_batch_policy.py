"""The gear of a step, from the gears that the sequences of a batch want."""

import pytest

from gearbx_mlx import GearbxError
from gearbx_mlx.routing.gates import policy_named


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


def test_a_function_is_a_policy():
    assert policy_named(min)([2, 1]) == 1


@pytest.mark.parametrize("name", ["", "high", "quantile", "quantile:", "quantile:1.1", "quantile:-1", "quantile:nan"])
def test_a_name_that_no_policy_has_is_refused_in_one_line(name):
    with pytest.raises(GearbxError, match=r"^batch policy .* does not exist; choose highest, most, or quantile:Q"):
        policy_named(name)
