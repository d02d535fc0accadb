"""What lossless mode learned about a machine is there at the next start."""

import json

import pytest
from conftest import tiny_model
from lossless_texts import endless

from gearbx_mlx import Gearbox, Lossless, stream_generate
from gearbx_mlx.decoding.lossless import learned, measured_seconds
from gearbx_mlx.decoding.policy import BURST, FixedPolicy, LearnedPolicy
from gearbx_mlx.decoding.sampling import GREEDY, Chooser


@pytest.fixture
def file(monkeypatch, own_cache):
    """Where times are kept: the tuner's file."""
    monkeypatch.setenv("GEARBX_TUNE", "1")
    return own_cache / "tuning.json"


class Start:
    """A start of the program: a gearbox, and rounds and tokens alone that take the given seconds."""

    def __init__(self, seed=0, chooser=GREEDY, **settings):
        self.gearbox = Gearbox(tiny_model(seed=seed), "4,16", **settings)
        self.drafter = Lossless().drafter(self.gearbox, chooser)
        self.known = learned(self.gearbox, self.drafter, chooser)
        self.policy = self.known.policy

    def write(self, rounds, round_seconds, alone_seconds):
        """Rounds of 4 tokens, of which 3 are drafted, each followed by a token alone."""
        for _ in range(rounds):
            for _ in range(4):
                draft = {"drafted": 3, "accepted": 3, "margins": (3.5,) * 3}
                self.policy.add_round(rows=4, seconds=round_seconds, **draft)
            for _ in range(BURST):
                self.policy.add_plain(alone_seconds)
        self.known.note((16 + BURST) * rounds)

    def drafts(self):
        return self.policy.length(15) > 0


def test_drafts_save_time_unless_nothing_may_be_measured(file, monkeypatch):
    gearbox = Gearbox(tiny_model(), "4,16")
    drafter = Lossless().drafter(gearbox, GREEDY)
    assert isinstance(Lossless().learned(gearbox, drafter, GREEDY).policy, LearnedPolicy)
    monkeypatch.setenv("GEARBX_TUNE", "0")
    assert isinstance(Lossless().learned(gearbox, drafter, GREEDY).policy, FixedPolicy)


@pytest.mark.parametrize(("round_seconds", "wins"), [(1.0, True), (9.0, False)])
def test_the_way_that_was_faster_writes_first_at_the_next_start(file, round_seconds, wins):
    Start().write(30, round_seconds, alone_seconds=1.0)
    assert Start().drafts() == wins


def test_times_and_shares_are_kept_and_no_choice(file):
    first = Start()
    first.write(30, 1.0, 1.0)
    stored = json.loads(file.read_text())
    kept = [times for machine in stored["machines"].values() for name, times in machine.items() if "drafts by" in name]
    assert kept == [first.policy.state]
    assert all(
        name.startswith(("seconds", "drafting", "verifying", "share", "count", "drafted", "written", "comparison"))
        for name in kept[0]
    )


def test_other_models_and_settings_learn_for_themselves(file):
    Start().write(30, 9.0, 1.0)
    assert not Start().drafts()
    sampled = Chooser(lambda logprobs: logprobs.argmax(-1))
    for other in (Start(seed=1), Start(kernels="mlx", dtype="bfloat16"), Start(chooser=sampled)):
        assert other.drafts()


def test_nothing_is_kept_of_a_few_tokens(file):
    Start().write(1, 1.0, 1.0)
    assert not file.exists()


def test_measuring_again_begins_without_what_is_kept(file):
    Start().write(30, 9.0, 1.0)
    assert Start(kernels="measure").drafts()


def test_the_summary_compares_what_this_run_has_seen(file):
    start = Start()
    assert measured_seconds(start.gearbox) == {}
    start.write(30, 1.0, 2.0)
    found = measured_seconds(start.gearbox)
    assert found["seconds_alone"] == pytest.approx(2.0)
    assert found["seconds_in_rounds"] == pytest.approx(0.25)
    assert measured_seconds(Start().gearbox) == {}


def test_a_text_teaches(file):
    gearbox = Gearbox(tiny_model(), "4,16")
    list(stream_generate(gearbox.model, endless(), [1, 5, 9], 60, gearbox=gearbox, mode=Lossless()))
    assert "drafts by 4 bits for 16 bits" in file.read_text()
