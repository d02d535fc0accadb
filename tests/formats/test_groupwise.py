import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx.formats.groupwise import dequantize, quantize
from gearbx_mlx.formats.rowwise import pack_symmetric_codes, unpack_symmetric_codes

DTYPES = [mx.float16, mx.bfloat16, mx.float32]


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.sampled_from(DTYPES), st.integers(1, 4), st.integers(1, 130), st.floats(-6, 2), st.integers(0, 2**32 - 1))
def test_round_trip_is_exact_within_half_a_scale(dtype, rows, width, magnitude, seed):
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
