"""AION's products: its baselines are right, and the study reports what it measured."""

import mlx.core as mx
import numpy as np
import pytest

from gearbx_mlx.formats import groupwise
from gearbx_mlx.formats.rowwise import pack_symmetric_codes
from research.conservation import compiled
from research.threads import SCALAR_SOURCE, emulated, scalar


@pytest.fixture(scope="module")
def product():
    """A matrix in format groupwise, activations, and their product in float64."""
    weight = mx.random.normal((24, 96), key=mx.random.key(0))
    x = mx.random.normal((96,), key=mx.random.key(1))
    codes, scales = groupwise.quantize(weight)
    packed = pack_symmetric_codes(codes, groupwise.GROUP_BITS)
    mx.eval(x, packed, scales)
    dense = np.array(groupwise.dequantize(codes, scales, 96), dtype=np.float64)
    return packed, scales, x, dense @ np.array(x, dtype=np.float64)


class TestBaselines:
    def test_one_weight_after_the_other(self, product, tmp_path):
        packed, scales, x, expected = product
        library = compiled(tmp_path, SCALAR_SOURCE)
        assert np.allclose(scalar(library, *map(np.array, (packed, scales, x))), expected, rtol=1e-5, atol=1e-5)

    def test_whole_matrices(self, product):
        packed, scales, x, expected = product
        assert np.allclose(emulated(*map(np.array, (packed, scales, x))), expected, rtol=1e-5, atol=1e-5)
