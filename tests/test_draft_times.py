"""How long passes take: measured by calibrate --cost time, written into the drafting file, and used by generate."""

import gc
import json
import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import mlx.core as mx
import pytest
from conftest import tiny_model
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler
from msgspec.structs import asdict, replace

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Lossless, batch_generate, calibrate, stream_generate
from gearbx_mlx.decoding.draft_plans import DraftPlans, shipped
from gearbx_mlx.decoding.draft_trials import draft_times, machine_of, times_here
from gearbx_mlx.routing.acceptance import (
    AcceptanceCurve,
    DraftTimes,
    LearnedAgreement,
    ProductRule,
    parse_draft_file,
    typical_agreement,
)
from gearbx_mlx.routing.rounds import MOST_ROWS, CostRule, Costs, LearnedCosts, Rounds

QUESTION = "Question: Tom has 5 apples and buys 7 more. How many apples does he have?\nAnswer:"


def times_of(machine, **change):
    values = {
        "machine": machine,
        "context": 256,
        "alone": 0.8,
        "draft": 0.3,
        "verification": [1.0] * MOST_ROWS,
        "per_token": 0.5,
    }
    return DraftTimes(**values | change)


def file_with(times):
    made = json.loads(next(made for made in shipped() if made.gears == [4, 16]).text())
    return made | {"gears": [3, 16], "draft": 3, "format": "planes", "times": times}


class TestMeasuring:
    @pytest.mark.slow
    def test_every_pass_has_a_time(self):
        model = tiny_model(hidden_size=512, intermediate_size=2048)
        gearbox = Gearbox(model, "4,16")
        recorded, curve = [([1.0, 2.0], [True, False])], AcceptanceCurve((), (0.5,))
        times = draft_times(gearbox, gearbox.ladder.top, gearbox.ladder[0], 64, recorded, curve)
        assert len(times.verification) == MOST_ROWS
        assert all(seconds > 0 for seconds in (times.alone, times.draft, *times.verification))
        assert gearbox.gear == gearbox.ladder.top

    @pytest.mark.slow
    def test_calibrate_writes_what_generate_reads(self, command, tmp_path):
        file = tmp_path / "d.json"
        flags = ("--mode", "lossless", "--gears", "4,16", "--format", "exact", "-m", 12, "--num-prompts", 2)
        done = command("calibrate", *flags, "--cost", "time", "--context", 32, "--out", file)
        assert done.status == 0
        assert "times as fast as the top gear (predicted)" in done.out
        times = parse_draft_file(file.read_text()).times
        assert times.context == 32
        assert times.times_faster == pytest.approx(times.alone / times.per_token)
        summary = tmp_path / "s.json"
        done = command("generate", "--mode", "lossless", "--curve", file, "-m", 12, "--summary", summary)
        assert done.status == 0
        assert "other conditions" not in done.err
        assert json.loads(summary.read_text())["tokens"] == 12

    def test_without_the_flag_there_are_none(self):
        made = calibrate(mode="lossless", gears="4,16", max_tokens=6, num_prompts=1)
        assert made.times is None

    def test_it_is_for_mode_lossless(self, command):
        done = command("calibrate", "--cost", "time", "--gears", "4,16")
        assert done.status == 2
        assert "--cost time is for --mode lossless" in done.err.replace("\n", " ")


class TestFile:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"verification": [1.0] * 3}, "times.verification"),
            ({"alone": 0.0}, "times.alone is 0"),
            ({"draft": 0.0}, "times.draft is 0"),
            ({"per_token": float("inf")}, "Infinity|per_token"),
            ({"verification": [1.0] * 15 + [-1.0]}, r"times.verification\[15\]"),
        ],
    )
    def test_refuses_times_that_cannot_be(self, change, says):
        with pytest.raises(GearbxError, match=says):
            parse_draft_file(json.dumps(file_with(asdict(times_of("this", **change)))))

    @pytest.mark.parametrize(("value", "says"), [({"draft": "1"}, "times"), ([], "times"), ({"draft": -1}, "times")])
    def test_refuses_a_file_whose_times_are_something_else(self, value, says):
        with pytest.raises(GearbxError, match=says):
            parse_draft_file(json.dumps(file_with(value)))

    def test_is_as_many_times_faster_as_mlx_lms_own_loop_takes_longer(self):
        assert times_of("this", alone=0.8, per_token=0.5).times_faster == pytest.approx(1.6)

    def test_goes_out_and_in(self):
        text = json.dumps(file_with(asdict(times_of("this"))))
        made = parse_draft_file(text)
        assert made.times == times_of("this")
        assert parse_draft_file(made.text()) == made


class TestUse:
    def test_times_of_this_machine_are_where_learning_begins(self, tiny):
        gearbox = Gearbox(tiny, "4,16")
        times = times_of(machine_of(gearbox), verification=[1.0 + rows for rows in range(MOST_ROWS)])
        assert times_here(times, gearbox) is times
        costs = LearnedCosts((times.draft, dict(enumerate(times.verification, 1))))
        assert costs.ready
        assert (costs.draft(), costs.verification(1), costs.verification(16)) == (0.3, 1.0, 16.0)

    def test_times_of_another_machine_are_left_out_and_said_to_be(self, tiny):
        gearbox = Gearbox(tiny, "4,16")
        with pytest.warns(GearbxWarning, match="times belong to elsewhere"):
            assert times_here(times_of("elsewhere"), gearbox) is None

    def test_a_text_does_not_begin_with_times_of_another_machine(self, geared_demo):
        made = parse_draft_file(json.dumps(file_with(None)))
        for machine, known in ((machine_of(geared_demo), 100.0), ("elsewhere", 0.0)):
            mode = Lossless(cost="time", curve=replace(made, times=times_of(machine, draft=100.0)))
            with nullcontext() if known else pytest.warns(GearbxWarning, match="they are not used"):
                assert mode.plans(geared_demo).of(1).rounds.costs.draft() == known

    def test_a_machine_is_its_processor_and_its_kernels(self, tiny):
        native, plain = Gearbox(tiny, "4,16", kernels="native"), Gearbox(tiny_model(), "4,16", kernels="mlx")
        assert machine_of(native) != machine_of(plain)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"format": "rowwise"}, "rowwise"),
            ({"group_size": 32}, "32"),
            ({"activations": "float"}, "float activations"),
            ({"dtype": "bfloat16"}, "bfloat16"),
        ],
    )
    def test_times_of_other_settings_are_left_out_and_said_to_be(self, tiny, change, says):
        settings = {"kernels": "native", "group_size": 64, "dtype": "float32"}
        times = times_of(machine_of(Gearbox(tiny, "4,16", **settings)))
        other = Gearbox(tiny_model(), "4,16", **settings | change)
        with pytest.warns(GearbxWarning, match=f"and this is .*{says}"):
            assert times_here(times, other) is None

    def test_where_drafts_took_long_they_begin_short_and_the_text_is_the_same(self, geared_demo, demo):
        slow = times_of(machine_of(geared_demo), draft=100.0, per_token=1.0)
        made = parse_draft_file(json.dumps(file_with(None)))
        runs = {}
        for cost in ("bytes", "time"):
            mode = Lossless(curve=replace(made, times=slow), cost=cost, lookup_tokens=0)
            mx.random.seed(0)
            runs[cost] = list(stream_generate(demo.model, demo.tokenizer, QUESTION, 60, gearbox=geared_demo, mode=mode))
        assert [r.token for r in runs["time"]] == [r.token for r in runs["bytes"]]
        drafted = {cost: [r.drafted for r in run if r.drafted] for cost, run in runs.items()}
        assert max(drafted["bytes"]) > 1
        assert drafted["time"][0] == 1  # a trial, which shows how long a draft takes here


@dataclass
class Steady:
    """A user's own agreement class, which cannot be hashed."""

    value: float

    def __call__(self, entropy):
        return self.value


class TestWhatIsLearned:
    """Plans with costs in time learn over texts, as long as these texts have the same rule and times."""

    def plan(self, gearbox, agreement=typical_agreement, times=None):
        return DraftPlans(gearbox, gearbox.ladder[0], ProductRule(agreement, 0.5), "time", 15, times).of(1)

    def test_goes_on_with_the_same_curve_and_times(self, tiny):
        gearbox = Gearbox(tiny, "4,16")
        assert self.plan(gearbox) is self.plan(gearbox)
        curves = [AcceptanceCurve(edges, (0.9, 0.1)) for edges in ((1.0,), (1.0,), [1.0])]
        one, same, listed = (self.plan(gearbox, curve, times_of("this")) for curve in curves)
        assert one is same is listed

    def test_begins_with_the_times_of_each_file(self, tiny):
        gearbox = Gearbox(tiny, "4,16")
        drafts = [
            self.plan(gearbox, times=times and times_of("this", draft=times)).rounds.costs.draft()
            for times in (None, 0.3, 0.7, 0.3)
        ]
        assert drafts == [0.0, 0.3, 0.7, 0.3]

    def test_stays_with_a_text_where_the_rule_is_the_users_own(self, tiny):
        gearbox = Gearbox(tiny, "4,16")
        assert self.plan(gearbox, Steady(0.9)).rule.agreement == Steady(0.9)
        agreements = [lambda entropy: 0.9 for _ in range(2)]
        kept = [weakref.ref(agreement) for agreement in agreements]
        for agreement in agreements:
            self.plan(gearbox, agreement)
        del agreement, agreements
        gc.collect()
        assert [agreement() for agreement in kept] == [None, None]

    @pytest.fixture
    def untaught(self, fresh_demo, monkeypatch):
        """A gearbox that drafts whatever passes cost here, and whatever an earlier start has seen."""
        monkeypatch.setenv("GEARBX_TUNE", "1")
        monkeypatch.setattr(Rounds, "drafts", lambda *_: True)
        gearbox = Gearbox(fresh_demo.model, "3,16")
        cache = gearbox.kernel_choices.tuner.cache
        monkeypatch.setattr(cache, "times", {})
        monkeypatch.setattr(cache, "save_soon", lambda: None)
        return gearbox

    def test_drafts_say_how_often_gears_agree(self, untaught, demo):
        mode = Lossless(cost="time", lookup_tokens=0)
        learned = mode.plans(untaught).of(1).agreement
        text = list(stream_generate(untaught.model, demo.tokenizer, QUESTION, 20, mode=mode, gearbox=untaught))
        rounds = rounds_of(text)
        known = sum(min(tokens[0].drafted, len(tokens)) for tokens in rounds[:-1])
        assert 0 < known <= learned.drafted <= known + rounds[-1][0].drafted

    def test_they_do_by_mlxs_kernels_in_half_precision(self, fresh_demo):
        gearbox = Gearbox(fresh_demo.model, "4,16", kernels="mlx", dtype="bfloat16")
        mode = Lossless(rule=CostRule(LearnedAgreement(), Costs(lambda: 1.0, lambda rows: 4.0)))
        text = stream_generate(fresh_demo.model, fresh_demo.tokenizer, QUESTION, 20, mode=mode, gearbox=gearbox)
        assert sum(response.drafted for response in text) > 0

    def test_a_sampler_without_a_kernel_says_nothing_about_others(self, geared_demo, demo, monkeypatch):
        monkeypatch.setenv("GEARBX_TUNE", "1")
        mode = Lossless(cost="time", lookup_tokens=0)
        own, theirs = (mode.plans(geared_demo, has_kernel).of(1).stretches for has_kernel in (True, False))
        before = own.seconds
        how = {"mode": mode, "gearbox": geared_demo, "sampler": mlx_lm_sampler(0.5)}
        list(stream_generate(demo.model, demo.tokenizer, QUESTION, 60, **how))
        assert theirs.seconds
        assert own.seconds == before

    def test_drafts_of_several_texts_say_so_too(self, untaught, demo):
        mode = Lossless(cost="time", lookup_tokens=0)
        learned = mode.plans(untaught).of(2).agreement
        prompts = [demo.tokenizer.encode(QUESTION)] * 2
        for _ in range(3):
            batch_generate(untaught.model, demo.tokenizer, prompts, max_tokens=60, mode=mode, gearbox=untaught)
        assert learned.drafted > 0


def rounds_of(responses):
    """The tokens of a text by the passes of the top gear that made them."""
    rounds = []
    for response in responses:
        if response.passes[-1]:
            rounds.append([])
        rounds[-1].append(response)
    return rounds
