"""Rowwise and groupwise codes in native CPU kernels."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import assert_products_close, float64
from hypothesis import given, settings
from hypothesis import strategies as st

from gearbx_mlx.formats import groupwise, rowwise
from gearbx_mlx.kernels.products import SymmetricCodes, symmetric_product

TYPES = [mx.float32, mx.bfloat16, mx.float16]


@pytest.mark.usefixtures("compiled")
class TestSymmetricCodes:
    @settings(max_examples=60)
    @given(
        bits=st.sampled_from([2, 4, 6, 8]),
        rows=st.integers(1, 40),
        width=st.integers(1, 300),
        vectors=st.integers(1, 20),
        dtype=st.sampled_from(TYPES),
        seed=st.integers(0, 1 << 30),
    )
    def test_rowwise(self, bits, rows, width, vectors, dtype, seed):
        keys = mx.random.split(mx.random.key(seed))
        codes, scales = rowwise.quantize(mx.random.normal((rows, width), key=keys[0]).astype(dtype), bits)
        x = mx.random.normal((vectors, width), key=keys[1])
        y = symmetric_product(x, SymmetricCodes(rowwise.pack_symmetric_codes(codes, bits), scales, bits, width))
        weights = float64(codes) * float64(scales)[:, None]
        # Codes are multiplied with their offset; the sum of the activations removes it again.
        assert_products_close(y, x, weights, np.abs(weights) + 2.0 ** (bits - 1) * float64(scales)[:, None])

    @settings(max_examples=30)
    @given(rows=st.integers(1, 40), width=st.integers(1, 300), vectors=st.integers(1, 20), seed=st.integers(0, 1 << 30))
    def test_groupwise(self, rows, width, vectors, seed):
        keys = mx.random.split(mx.random.key(seed))
        codes, scales = groupwise.quantize(mx.random.normal((rows, width), key=keys[0]))
        x = mx.random.normal((vectors, width), key=keys[1])
        y = symmetric_product(x, SymmetricCodes(rowwise.pack_symmetric_codes(codes, 4), scales, 4, width))
        sizes = np.repeat(float64(scales), 32, axis=1)[:, :width]
        weights = float64(codes)[:, :width] * sizes
        assert_products_close(y, x, weights, np.abs(weights) + 8 * sizes)

    def test_same_bits_in_any_company(self, native):
        codes, scales = rowwise.quantize(mx.random.normal((50, 203)), 6)
        packed, x = rowwise.pack_symmetric_codes(codes, 6), mx.random.normal((20, 203))
        for x_bits in (0, 8, 16):
            together = native.symmetric_matvec(x, packed, scales, 6, x_bits)
            for i in range(20):
                alone = native.symmetric_matvec(x[i : i + 1], packed, scales, 6, x_bits)
                assert mx.array_equal(together[i : i + 1], alone).item()

    def test_wrong_arguments_are_refused(self, native):
        codes, scales = rowwise.quantize(mx.random.normal((8, 64)), 4)
        packed, x = rowwise.pack_symmetric_codes(codes, 4), mx.ones((1, 64))
        for arguments in [
            (x, packed, scales, 5),
            (x, packed, scales, 8),
            (x, packed.astype(mx.int32), scales, 4),
            (x, packed, scales[:4], 4),
            (x, packed, scales[:, None], 4),
            (x, packed, scales.astype(mx.int32), 4),
            (mx.ones((1, 65)), packed, scales, 4),
            (mx.ones((0, 64)), packed, scales, 4),
            (x, packed, scales, 4, 12),
        ]:
            with pytest.raises(ValueError, match=r"x|codes|rows|scale|vector|activations"):
                native.symmetric_matvec(*arguments)
