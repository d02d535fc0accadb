"""What lossless mode learned about a machine is there at the next start, and in the summary."""

import json

import mlx.core as mx
import pytest
from conftest import tiny_model
from lossless_texts import endless
from test_policy import Machine, write

from gearbx_mlx import Gearbox, Lossless, stream_generate
from gearbx_mlx.decoding.drafters import DraftTarget
from gearbx_mlx.decoding.drafters.low_gear import LowGear
from gearbx_mlx.decoding.learned import MeasuredPolicy, measured_seconds, policy_of, rows_of_pass, speed_rows
from gearbx_mlx.decoding.policy import FixedPolicy, LearnedPolicy
from gearbx_mlx.decoding.sampling import GREEDY, Chooser
from gearbx_mlx.kernels import metal

FAST, SLOW = 0.005, 0.03  # seconds of a drafted token


@pytest.fixture
def file(monkeypatch, own_cache):
    """Where times are kept: the tuner's file."""
    monkeypatch.setenv("GEARBX_TUNE", "1")
    return own_cache / "tuning.json"


class Start:
    """A start of the program: a gearbox, and texts on a simulated machine."""

    def __init__(self, seed=0, chooser=GREEDY, **settings):
        self.gearbox = Gearbox(tiny_model(seed=seed), "4,16", **settings)
        self.drafter = LowGear.of(DraftTarget(self.gearbox, [], chooser))
        self.known = policy_of(self.gearbox, self.drafter, chooser)
        self.policy = self.known.policy

    def write(self, tokens, drafted):
        """Write tokens, where plain ones take 15 ms and drafted ones so many seconds."""
        write(self.policy, Machine(drafted=drafted), tokens)
        self.known.note(tokens)

    def drafts(self):
        return self.policy.length(15) > 0


def test_policy_is_learned_unless_measuring_is_disabled(file, monkeypatch):
    gearbox = Gearbox(tiny_model(), "4,16")
    drafter = LowGear.of(DraftTarget(gearbox, [], GREEDY))
    assert isinstance(Lossless().policy_for(gearbox, drafter, GREEDY).policy, LearnedPolicy)
    monkeypatch.setenv("GEARBX_TUNE", "0")
    assert isinstance(Lossless().policy_for(gearbox, drafter, GREEDY).policy, FixedPolicy)


@pytest.mark.parametrize(("drafted", "wins"), [(FAST, True), (SLOW, False)])
def test_faster_method_starts_next_run(file, drafted, wins):
    Start().write(400, drafted)
    assert Start().drafts() == wins


def test_times_and_shares_are_kept_and_no_choice(file):
    first = Start()
    first.write(400, FAST)
    stored = json.loads(file.read_text())
    kept = [times for machine in stored["machines"].values() for name, times in machine.items() if "drafts by" in name]
    assert kept == [first.policy.state]


def test_other_models_and_settings_learn_for_themselves(file):
    Start().write(400, SLOW)
    assert not Start().drafts()
    sampled = Chooser(lambda logprobs: logprobs.argmax(-1))
    for other in (Start(seed=1), Start(kernels="mlx", dtype="bfloat16"), Start(chooser=sampled)):
        assert other.drafts()


def test_few_tokens_are_not_kept(file):
    Start().write(20, FAST)
    assert not file.exists()


def test_new_measurement_ignores_kept_state(file):
    Start().write(400, SLOW)
    assert Start(kernels="measure").drafts()


def test_summary_compares_only_this_run(file):
    start = Start()
    assert measured_seconds(start.gearbox) == {}
    start.write(4000, FAST)
    found = measured_seconds(start.gearbox)
    assert found["plain_seconds"] == pytest.approx(0.015)
    assert 0.005 < found["seconds_in_rounds"] < 0.015
    assert measured_seconds(Start().gearbox) == {}


def test_output_updates_state(file):
    gearbox = Gearbox(tiny_model(), "4,16")
    list(stream_generate(gearbox.model, endless(), [1, 5, 9], 60, gearbox=gearbox, mode=Lossless()))
    assert "drafts by 4 bits for 16 bits" in file.read_text()


class TestFigures:
    def test_few_tokens_give_no_figures(self):
        policy = MeasuredPolicy()
        write(policy, Machine(), 6)
        assert policy.seconds is None

    @pytest.mark.parametrize("early", [True, False])
    def test_figures_come_from_this_run(self, early):
        machine, policy = Machine(), MeasuredPolicy()
        spent, lengths = write(policy, machine, 4000, early=early)
        rounds, plain = policy.seconds
        assert plain == pytest.approx(machine.plain, rel=0.03)
        in_rounds = (spent - machine.plain * lengths.count(0)) / (4000 - lengths.count(0))
        assert rounds == pytest.approx(in_rounds, rel=0.15)

    def test_slowing_machine_changes_no_comparison(self):
        machine, policy = Machine(), MeasuredPolicy()
        write(policy, machine, 4000, slow=lambda token: 1 + token / 1000)
        usual = MeasuredPolicy()
        write(usual, machine, 4000)
        (rounds, plain), (usual_rounds, usual_plain) = policy.seconds, usual.seconds
        assert rounds / plain == pytest.approx(usual_rounds / usual_plain, rel=0.15)

    def test_earlier_start_gives_no_figures(self):
        first = MeasuredPolicy()
        write(first, Machine(), 600)
        again = MeasuredPolicy(first.state)
        write(again, Machine(), 40)
        assert again.seconds is None


class TestSpeedup:
    def test_estimates_effect_of_better_drafts(self):
        """Estimated from rounds with bad drafts, it is near to what drafts write that are right more often."""
        machine, policy = Machine(), MeasuredPolicy()
        slow, _ = write(policy, machine, 4000, share=0.6)
        fast, _ = write(LearnedPolicy(), machine, 4000, share=0.6 + 0.4 * 0.5)
        assert policy.speedup(0.5) == pytest.approx(slow / fast, rel=0.15)
        assert 1 <= policy.speedup(0.1) < policy.speedup(0.5)

    def test_is_not_claimed_without_rounds(self):
        assert MeasuredPolicy().speedup(0.5) is None


def test_speed_compares_rounds_with_plain_decoding():
    summary = {"seconds_in_rounds": 0.01, "plain_seconds": 0.0201, "drafted": 9}
    times = "10 ms/token in rounds, 20.1 ms/token in plain decoding"
    assert speed_rows(summary) == [("speed", f"2.01× with drafts: {times}")]
    assert speed_rows(summary | {"drafted": 0}) == []


@pytest.mark.parametrize("kernels", ["mlx", "native"])
@pytest.mark.parametrize(
    ("chip", "gears", "dtype", "draft", "rows"),
    [
        ("applegpu_g13g", "4,16", "bfloat16", 15, 16),  # M1: a GEMM takes 16 rows at the cost of two
        ("applegpu_g14s", "4,8", "bfloat16", 4, 1),  # M2: quantized weights are read again for each row
        ("applegpu_g15s", "4,16", "bfloat16", 4, 5),  # M3
        ("applegpu_g16s", "4,8", "bfloat16", 4, 5),
        ("applegpu_g17g", "4,16", "float32", 4, 16),  # no kernel of a few rows in float32
        ("another", "4,16", "bfloat16", 4, 5),
    ],
)
def test_rows_of_a_pass_follow_the_gpu(compiled, monkeypatch, chip, gears, dtype, draft, rows, kernels):
    gearbox = Gearbox(tiny_model(dtype=mx.bfloat16), gears, kernels=kernels, dtype=dtype)
    monkeypatch.setattr(metal, "available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": chip})
    assert rows_of_pass(gearbox) == (draft, rows)
