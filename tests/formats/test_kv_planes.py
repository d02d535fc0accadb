"""Keys and values as nested planes: what every gear reads of them."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.formats.kv_cache import group_for, pack, unpack

WIDTHS = (4, 4)


def steps(vectors: mx.array, bits: int, group_size: int) -> np.ndarray:
    """The distance between the codes of each number's group, (..., D)."""
    grouped = np.array(vectors.astype(mx.float32)).reshape(*vectors.shape[:-1], -1, group_size)
    spread = np.ptp(grouped, axis=-1) / (2**8 - 1) * 2 ** (8 - bits)
    return np.repeat(spread, group_size, axis=-1)


@pytest.mark.parametrize(("dims", "group_size"), [(64, 64), (64, 32), (80, 16), (16, 16), (8, 8), (128, 32)])
def test_each_gear_is_off_by_half_a_step_at_most(dims, group_size):
    vectors = normal(2, 3, 5, dims)
    packed = pack(vectors, WIDTHS, group_size)
    for bits in (4, 8):
        off = np.abs(np.array(unpack(*packed, WIDTHS, bits)) - np.array(vectors))
        assert (off <= steps(vectors, bits, group_size) * 0.5001 + 1e-6).all()


def test_arrays_have_the_documented_shapes_and_types():
    planes, scales, offsets = pack(normal(1, 2, 3, 64).astype(mx.bfloat16), WIDTHS, 32)
    assert [(p.shape, p.dtype) for p in planes] == [((1, 2, 3, 8), mx.uint32)] * 2
    assert scales.shape == offsets.shape == (1, 2, 3, 2)
    assert scales.dtype == offsets.dtype == mx.bfloat16


def test_first_plane_is_an_affine_weight_of_mlx():
    vectors = normal(1, 2, 3, 64)
    packed = planes, scales, offsets = pack(vectors, WIDTHS, 32)
    theirs = mx.dequantize(planes[0], scales, offsets, group_size=32, bits=4)
    assert mx.allclose(unpack(*packed, WIDTHS, 4), theirs, atol=1e-6)


def test_position_is_packed_by_itself():
    vectors = normal(1, 2, 6, 64)
    whole, alone = pack(vectors, WIDTHS, 64), pack(vectors[:, :, 3:4], WIDTHS, 64)
    for bits in (4, 8):
        assert mx.array_equal(unpack(*whole, WIDTHS, bits)[:, :, 3:4], unpack(*alone, WIDTHS, bits))


def test_equal_numbers_and_zeros_stay_what_they_are():
    vectors = mx.concatenate([mx.zeros((1, 1, 1, 64)), mx.full((1, 1, 1, 64), 3.0)], axis=2)
    for bits in (4, 8):
        assert mx.allclose(unpack(*pack(vectors, WIDTHS, 64), WIDTHS, bits), vectors, atol=1e-6)


@pytest.mark.parametrize(
    ("dims", "four", "eight"),
    [(64, 0.3125, 0.5625), (96, 0.3125, 0.5625), (16, 0.375, 0.625), (80, 0.375, 0.625), (8, 0.5, 0.75),
     (24, 0.5, 0.75), (40, 0.5, 0.75)],
)  # fmt: skip
def test_shares_of_bytes_in_bfloat16_are_those_of_the_page(dims, four, eight):
    vectors = normal(1, 1, 1, dims).astype(mx.bfloat16)
    (coarse, fine), scales, offsets = pack(vectors, WIDTHS, group_for(dims))
    read = coarse.nbytes + scales.nbytes + offsets.nbytes
    assert (read / vectors.nbytes, (read + fine.nbytes) / vectors.nbytes) == (four, eight)


@pytest.mark.parametrize(("dims", "group"), [(64, 32), (96, 32), (80, 16), (40, 8), (36, None)])
def test_group_divides_the_head(dims, group):
    assert group_for(dims) == group


@pytest.mark.parametrize(("widths", "group_size"), [((4, 8), 64), ((3,), 64), ((), 64), ((4, 4), 48), ((4, 4), 4)])
def test_planes_that_cannot_be_made_are_refused(widths, group_size):
    with pytest.raises(GearbxError):
        pack(normal(1, 1, 1, 64), widths, group_size)
