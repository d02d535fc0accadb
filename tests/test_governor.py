"""The controller on a model: what it sets, what it reports, and the simulated machine from end to end."""

import dataclasses
import json
import time
import warnings

import mlx.core as mx
import pytest
from conftest import active_memory, tiny_model

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Governor, Kickdown, Route, stream_generate
from gearbx_mlx.formats.tied import linear_of
from gearbx_mlx.gears.discovery import default_sensitivity
from gearbx_mlx.kernels import device
from gearbx_mlx.machine.readers import MachineState, OwnMemory, Point, Scripted, Watch

PROMPT = "Tom has 3 apples and 4 pears. How many"


def bits_in(gearbox: Gearbox) -> dict[str, int]:
    """The modules that the model really has, whatever the gearbox says of them."""
    modules = dict(gearbox.model.named_modules())
    return {layer.path: getattr(linear_of(modules[layer.path]), "bits", 16) for layer in gearbox.layers}


def told(responses) -> list:
    return [response.decision for response in responses if response.decision]


class Ticking:
    """A clock that advances some seconds whenever it is read."""

    def __init__(self, seconds: float = 0.001):
        self.time, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.time += self.seconds
        return self.time


@pytest.fixture
def on_simulated_gpu(monkeypatch) -> list:
    """MLX's default device claims to be a GPU, like a Mac's; each wait for the whole device is noted."""
    waits = []
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(device, "check_generation", lambda name: None)  # mlx-lm was imported on the CPU
    monkeypatch.setattr(mx, "synchronize", lambda *_: waits.append(True))
    return waits


@pytest.fixture
def geared(fresh_demo):
    return Gearbox(fresh_demo.model, "4,8", widths=[5, 6], kernels="mlx"), fresh_demo.tokenizer


class TestOrder:
    def test_without_a_manifest_it_is_the_documents(self):
        model = tiny_model(num_hidden_layers=8)
        modules = {layer.path: layer.module for layer in Gearbox(model).layers}
        cost = default_sensitivity(modules)
        order = sorted(modules, key=lambda path: cost(path, 4))
        assert all("self_attn" in path and 2 <= int(path.split(".")[2]) < 6 for path in order[:16])
        assert all("mlp" in path and 2 <= int(path.split(".")[2]) < 6 for path in order[16:28])
        assert {path.split(".")[2] for path in order[28:-1]} == {"0", "1", "6", "7"}
        assert order[-1] == "lm_head"

    @pytest.mark.slow
    def test_a_measured_order_and_bounds_are_kept(self, geared):
        gearbox, tokenizer = geared
        paths = [layer.path for layer in gearbox.layers]
        first = paths[10]
        governor = Governor(
            gearbox,
            1e6,
            clock=Ticking(),
            sensitivity=lambda path, bits: float(path != first),
            bounds={paths[3]: (6, 6), paths[4]: (5, 8)},
        )
        assert governor.controller.schedule.steps[0].path == first
        with pytest.warns(GearbxWarning, match="no table meets"):
            list(stream_generate(gearbox.model, tokenizer, PROMPT, 60, gearbox=gearbox, controller=governor))
        caps = governor.controller.caps
        assert (caps[paths[3]], caps[paths[4]]) == (6, 5)
        assert {bits for path, bits in caps.items() if path not in paths[3:5]} == {4}

    def test_bounds_that_no_width_is_in(self, geared):
        with pytest.raises(GearbxError, match="none is from 7 to 7"):
            Governor(geared[0], bounds={geared[0].layers[0].path: (7, 7)})


class TestGoverned:
    @pytest.mark.slow
    @pytest.mark.parametrize("mode", [Route(initial_gear="high"), Kickdown()], ids=["route", "kickdown"])
    def test_caps_are_in_the_model_while_it_generates_and_not_afterwards(self, geared, mode):
        gearbox, tokenizer = geared
        script = Scripted([Point(0, MachineState("critical"))])
        governor = Governor(gearbox, watch=Watch([script]))
        seen = []
        for response in stream_generate(
            gearbox.model, tokenizer, PROMPT, 40, gearbox=gearbox, mode=mode, controller=governor
        ):
            seen.append({*bits_in(gearbox).values()})
            if response.decision:
                assert response.decision.machine == {"thermal": "critical"}
                assert response.decision.share == 0.0
        assert all(bits == {4} for bits in seen[10:])
        assert {8} in seen[:10]
        gearbox.shift("high")
        assert {*bits_in(gearbox).values()} == {8}
        assert governor.summary()["machine"] == {"thermal": "critical"}

    def test_the_next_text_begins_where_this_one_ended(self, geared):
        gearbox, tokenizer = geared
        governor = Governor(gearbox, watch=Watch([Scripted([Point(0, MachineState("critical"))])]))
        options = {"gearbox": gearbox, "controller": governor}
        list(stream_generate(gearbox.model, tokenizer, PROMPT, 12, **options))
        first = next(iter(stream_generate(gearbox.model, tokenizer, PROMPT, 5, **options)))
        assert first.weight_bytes == gearbox.weight_bytes_per_token(gearbox.ladder[0])

    @pytest.mark.slow
    def test_bytes_and_bits_are_those_of_the_caps(self, geared):
        gearbox, tokenizer = geared
        gearbox.shift("low")
        low = gearbox.weight_bytes_per_token(gearbox.gear)
        governor = Governor(gearbox, watch=Watch([Scripted([Point(0, MachineState("critical"))])]))
        responses = list(
            stream_generate(
                gearbox.model,
                tokenizer,
                PROMPT,
                40,
                gearbox=gearbox,
                controller=governor,
                mode=Route([0.0001]),
            )
        )
        assert {response.weight_bytes for response in responses[12:]} == {low}
        assert any(response.gear == "high" for response in responses[12:])
        read = sum(response.weight_bytes for response in responses)
        schedule = governor.controller.schedule
        assert governor.bits_read == pytest.approx(8 * (read - len(responses) * schedule.fixed) / schedule.weights)
        assert schedule.read([1, 0])[0] == low

    @pytest.mark.slow
    def test_a_reader_that_fails_and_a_target_that_is_not_met_are_said_once(self, geared):
        class Fails:
            name = "heat"

            def read(self):
                raise OSError("no sensor")

        gearbox, tokenizer = geared
        with Watch([Fails()], interval=0.001) as watch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while not watch.polls[0].failure:
                time.sleep(0.001)
            governor = Governor(gearbox, 1e7, watch=watch)
            tokens = list(stream_generate(gearbox.model, tokenizer, PROMPT, 90, gearbox=gearbox, controller=governor))
        assert len(tokens) == 90
        messages = [str(w.message) for w in caught if issubclass(w.category, GearbxWarning)]
        assert sorted(message.split(" (")[0] for message in messages) == [
            "heat cannot be read",
            "no table meets 1e+07 tokens/s: every layer is at its fewest bits",
        ]

    @pytest.mark.slow
    def test_a_spike_of_latency_on_a_gpu_lowers_caps_without_a_wait(self, fresh_demo, on_simulated_gpu):
        gearbox = Gearbox(fresh_demo.model, "4,8", widths=[5, 6], kernels="auto")
        assert gearbox.device == "gpu"
        clock = Ticking(seconds=0.05)
        options = {"gearbox": gearbox, "mode": Route([0.0001]), "controller": Governor(gearbox, 20.0, clock=clock)}
        for number, response in enumerate(stream_generate(gearbox.model, fresh_demo.tokenizer, PROMPT, 90, **options)):
            if response.decision and response.decision.moved:
                break
            if number == 44:
                clock.seconds = 0.075
        assert 44 < number <= 44 + 15
        assert max(step.after for step in response.decision.moved) < 8
        assert on_simulated_gpu == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mode": "lossless"}, "mode 'lossless' writes the top gear's text"),
            ({"mode": "route", "draft_model": object()}, "leave one of them out"),
        ],
    )
    def test_where_gears_cannot_be_capped(self, geared, options, message):
        gearbox, tokenizer = geared
        with pytest.raises(GearbxError, match=message):
            stream_generate(gearbox.model, tokenizer, PROMPT, gearbox=gearbox, controller=Governor(gearbox), **options)

    def test_another_gearbox(self, geared):
        gearbox, tokenizer = geared
        other = Governor(Gearbox(tiny_model()))
        with pytest.raises(GearbxError, match="belongs to another gearbox"):
            stream_generate(gearbox.model, tokenizer, PROMPT, gearbox=gearbox, controller=other)

    @pytest.mark.slow
    def test_a_thousand_changes_copy_nothing(self):
        gearbox = Gearbox(tiny_model(), "4,8", widths=[5, 6])
        governor = Governor(gearbox, 1.0)
        x = mx.array([[1, 5, 9]])
        schedule, last = governor.controller.schedule, governor.controller.schedule.last

        def change(number: int) -> None:
            gearbox.cap(schedule.caps(number * 7 % (last + 1)))
            mx.eval(gearbox.model(x))

        for position in range(last + 1):  # each table once: planes are made when they are first used
            change(position)
        mx.clear_cache()
        before = active_memory()
        held = []
        for number in range(1000):
            change(number)
            if number % 100 == 99:
                held.append(active_memory())
        assert max(held) <= before


class TestCommand:
    def test_a_scripted_machine(self, command, tmp_path, monkeypatch):
        script, trace, summary = (tmp_path / name for name in ("machine.jsonl", "trace.jsonl", "summary.json"))
        script.write_text('{"tokens": 0, "thermal": "nominal"}\n{"tokens": 15, "thermal": "critical"}\n')
        monkeypatch.setenv("GEARBX_MACHINE", str(script))
        files = "--trace", trace, "--summary", summary
        ran = command("generate", "--gears", "4,8", "--target-tps", 0, "-m", 30, *files)
        assert ran.status == 0
        assert "the machine's state; caps moved 1 times, the top gear now 4.50 bits per weight; thermal critical" in (
            " ".join(ran.err.split())
        )
        records = [json.loads(line) for line in trace.read_text().splitlines()]
        decided = {record["index"]: record["decision"] for record in records if "decision" in record}
        assert list(decided) == [9, 19, 29]
        assert [len(decision["moved"]) > 0 for decision in decided.values()] == [False, True, False]
        assert decided[19]["reason"] == "the machine allows 0%"
        assert decided[19]["machine"] == {"thermal": "critical"}
        result = json.loads(summary.read_text())
        assert result["controller"]["cap_changes"] == 1
        assert result["effective_bits_per_weight"] > 4.5

    def test_a_script_that_is_not_there(self, command, monkeypatch):
        monkeypatch.setenv("GEARBX_MACHINE", "nowhere.jsonl")
        ran = command("generate", "--target-tps", 0, "-m", 4)
        assert ran.status == 2
        assert "nowhere.jsonl: cannot be read" in ran.err

    def test_a_target(self, command):
        ran = command("generate", "--target-tps", "0.001", "-m", 12)
        assert ran.status == 0
        assert "watching" in ran.err
        assert "target 0.001 tokens/s; caps moved 0 times" in " ".join(ran.err.split())

    def test_a_process_near_its_limit_is_capped(self, command, monkeypatch, tmp_path):
        trace = tmp_path / "trace.jsonl"
        monkeypatch.setattr(OwnMemory, "bytes", lambda reader: int(0.96 * reader.limit))
        ran = command("generate", "--gears", "4,8", "--residency", "disk:8GB", "-m", 24, "--trace", trace)
        assert ran.status == 0, ran.err
        assert "the machine's state; caps moved 1 times, the top gear now 4.50 bits" in " ".join(ran.err.split())
        decisions = [json.loads(line).get("decision") for line in trace.read_text().splitlines()]
        assert decisions[9]["machine"] == {"memory": 0.96}

    def test_a_process_far_from_its_limit_is_not(self, command):
        ran = command("generate", "--gears", "4,8", "--residency", "disk:1TB", "-m", 12)
        assert ran.status == 0, ran.err
        assert "caps moved 0 times" in " ".join(ran.err.split())

    def test_a_model_beyond_the_limit_is_refused(self, command):
        ran = command("generate", "--residency", "disk:2MB", "-m", 4)
        assert ran.status == 2
        assert ran.err.startswith("error: --residency disk:2 MB: with the model loaded this process has ")
        assert ran.err.count("\n") == 1

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--target-tps", "-1"], "--target-tps is -1.0; give tokens per second, 0.001 or more"),
            (["--target-tps", "1e-300"], "--target-tps is 1e-300; give tokens per second, 0.001 or more"),
            (["--target-tps", "nan"], "--target-tps is nan"),
            (["--target-tps", "5", "--mode", "lossless"], "--mode lossless writes the top gear's text"),
            (["--target-tps", "5", "--mode", "telemetry-only"], "--mode telemetry-only changes no gear"),
            (["--residency", "disk:much"], "--residency disk:much: 'much' is not a size; give bytes such as 3GB"),
            (["--target-tps", "5", "--gears", "16", "--format", "affine"], "nothing to cap"),
        ],
    )
    def test_flags_that_cannot_be(self, command, flags, message):
        ran = command("generate", *flags)
        assert ran.status == 2
        assert message in " ".join(ran.err.split())


class TestSimulation:
    @pytest.fixture(scope="class")
    @classmethod
    def script(cls):
        from research import throttling

        return throttling

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, script):
        return script.made()

    @pytest.mark.slow
    @pytest.mark.parametrize(("target", "noise"), [(15.0, 0.05), (20.0, 0.1)])
    def test_settles_after_steps_and_stays(self, script, loaded, target, noise):
        run = script.simulate(script.steps(target, noise, seconds=24), *loaded)
        found = script.settling(run)
        assert [step.slower for step in found] == [1.0, 1.7, 1.0]
        for step in found:
            assert step.tokens <= 60
            assert step.overshoot < 0.15
            assert step.late_changes <= 1
            assert step.reversals == 0
        assert run.out_of_reach is None

    @pytest.mark.slow
    def test_settles_at_the_nearest(self, script, loaded):
        with pytest.warns(GearbxWarning, match="no table meets 100 tokens/s"):
            run = script.simulate(script.steps(100.0, 0.05, seconds=15), *loaded)
        assert all(step.tokens <= 60 and step.error == 0 for step in script.settling(run))

    @pytest.mark.slow
    def test_a_machine_that_gets_hot_empty_and_full(self, script, loaded, monkeypatch):
        monkeypatch.setattr(script, "TOP_SPEED", 6.0)  # a third of the picture's tokens
        story = dataclasses.replace(script.STORY, target=5.0)
        run = script.simulate(story, *loaded)

        def at(seconds):
            return next(token for token in run.tokens if token.seconds >= seconds)

        assert at(29).position == 0
        throttled = [token for token in run.tokens if 30 + 60 / 5 < token.seconds < 44]
        assert all(abs(token.speed / story.target - 1) < 0.1 for token in throttled)
        assert at(50).share == pytest.approx(1 / 3)
        assert at(50).bits < at(44).bits
        assert {*at(99).caps.values()} == {4}  # the battery is almost empty
        assert at(111).position == 0  # on a charger
        assert at(118).share == pytest.approx(0.2)  # memory
