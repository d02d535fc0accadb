"""What lossless mode learned about a machine is there at the next start. The test has its own clock."""

import json
import math

import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox, Lossless
from gearbx_mlx.decoding.draft_plans import learned_plan, seconds_of_ways
from gearbx_mlx.decoding.draft_trials import few_pass_times
from gearbx_mlx.routing.acceptance import USUAL_LENGTH
from gearbx_mlx.routing.rounds import FIRST, FIRST_PASSES, LONGEST, MOST_ROWS, TRIAL, UNMADE


@pytest.fixture
def file(monkeypatch, own_cache):
    """Where times are kept: the tuner's file."""
    monkeypatch.setenv("GEARBX_TUNE", "1")
    return own_cache / "tuning.json"


def unmeasured(gearbox, draft):
    """A trial before the first text that says nothing."""


class Start:
    """A start of the program: a gearbox, and texts whose tokens take the given seconds in rounds or alone."""

    def __init__(self, seed=0, ladder="4,16", **settings):
        self.gearbox = Gearbox(tiny_model(seed=seed), ladder, **settings)
        self.plan, self.now = learned_plan(self.gearbox, self.gearbox.ladder[0], 15, unmeasured), 0.0
        self.plan.stretches._clock = lambda: self.now

    def write(self, tokens, rounds, alone, draft=0.3):
        """How each token of a text was written: True for rounds."""
        costs, stretches, ways = self.plan.rounds.costs, self.plan.stretches, []
        stretches.begin()
        for _ in range(tokens):
            stretches.token()
            if stretches.over:
                stretches.turn()
            ways.append(stretches.in_rounds)
            self.now += rounds if ways[-1] else alone
            if ways[-1]:
                if draft:
                    costs.add_draft(draft)
                if costs.wants_verification(1):
                    costs.add_verification(1, alone)
        self.plan.keep()
        return ways


def test_drafts_save_time_unless_nothing_may_be_measured(file, monkeypatch):
    assert Lossless().plan(Gearbox(tiny_model(), "4,16")).rounds.costs.measured
    monkeypatch.setenv("GEARBX_TUNE", "0")
    plan = Lossless().plan(Gearbox(tiny_model(), "4,16"))
    assert (plan.rounds.costs.measured, plan.rule.length) == (False, USUAL_LENGTH)


@pytest.mark.filterwarnings("error")
def test_a_ladder_of_one_gear_keeps_the_times_of_its_rows(file):
    first = Start(ladder="16")
    assert not first.plan.rounds.costs.ready
    first.write(LONGEST, rounds=1.0, alone=2.0, draft=None)
    again = Start(ladder="16")
    assert again.plan.rounds.costs.ready
    assert again.plan.rounds.costs.verification(1) == pytest.approx(2.0)
    assert not again.plan.rounds.drafts()


def test_the_way_that_won_writes_first_at_the_next_start(file):
    for rounds, alone, pause in ((2.0, 1.0, UNMADE // 2), (1.0, 2.0, FIRST)):
        file.unlink(missing_ok=True)
        first = Start().write(2 * TRIAL[True], rounds, alone)
        assert first[: TRIAL[True]] == [True] * TRIAL[True]
        again = Start().write(pause - 2 * TRIAL[True], rounds, alone)
        assert again == [rounds < alone] * len(again)


def test_passes_cost_what_they_cost_before(file):
    Start().write(100, 1.0, 2.0)
    costs = Start().plan.rounds.costs
    assert costs.ready
    assert costs.draft() == 0.3
    assert [costs.verification(rows) for rows in (1, MOST_ROWS)] == [2.0, 2.0]


@pytest.mark.slow
def test_what_lost_is_tried_again_after_many_starts_with_short_texts(file):
    Start().write(2 * TRIAL[True], 2.0, 1.0)
    ways = [way for _ in range(160) for way in Start().write(50, 0.5, 1.0)]  # rounds have become faster
    assert LONGEST < ways.index(True) < UNMADE + 50  # a trial makes the gear
    assert sum(ways[-500:]) > 400


def test_other_models_and_settings_learn_for_themselves(file):
    Start().write(100, 2.0, 1.0)
    for other in (Start(seed=1), Start(group_size=32), Start(kernels="mlx", dtype="bfloat16")):
        assert other.plan.rounds.costs.ready == (other.gearbox.group_size == 32)


def test_nothing_is_kept_before_both_ways_and_a_draft_were_seen(file):
    Start().write(FIRST_PASSES, 1.0, 2.0)
    assert not file.exists()


def test_nothing_is_kept_or_known_where_nothing_is_measured(file, monkeypatch):
    Start().write(100, 1.0, 2.0)
    before = file.read_text()
    monkeypatch.setenv("GEARBX_TUNE", "0")
    start = Start()
    assert not start.plan.rounds.costs.ready
    start.write(100, 5.0, 2.0)
    assert file.read_text() == before


def test_a_file_that_lacks_something_is_measured_again(file):
    Start().write(100, 1.0, 2.0)
    stored = json.loads(file.read_text())
    ((times,),) = [machine.values() for machine in stored["machines"].values()]
    del times["7"]
    file.write_text(json.dumps(stored))
    assert not Start().plan.rounds.costs.ready


def test_what_drafts_show_is_there_at_the_next_start(file):
    first = Start()
    first.plan.agreement.add([0.1] * 40, 40)
    first.plan.keep()
    again, other = Start(), Start(seed=1)
    assert again.plan.agreement(0.1) == pytest.approx(first.plan.agreement(0.1))
    assert first.plan.agreement(0.1) > other.plan.agreement(0.1)


def test_the_summary_knows_both_ways_from_an_earlier_start(file):
    Start().write(100, 1.0, 2.0)
    start = Start()
    start.write(40, 1.1, 2.0)
    found = seconds_of_ways(start.gearbox)
    assert math.isclose(found["seconds_alone"], 2.0)
    assert 0.9 < found["seconds_in_rounds"] < 1.2
    assert found["alone_at_earlier_start"]
    start.write(200, 1.1, 2.0)
    assert not seconds_of_ways(start.gearbox)["alone_at_earlier_start"]


def test_a_first_start_measures_before_the_text(file, monkeypatch):
    gearbox, called = Gearbox(tiny_model(), "4,16"), []

    def trial(gearbox, draft):
        called.append(draft.bits)
        return 0.3, {1: 1.0, 4: 1.3}

    def plan(gearbox=gearbox):
        return learned_plan(gearbox, gearbox.ladder[0], 15, trial)

    first = plan()
    costs = first.rounds.costs
    assert costs.ready
    assert costs.draft() == 0.3
    assert [costs.verification(rows) for rows in (1, 2, 4, 16)] == pytest.approx([1.0, 1.1, 1.3, 1.3])
    first.keep()
    assert plan(Gearbox(tiny_model(), "4,16")).rounds.costs.ready
    assert called == [4]
    monkeypatch.setenv("GEARBX_TUNE", "0")
    assert not plan(Gearbox(tiny_model(), "4,16")).rounds.costs.ready


def test_what_is_measured_leaves_the_gearbox_as_it_was(file):
    gearbox = Gearbox(tiny_model(), "4,16")
    step, rows = few_pass_times(gearbox, gearbox.ladder[0])
    assert 0 < step < 10
    assert all(0 < seconds < 10 for seconds in rows.values())
    assert (gearbox.gear, gearbox.shifts) == (gearbox.ladder.top, 0)
    assert few_pass_times(gearbox, gearbox.ladder.top) is None
