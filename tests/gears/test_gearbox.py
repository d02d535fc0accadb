import itertools
import random
import time

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from conftest import PROMPT, every_gear, on_disk, same_weights, tiny_model, weights_of
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from refusals import refuses

from gearbx_mlx import Gearbox, GearbxError, Ladder
from gearbx_mlx.formats.planes import Affine
from gearbx_mlx.gears.offload import idle_parameters
from gearbx_mlx.loading import DEMO_MODEL, load

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


def failing(function, at: int, error: BaseException):
    """The function, which fails at its n-th call."""
    calls = itertools.count(1)

    def call(*arguments):
        if next(calls) == at:
            raise error
        return function(*arguments)

    return call


class TestLadder:
    def test_gears_have_names(self):
        assert [g.name for g in Ladder.parse("4,16")] == ["low", "high"]
        assert [g.name for g in Ladder.parse("16")] == ["high"]
        assert [g.name for g in Ladder.parse("3,4,6,16")] == ["low", "mid1", "mid2", "high"]
        ladder = Ladder.parse("4, 8, 16")
        assert [g.name for g in ladder] == ["low", "mid", "high"]
        assert ladder.find("mid") is ladder.find("8") is ladder[1]
        assert str(ladder) == "4,8,16"

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("8,4,16", "must ascend, got '8,4,16'; did you mean '4,8,16'"),
            ("4,4,16", "must ascend"),
            ("4,7,16", "7 bits in '4,7,16' is not supported"),
            ("4,8,32", "32 bits in '4,8,32' is not supported"),
            ("0,16", "not supported"),
            ("four", "not whole numbers"),
            ("4;8", "not whole numbers"),
            ("", "not whole numbers"),
        ],
    )
    def test_bad_ladders_are_refused(self, text, complaint):
        with pytest.raises(GearbxError, match=complaint.replace("?", r"\?")):
            Ladder.parse(text)

    def test_no_such_gear(self):
        with pytest.raises(GearbxError, match=r"no gear 'top' in the ladder 4,16; choose from 4 \(low\), 16 \(high\)"):
            Ladder.parse("4,16").find("top")


class TestDiscovery:
    def test_a_predicate_chooses_layers_and_their_lowest_bits(self, tiny):
        gearbox = Gearbox(tiny, manage=lambda path, module: {"bits": 8} if path.endswith("v_proj") else "mlp" in path)
        low, _mid, _high = gearbox.ladder
        bits = {layer.path: [gearbox.bits_of(layer, gear) for gear in gearbox.ladder] for layer in gearbox.layers}
        assert bits["model.layers.0.self_attn.v_proj"] == [8, 8, 16]
        assert bits["model.layers.0.mlp.up_proj"] == [4, 8, 16]
        assert "model.layers.0.self_attn.q_proj" in gearbox.unmanaged
        gearbox.shift(low)
        assert tiny.model.layers[0].self_attn.v_proj.bits == 8

    def test_a_model_class_may_ask_for_more_bits(self):
        model = tiny_model("qwen3_moe")  # whose routers mlx-lm keeps at 8 bits
        gearbox = Gearbox(model, "4,8,16")
        gearbox.shift("low")
        assert model.model.layers[0].mlp.gate.bits == 8
        assert model.model.layers[0].mlp.switch_mlp.up_proj.bits == 4

    def test_layers_of_odd_width_stay_dense(self):
        model = tiny_model()
        model.model.layers[1].mlp.down_proj = nn.Linear(100, 64, bias=False)
        gearbox = Gearbox(model)
        assert gearbox.unmanaged == {DOWN: "input width 100 is not a multiple of the group size 64"}
        assert "down_proj: dense (input width 100" in gearbox.describe()

    def test_custom_classes_are_unchanged_and_reported(self, tiny):
        class SplitLinear(nn.Linear):
            def __call__(self, x):
                return super().__call__(x)

        tiny.model.layers[0].mlp.up_proj = SplitLinear(64, 128, bias=False)
        gearbox = Gearbox(tiny)
        assert gearbox.unmanaged == {"model.layers.0.mlp.up_proj": "layers of class SplitLinear are not known"}

    def test_model_without_managed_layers_is_refused(self, tiny):
        with pytest.raises(GearbxError, match="no layer can change gear: not selected by manage"):
            Gearbox(tiny, manage=lambda path, module: False)


class TestShift:
    def test_gears_are_made_when_they_are_first_engaged(self, tiny):
        made = []

        class Spy(Affine):
            def modules(self, dense, wanted, *rest):
                made.append(wanted)
                return super().modules(dense, wanted, *rest)

        gearbox = Gearbox(tiny, format=Spy())
        assert made == []
        gearbox.shift("low")
        assert set(made) == {4}
        gearbox.shift("high")
        gearbox.shift("low")
        assert len(made) == len(gearbox.layers)
        gearbox.prepare(gearbox.ladder.find("mid"))
        assert set(made) == {4, 8}
        assert tiny.model.layers[0].mlp.up_proj.bits == 4

    @pytest.mark.parametrize("is_dropped", [False, True])
    @pytest.mark.parametrize("start", ["high", "low"])
    def test_failure_making_gear_changes_no_layer(self, tiny, monkeypatch, tmp_path, start, is_dropped):
        gearbox = Gearbox(tiny, "4,8,16", format="affine", **(on_disk(tiny, tmp_path) if is_dropped else {}))
        gearbox.shift(start)
        before, modules = weights_of(tiny), dict(tiny.named_modules())
        monkeypatch.setattr(Affine, "modules", failing(Affine.modules, 5, MemoryError("injected")))
        with pytest.raises(MemoryError, match="injected"):
            gearbox.shift("mid")
        assert gearbox.gear.name == start
        assert same_weights(weights_of(tiny), before)
        assert dict(tiny.named_modules()) == modules
        monkeypatch.undo()
        gearbox.shift("mid")
        assert gearbox.gear.name == "mid"

    @pytest.mark.parametrize("format", ["affine", "planes", "rowwise"])
    def test_shift_calls_update_modules_once(self, tiny, monkeypatch, format):
        gearbox, calls = Gearbox(tiny, "4,8,16", format=format, kernels="mlx"), []
        put = type(tiny).update_modules

        def noted(model, tree, strict=True):
            calls.append(dict(tree_flatten(tree, is_leaf=nn.Module.is_module)))
            return put(model, tree, strict)

        monkeypatch.setattr(type(tiny), "update_modules", noted)
        for gear in ("low", "mid", "high", "low"):
            gearbox.shift(gear)
            modules = dict(tiny.named_modules())
            assert calls[-1].keys() == {layer.path for layer in gearbox.layers}
            assert all(modules[path] is module for path, module in calls[-1].items())
        assert len(calls) == 4
        assert calls[0] == calls[3]  # made once
        if format == "affine":
            assert {type(module) for module in calls[0].values()} == {nn.QuantizedLinear}

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_failure_swapping_modules_changes_no_layer(self, tiny, monkeypatch, error):
        gearbox = Gearbox(tiny, "4,8,16")
        gearbox.shift("low")
        gearbox.shift("high")
        before = weights_of(tiny)
        put, calls = type(tiny).update_modules, []

        def half_way(model, tree, strict=True):
            calls.append(1)
            if len(calls) == 1:
                put(model, {"model": {"layers": tree["model"]["layers"][:1]}})
                raise error("injected")
            put(model, tree)

        monkeypatch.setattr(type(tiny), "update_modules", half_way)
        with pytest.raises(error):
            gearbox.shift("low")
        assert gearbox.gear.name == "high"
        assert same_weights(weights_of(tiny), before)

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ({"format": "nf4"}, "format 'nf4' does not exist; choose from planes, affine"),
            ({"manage": "nothing"}, "manage: unknown, got nothing; choose from all, attention, mlp, everything"),
            ({"residency": "cloud"}, "residency: unknown, got cloud; choose from resident, disk, stream"),
            ({"residency": "disk"}, "pass checkpoint="),
            ({"residency": "disk", "checkpoint": "nowhere"}, "nowhere: no model"),
            ({"group_size": 48}, "group size: unsupported, got 48; choose from 32, 64, 128"),
            ({"dtype": "int8"}, "dtype: unknown, got int8; choose from auto, float32, bfloat16, float16"),
            ({"kernels": "fast"}, "kernels: unknown, got fast; choose from auto, native, mlx"),
            ({"activations": "int4"}, "activations: unknown, got int4; did you mean int8"),
        ],
    )
    def test_unknown_arguments_are_refused(self, tiny, arguments, complaint):
        with pytest.raises(GearbxError, match=complaint):
            Gearbox(tiny, **arguments)

    @pytest.mark.parametrize("arguments", [{"residency": "disk"}, {"kernels": "fast"}, {"dtype": "int8"}])
    def test_refusal_leaves_quantized_model_unchanged(self, arguments):
        model = quantize_model(tiny_model(), {}, 64, 8)[0]
        before = model(PROMPT)
        with pytest.raises(GearbxError):
            Gearbox(model, "4,8", **arguments)
        assert mx.allclose(model(PROMPT), before, atol=1e-5)  # perhaps by native kernels now
        Gearbox(model, "4,8", kernels="mlx").shift(8)
        assert mx.allclose(model(PROMPT), before, atol=1e-5)

    def test_failure_releasing_idle_gears_changes_no_layer(self, tiny, monkeypatch, tmp_path):
        gearbox = Gearbox(tiny, "4,8,16", **on_disk(tiny, tmp_path))
        before = weights_of(tiny)
        monkeypatch.setattr("gearbx_mlx.gears.offload.idle_parameters", failing(idle_parameters, 3, MemoryError()))
        with pytest.raises(MemoryError):
            gearbox.shift("low")
        assert (gearbox.gear.name, gearbox.shifts) == ("high", 0)
        assert same_weights(weights_of(tiny), before)

    def test_unused_originals_are_released(self, tiny):
        layer = tiny.model.layers[0].mlp.up_proj
        Gearbox(tiny, "4,8", kernels="mlx")
        assert layer.weight.size == 0
        assert mx.isfinite(tiny(PROMPT)).all().item()

    def test_accepts_gear_name_bits_or_gear(self, tiny):
        gearbox = Gearbox(tiny)
        for wanted in ("mid", "8", 8, gearbox.ladder[1]):
            gearbox.shift("high")
            gearbox.shift(wanted)
            assert gearbox.gear.bits == 8
        for wanted in ("reverse", 6, Ladder.parse("6,16")[0]):
            with pytest.raises(GearbxError, match="no gear"):
                gearbox.shift(wanted)

    def test_second_gearbox_replaces_unshifted_first(self, tiny):
        first, second = Gearbox(tiny), Gearbox(tiny)
        with pytest.raises(GearbxError, match="was replaced by a newer one"):
            first.shift("low")
        second.shift("low")
        with pytest.raises(GearbxError, match="quantized already"):
            Gearbox(tiny)
        second.shift("high")
        Gearbox(tiny)

    @pytest.mark.slow
    @pytest.mark.parametrize("residency", ["resident", "disk"])
    @pytest.mark.parametrize(
        ("format", "ladder"),
        [("planes", "3,4,8,16"), ("affine", "3,4,8,16"), ("rowwise", "2,4,6,16"), ("groupwise", "4,16")],
    )
    def test_two_hundred_random_shifts_end_bit_exact(self, residency, format, ladder):
        model, _ = mlx_lm.load(str(DEMO_MODEL))
        before = weights_of(model)
        gearbox = Gearbox(model, ladder, format=format, residency=residency, checkpoint=DEMO_MODEL)
        lows = {}
        draw = random.Random(0)
        for _ in range(200):
            gear = draw.choice(gearbox.ladder)
            gearbox.shift(gear)
            assert gearbox.gear is gear
            if gear.name not in lows:
                lows[gear.name] = weights_of(model)
            elif draw.random() < 0.1:
                assert same_weights(weights_of(model), lows[gear.name])
        gearbox.shift("high")
        assert same_weights(weights_of(model), before)


def bits_in(gearbox: Gearbox) -> dict[str, int]:
    """The modules that the model really has, whatever the gearbox says of them."""
    modules = dict(gearbox.model.named_modules())
    return {layer.path: getattr(modules[layer.path], "bits", 16) for layer in gearbox.layers}


@pytest.mark.parametrize("format", ["planes", "affine"])
class TestTables:
    def test_a_gear_has_the_bits_of_its_table(self, format):
        gearbox = Gearbox(tiny_model(), format=format, tables={"low": {UP: 3, DOWN: 6}, "high": {UP: 8}})
        assert bits_in(gearbox) == {path: 8 if path == UP else 16 for path in bits_in(gearbox)}
        gearbox.shift("low")
        assert bits_in(gearbox) == {path: {UP: 3, DOWN: 6}.get(path, 4) for path in bits_in(gearbox)}
        gearbox.shift("mid")
        assert set(bits_in(gearbox).values()) == {8}

    def test_layer_matches_gear_of_its_bits(self, format):
        mixed, plain = tiny_model(), tiny_model()
        gearbox = Gearbox(mixed, "4,16", format=format, tables={"low": {UP: 6}})
        gearbox.shift("low")
        only = Gearbox(plain, "6,16", format=format)
        only.shift("low")
        x = mx.random.normal((3, 64), key=mx.random.key(0))
        assert mx.array_equal(mixed.model.layers[0].mlp.up_proj(x), plain.model.layers[0].mlp.up_proj(x)).item()

    def test_bytes_match_table(self, format):
        gearbox = Gearbox(tiny_model(), "4,16", format=format, tables={"low": {UP: 8}})
        plain = Gearbox(tiny_model(), "4,16", format=format)
        low, (layer,) = gearbox.ladder[0], [e for e in gearbox.layers if e.path == UP]
        more = gearbox.weight_bytes_per_token(low) - plain.weight_bytes_per_token(low)
        assert more == gearbox.layer_bytes(layer, low) - plain.layer_bytes(layer, low) == layer.module.weight.size // 2


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"lowest": {UP: 4}}, "no gear 'lowest' in the ladder 4,8,16"),
        ({"low": {"nowhere": 4}}, "the table of low has nowhere, but it does not change gear"),
        ({"low": {UP: 7}}, f"the table of low has 7 bits for {UP}; choose from 2, 3, 4, 5, 6, 8, 16"),
    ],
)
def test_impossible_table_is_refused(table, told):
    with pytest.raises(GearbxError, match=told):
        Gearbox(tiny_model(), tables=table)


class TestCaps:
    @pytest.fixture
    def gearbox(self):
        return Gearbox(tiny_model(), "4,8,16", widths=[3, 5, 6])

    def test_layers_can_be_put_to_every_width(self, gearbox):
        assert {gearbox.widths_of(layer) for layer in gearbox.layers} == {(3, 4, 5, 6, 8, 16)}
        for bits in (3, 4, 5, 6, 8, 16):
            gearbox.cap({UP: bits})
            assert bits_in(gearbox) == {path: bits if path == UP else 16 for path in bits_in(gearbox)}
        gearbox.cap({})
        assert set(bits_in(gearbox).values()) == {16}

    def test_a_cap_holds_in_every_gear(self, gearbox):
        gearbox.cap({UP: 5})
        for gear in every_gear(gearbox):
            assert bits_in(gearbox)[UP] == min(gear.bits, 5)
            assert bits_in(gearbox)[DOWN] == gear.bits

    def test_capped_layer_has_next_lower_width(self, gearbox):
        gearbox.cap({UP: 7, DOWN: 2})
        assert bits_in(gearbox) | {UP: 6, DOWN: 3} == bits_in(gearbox)

    def test_lifted_caps_restore_gear_bit_for_bit(self, gearbox):
        gearbox.shift("mid")
        before, logits = weights_of(gearbox.model), gearbox.model(PROMPT)
        read = gearbox.weight_bytes_per_token(gearbox.gear)
        gearbox.cap({layer.path: 3 for layer in gearbox.layers})
        assert gearbox.weight_bytes_per_token(gearbox.gear) < read
        gearbox.cap({})
        assert same_weights(weights_of(gearbox.model), before)
        assert mx.array_equal(gearbox.model(PROMPT), logits).item()
        assert gearbox.weight_bytes_per_token(gearbox.gear) == read

    def test_failing_cap_changes_no_layer(self, gearbox, monkeypatch):
        gearbox.cap({DOWN: 4})
        before = bits_in(gearbox)
        kind = type(gearbox.model)
        monkeypatch.setattr(kind, "update_modules", failing(kind.update_modules, 1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            gearbox.cap({UP: 4})
        assert bits_in(gearbox) == before
        gearbox.shift("low")
        gearbox.shift("high")
        assert bits_in(gearbox) == before

    def test_unneeded_originals_are_released_after_all_widths(self):
        gearbox = Gearbox(tiny_model(), "4,8", format="affine", widths=[6])
        assert all(layer.module.weight.size for layer in gearbox.layers)
        gearbox.shift("low")
        gearbox.cap({layer.path: 6 for layer in gearbox.layers})
        gearbox.shift("high")
        assert not any(layer.module.weight.size for layer in gearbox.layers)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("ladder", ["4,16", "4,8,16"])
def test_background_gear_equals_made_gear(ladder):
    beside, now = (Gearbox(load()[0], ladder, kernels="native") for _ in range(2))
    before = beside.model(PROMPT)
    assert beside.makes_beside
    assert not beside.ready(beside.ladder[0])
    beside.begin(beside.ladder[0])
    assert mx.array_equal(beside.model(PROMPT), before).item()
    deadline = time.monotonic() + 60
    while not beside.ready(beside.ladder[0]):
        assert time.monotonic() < deadline
    for _ in every_gear(beside, now):
        assert mx.array_equal(beside.model(PROMPT), now.model(PROMPT)).item()


def test_gear_unmakeable_in_thread_is_made_synchronously():
    gearbox = Gearbox(load()[0], "4,16", kernels="mlx")
    assert not gearbox.makes_beside
    gearbox.begin(gearbox.ladder[0])
    assert gearbox.ready(gearbox.ladder[0])


@pytest.mark.usefixtures("compiled")
def test_damage_found_by_thread_is_raised_at_shift():
    model = load()[0]
    model.layers[0].mlp.up_proj.weight = model.layers[0].mlp.up_proj.weight * float("nan")
    mx.eval(model.parameters())
    gearbox = Gearbox(model, "4,16", kernels="native")
    gearbox.begin(gearbox.ladder[0])
    with refuses("weights are not finite"):
        gearbox.shift(4)
    assert gearbox.gear == gearbox.ladder.top
