import mlx.core as mx
import numpy as np
import pytest
from conftest import layer_with, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from gearbx_mlx.formats.rowwise import (
    CODE_OFFSET,
    MIN_SCALES,
    Q_MAX,
    Rowwise,
    dequantize,
    pack_symmetric_codes,
    quantize,
    row_bytes,
    unpack_symmetric_codes,
)

DTYPES = [mx.float16, mx.bfloat16, mx.float32]
BITS = list(Q_MAX)
seeds = st.integers(0, 2**32 - 1)
widths = st.one_of(st.integers(1, 9), st.integers(10, 200))


class TestPacking:
    @settings(deadline=None)
    @given(st.sampled_from(BITS), st.integers(1, 4), widths, seeds)
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
    def test_layout_is_little_endian_offset_codes(self, bits):
        codes = np.random.default_rng(0).integers(-Q_MAX[bits], Q_MAX[bits] + 1, 37)
        packed = np.array(pack_symmetric_codes(mx.array(codes), bits)).tobytes()
        stream = int.from_bytes(packed, "little")
        read = [((stream >> (i * bits)) & (2**bits - 1)) - CODE_OFFSET[bits] for i in range(len(packed) * 8 // bits)]
        assert read[:37] == codes.tolist()
        assert set(read[37:]) <= {0}  # padding decodes to 0

    def test_the_bytes_of_the_paper(self):
        assert np.array(pack_symmetric_codes(mx.array([-7, 7]), 4))[0] == 0x01 | 0x0F << 4  # +8, low nibble first
        assert np.array(pack_symmetric_codes(mx.array([-1, 0, 1, 0]), 2))[0] == 0b10_11_10_01  # +2
        word = 1 | 63 << 6 | 32 << 12 | 33 << 18  # +32, four codes in three bytes
        assert np.array(pack_symmetric_codes(mx.array([-31, 31, 0, 1]), 6))[:3].tobytes() == word.to_bytes(3, "little")
        assert np.array(pack_symmetric_codes(mx.array([-127, 127]), 8))[:3].tolist() == [-127, 127, 0]


class TestQuantization:
    @settings(deadline=None, max_examples=200)
    @given(st.sampled_from(BITS), st.sampled_from(DTYPES), st.integers(1, 5), widths, st.floats(-6, 2), seeds)
    def test_elements_are_within_half_a_scale(self, bits, dtype, rows, width, magnitude, seed):
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
    def test_scales_match_paper_with_floor(self, bits, dtype):
        weight = mx.concatenate([normal(4, 50).astype(dtype), mx.zeros((1, 50), dtype)])
        codes, scales = quantize(weight, bits)
        largest = mx.abs(weight.astype(mx.float32)).max(axis=-1)[:4]
        assert mx.array_equal(scales[:4], (largest / Q_MAX[bits]).astype(dtype)).item()
        assert scales[4].item() == mx.array(MIN_SCALES[dtype]).astype(dtype).item()
        assert not codes[4].any().item()

    def test_error_grows_as_in_paper(self):
        weight = mx.random.uniform(-1, 1, (64, 4096), key=mx.random.key(0))
        mse = {bits: ((dequantize(*quantize(weight, bits)) - weight) ** 2).mean().item() for bits in BITS}
        for bits, factor in {6: 16.8, 4: 329, 2: 16129}.items():
            assert mse[bits] / mse[8] == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize(("bits", "bytes_per_weight"), [(8, 1.0), (6, 0.75), (4, 0.5), (2, 0.25)])
def test_bytes_per_weight_match_table_5(bits, bytes_per_weight):
    dense = layer_with(normal(256, 2048).astype(mx.float16))
    arrays = tree_flatten(Rowwise().modules(dense, bits, (bits,), 64, mx.float16)[bits].parameters())
    assert sum(a.nbytes for _, a in arrays) / dense.weight.size == bytes_per_weight + 2 / 2048
