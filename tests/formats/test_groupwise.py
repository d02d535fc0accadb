import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import ARCHITECTURES, same_weights, tiny_model, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.base import ReconstructedLinear, ReconstructedSwitchLinear
from gearbx_mlx.formats.groupwise import Groupwise, dequantize, quantize
from gearbx_mlx.formats.rowwise import pack_symmetric_codes, unpack_symmetric_codes

DTYPES = [mx.float16, mx.bfloat16, mx.float32]
PROMPT = mx.array([[1, 5, 9, 2, 7]])


def matrix(*shape: int, dtype: mx.Dtype = mx.float32, scale: float = 0.02, seed: int = 0) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def gear(weight: mx.array, bias: mx.array | None = None, cache: bool = False) -> nn.Module:
    dense = nn.Linear(1, 1, bias=False) if weight.ndim == 2 else SwitchLinear(1, 1, 1, bias=False)
    dense.weight = weight
    if bias is not None:
        dense.bias = bias
    return Groupwise(cache).modules(dense, 4, (4,), 64, mx.float32)[4]


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.sampled_from(DTYPES), st.integers(1, 4), st.integers(1, 130), st.floats(-6, 2), st.integers(0, 2**32 - 1))
def test_round_trip_is_exact_and_no_element_off_by_more_than_half_a_scale(dtype, rows, width, magnitude, seed):
    values = np.random.default_rng(seed).standard_normal((rows, width)) * 10.0**magnitude
    weight = mx.array(values.astype(np.float32)).astype(dtype)
    codes, scales = quantize(weight)
    groups = math.ceil(width / 32)
    assert (scales.dtype, scales.shape, codes.shape) == (mx.float32, (rows, groups), (rows, groups * 32))
    assert mx.abs(codes.astype(mx.int32)).max().item() <= 7
    assert not codes[:, width:].any().item()
    packed = pack_symmetric_codes(codes, 4)
    assert (packed.dtype, packed.shape) == (mx.uint8, (rows, groups * 16))
    assert mx.array_equal(unpack_symmetric_codes(packed, 4, groups * 32), codes).item()
    off = np.abs(np.array(dequantize(codes, scales, width) - weight.astype(mx.float32), dtype=np.float64))
    half = np.repeat(np.array(scales, dtype=np.float64), 32, axis=-1)[:, :width] / 2
    assert (off <= half * (1 + 1e-5)).all()


def test_groups_of_zeros_stay_zeros():
    codes, scales = quantize(mx.zeros((2, 40)))
    assert mx.isfinite(scales).all().item()
    assert not dequantize(codes, scales, 40).any().item()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 31, 36])
def test_scales_show_what_is_not_finite(value, column):
    values = np.ones((3, 37), np.float32)
    values[1, column] = value
    finite = np.isfinite(np.array(quantize(mx.array(values))[1]))
    assert finite.sum() == 5
    assert not finite[1, column // 32]


@pytest.mark.parametrize(("rows", "width"), [(48, 256), (1, 64), (16, 1), (1, 1), (7, 37)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_computes_with_its_dequantization(rows, width, bias):
    weight, offset = matrix(rows, width), matrix(rows, scale=1.0) if bias else None
    module = gear(weight, offset)
    assert type(module) is ReconstructedLinear
    assert (module.input_dims, module.output_dims) == (width, rows)
    x = matrix(3, width, scale=1.0, seed=1)
    expected = x @ dequantize(*quantize(weight), width).T + (offset if bias else 0)
    assert mx.allclose(module(x), expected, atol=1e-5).item()
    assert bias is False or module.bias is offset
    assert module(x.astype(mx.bfloat16)).dtype == (mx.float32 if bias else mx.bfloat16)


@pytest.mark.parametrize("cache", [False, True])
def test_experts_agree_with_linears_one_by_one(cache):
    weight, bias = matrix(8, 11, 37), matrix(8, 11, scale=1.0)
    module = gear(weight, bias, cache)
    assert type(module) is ReconstructedSwitchLinear
    assert (module.input_dims, module.output_dims, module.num_experts) == (37, 11, 8)
    wanted = [0, 7, 1, 7, 0]
    x = matrix(5, 1, 1, 37, scale=1.0)
    y = module(x, mx.array([[expert] for expert in wanted]))
    for row, expert in enumerate(wanted):
        assert mx.allclose(y[row, 0], gear(weight[expert], bias[expert])(x[row]), atol=1e-5).item()


def test_the_cache_changes_no_bit():
    weight, x = matrix(24, 70), matrix(3, 70, scale=1.0)
    cached, plain = gear(weight, cache=True), gear(weight)
    for _ in range(2):
        assert mx.array_equal(cached(x), plain(x)).item()
    assert cached._kept is not None
    cached.forget()
    assert cached._kept is plain._kept is None


@pytest.mark.parametrize("shape", [(9, 37), (4, 256), (3, 5, 21), (1, 1)])
def test_bytes_read_are_those_of_the_arrays(shape):
    arrays = sum(a.nbytes for _, a in tree_flatten(gear(matrix(*shape, dtype=mx.float16)).parameters()))
    assert get_format("groupwise").bytes_read(shape, 4, (4,), 64, 2) == arrays
    if shape[-1] % 32 == 0:
        assert 8 * arrays / math.prod(shape) == 4 + 32 / 32  # codes, and a float32 scale for 32 of them


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_runs_in_its_gear_and_comes_back(architecture):
    model = tiny_model(architecture)
    before, logits = weights_of(model), model(PROMPT)
    gearbox = Gearbox(model, "4,16", format="groupwise", kernels="mlx")
    gearbox.shift("low")
    reference = tiny_model(architecture)  # the same, with the dense weights that the gear stands for
    modules = dict(reference.named_modules())
    for layer in gearbox.layers:
        if gearbox.bits_of(layer, gearbox.gear) == 4:  # a router that asks for 8 bits stays dense
            dense = modules[layer.path]
            dense.weight = dequantize(*quantize(dense.weight), dense.weight.shape[-1])
    assert mx.allclose(model(PROMPT), reference(PROMPT), atol=1e-4).item()
    assert not mx.allclose(model(PROMPT), logits, atol=1e-3).item()
    gearbox.shift("high")
    assert mx.array_equal(model(PROMPT), logits).item()
    assert same_weights(weights_of(model), before)


def test_a_shift_drops_what_was_cached(tiny):
    gearbox = Gearbox(tiny, "4,16", format=Groupwise(cache=True), kernels="mlx")
    gearbox.shift("low")
    module = tiny.model.layers[0].mlp.up_proj
    tiny(PROMPT)
    assert module._kept is not None
    gearbox.shift("high")
    assert module._kept is None


@pytest.mark.parametrize("ladder", ["4,8,16", "2,16"])
def test_bits_that_it_has_not_are_refused(tiny, ladder):
    with pytest.raises(GearbxError, match=r"format 'groupwise' has no gear of [82] bits; choose from 4, 16"):
        Gearbox(tiny, ladder, format="groupwise")


def test_a_layer_of_any_width_is_managed(tiny):
    tiny.model.layers[1].mlp.down_proj = nn.Linear(100, 64, bias=False)
    assert Gearbox(tiny, "4,16", format="groupwise").unmanaged == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(tiny, value):
    layer = tiny.model.layers[1].mlp.up_proj
    layer.weight = mx.concatenate([mx.full((1, 64), value), layer.weight[1:]])
    gearbox = Gearbox(tiny, "4,16", format="groupwise")
    with pytest.raises(GearbxError, match=r"model.layers.1.mlp.up_proj: weights are not finite"):
        gearbox.shift("low")
    assert gearbox.gear.name == "high"
