"""Times that a sequence's state reports to the policy, with a simulated clock and no model."""

import pytest
from conftest import Clock

from gearbx_mlx.decoding.plan import DecodePlan, DecodeState


@pytest.mark.parametrize(
    ("is_queued", "away", "seconds"),
    [(True, 1.9, 10.0), (True, 2.1, None), (False, 2.1, 7.9)],
)
def test_round_with_long_pause_has_no_time(is_queued, away, seconds):
    clock = Clock()
    plan = DecodePlan(None, keywords=None, chooser=None, clock=clock)
    state = DecodeState(text=None, cache=[], is_queued=is_queued, started=(100.0, 5.0), away=5.0 + away)
    clock.now = 110.0
    assert state.seconds(plan) == (None if seconds is None else pytest.approx(seconds))
