"""Attention over nested planes: values, accesses and bits of the Metal kernel on a CPU."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal

from gearbx_mlx.formats.kv_cache import Nested, pack
from gearbx_mlx.kernels.metal import Launch
from gearbx_mlx.kernels.metal_attention import join_launch, nested_launch, takes_nested

from .cases import run_launch
from .checks import attended, exact
from .compiler import unroll
from .launch import Report
from .test_harness import text_of
from .test_mutations import changer
from .test_rows import DTYPES, ORDERS, masked, ran, same_bits

SCALE = 0.3
WIDTHS = (4, 4)

# Mistakes: the text, its replacement.
MISTAKES = {
    "codes of the next position": ("begin + position, chunk);\n#if", "begin + position + 1, chunk);\n#if"),
    "codes of another chunk": ("chunk * (CHUNK * BITS / 32) + w", "(chunk ^ 1) * (CHUNK * BITS / 32) + w"),
    "swapped nibbles": ("word >> (i * BITS)", "word >> ((i ^ 1) * BITS)"),
    "mask too narrow": ("((1u << BITS) - 1)", "((1u << BITS) - 2)"),
    "second plane in front": ("codes[i] <<= BITS;", ""),
    "first plane twice": ("from.planes[1]", "from.planes[0]"),
    "scale of another group": ("scales.at(begin + position, chunk / SHARERS)", "scales.at(begin + position, 0)"),
    "offset of another position": ("offsets.at(begin + position", "offsets.at(begin"),
    "scale of each lane": ("simd_shuffle(scale, ushort(leader))", "scale * 1.0f"),
    "offset of the first lane": ("simd_shuffle(offset, ushort(leader))", "simd_shuffle(offset, ushort(0))"),
    "scale read by all lanes": ("lane == leader", "true"),
    "step not scaled down": ("fma(scale * share", "fma(scale"),
    "offset not in the middle": ("(share - 1.0f) / 2.0f", "0.0f"),
    "positions past the last one": ("position < count", "true"),
    "shuffled by some lanes alone": ("i < TILE * CHUNKS", "i < count * CHUNKS"),
    "a position short": ("position * (DIMS + PADDING)", "position * DIMS"),
    "keys taken for values": ("unpack(nested_##array", "unpack(nested_keys"),
}
MIXED = {  # where further positions are read as they are
    "planes alone": ("begin < packed", "true"),
    "entries alone": ("begin < packed", "false"),
    "a tile too many": ("begin < packed", "begin <= packed"),
    "a tile too few": ("begin < packed", "begin + TILE < packed"),
}


def vectors(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Normal numbers with a mean that is not 0, so that offsets matter."""
    return normal(*shape, dtype=dtype, seed=seed) + mx.array(0.5, dtype)


def cached(
    keys: int, packed: int, bits: int, width: int, group_size: int, dtype=mx.float32, batch=1, heads=2
) -> Nested:
    """Keys and values as the gear with `bits` reads them; `packed` positions are in planes with room for more."""

    def planes_of(entries: mx.array) -> list[mx.array]:
        room = mx.full((batch, heads, 9, width), 3, dtype)
        planes, scales, offsets = pack(mx.concatenate([entries[:, :, :packed], room], axis=2), WIDTHS, group_size)
        return [*planes[: bits // 4], scales, offsets]

    k, v = (vectors(batch, heads, keys, width, dtype=dtype, seed=seed) for seed in (1, 2))
    return Nested((k, v), (planes_of(k), planes_of(v)), packed)


def launched(queries: mx.array, cache: Nested, mask) -> Launch:
    return nested_launch(queries, cache, SCALE, mask)


def attend(queries: mx.array, cache: Nested, mask, order: int = 0, schedule: int = 0) -> tuple[mx.array, Report]:
    parts, report = ran(launched(queries, cache, mask), order, schedule)
    return ran(join_launch(parts, queries.dtype), order, schedule)[0], report


def read_of_cache(report: Report) -> int:
    """Bytes of keys and values that a launch read, without shapes and strides."""
    counted = [name for name in report.reads if name.startswith(("keys", "values"))]
    return sum(report.reads[name].sum() for name in counted if not name.endswith(("_shape", "_strides")))


@pytest.mark.clang
class TestValuesAndAccesses:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize(
        ("dtype", "width", "group_size", "packed", "kind"),
        [
            (mx.float32, 64, 64, 128, "causal"),
            (mx.float16, 80, 16, 135, "all"),
            (mx.bfloat16, 128, 64, 135, "some"),
            (mx.float16, 128, 32, 64, "causal"),
            (mx.bfloat16, 256, 64, 135, "causal"),
        ],
        ids=str,
    )
    def test_are_those_of_exact_arithmetic_and_read_a_gears_bytes_once(
        self, dtype, width, group_size, packed, kind, bits
    ):
        length, keys = 3, 135  # more than a block, and no whole tile
        q = vectors(2, length, 4, width, dtype=dtype).swapaxes(1, 2)
        cache = cached(keys, packed, bits, width, group_size, dtype, batch=2)
        seen, mask = masked(kind, length, keys)
        wanted, bound = attended(exact(q), *map(exact, cache.unpacked()), seen, SCALE, dtype)
        for order, schedule in ORDERS:
            y, report = attend(q, cache, mask, order, schedule)
            assert (np.abs(exact(y) - wanted) <= bound).all()
            assert read_of_cache(report) == cache.nbytes()  # as a pass counts it
        assert ("keys_finer" in report.reads) == (bits == 8)

    def test_the_low_gear_reads_half_of_the_codes(self):
        read = {}
        for bits in (4, 8):
            _, report = attend(vectors(1, 4, 1, 64), cached(40, 40, bits, 64, 64), None)
            read[bits] = read_of_cache(report)
        codes, scales = 2 * 2 * 40 * 64 // 2, 2 * 2 * 2 * 40 * 4  # of keys and values, in bytes
        assert read == {4: codes + scales, 8: 2 * codes + scales}

    def test_a_cache_of_one_position(self):
        cache = cached(1, 1, 8, 64, 64, heads=1)
        wanted = np.repeat(exact(cache.unpacked()[1]), 2, 1)
        y, _ = attend(vectors(1, 2, 1, 64), cache, "causal")
        rounded = 4 * 2.0**-24 * np.abs(wanted).max() * 2  # step, offset and their sum, here and where it is unpacked
        np.testing.assert_allclose(exact(y), wanted, rtol=0, atol=rounded)


@pytest.mark.clang
@pytest.mark.slow
@pytest.mark.parametrize(("heads", "rows", "whole", "bits"), [(4, 2, True, 8), (6, 8, False, 8), (4, 16, True, 4)])
def test_a_query_has_the_same_bits_in_any_company(heads, rows, whole, bits):
    """For any keys after those that it sees, even NaN, and for every way of hiding them."""
    keys, width = 128 + (rows + 1) // 2, 32  # some of the queries see a second block
    q = vectors(1, heads, rows, width)
    cache = cached(keys, keys if whole else 96, bits, width, 16)
    causal, _ = attend(q, cache, "causal")
    seen = mx.arange(keys) <= mx.arange(keys - rows, keys)[:, None]
    masked, _ = attend(q, cache, seen)
    assert same_bits(causal, masked)
    for row in (0, rows - 1):
        visible = keys - rows + row + 1
        k, v = (array[:, :, :visible] for array in cache.entries)
        one = q[:, :, row : row + 1]
        alone, _ = attend(one, Nested((k, v), cache.planes, min(cache.packed, visible)), None)
        assert same_bits(alone, causal[:, :, row : row + 1])

        def spoiled(array: mx.array, visible: int = visible) -> mx.array:
            return array + mx.where(mx.arange(array.shape[2])[:, None] < visible, 0.0, mx.nan)

        entries = tuple(map(spoiled, cache.entries))
        planes = tuple([*arrays[:-1], spoiled(arrays[-1])] for arrays in cache.planes)
        behind, _ = attend(one, Nested(entries, planes, cache.packed), seen[row : row + 1])
        assert same_bits(behind, alone)


@pytest.mark.metal_mutations
@pytest.mark.some(5)
@pytest.mark.clang
@pytest.mark.parametrize("name", MISTAKES | MIXED)
def test_a_mistake_is_noticed(name):
    made = launched(vectors(1, 4, 4, 64), cached(70, 64 if name in MIXED else 70, 8, 64, 32), "causal")
    sound, broken = run_launch(made), run_launch(made, change=changer(*(MISTAKES | MIXED)[name]))
    faulty = broken.error or read_of_cache(broken) != read_of_cache(sound)
    assert sound.error == ""
    assert faulty or not np.array_equal(sound.out[0], broken.out[0], equal_nan=True)


@pytest.mark.clang
@pytest.mark.parametrize("bits", [4, 8])
def test_loops_can_be_unrolled(bits):
    cache = cached(9, 9, bits, 128, 64, mx.float16)
    text = text_of(launched(vectors(1, 4, 3, 128, dtype=mx.float16), cache, "causal"))
    assert text.count("UNROLL for") > 6
    unroll(text)


HALF = mx.float16
SOUND = cached(40, 32, 8, 64, 32, HALF)
QUERIES = mx.zeros((1, 4, 2, 64), HALF)


def with_keys(*arrays: mx.array) -> Nested:
    """SOUND with other planes, scales and offsets of keys."""
    return dataclasses.replace(SOUND, planes=(list(arrays), SOUND.planes[1]))


COARSE, FINER, SCALES, OFFSETS = SOUND.planes[0]
NARROW = mx.zeros((1, 2, 40, 32), HALF)
REFUSED = {
    "scales of another type": (QUERIES.astype(mx.float32), SOUND, None),
    "many queries": (mx.zeros((1, 4, 17, 64), HALF), SOUND, None),
    "heads that do not share": (mx.zeros((1, 3, 2, 64), HALF), SOUND, None),
    "another batch": (mx.zeros((2, 4, 2, 64), HALF), SOUND, None),
    "more queries than keys": (mx.zeros((1, 4, 10, 64), HALF), cached(9, 9, 8, 64, 32, HALF), None),
    "no plane": (QUERIES, with_keys(SCALES, OFFSETS), None),
    "three planes": (QUERIES, with_keys(COARSE, FINER, FINER, SCALES, OFFSETS), None),
    "planes of keys alone": (QUERIES, with_keys(COARSE, SCALES, OFFSETS), None),
    "a short plane": (QUERIES, with_keys(COARSE, FINER[:, :, :9], SCALES, OFFSETS), None),
    "a narrow plane": (QUERIES, with_keys(COARSE, FINER[..., 1:], SCALES, OFFSETS), None),
    "other groups of offsets": (QUERIES, with_keys(COARSE, FINER, SCALES, OFFSETS[..., :1]), None),
    "signed words": (QUERIES, with_keys(COARSE.astype(mx.int32), FINER, SCALES, OFFSETS), None),
    "a tile of two kinds": (QUERIES, dataclasses.replace(SOUND, packed=31), None),
    "nothing packed": (QUERIES, dataclasses.replace(SOUND, packed=0), None),
    "entries of another width": (QUERIES, dataclasses.replace(SOUND, entries=(NARROW, NARROW)), None),
    "an unknown mask": (QUERIES, SOUND, "sliding"),
    "a mask that is added": (QUERIES, SOUND, mx.zeros((2, 40))),
    "groups that lanes do not share": (mx.zeros((1, 4, 2, 24), HALF), cached(9, 9, 8, 24, 24, HALF), None),
    "a wide tile": (mx.zeros((1, 4, 2, 256)), cached(9, 9, 8, 256, 64), None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    queries, cache, mask = REFUSED[name]
    assert takes_nested(QUERIES, SOUND, "causal")
    assert not takes_nested(queries, cache, mask)
    assert launched(queries, cache, mask) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "group_size"), [(64, 32), (80, 16), (128, 32), (256, 32)])
def test_each_type_and_width_of_a_head_has_a_kernel(width, group_size, dtype):
    cache = cached(40, 40, 8, width, group_size, dtype)
    taken = takes_nested(mx.zeros((1, 4, 16, width), dtype), cache, "causal") is not None
    assert taken == (width < 256 or dtype != mx.float32)  # whose tiles are larger than threadgroup memory
