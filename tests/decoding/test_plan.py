"""Times that a sequence's state reports to the policy, with a simulated clock and no model."""

from types import SimpleNamespace

import pytest
from conftest import Clock

from gearbx_mlx.decoding.plan import DecodePlan, DecodeState


@pytest.mark.parametrize(
    ("synchronous", "away", "seconds"),
    [(False, 1.9, 10.0), (False, 2.1, None), (True, 2.1, 7.9)],
)
def test_round_with_long_pause_has_no_time(synchronous, away, seconds):
    clock = Clock()
    verifier = SimpleNamespace(is_synchronous=lambda cache: synchronous)
    plan = DecodePlan(verifier, keywords=None, chooser=None, stream=None, clock=clock)
    state = DecodeState(text=None, cache=[], started=(100.0, 5.0), away=5.0 + away)
    clock.now = 110.0
    assert state.seconds(plan) == (None if seconds is None else pytest.approx(seconds))
