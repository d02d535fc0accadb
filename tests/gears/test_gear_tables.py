"""Gears with separate bits for every layer, and bounds on them."""

import mlx.core as mx
import pytest
from conftest import PROMPT, same_weights, tiny_model, weights_of

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.gears import gearbox as gearbox_module
from gearbx_mlx.loading import DEMO_MODEL

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


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

    def test_a_layer_computes_as_in_a_gear_of_its_bits(self, format):
        mixed, plain = tiny_model(), tiny_model()
        gearbox = Gearbox(mixed, "4,16", format=format, tables={"low": {UP: 6}})
        gearbox.shift("low")
        only = Gearbox(plain, "6,16", format=format)
        only.shift("low")
        x = mx.random.normal((3, 64), key=mx.random.key(0))
        assert mx.array_equal(mixed.model.layers[0].mlp.up_proj(x), plain.model.layers[0].mlp.up_proj(x)).item()

    def test_bytes_are_those_of_the_table(self, format):
        gearbox = Gearbox(tiny_model(), "4,16", format=format, tables={"low": {UP: 8}})
        plain = Gearbox(tiny_model(), "4,16", format=format)
        low, (layer,) = gearbox.ladder[0], [e for e in gearbox.layers if e.path == UP]
        more = gearbox.weight_bytes_per_token(low) - plain.weight_bytes_per_token(low)
        assert more == gearbox.layer_bytes(layer, low) - plain.layer_bytes(layer, low) == layer.module.weight.size // 2

    def test_a_gear_of_another_ladder_costs_what_its_own_table_says(self, format):
        gearbox = Gearbox(tiny_model(), "4,8,16", format=format, tables={"mid": {UP: 5}})
        pair = Gearbox(tiny_model(), "8,16", format=format, tables={"low": {UP: 5}})
        costed = gearbox.costed_in(pair.ladder)
        assert costed.weight_bytes_per_token(pair.ladder[0]) == pair.weight_bytes_per_token(pair.ladder[0])


class TestTablesThatCannotBe:
    @pytest.mark.parametrize(
        ("table", "told"),
        [
            ({"lowest": {UP: 4}}, "no gear 'lowest' in the ladder 4,8,16"),
            ({"low": {"nowhere": 4}}, "the table of low has nowhere, which is not a layer that changes gear"),
            ({"low": {UP: 7}}, f"the table of low has 7 bits for {UP}; choose from 2, 3, 4, 5, 6, 8, 16"),
        ],
    )
    def test_is_one_line(self, table, told):
        with pytest.raises(GearbxError, match=told):
            Gearbox(tiny_model(), tables=table)

    def test_widths_that_the_format_has_not(self):
        with pytest.raises(GearbxError, match="groupwise"):
            Gearbox(tiny_model(), "4,16", format="groupwise", widths=[8])


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
        for gear in gearbox.ladder:
            gearbox.shift(gear)
            assert bits_in(gearbox)[UP] == min(gear.bits, 5)
            assert bits_in(gearbox)[DOWN] == gear.bits

    def test_a_layer_has_the_next_width_below_its_cap(self, gearbox):
        gearbox.cap({UP: 7, DOWN: 2})
        assert bits_in(gearbox) | {UP: 6, DOWN: 3} == bits_in(gearbox)

    def test_lifted_caps_leave_the_gear_bit_for_bit_as_it_was(self, gearbox):
        gearbox.shift("mid")
        before, logits = weights_of(gearbox.model), gearbox.model(PROMPT)
        read = gearbox.weight_bytes_per_token(gearbox.gear)
        gearbox.cap({layer.path: 3 for layer in gearbox.layers})
        assert gearbox.weight_bytes_per_token(gearbox.gear) < read
        gearbox.cap({})
        assert same_weights(weights_of(gearbox.model), before)
        assert mx.array_equal(gearbox.model(PROMPT), logits).item()
        assert gearbox.weight_bytes_per_token(gearbox.gear) == read

    def test_where_idle_gears_are_given_up(self, fresh_demo):
        model = fresh_demo.model
        gearbox = Gearbox(model, "4,8,16", format="affine", residency="disk", checkpoint=DEMO_MODEL, widths=[6])
        logits, down = model(PROMPT), gearbox.layers[3].path
        gearbox.cap({down: 6})
        assert not mx.array_equal(model(PROMPT), logits).item()
        gearbox.shift("low")
        gearbox.cap({})
        gearbox.shift("high")
        assert mx.array_equal(model(PROMPT), logits).item()

    def test_caps_copy_nothing(self, gearbox):
        for bits in (3, 4, 5, 6, 8, 16):
            gearbox.cap({layer.path: bits for layer in gearbox.layers})
        gearbox.cap({})
        before = mx.get_active_memory()
        for turn in range(1000):
            gearbox.cap({gearbox.layers[turn % len(gearbox.layers)].path: (3, 4, 5, 6, 8)[turn % 5]})
        gearbox.cap({})
        assert mx.get_active_memory() <= before

    def test_a_layer_that_there_is_not(self, gearbox):
        with pytest.raises(GearbxError, match="no layer nowhere changes gear"):
            gearbox.cap({"nowhere": 4})

    def test_a_cap_that_fails_changes_nothing(self, gearbox, monkeypatch):
        gearbox.cap({DOWN: 4})
        before = bits_in(gearbox)
        put, calls = gearbox_module.put_modules, []

        def failing(model, tree):
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt
            put(model, tree)

        monkeypatch.setattr(gearbox_module, "put_modules", failing)
        with pytest.raises(KeyboardInterrupt):
            gearbox.cap({UP: 4})
        assert bits_in(gearbox) == before
        gearbox.shift("low")
        gearbox.shift("high")
        assert bits_in(gearbox) == before

    def test_originals_that_no_gear_needs_are_given_up_once_all_widths_are_made(self):
        gearbox = Gearbox(tiny_model(), "4,8", format="affine", widths=[6])
        assert all(layer.module.weight.size for layer in gearbox.layers)
        gearbox.shift("low")
        gearbox.cap({layer.path: 6 for layer in gearbox.layers})
        gearbox.shift("high")
        assert not any(layer.module.weight.size for layer in gearbox.layers)
