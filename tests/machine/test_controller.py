"""The controller's numbers on machines of many kinds."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gearbx_mlx import GearbxError
from gearbx_mlx.machine import controller as numbers
from gearbx_mlx.machine.controller import DEAD_BAND, DECIDE_EVERY, LAG, PID, CapSchedule, Controller, Range

WIDTHS = (4, 5, 6, 8)


def schedule(layers: int = 30, widths=WIDTHS, gears=(8,), fixed: int = 50_000, sensitivity=None) -> CapSchedule:
    """Layers of three sizes, the first the least sensitive."""
    found = []
    for number in range(layers):
        weights = 4096 * (1 + number % 3)
        read = {bits: weights * bits // 8 for bits in {*widths, *gears}}
        found.append(Range(f"layers.{number}", widths, gears, read, weights))
    return CapSchedule(found, sensitivity or (lambda path, bits: 4.0**-bits * (1 + int(path.split(".")[1]))), fixed)


class Plant:
    """A machine whose time per token is that of the bytes plus a constant; caps act LAG tokens late."""

    def __init__(self, controller: Controller, overhead: float = 0.0, noise: float = 0.0, seed: int = 0, passes=(1,)):
        self.controller, self.overhead, self.noise, self.passes = controller, overhead, noise, passes
        self.read = controller.schedule.read(passes)
        self.random = np.random.default_rng(seed)
        self.positions = [0] * (LAG + 1)
        self.decisions = []

    def speeds(self, slower: float) -> np.ndarray:
        """Tokens per second at every position; 1 at the top where nothing is slower."""
        return 1 / (slower * (self.overhead + (1 - self.overhead) * self.read / self.read[0]))

    def run(self, tokens: int, slower: float = 1.0, share: float = 1.0) -> np.ndarray:
        """Speeds without noise, of so many tokens."""
        speeds, found = self.speeds(slower), []
        for _ in range(tokens):
            self.positions.append(self.controller.position)
            speed = speeds[self.positions[-1 - LAG]]
            found.append(speed)
            seconds = math.exp(self.noise * self.random.standard_normal()) / speed
            decision = self.controller.token(seconds, self.passes, share)
            if decision:
                self.decisions.append(decision)
        return np.array(found)

    def goal(self, slower: float) -> float:
        speeds = self.speeds(slower)
        return float(np.clip(self.controller.target, speeds.min(), speeds.max()))


class TestStairs:
    def test_moves_least_sensitive_down_and_most_sensitive_up(self):
        found = schedule(3, (4, 8), sensitivity=lambda path, bits: {"layers.0": 2, "layers.1": 3, "layers.2": 1}[path])
        assert [step.path for step in found.steps] == ["layers.2", "layers.0", "layers.1"]
        assert found.caps(1) == {"layers.0": 8, "layers.1": 8, "layers.2": 4}
        assert found.caps(2)["layers.0"] == 4  # the first to be taken back

    def test_bytes_match_caps(self):
        found = schedule(5, gears=(4, 8))
        for position in (0, 3, 8, found.last):
            caps = found.caps(position)
            read = sum(layer.read[min(8, caps[path])] for path, layer in found.layers.items())
            assert found.read([0, 1])[position] == read + found.fixed
            low = sum(layer.read[4] for layer in found.layers.values())
            assert found.read([2, 0])[position] == 2 * (low + found.fixed)

    def test_within_is_a_fraction(self):
        found = schedule()
        read = found.read([1])
        assert found.within(1.0) == 0
        assert found.within(0.0) == found.last
        half = found.within(0.5)
        assert read[half] <= (read[0] + read[-1]) / 2 < read[half - 1]


class TestPID:
    def test_update_matches_formula(self, monkeypatch):
        for name, factor in (("PROPORTIONAL", 0.5), ("INTEGRAL", 0.25), ("DERIVATIVE", 2.0)):
            monkeypatch.setattr(numbers, name, factor)
        pid, errors = PID(), [1.0, 3.0, -2.0]
        told = [pid.update(error) for error in errors]
        sums, changes = np.cumsum(errors), np.diff(errors, prepend=0.0)
        assert told == pytest.approx(0.5 * np.array(errors) + 0.25 * sums + 2.0 * changes)

    def test_does_not_wind_up(self):
        free, stuck = PID(), PID()
        for _ in range(1000):
            stuck.update(5.0)
            stuck.track(0.0)  # the actuator cannot
        free.update(5.0)
        free.track(0.0)
        free.update(5.0)
        free.track(0.0)
        assert stuck.update(-1.0) == pytest.approx(free.update(-1.0))
        assert stuck.update(-1.0) < 0


class TestController:
    @pytest.mark.some(8)
    @pytest.mark.parametrize("overhead", [0.0, 0.3, 0.5])
    @pytest.mark.parametrize("target", [0.8, 1.0, 1.2, 1.5])
    @pytest.mark.parametrize("noise", [0.0, 0.05])
    def test_a_step_down_and_up(self, target, noise, overhead):
        for seed in range(5):
            plant = Plant(Controller(schedule(), target), overhead, noise, seed)
            plant.run(103)
            for slower in (1.7, 1.0):
                speeds, goal = plant.run(200, slower), plant.goal(slower)
                beyond = np.sign(goal - speeds[0]) * (speeds / goal - 1)
                assert np.all(np.abs(speeds[60:] / goal - 1) < 0.10)
                assert beyond.max() < 0.15
                changes = np.flatnonzero(np.diff(plant.positions[-140:]))
                assert len(changes) <= 1  # a last correction, once enough tokens have been seen

    def test_holds_still_in_noise(self):
        moved = 0
        for seed in range(10):
            plant = Plant(Controller(schedule(), 1.3), 0.2, 0.1, seed)
            plant.run(200)
            plant.run(1000)
            moved += np.count_nonzero(np.diff(plant.positions[-1000:]))
        assert moved <= 5  # of 1000 decisions

    def test_machine_pause_does_not_count_as_speed(self):
        controller = Controller(schedule(), 1.0)
        plant = Plant(controller)
        plant.run(100)
        for _ in range(10):
            controller.token(20.0, (1,))  # another program used the machine
            plant.run(19)
        assert {*plant.positions} == {0}

    def test_no_table_meets_the_target(self):
        controller = Controller(schedule(), 50.0)
        plant = Plant(controller)
        plant.run(100)
        assert controller.position == controller.schedule.last
        assert controller.out_of_reach == "no table meets 50 tokens/s: every layer is at its fewest bits"
        assert "fewest bits" in plant.decisions[-1].reason
        plant.run(500)
        controller.target = 0.9  # nothing has wound up meanwhile: the way back takes as long as the way there
        plant.run(45)
        assert controller.position == 0

    def test_budget_precedes_target(self):
        controller = Controller(schedule(), 0.5)
        plant = Plant(controller)
        plant.run(DECIDE_EVERY, share=0.5)
        assert controller.position == controller.schedule.within(0.5)
        plant.run(100, share=0.5)
        assert controller.position == controller.schedule.within(0.5)
        assert "the machine allows no more" in plant.decisions[-1].reason
        plant.run(60)
        assert controller.position == 0

    def test_without_target_only_budget_caps(self):
        controller = Controller(schedule())
        plant = Plant(controller)
        for share in (1.0, 0.3, 0.0, 0.6):
            plant.run(DECIDE_EVERY, share=share)
            assert controller.position == controller.schedule.within(share)

    def test_unaffected_gears_move_no_caps(self):
        controller = Controller(schedule(gears=(4, 8)), 5.0)
        plant = Plant(controller, passes=(1, 0))
        plant.run(100)
        assert controller.position == 0
        assert controller.out_of_reach is not None

    def test_decision_describes_action_and_reason(self):
        controller = Controller(schedule(), 2.0)
        plant = Plant(controller)
        plant.run(DECIDE_EVERY)
        (decision,) = plant.decisions
        assert decision.token == DECIDE_EVERY
        assert decision.tokens_per_second == pytest.approx(1.0)
        assert decision.reason == "1 tokens/s for a target of 2"
        assert decision.position == controller.position > 0
        capped = {path: bits for path, bits in controller.caps.items() if bits < 8}
        assert {step.path: step.after for step in decision.moved} == capped

    @pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
    def test_impossible_target_is_refused(self, target):
        with pytest.raises(GearbxError, match="must be more than 0 tokens per second"):
            Controller(schedule(), target)

    @pytest.mark.slow
    @given(
        target=st.floats(0.3, 4.0),
        slower=st.floats(0.5, 3.0),
        overhead=st.floats(0.0, 0.6),
        widths=st.sampled_from([(4, 8), WIDTHS, (3, 4, 5, 6, 8), (2, 8)]),
        layers=st.integers(12, 60),
    )
    @example(target=0.8828125, slower=2.046875, overhead=0.34375, widths=(2, 8), layers=46)  # a late correction
    def test_settles_on_any_machine_and_stays(self, target, slower, overhead, widths, layers):
        controller = Controller(schedule(layers, widths), target)
        plant = Plant(controller, overhead)
        plant.run(95)
        speeds = plant.run(160, slower)
        goal, nearest = plant.goal(slower), plant.speeds(slower)
        step = np.max(np.abs(np.diff(np.log(nearest))))  # of the schedule
        late = np.abs(np.log(speeds[60:] / goal))
        assert np.all(late <= max(DEAD_BAND, step) + 1e-9)
        changes = np.diff(plant.positions[-100:])
        assert np.all(changes >= 0) or np.all(changes <= 0)  # last corrections, never there and back
        assert len({*plant.positions[-60:]}) == 1  # and then none at all
