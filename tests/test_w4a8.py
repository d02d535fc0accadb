"""AION's products: its baselines multiply, its terms add up, and the study says what it measured."""

import mlx.core as mx
import numpy as np
import pytest

from gearbx_mlx.formats import groupwise
from gearbx_mlx.formats.rowwise import pack_symmetric_codes
from gearbx_mlx.kernels import cpu
from research.threads import emulated, terms_of_trial, w4a8


@pytest.fixture(scope="module")
def product():
    """A matrix in format groupwise, activations, and their product in float64."""
    weight = mx.random.normal((24, 96), key=mx.random.key(0))
    x = mx.random.normal((96,), key=mx.random.key(1))
    codes, scales = groupwise.quantize(weight)
    packed = pack_symmetric_codes(codes, groupwise.BITS)
    mx.eval(x, packed, scales)
    dense = np.array(groupwise.dequantize(codes, scales, 96), dtype=np.float64)
    return packed, scales, x, dense @ np.array(x, dtype=np.float64)


class TestBaselines:
    def test_one_weight_after_the_other(self, product):
        if cpu.native() is None:
            pytest.skip(cpu.why_not())
        packed, scales, x, expected = product
        assert np.allclose(cpu.native().scalar_groupwise(x, packed, scales), expected, rtol=1e-5, atol=1e-5)

    def test_whole_matrices(self, product):
        packed, scales, x, expected = product
        assert np.allclose(emulated(*map(np.array, (packed, scales, x))), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("part", [0, 1, 2])
    def test_arrays_that_do_not_fit_are_refused(self, product, part):
        if cpu.native() is None:
            pytest.skip(cpu.why_not())
        packed, scales, x, _ = product
        arrays = [x, packed, scales]
        arrays[part] = arrays[part][:-1] + 0
        mx.eval(arrays)
        with pytest.raises(ValueError, match="in groups of 32"):
            cpu.native().scalar_groupwise(*arrays)


def test_the_terms_are_differences_of_what_was_timed():
    seconds = {"float32": 8e-6, "4 bits, weight-only": 6e-6, "W4A16": 3e-6, "W4A8": 2e-6}
    cached = {
        **{"float32": [1e-12, 5e-6], "4 bits, weight-only": [4e-12, 6e-6]},
        **{"W4A8": [1.5e-12, 5.2e-6], "W8A8": [0.5e-12, 5.2e-6]},
    }
    found = terms_of_trial({"seconds": seconds, "cached": cached}, 1_000_000)
    assert found == {
        "memory, float32": pytest.approx(7.0),
        "memory, 4 bits": pytest.approx(0.3),  # 2 in all, 1.5 in the cache, 0.2 rounding
        "fma": pytest.approx(1.0),
        "dequant": pytest.approx(3.0),
        "sdot": pytest.approx(0.5),
        "unpack": pytest.approx(1.0),
        "quant_act": pytest.approx(0.2),
        "arithmetic": pytest.approx(0.5),
        "overhead": pytest.approx(-1.8),
    }
    weight_only = found["fma"] + found["dequant"]  # AION's equations 1 and 2, without memory
    integers = found["sdot"] + found["unpack"] + found["quant_act"]
    assert found["arithmetic"] - found["overhead"] == pytest.approx(weight_only - integers)


@pytest.mark.slow
def test_the_study(tmp_path):
    found = w4a8(rows=48, cols=128, megabytes=1, most=2, trials=2)
    rows, terms = found.data["rows"], found.data["terms"]
    names = ["4 bits, numpy", "4 bits, scalar"]
    names += [name for name in ("float32", "4 bits, weight-only", "W4A16", "W4A8") for _ in range(2)]
    assert [row["implementation"] for row in rows] == names
    assert [row["threads"] for row in rows] == [1, 1, 1, 2, 1, 2, 1, 2, 1, 2]
    for row in rows:
        assert row["spread"][0] <= row["times_float32"] <= row["spread"][1]
        assert row["bytes"] == (48 * 128 * 4 if row["implementation"] == "float32" else 48 * 4 * (16 + 4))
    assert [row["term"] for row in terms][-2:] == ["arithmetic", "overhead"]
    assert "| quant_act" in found.tables["terms"]
    picture = tmp_path / "w.svg"
    found.pictures["w4a8.png"](picture)
    assert "W4A8 at the read bandwidth" in picture.read_text()
