import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import ARCHITECTURES, on_disk, same_weights, tiny_model, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from gearbx_mlx import Gearbox, GearbxError, Observer
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.base import ReconstructedLinear, ReconstructedSwitchLinear
from gearbx_mlx.formats.rowwise import (
    OFFSET,
    Q_MAX,
    SCALE_FLOOR,
    Rowwise,
    dequantize,
    pack_symmetric_codes,
    quantize,
    row_bytes,
    unpack_symmetric_codes,
)

DTYPES = [mx.float16, mx.bfloat16, mx.float32]
BITS = list(Q_MAX)
PROMPT = mx.array([[1, 5, 9, 2, 7]])
widths = st.one_of(st.integers(1, 9), st.integers(10, 200))


def matrix(*shape: int, dtype: mx.Dtype = mx.float32, scale: float = 0.02, seed: int = 0) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def linear(rows: int, width: int, dtype: mx.Dtype = mx.float32, bias: bool = True) -> nn.Linear:
    dense = nn.Linear(width, rows, bias=bias)
    dense.weight = matrix(rows, width, dtype=dtype)
    if bias:
        dense.bias = matrix(rows, dtype=dtype, scale=1.0, seed=1)
    return dense


def gear(dense: nn.Module, bits: int, cache: bool = False, dtype: mx.Dtype = mx.float32) -> nn.Module:
    return Rowwise(cache).modules(dense, bits, (bits,), 64, dtype)[bits]


class TestPacking:
    @settings(deadline=None)
    @given(st.sampled_from(BITS), st.integers(1, 4), widths, st.integers(0, 2**32 - 1))
    def test_round_trip_is_exact(self, bits, rows, width, seed):
        codes = np.random.default_rng(seed).integers(-Q_MAX[bits], Q_MAX[bits] + 1, (rows, width)).astype(np.int8)
        packed = pack_symmetric_codes(mx.array(codes), bits)
        assert packed.shape == (rows, row_bytes(width, bits))
        assert packed.dtype == (mx.int8 if bits == 8 else mx.uint8)
        assert packed.shape[-1] % 16 == 0
        back = unpack_symmetric_codes(packed, bits, width)
        assert back.dtype == mx.int8
        assert np.array_equal(np.array(back), codes)

    @pytest.mark.parametrize("bits", [6, 4, 2])
    def test_layout_is_a_little_endian_stream_of_offset_codes(self, bits):
        codes = np.random.default_rng(0).integers(-Q_MAX[bits], Q_MAX[bits] + 1, 37)
        packed = np.array(pack_symmetric_codes(mx.array(codes), bits)).tobytes()
        stream = int.from_bytes(packed, "little")
        read = [((stream >> (i * bits)) & (2**bits - 1)) - OFFSET[bits] for i in range(len(packed) * 8 // bits)]
        assert read[:37] == codes.tolist()
        assert set(read[37:]) <= {0}  # padding decodes to 0

    def test_the_bytes_of_the_paper(self):
        assert np.array(pack_symmetric_codes(mx.array([-7, 7]), 4))[0] == 0x01 | 0x0F << 4  # +8, low nibble first
        assert np.array(pack_symmetric_codes(mx.array([-1, 0, 1, 0]), 2))[0] == 0b10_11_10_01  # +2
        word = 1 | 63 << 6 | 32 << 12 | 33 << 18  # +32, four codes in three bytes
        assert np.array(pack_symmetric_codes(mx.array([-31, 31, 0, 1]), 6))[:3].tobytes() == word.to_bytes(3, "little")
        assert np.array(pack_symmetric_codes(mx.array([-127, 127]), 8))[:3].tolist() == [-127, 127, 0]

    def test_experts_pack_as_matrices_one_by_one(self):
        codes = mx.array(np.random.default_rng(0).integers(-31, 32, (3, 5, 21)))
        assert mx.array_equal(pack_symmetric_codes(codes, 6)[1], pack_symmetric_codes(codes[1], 6)).item()


class TestQuantization:
    @settings(deadline=None, max_examples=200)
    @given(
        st.sampled_from(BITS),
        st.sampled_from(DTYPES),
        st.integers(1, 5),
        widths,
        st.floats(-6, 2),
        st.integers(0, 2**32 - 1),
    )
    def test_no_element_is_off_by_more_than_half_a_scale(self, bits, dtype, rows, width, magnitude, seed):
        values = np.random.default_rng(seed).standard_normal((rows, width)) * 10.0**magnitude
        weight = mx.array(values.astype(np.float32)).astype(dtype)
        codes, scales = quantize(weight, bits)
        assert (codes.dtype, scales.dtype, scales.shape) == (mx.int8, dtype, (rows,))
        assert mx.abs(codes.astype(mx.int32)).max().item() <= Q_MAX[bits]
        off = np.array(dequantize(codes, scales) - weight.astype(mx.float32), dtype=np.float64)
        half = np.array(scales.astype(mx.float32), dtype=np.float64)[:, None] / 2
        assert (np.abs(off) <= half * (1 + 1e-4)).all()  # float32 products and quotients are rounded

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_scales_are_those_of_the_paper_and_have_its_floor(self, bits, dtype):
        weight = mx.concatenate([matrix(4, 50, dtype=dtype, scale=1.0), mx.zeros((1, 50), dtype)])
        codes, scales = quantize(weight, bits)
        largest = mx.abs(weight.astype(mx.float32)).max(axis=-1)[:4]
        assert mx.array_equal(scales[:4], (largest / Q_MAX[bits]).astype(dtype)).item()
        assert scales[4].item() == mx.array(SCALE_FLOOR[dtype]).astype(dtype).item()
        assert not codes[4].any().item()

    def test_floors(self):
        assert [SCALE_FLOOR[dtype] for dtype in DTYPES] == [1e-4, 1e-8, 1e-8]

    def test_error_grows_as_the_paper_says(self):
        weight = mx.random.uniform(-1, 1, (64, 4096), key=mx.random.key(0))
        mse = {bits: ((dequantize(*quantize(weight, bits)) - weight) ** 2).mean().item() for bits in BITS}
        for bits, factor in {6: 16.8, 4: 329, 2: 16129}.items():
            assert mse[bits] / mse[8] == pytest.approx(factor, rel=0.05)

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("column", [0, 3, 36])
    def test_scales_show_what_is_not_finite(self, bits, value, column):
        values = np.ones((3, 37), np.float32)
        values[1, column] = value
        assert np.isfinite(np.array(quantize(mx.array(values), bits)[1])).tolist() == [True, False, True]


class TestModules:
    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize(("rows", "width"), [(48, 256), (1, 64), (16, 1), (1, 1), (7, 37), (5, 21)])
    def test_a_linear_layer_computes_with_its_dequantization(self, bits, bias, rows, width):
        dense = linear(rows, width, bias=bias)
        module = gear(dense, bits)
        assert type(module) is ReconstructedLinear
        assert (module.input_dims, module.output_dims, module.weight_shape) == (width, rows, (rows, width))
        for shape in [(width,), (3, width), (2, 3, width)]:
            x = matrix(*shape, scale=1.0, seed=2)
            weight = dequantize(*quantize(dense.weight, bits))
            expected = x @ weight.T + (dense.bias if bias else 0)
            assert mx.allclose(module(x), expected, atol=1e-5).item()
        if bias:
            assert module.bias is dense.bias
        assert not module.trainable_parameters()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_type_computed_in_is_that_of_the_activations(self, dtype):
        module = gear(linear(8, 40, bias=False), 8)
        assert module(matrix(2, 40, dtype=dtype)).dtype == dtype

    def test_activations_need_not_be_contiguous(self):
        module = gear(linear(8, 40), 4)
        x = matrix(40, 3, scale=1.0)
        assert mx.allclose(module(x.T), module(mx.contiguous(x.T)), atol=1e-6).item()

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("cache", [False, True])
    def test_experts_agree_with_linears_one_by_one(self, bits, cache):
        experts = SwitchLinear(37, 11, num_experts=8, bias=True)
        experts.bias = matrix(8, 11, scale=1.0)
        module = gear(experts, bits, cache)
        assert type(module) is ReconstructedSwitchLinear
        assert (module.input_dims, module.output_dims, module.num_experts) == (37, 11, 8)
        for wanted in ([0, 7, 1, 7, 0], [*range(8), 3, 3]):  # fewer than all experts, and more
            x = matrix(len(wanted), 1, 1, 37, scale=1.0)
            y = module(x, mx.array([[expert] for expert in wanted]))
            for row, expert in enumerate(wanted):
                alone = nn.Linear(37, 11)
                alone.weight, alone.bias = experts.weight[expert], experts.bias[expert]
                assert mx.allclose(y[row, 0], gear(alone, bits)(x[row]), atol=1e-5).item()

    @pytest.mark.parametrize("bits", BITS)
    def test_the_cache_changes_no_bit_and_is_no_parameter(self, bits):
        dense = linear(24, 70)
        cached, plain = gear(dense, bits, cache=True), gear(dense, bits)
        before = cached.parameters().keys()
        x = matrix(3, 70, scale=1.0)
        for _ in range(2):
            assert mx.array_equal(cached(x), plain(x)).item()
        kept = cached._kept
        assert kept.shape == (24, 70)
        assert cached.parameters().keys() == before
        cached(x)
        assert cached._kept is kept
        half = cached(x.astype(mx.float16))  # another type is another reconstruction
        assert mx.array_equal(half, plain(x.astype(mx.float16))).item()
        assert cached._kept.dtype == mx.float16
        cached.forget()
        assert cached._kept is plain._kept is None

    def test_the_cache_changes_no_bit_of_experts(self):
        experts = SwitchLinear(64, 16, num_experts=8, bias=True)
        x, chosen = matrix(3, 1, 1, 64, scale=1.0), mx.array([[0, 5], [2, 5], [1, 7]])
        assert mx.array_equal(gear(experts, 4, cache=True)(x, chosen), gear(experts, 4)(x, chosen)).item()

    @pytest.mark.parametrize(("bits", "bytes_per_weight"), [(8, 1.0), (6, 0.75), (4, 0.5), (2, 0.25)])
    def test_bytes_per_weight_are_those_of_table_5(self, bits, bytes_per_weight):
        dense = linear(256, 2048, mx.float16, bias=False)
        arrays = tree_flatten(gear(dense, bits, dtype=mx.float16).parameters())
        assert sum(a.nbytes for _, a in arrays) / dense.weight.size == bytes_per_weight + 2 / 2048

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("shape", [(9, 37), (4, 256), (3, 5, 21), (1, 1)])
    def test_bytes_read_are_those_of_the_arrays(self, bits, shape):
        dense = linear(1, 1, bias=False) if len(shape) == 2 else SwitchLinear(1, 1, 1, bias=False)
        dense.weight = matrix(*shape, dtype=mx.float16)
        arrays = sum(a.nbytes for _, a in tree_flatten(gear(dense, bits, dtype=mx.float16).parameters()))
        assert get_format("rowwise").bytes_read(shape, bits, (bits,), 64, 2) == arrays

    def test_a_gear_is_the_same_whatever_it_is_computed_in(self):
        dense = linear(9, 37, mx.bfloat16)
        half, single = gear(dense, 4, dtype=mx.bfloat16), gear(dense, 4, dtype=mx.float32)
        assert single.scales.dtype == mx.float32
        assert mx.array_equal(half.weight, single.weight).item()
        assert mx.array_equal(half.scales, single.scales).item()


class TestGearbox:
    @pytest.mark.some(5)
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_every_architecture_runs_in_every_gear_and_comes_back(self, architecture):
        model = tiny_model(architecture)
        before, logits = weights_of(model), model(PROMPT)
        gearbox = Gearbox(model, "4,8,16", format="rowwise", kernels="mlx")
        errors = {}
        for name in ("low", "mid", "high"):
            gearbox.shift(name)
            errors[name] = mx.abs(model(PROMPT) - logits).max().item()
        assert errors["low"] > errors["mid"] > errors["high"] == 0.0
        assert same_weights(weights_of(model), before)

    @pytest.mark.parametrize("is_dropped", [False, True])
    def test_a_shift_drops_what_was_cached_and_changes_nothing(self, tmp_path, is_dropped):
        model, plain = tiny_model(), tiny_model()
        idle = on_disk(model, tmp_path) if is_dropped else {}
        gearbox = Gearbox(model, "2,6,16", format=Rowwise(cache=True), kernels="mlx", **idle)
        other = Gearbox(plain, "2,6,16", format="rowwise", kernels="mlx")
        up = model.model.layers[0].mlp
        for name in ("low", "mid", "low", "high"):
            engaged = up.up_proj
            gearbox.shift(name)
            assert getattr(engaged, "_kept", None) is None
            other.shift(name)
            for _ in range(2):
                assert mx.array_equal(model(PROMPT), plain(PROMPT)).item()
            assert name == "high" or up.up_proj._kept is not None

    @pytest.mark.parametrize("ladder", ["3,16", "4,5,16"])
    def test_bits_that_it_has_not_are_refused(self, tiny, ladder):
        with pytest.raises(GearbxError, match=r"format 'rowwise' has no gear of [35] bits; choose from 2, 4, 6, 8, 16"):
            Gearbox(tiny, ladder, format="rowwise")

    def test_a_layer_of_any_width_is_managed(self, tiny):
        tiny.model.layers[1].mlp.down_proj = nn.Linear(100, 64, bias=False)
        gearbox = Gearbox(tiny, format="rowwise")
        assert gearbox.unmanaged == {}

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_weights_that_are_not_finite_are_named(self, tiny, value):
        layer = tiny.model.layers[1].mlp.up_proj
        layer.weight = mx.concatenate([mx.full((1, 64), value), layer.weight[1:]])
        gearbox = Gearbox(tiny, format="rowwise")
        with pytest.raises(GearbxError, match=r"model.layers.1.mlp.up_proj: weights are not finite"):
            gearbox.shift("low")
        assert gearbox.gear.name == "high"

    def test_bits_per_weight_count_scales_and_padding(self):
        gearbox = Gearbox(tiny_model(dtype=mx.float16), "4,16", format="rowwise", manage="attention")
        assert gearbox.bits_per_weight(gearbox.ladder[0]) == 4 + 16 / 64

    def test_its_gears_are_seen_as_quantized_and_counted(self, tiny):
        gearbox = Gearbox(tiny, "4,16", format="rowwise")
        gearbox.shift("low")
        with pytest.raises(GearbxError, match="quantized already"):
            Gearbox(tiny)
        assert Observer(tiny).bits_per_weight(gearbox.gear) == pytest.approx(gearbox.bits_per_weight(gearbox.gear))
