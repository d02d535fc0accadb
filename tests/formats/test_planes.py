import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import float64, layer_with, matrix, normal, same_arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from mlx.utils import tree_flatten

from gearbx_mlx import GearbxError
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.planes import PlanesLinear, split, split_natively
from gearbx_mlx.kernels import cpu
from gearbx_mlx.kernels.bit_planes import pack_mlx_codes, unpack_mlx_codes

DTYPES = [mx.float16, mx.bfloat16, mx.float32]
WIDTHS = [(4, 4), (4, 1, 1, 2), (3, 5), (2, 1, 1, 1, 1, 2), (5, 3), (6, 2), (4, 2), (8,), (4,)]
GROUP = 64


def error(approximation: mx.array, exact: mx.array) -> float:
    exact = exact.astype(mx.float32)
    return (mx.linalg.norm(approximation - exact) / mx.linalg.norm(exact)).item()


@settings(deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_packing_is_mlx_own_layout_and_reversible(bits, groups, rows, random):
    codes = np.array([[random.randrange(2**bits) for _ in range(32 * groups)] for _ in range(rows)], dtype=np.uint32)
    words = pack_mlx_codes(mx.array(codes), bits)
    assert words.shape == (rows, groups * bits)
    assert np.array_equal(np.array(unpack_mlx_codes(words, bits)), codes)
    ones = mx.ones((rows, groups))
    unpacked = mx.dequantize(words, ones, mx.zeros_like(ones), group_size=32, bits=bits)
    assert np.array_equal(np.array(unpacked), codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
def test_every_prefix_computes_with_its_own_dequantization(widths, dtype):
    dense = layer_with(matrix(48, 256, dtype=dtype), bias=True)
    ladder = tuple(np.cumsum(widths).tolist())
    planes = split(dense.weight, widths, GROUP, mx.float32)
    modules = get_format("planes").modules(dense, ladder[0], ladder, GROUP, mx.float32)
    x = normal(3, 256, seed=1)
    for bits in ladder:
        expected = x @ planes.gear(bits).dequantize().T + dense.bias
        assert mx.allclose(modules[bits](x), expected, atol=1e-5).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
def test_full_stack_is_affine_within_storage_rounding(widths, dtype):
    weight = matrix(32, 256, dtype=dtype)
    planes = split(weight, widths, GROUP)
    bits = sum(widths)
    codes = mx.zeros((32, 256), dtype=mx.uint32)
    for words, width in zip(planes.weights, widths):
        codes = (codes << width) | unpack_mlx_codes(words, width)
    grouped = weight.astype(mx.float32).reshape(32, -1, GROUP)
    step = planes.scales.astype(mx.float32) * 2.0 ** -(bits - widths[0])
    rebuilt = planes.gear(bits).dequantize().reshape(grouped.shape)
    # One code is one step, exactly up to float32 ...
    offset = rebuilt - codes.reshape(grouped.shape).astype(mx.float32) * step[..., None]
    assert (offset.max(axis=-1) - offset.min(axis=-1)).max().item() <= 1e-6
    # ... and an element is off by half a step at most, except at the ends by the rounding of scale and bias.
    rounding = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}[dtype]
    span = mx.abs(grouped).max(axis=-1, keepdims=True) * 2
    slack = 2 * rounding * span + 1e-6
    assert (mx.abs(rebuilt - grouped) <= step[..., None] * 0.5 + slack).all().item()


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 0.02, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_stock_quantization(dtype, scale):
    weight = matrix(128, 512, dtype=dtype, scale=scale)
    planes = split(weight, (4, 4), GROUP)
    for bits in (4, 8):
        stock = mx.dequantize(*mx.quantize(weight, GROUP, bits), GROUP, bits).astype(mx.float32)
        most = 0.8 if dtype == mx.bfloat16 and bits == 8 else 1.02
        assert error(planes.gear(bits).dequantize(), weight) <= most * error(stock, weight)


def plain_errors(weight: mx.array, bits: int) -> np.ndarray:
    """Squared errors (O, G) of the nearest codes between the ends of each group, in numbers of the weight's type."""
    grouped = float64(weight).reshape(len(weight), -1, GROUP)
    floor = {mx.float16: 2.0**-24}.get(weight.dtype, 2.0**-100)
    low, high = grouped.min(axis=-1, keepdims=True), grouped.max(axis=-1, keepdims=True)
    step = np.maximum((high - low) / (2**bits - 1), floor)
    step, offset = (float64(mx.array(a.astype(np.float32)).astype(weight.dtype)) for a in (step, low))
    codes = np.clip(np.rint((grouped - offset) / step), 0, 2**bits - 1)
    return ((grouped - (codes * step + offset)) ** 2).sum(axis=-1)


@settings(deadline=None, max_examples=60)
@given(
    arrays(np.float32, (2, 128), elements=st.floats(-4, 4, width=32)),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from(DTYPES),
    st.sampled_from([1e-3, 1.0, 50.0]),
    st.sampled_from([0.0, 3.0]),
)
def test_single_plane_groups_are_no_worse_than_rtn(values, bits, dtype, scale, offset):
    weight = (mx.array(values) * scale + offset).astype(dtype)
    left = float64(split(weight, (bits,), GROUP).dequantize()) - float64(weight)
    errors = (left.reshape(2, -1, GROUP) ** 2).sum(axis=-1)
    rounding = GROUP * (2.0**-22 * np.abs(float64(weight)).max()) ** 2
    assert (errors <= plain_errors(weight, bits) * (1 + 1e-4) + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "share"), [(3, 0.92), (4, 0.95)])
def test_single_plane_error_is_below_rtn(dtype, bits, share):
    weight = matrix(64, 512, dtype=dtype)
    left = float64(split(weight, (bits,), GROUP).dequantize()) - float64(weight)
    assert (left**2).sum() < share * plain_errors(weight, bits).sum()


@pytest.mark.usefixtures("compiled")
@settings(deadline=None, max_examples=60)
@given(
    arrays(np.float32, (3, 256), elements=st.floats(-4, 4, width=32)),
    st.sampled_from(WIDTHS),
    st.sampled_from([32, 64, 128]),
    st.sampled_from(DTYPES),
    st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_native_kernels_make_planes_of_the_same_bits(values, widths, group, dtype, scale):
    dense = layer_with((mx.array(values) * scale).astype(dtype))
    ours, mlxs = split_natively(dense, widths, group, dtype, cpu.native()), split(dense.weight, widths, group)
    assert same_arrays(ours.arrays, mlxs.arrays)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("widths", [(4,), (4, 4)])
def test_native_scale_of_nonfinite_group_is_nan(widths, bad):
    weight = matrix(4, 256).astype(mx.bfloat16)
    weight[1, 70] = bad
    scales = split_natively(layer_with(weight), widths, GROUP, mx.bfloat16, cpu.native()).scales
    assert np.argwhere(~np.isfinite(float64(scales))).tolist() == [[1, 1]]


@settings(deadline=None, max_examples=60)
@given(
    arrays(np.float32, (2, 128), elements=st.floats(-4, 4, width=32)),
    st.sampled_from([widths for widths in WIDTHS if len(widths) > 1]),
    st.sampled_from(DTYPES),
    st.sampled_from([1e-3, 1.0, 50.0]),
    st.sampled_from([0.0, 3.0]),
)
def test_any_weights_are_within_half_a_step(values, widths, dtype, scale, offset):
    weight = (mx.array(values) * scale + offset).astype(dtype)
    planes = split(weight, widths, GROUP)
    exact = weight.astype(mx.float32).reshape(2, -1, GROUP)
    rounding = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.float32: 2.0**-20}[dtype]
    slack = (mx.abs(exact).max(axis=-1, keepdims=True) * 4 * rounding) + 2.0**-22
    if dtype == mx.float16:  # below 2^-14 its numbers are 2^-24 apart: a scale is off by half of that for every code
        slack = slack + 2.0**-25 * 2 ** widths[0]
    for bits in np.cumsum(widths).tolist():
        step = planes.scales.astype(mx.float32)[..., None] * 2.0 ** -(bits - widths[0])
        difference = mx.abs(planes.gear(bits).dequantize().reshape(exact.shape) - exact)
        assert (difference <= step * 0.5 + slack + step * 32 * rounding).all().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 0.37, -1e-3, 1000.0])
def test_groups_without_range_keep_their_value(value, dtype):
    weight = mx.full((4, 128), value).astype(dtype)
    planes = split(weight, (4, 4), GROUP)
    tolerance = 1e-4 + abs(value) * {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.float32: 2.0**-20}[dtype]
    for bits in (4, 8):
        difference = mx.abs(planes.gear(bits).dequantize() - weight.astype(mx.float32)).max().item()
        assert difference <= (tolerance if bits == 8 else tolerance + 6.2e-5 * 8)


def test_low_gear_is_stock_module_on_first_plane():
    dense = nn.Linear(128, 16)
    modules = get_format("planes").modules(dense, 4, (4, 6, 8), GROUP, mx.float32)
    low, mid, high = modules[4], modules[6], modules[8]
    assert type(low) is nn.QuantizedLinear
    assert type(mid) is type(high) is PlanesLinear
    assert low.weight is mid.weights[0] is high.weights[0]
    assert low.scales is mid.scales is high.scales
    assert mid.weights[1] is high.weights[1]
    assert low.bias is dense.bias is high.bias


def test_4_and_8_bit_gears_share_arrays():
    dense = layer_with(matrix(256, 512, dtype=mx.float16))
    modules = get_format("planes").modules(dense, 4, (4, 8), GROUP, mx.float16)
    arrays = {id(a): a.nbytes for m in modules.values() for _, a in tree_flatten(m.parameters())}
    # 8 bits of codes, and per group of 64 one scale and two biases of 16 bits: 8.75, where two copies take 13.
    assert 8 * sum(arrays.values()) / dense.weight.size == 8 + 3 * 16 / GROUP


def test_planes_of_more_than_a_byte_are_refused():
    with pytest.raises(GearbxError, match=r"at most 8 bits in total, got 4\+4\+4"):
        split(matrix(4, 64), (4, 4, 4), GROUP)
