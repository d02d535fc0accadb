"""Schedules in commands: what is refused, when and in which words; policies of evaluate; the result of calibrate."""

import io
import json
import sys

import numpy as np
import pytest
from chats import chat
from conftest import tiny_model
from test_bad_input import assert_refused
from test_commands import save_model
from test_target import recording

from gearbx_mlx import Gearbox, GearbxError, Route
from gearbx_mlx import evaluate as run_evaluation
from gearbx_mlx.calibrate import calibrate
from gearbx_mlx.evaluation.policies import HigherOf, Planned, scheduled_plan, shuffled
from gearbx_mlx.evaluation.target import Wish, in_order, schedules
from gearbx_mlx.gears.ladder import Ladder

TALE = "Once upon a time there was a king who had three sons, and each of them wanted to be king after him. "
LADDER = Ladder([4, 8, 16])


@pytest.fixture
def small(tmp_path):
    """A small random model."""
    save_model(tiny_model(vocab_size=4096), tmp_path / "small")
    return tmp_path / "small"


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TALE * 40)
    return file


class TestBesideTheGate:
    """A schedule sets every gear, so the flags of the gate would have no effect."""

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (["--thresholds", "1"], ["--thresholds"]),
            (["--initial-gear", "high"], ["--initial-gear"]),
            (["--window", "2", "--hysteresis", "0.2"], ["--hysteresis and --window"]),
            (["--min-gear-duration", "2"], ["--min-gear-duration"]),
        ],
    )
    @pytest.mark.parametrize("name", ["generate", "chat", "server"])
    def test_is_refused(self, command, name, flags, named):
        given = ["--gears", "4,8", "--schedule", "8:32,4", *flags]
        assert_refused(command(name, *given, *(["--port", "0"] if name == "server" else [])), "--schedule", *named)

    def test_is_refused_in_a_program(self):
        with pytest.raises(GearbxError, match="leave thresholds, initial gear, hysteresis"):
            Route(schedule="16:5,3", hysteresis=0.2)

    def test_is_refused_in_a_chat_that_runs(self):
        with chat(gears="3,16") as session, pytest.raises(GearbxError, match="leave --thresholds out"):
            session.model.change("route", ["--schedule", "16:3,3", "--thresholds", "1"])

    def test_is_refused_with_two_models(self, command):
        for flags in (["--schedule", "8:3,4"], ["--prompt-gear", "8"], ["--tolerance", "1"]):
            assert_refused(command("generate", "--small-model", "none", *flags), flags[0], "--small-model")


class TestWords:
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--schedule", "4:3,8"], ["--schedule '4:3,8'", "descend", "choose from 4 (low), 8 (high)"]),
            (["--schedule", "8:3,8"], ["--schedule '8:3,8'", "descend"]),
            (["--schedule", "6:3,4"], ["--schedule '6:3,4'", "no gear '6' in the ladder 4,8", "4 (low), 8 (high)"]),
            (["--schedule", "8:0,4"], ["--schedule '8:0,4'", "1 or more", "such as 8:32,6:64,4"]),
            (["--schedule", "8:-1,4"], ["--schedule '8:-1,4'", "1 or more"]),
            (["--schedule", "8:many,4"], ["--schedule '8:many,4'", "1 or more"]),
            (["--gear", "4", "--prompt-gear", "6"], ["--prompt-gear", "'6'", "choose from 4 (low), 8 (high)"]),
            (["--gear", "6"], ["--gear: no gear '6'", "4 (low), 8 (high)"]),
            (["--thresholds", "1", "--initial-gear", "6"], ["--initial-gear: no gear '6'", "4 (low), 8 (high)"]),
        ],
    )
    def test_name_the_flag_the_value_and_the_gears(self, command, flags, words):
        assert_refused(command("generate", "--gears", "4,8", *flags), *words)

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--schedule", "4:3,8"], ["--schedule '4:3,8'", "descend", "4 (low), 8 (mid), 16 (high)"]),
            (["--schedule", "8:0,4"], ["--schedule '8:0,4'"]),
            (["--prompt-gear", "6"], ["--prompt-gear: no gear '6'", "4 (low)"]),
            (["--between", "5,16"], ["--between: no gear '5'", "4 (low)"]),
            (["--schedule", "8:3,4", "--policy", "route"], ["--schedule is for --policy schedule"]),
            (["--policy", "schedule-route"], ["--policy schedule-route", "--schedule"]),
            (["--schedule", "8:3,4", "--task", "gsm8k"], ["--schedule", "--task"]),
        ],
    )
    def test_of_evaluate(self, command, text, tmp_path, flags, words):
        given = ["evaluate", "--data", text, "--out", tmp_path / "out", "--context", 16, "--tokens", 20]
        prompt = ["--prompt-tokens", 4] if "--task" not in flags else []
        assert_refused(command(*given, *prompt, *flags), *words)

    def test_a_program_is_told_without_a_flag(self, demo, geared_demo):
        with pytest.raises(GearbxError, match=r"^schedule '3:5,16': gears must descend"):
            Route(schedule="3:5,16").text(geared_demo, demo.tokenizer, TALE)


class TestAtTheStart:
    """A bad schedule ends a server or a chat before it takes a request or a message."""

    def test_a_server(self, command):
        assert_refused(command("server", "--port", "0", "--gears", "4,8", "--schedule", "4:3,8"), "--schedule '4:3,8'")

    def test_a_chat(self, command, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))  # nothing is said
        assert_refused(command("chat", "--schedule", "4:3,8", "--no-history"), "--schedule '4:3,8'")

    def test_a_chat_that_runs_keeps_its_mode(self):
        with chat(gears="3,16", gear="low") as session:
            with pytest.raises(GearbxError, match="--schedule '3:3,16'"):
                session.model.change("route", ["--schedule", "3:3,16"])
            assert session.model.mode == "static"


class TestPlans:
    def test_a_schedule_begins_again_in_every_window(self):
        plan = scheduled_plan(LADDER.schedule("16:2,8:1,4"), np.array([0, 1, 2, 3, 4, 0, 1, 2]))
        assert [gear.bits for gear in plan.gears] == [16, 16, 8, 4, 4, 16, 16, 8]

    def test_its_coin_has_as_many_tokens_in_each_gear(self):
        gears = scheduled_plan(LADDER.schedule("16:9,8:20,4"), np.arange(100)).gears
        coin = shuffled(gears, seed=0).gears
        assert sorted(gear.bits for gear in coin) == sorted(gear.bits for gear in gears)
        assert coin != gears

    def test_the_higher_of_two(self):
        low, mid, high = LADDER
        both = HigherOf(Planned([high, mid, low]), Planned([low, high, mid]))
        both.begin()
        assert [both.first(place) for place in range(3)] == [high, high, mid]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The rows of a report by name, and its directory."""
    place = tmp_path_factory.mktemp("schedules")
    save_model(tiny_model(vocab_size=4096), place / "small")
    (place / "text.txt").write_text(TALE * 40)
    shared = {"tokens": 60, "context": 25, "prompt_tokens": 4, "share": "0.5", "q_group_size": 32, "format": "affine"}
    policies = {"policy": ["schedule", "schedule-route"], "schedule": ["8:5,4", "16:5,8:5,4"]}
    report = run_evaluation(
        place / "text.txt", model=place / "small", out=place / "out", gears="4,8,16", **shared, **policies
    )
    return {row["name"]: row for row in report["policies"]} | {"out": place / "out"}


class TestEvaluation:
    def test_gears_are_counted_from_the_end_of_the_prompt(self, found):
        assert found["schedule-8:5,4"]["gear_shares"] == {"low": 0.75, "mid": 0.25, "high": 0}
        assert found["schedule-16:5,8:5,4"]["gear_shares"] == {"low": 0.5, "mid": 0.25, "high": 0.25}
        assert found["schedule-8:5,4"]["share_top"] == found["schedule-16:5,8:5,4"]["share_top"] == 0.25

    def test_bytes_are_those_of_its_gears(self, found):
        low, mid, top = (found[f"static-{bits}"]["weight_bytes_per_token"] for bits in (4, 8, 16))
        read = found["schedule-16:5,8:5,4"]["weight_bytes_per_token"]
        assert read == pytest.approx(low / 2 + mid / 4 + top / 4)

    def test_the_gate_on_top_only_adds(self, found):
        alone, both = found["schedule-16:5,8:5,4"], found["schedule-route-16:5,8:5,4-0.5"]
        assert both["gear_shares"]["high"] > alone["gear_shares"]["high"]
        assert both["gear_shares"]["low"] < alone["gear_shares"]["low"]
        assert both["threshold"] > 0

    def test_chance_has_the_same_shares_and_bytes(self, found):
        for name in ("schedule-8:5,4", "schedule-route-8:5,4-0.5"):
            row, coin = found[name], np.load(found["out"] / "recordings" / f"coin-of-{name}.npz")
            shares = [float((coin["gear"] == index).mean()) for index in range(3)]
            assert shares == pytest.approx([*row["gear_shares"].values()])
            assert row["against_random_same_share"] == row["against_random_same_bytes"]
            assert row["against_random_same_share"]["kl_mean"] == pytest.approx(coin["kl"].mean())

    def test_is_compared_with_static_gears(self, found):
        assert found["schedule-8:5,4"]["better_static"] in (None, "static-4")
        assert found["schedule-8:5,4"]["schedule"] == "8:5,4"
        assert found["static-4"]["schedule"] is None


def costing(ladder: Ladder, gear) -> float:
    return float(gear.bits)


class TestPrediction:
    """Two windows of four tokens: the low gear is wrong on the first two of each."""

    positions = np.array([0, 1, 2, 3] * 2)
    low = recording([1.0, 1.0, 0.0, 0.0] * 2, [False, False, True, True] * 2, [0.0] * 8)
    mid = recording([0.1] * 8, [True] * 8, [0.0] * 8)
    top = recording([0.0] * 8, [True] * 8, [0.0] * 8)

    def best(self, wish: Wish, bits=(16, 4)):
        recordings = dict(zip(LADDER, (self.low, self.mid, self.top)))
        gears = [LADDER.find(each) for each in bits]
        return in_order(schedules(recordings, gears, self.positions, costing), wish)[0]

    def test_the_first_tokens_in_the_top_gear(self):
        found = self.best(Wish(kl=0.0))
        assert str(found) == "--schedule 16:2,4"
        assert found.predicted.weight_bytes == pytest.approx(10)
        assert found.predicted.agreement == 1

    def test_a_gear_between(self):
        assert str(self.best(Wish(kl=0.1), (16, 8, 4))) == "--schedule 8:2,4"

    def test_the_least_kl_for_given_bytes(self):
        found = self.best(Wish(weight_bytes=7))
        assert str(found) == "--schedule 16:1,4"
        assert found.predicted.kl_mean == pytest.approx(0.25)

    def test_a_gear_alone_where_none_is_needed(self):
        assert str(self.best(Wish(agreement=0.5))) == "--schedule 4"

    def test_none(self):
        with pytest.raises(GearbxError, match="the least is 4 weight bytes per token"):
            self.best(Wish(weight_bytes=3))


class TestCalibrate:
    def test_writes_a_schedule_that_generate_takes(self, command, small, text, tmp_path):
        out, summary = tmp_path / "schedule.json", tmp_path / "s.json"
        flags = ["--model", small, "--q-group-size", 32]
        given = ["--data", text, "--context", 40, "--prompt-tokens", 8, "--tokens", 90, "--out", out]
        box = Gearbox(tiny_model(vocab_size=4096), "4,8,16", group_size=32)
        most = sum(box.weight_bytes_per_token(gear) for gear in box.ladder[:2]) / 2
        result = command("calibrate", *flags, "--schedule-gears", "8,4", "--target-bytes", most, *given)
        assert result.status == 0, result.err
        made = json.loads(out.read_text())
        assert made["schedule"].startswith("8:")
        assert f"--schedule {made['schedule']}" in result.out
        assert f"--schedule {made['schedule']}" in result.err  # the next command
        assert made["gears"] == [4, 8, 16]
        assert (made["tokens"], made["longest"]) == (90, 31)
        assert made["verified"]["weight_bytes"] == pytest.approx(made["predicted"]["weight_bytes"])
        assert 0.8 * most < made["verified"]["weight_bytes"] <= most
        assert made["verified"]["kl_mean"] == pytest.approx(made["predicted"]["kl_mean"], rel=0.5)
        ran = command(
            "generate", *flags, "-m", 6, "--gears", "4,8,16", "--schedule", made["schedule"], "--summary", summary
        )
        assert ran.status == 0, ran.err
        assert json.loads(summary.read_text())["mode"] == "route"

    def test_of_prompts_in_a_program(self):
        found = calibrate(schedule_gears="8,4", target_kl=1.0, max_tokens=6, num_prompts=1)
        assert found.schedule == "4"
        assert (found.tokens, found.longest) == (6, 6)

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--schedule-gears", "4,8", "--target-kl", "1"], ["--schedule-gears is '4,8'", "the highest first"]),
            (["--schedule-gears", "8", "--target-kl", "1"], ["--schedule-gears is '8'", "2 to 5 gears"]),
            (["--schedule-gears", "8,7,6,5,4,3", "--target-kl", "1"], ["--schedule-gears is '8,7", "2 to 5 gears"]),
            (["--schedule-gears", "8:3,4", "--target-kl", "1"], ["--schedule-gears '8:3,4' are not whole numbers"]),
            (["--schedule-gears", "8,4"], ["--schedule-gears needs a budget", "--target-bytes"]),
            (["--schedule-gears", "8,4", "--target-kl", "1", "--mode", "kickdown"], ["--schedule-gears", "route"]),
            (["--schedule-gears", "8,4", "--target-kl", "1", "--shares", "0.5,0.5"], ["--shares"]),
            (["--schedule-gears", "8,4", "--target-kl", "1", "--window", "2"], ["--window"]),
            (["--schedule-gears", "6,4", "--gears", "4,8", "--target-kl", "1"], ["--schedule-gears 6,4", "4 (low)"]),
            (["--schedule-gears", "8,4", "--target-bytes", "1"], ["1 weight bytes per token", "the least is"]),
            (["--prompt-tokens", "4"], ["--prompt-tokens", "--schedule-gears"]),
        ],
    )
    def test_mistakes(self, command, tmp_path, flags, words):
        out = tmp_path / "s.json"
        assert_refused(command("calibrate", "--max-tokens", 4, "--num-prompts", 1, "--out", out, *flags), *words)
        assert not out.exists()

    def test_a_prompt_that_fills_the_window(self, command, text):
        flags = ["--schedule-gears", "8,4", "--target-kl", "1", "--data", text, "--context", 64]
        assert_refused(command("calibrate", *flags), "--prompt-tokens is 128", "62 or fewer")
