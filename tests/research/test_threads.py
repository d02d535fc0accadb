"""AION's products: its baselines are right, and the study reports what it measured."""

import mlx.core as mx
import numpy as np
import pytest

from gearbx_mlx.formats import groupwise
from gearbx_mlx.formats.rowwise import pack_symmetric_codes
from research.conservation import compiled
from research.threads import SCALAR_SOURCE, emulated, scalar, w4a8


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


@pytest.mark.slow
def test_the_study(tmp_path):
    found = w4a8(rows=48, cols=128, megabytes=1, most=2, trials=2)
    rows = found.data
    names = ["4 bits, numpy", "4 bits, scalar"]
    names += [name for name in ("float32", "4 bits, weight-only", "W4A16", "W4A8") for _ in range(2)]
    assert [row["implementation"] for row in rows] == names
    assert [row["threads"] for row in rows] == [1, 1, 1, 2, 1, 2, 1, 2, 1, 2]
    for row in rows:
        assert row["spread"][0] <= row["times_float32"] <= row["spread"][1]
        assert row["bytes"] == (48 * 128 * 4 if row["implementation"] == "float32" else 48 * 4 * (16 + 4))
    picture = tmp_path / "w.svg"
    found.pictures["w4a8.png"](picture)
    assert "W4A8 at the read bandwidth" in picture.read_text()
