"""The controller on a model: what it sets, what it reports, and the simulated machine from end to end."""

from contextlib import nullcontext

import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox, GearbxError, Governor, Kickdown, Route, stream_generate
from gearbx_mlx.decoding.governor import MemoryGuard
from gearbx_mlx.formats.tied import linear_of
from gearbx_mlx.gears.discovery import default_sensitivity
from gearbx_mlx.machine.sensors import MachineState, OwnMemory, Point, Scripted, Watch

PROMPT = "Tom has 3 apples and 4 pears. How many"


def bits_in(gearbox: Gearbox) -> dict[str, int]:
    """The modules that the model really has, whatever the gearbox says of them."""
    modules = dict(gearbox.model.named_modules())
    return {layer.path: getattr(linear_of(modules[layer.path]), "bits", 16) for layer in gearbox.layers}


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

    def test_bounds_without_width_are_refused(self, geared):
        with pytest.raises(GearbxError, match="needs bits from 7 to 7"):
            Governor(geared[0], bounds={geared[0].layers[0].path: (7, 7)})


class TestGoverned:
    @pytest.mark.slow
    @pytest.mark.parametrize("mode", [Route(initial_gear="high"), Kickdown()], ids=["route", "kickdown"])
    def test_caps_apply_only_during_generation(self, geared, mode):
        gearbox, tokenizer = geared
        governor = Governor(gearbox, watch=Watch([Scripted([Point(0, MachineState("critical"))])]))
        how, seen = {"gearbox": gearbox, "mode": mode, "controller": governor}, []
        for response in stream_generate(gearbox.model, tokenizer, PROMPT, 40, **how):
            seen.append({*bits_in(gearbox).values()})
            if response.decision:
                assert response.decision.machine == {"thermal": "critical"}
                assert response.decision.share == 0.0
        assert all(bits == {4} for bits in seen[10:])
        assert {8} in seen[:10]
        gearbox.shift("high")
        assert {*bits_in(gearbox).values()} == {8}
        assert governor.summary()["machine"] == {"thermal": "critical"}

    def test_next_output_starts_at_last_cap(self, geared):
        gearbox, tokenizer = geared
        governor = Governor(gearbox, watch=Watch([Scripted([Point(0, MachineState("critical"))])]))
        options = {"gearbox": gearbox, "controller": governor}
        list(stream_generate(gearbox.model, tokenizer, PROMPT, 12, **options))
        first = next(iter(stream_generate(gearbox.model, tokenizer, PROMPT, 5, **options)))
        assert first.weight_bytes == gearbox.weight_bytes_per_token(gearbox.ladder[0])

    def test_caps_stay_until_the_last_sequence_ends(self, geared):
        gearbox, tokenizer = geared
        governor = Governor(gearbox, watch=Watch([Scripted([Point(0, MachineState("critical"))])]))
        options = {"gearbox": gearbox, "controller": governor, "mode": Route()}
        first, second = (stream_generate(gearbox.model, tokenizer, PROMPT, 60, **options) for _ in range(2))
        for _ in range(12):
            next(first), next(second)
        first.close()
        next(second)
        assert {*bits_in(gearbox).values()} == {4}
        second.close()
        assert not gearbox.caps

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mode": "lossless"}, "mode 'lossless': generates the top gear's output"),
            ({"mode": "route", "draft_model": object()}, "takes no draft model"),
        ],
    )
    def test_uncappable_gears_are_refused(self, geared, options, message):
        gearbox, tokenizer = geared
        with pytest.raises(GearbxError, match=message):
            stream_generate(gearbox.model, tokenizer, PROMPT, gearbox=gearbox, controller=Governor(gearbox), **options)

    def test_other_gearbox_is_refused(self, geared):
        gearbox, tokenizer = geared
        other = Governor(Gearbox(tiny_model()))
        with pytest.raises(GearbxError, match="belongs to a different gearbox"):
            stream_generate(gearbox.model, tokenizer, PROMPT, gearbox=gearbox, controller=other)


class TestCommand:
    def test_a_scripted_machine(self, generated, tmp_path, monkeypatch):
        script = tmp_path / "machine.jsonl"
        script.write_text('{"tokens": 0, "thermal": "nominal"}\n{"tokens": 15, "thermal": "critical"}\n')
        monkeypatch.setenv("GEARBX_MACHINE", str(script))
        ran = generated("--gears", "4,8", "--target-tps", 0, "-m", 30)
        said = "the machine's state; cap changes: 1, top gear at 4.50 bits per weight; thermal critical"
        assert said in " ".join(ran.err.split())
        decided = {record["index"]: record["decision"] for record in ran.trace if "decision" in record}
        assert list(decided) == [9, 19, 29]
        assert [len(decision["moved"]) > 0 for decision in decided.values()] == [False, True, False]
        assert decided[19]["reason"] == "the machine allows 0%"
        assert decided[19]["machine"] == {"thermal": "critical"}
        assert ran.summary["controller"]["cap_changes"] == 1
        assert ran.summary["effective_bits_per_weight"] > 4.5

    def test_ungovernable_commands_are_refused(self, command, monkeypatch):
        ran = command("generate", "--target-tps", "5", "--gears", "16", "--format", "affine")
        assert ran.status == 2
        assert "nothing to cap" in ran.err.splitlines()[-1]
        monkeypatch.setenv("GEARBX_MACHINE", "nowhere.jsonl")
        ran = command("generate", "--target-tps", 0, "-m", 4)
        assert ran.status == 2
        assert "nowhere.jsonl: cannot be read" in ran.err

    def test_a_process_near_its_limit_is_capped(self, generated, monkeypatch):
        monkeypatch.setattr(OwnMemory, "bytes", lambda sensor: int(0.96 * sensor.limit))
        flags = "--gears", "4,8", "--mode", "route", "--residency", "disk:8GB"
        ran = generated(*flags, "-m", 24)
        assert "the machine's state; cap changes: 1, top gear at 4.50 bits" in " ".join(ran.err.split())
        assert ran.trace[9]["decision"]["machine"] == {"memory": 0.96}

    @pytest.mark.parametrize("mode", ["lossless", "static"])
    def test_limit_leaves_uncapped_modes_unchanged(self, command, monkeypatch, mode):
        """Where memory is short, it says what it gives up."""
        flags = ("--gears", "4,16", "-m", 30, "--mode", mode)
        plain = command("generate", *flags)
        shares = iter([0.5, 0.5, 0.96, 0.93, 0.97, 0.93])  # when it is loaded, then of tokens 10, 20 and 30
        monkeypatch.setattr(OwnMemory, "bytes", lambda sensor: int(next(shares, 0.5) * sensor.limit))
        limited = command("generate", *flags, "--residency", "disk:8GB")
        assert limited.status == 0, limited.err
        assert limited.out == plain.out
        assert limited.err.count("memory is near the limit of 8 GB, so MLX's cache is freed every 10 tokens") == 1
        assert "controller" not in limited.err

    def test_lossless_output_beyond_limit_ends_with_remedy(self, command, monkeypatch):
        later = []
        monkeypatch.setattr(MemoryGuard, "governing", lambda guard: later.append(1) or nullcontext())
        monkeypatch.setattr(OwnMemory, "bytes", lambda sensor: int(sensor.limit * (1.25 if later else 0.5)))
        ran = command("generate", "--gears", "4,16", "-m", 30, "--residency", "disk:8GB")
        assert ran.status == 2
        assert ran.err.splitlines()[-1] == (
            "error: --residency: memory must stay below 8 GB, got 10 GB after 10 tokens; set a higher limit than "
            "disk:8 GB, a lower --max-tokens, or --mode route to cap layers"
        )
