"""Codebooks in a gearbox: shifts, floors, weights that are not finite."""

import math

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import ARCHITECTURES, PROMPT, heavy, linear_layers, same_weights, tiny_model, weights_of

from gearbx_mlx import Gearbox, GearbxError

FORMATS = ("codebook", "codebook-library")


class TestGearbox:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_every_architecture_runs_and_comes_back(self, architecture):
        model = tiny_model(architecture)
        before, logits = weights_of(model), model(PROMPT)
        gearbox = Gearbox(model, "2,4,16", format="codebook", kernels="mlx")
        for gear in ("low", "mid"):
            gearbox.shift(gear)
            found = model(PROMPT)
            assert mx.isfinite(found).all().item()
            assert not mx.array_equal(found, logits).item()
        gearbox.shift("high")
        assert same_weights(weights_of(model), before)
        assert mx.array_equal(model(PROMPT), logits).item()

    @pytest.mark.slow
    @pytest.mark.parametrize("name", FORMATS)
    def test_a_hundred_random_shifts(self, name):
        gearbox = Gearbox(tiny_model(), "2,3,4,16", format=name, kernels="mlx")
        logits = {}
        for choice in np.random.default_rng(0).integers(0, 4, 100):
            gear = gearbox.ladder[int(choice)]
            gearbox.shift(gear)
            now = gearbox.model(PROMPT)
            assert mx.array_equal(logits.setdefault(gear, now), now).item()
        gearbox.shift("high")
        assert mx.array_equal(gearbox.model(PROMPT), tiny_model()(PROMPT)).item()

    @pytest.mark.slow
    def test_residency(self, fresh_demo):
        gearbox = Gearbox(
            fresh_demo.model,
            "3,16",
            format="codebook",
            residency="disk",
            checkpoint=fresh_demo.path,
            manage="attention",
        )
        top = gearbox.model(PROMPT)
        gearbox.shift("low")
        low = gearbox.model(PROMPT)
        mx.eval(low)
        for gear, expected in (("high", top), ("low", low), ("high", top)):
            gearbox.shift(gear)
            assert mx.array_equal(gearbox.model(PROMPT), expected).item()

    @pytest.mark.slow
    def test_it_writes_text_on_the_demo_model(self, fresh_demo):
        gearbox = Gearbox(fresh_demo.model, "4,16", format="codebook")
        prompt = "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:"

        def text() -> str:
            return mlx_lm.generate(fresh_demo.model, fresh_demo.tokenizer, prompt, max_tokens=16)

        expected = text()
        gearbox.shift("low")
        low = text()
        assert len(set(low.split())) > 3
        gearbox.shift("high")
        assert text() == expected

    def test_a_layer_with_a_floor_gets_bits_that_the_ladder_has_not(self):
        def floor(path, module):
            return {"bits": 5} if "q_proj" in path else True

        gearbox = Gearbox(tiny_model(), "2,16", format="codebook", manage=floor)
        gearbox.shift("low")
        assert gearbox.model.layers[0].self_attn.q_proj.bits == 5
        assert gearbox.model.layers[0].self_attn.k_proj.bits == 2
        assert (
            Gearbox(tiny_model(), "2,16", manage=floor).bits_of(
                next(e for e in gearbox.layers if "q_proj" in e.path), gearbox.ladder[0]
            )
            == 16
        )

    def test_outliers_are_counted_once_a_gear_is_made(self):
        model = tiny_model()
        for module in linear_layers(model).values():
            module.weight = heavy(*module.weight.shape)
        gearbox = Gearbox(model, "3,16", format="codebook")
        low = gearbox.ladder[0]
        expected = gearbox.bits_per_weight(low), gearbox.weight_bytes_per_token(low)
        gearbox.shift(low)
        assert gearbox.bits_per_weight(low) > expected[0]
        assert gearbox.weight_bytes_per_token(low) > expected[1]

    @pytest.mark.some(2)
    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_weights_that_are_not_finite(self, name, value):
        model = tiny_model()
        model.layers[1].mlp.up_proj.weight[3, 5] = value
        gearbox = Gearbox(model, "3,16", format=name)
        with pytest.raises(GearbxError, match=r"layers\.1\.mlp\.up_proj: weights are not finite"):
            gearbox.shift("low")
        assert gearbox.gear.name == "high"

    def test_bits_that_there_are_not(self):
        with pytest.raises(GearbxError, match="format 'codebook' has no gear of 8 bits; choose from 2, 3, 4, 5, 6, 16"):
            Gearbox(tiny_model(), "4,8,16", format="codebook")
        with pytest.raises(GearbxError, match="format 'codebook-library' has no gear of 5 bits"):
            Gearbox(tiny_model(), "5,16", format="codebook-library")
