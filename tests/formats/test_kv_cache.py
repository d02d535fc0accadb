"""A KV cache in gears: its content, and what passes read of it."""

import copy

import mlx.core as mx
import pytest
from conftest import normal
from mlx_lm.models.cache import BatchKVCache, KVCache, save_prompt_cache

from gearbx_mlx.decoding.caches import Snapshot, plain_cache
from gearbx_mlx.formats.kv_cache import TOGETHER, KVGears, NestedKVCache, pack, unpack


def cache_of(ladder: tuple[int, ...], bits: int, native: bool = False) -> NestedKVCache:
    """A cache whose passes all read in one gear."""
    return NestedKVCache(KVGears(ladder, lambda: bits, native))


def filled(cache: NestedKVCache, positions: int, dims: int = 32, at_once: int = 1) -> tuple[mx.array, mx.array]:
    """Add positions to a cache, some at once, and return all their keys and values."""
    keys, values = normal(1, 2, positions, dims), normal(1, 2, positions, dims, seed=1)
    for first in range(0, positions, at_once):
        some = slice(first, first + at_once)
        cache.update_and_fetch(keys[:, :, some], values[:, :, some])
    return keys, values


@pytest.mark.parametrize("ladder", [(4, 16), (4, 8, 16), (16,)])
def test_top_gear_reads_the_entries_themselves(ladder):
    cache = cache_of(ladder, 16)
    keys, values = filled(cache, 150)
    for got, given in zip(cache.read(1) or cache.keys_and_values(), (keys, values)):
        assert mx.array_equal(got, given)


@pytest.mark.parametrize(("ladder", "bits"), [((4, 16), 4), ((4, 8, 16), 8)])
def test_low_gear_reads_planes_of_all_but_the_latest_entries(ladder, bits):
    cache = cache_of(ladder, bits)
    keys, values = filled(cache, 150)
    for got, given in zip(cache.read(1).unpacked(), (keys, values)):
        begin = given[:, :, : 2 * TOGETHER]
        widths = cache.gears.widths
        assert mx.array_equal(got[:, :, : 2 * TOGETHER], unpack(*pack(begin, widths, 32), widths, bits))
        assert mx.array_equal(got[:, :, 2 * TOGETHER :], given[:, :, 2 * TOGETHER :])


@pytest.mark.parametrize("bits", [4, 8])
def test_planes_alone_have_every_position(bits):
    cache = cache_of((4, 8), bits)
    keys, values = filled(cache, 70)
    assert cache.keys is None
    for got, given in zip(cache.read(1).unpacked(), (keys, values)):
        assert mx.array_equal(got, unpack(*pack(given, (4, 4), 32), (4, 4), bits))


@pytest.mark.parametrize("at_once", [1, 16, 30])
def test_prompt_reads_its_entries_which_become_planes_with_the_next_token(at_once):
    cache = cache_of((4, 8), 8)
    cache.gears.begin_prompt()
    keys, _ = filled(cache, 90, at_once=at_once)
    assert mx.array_equal(cache.keys_and_values()[0], keys)
    cache.gears.end_prompt()
    cache.update_and_fetch(normal(1, 2, 1, 32), normal(1, 2, 1, 32))
    assert cache.keys is None
    assert mx.array_equal(cache.read(1).unpacked()[0][:, :, :90], unpack(*pack(keys, (4, 4), 32), (4, 4), 8))


def test_low_gear_reads_the_entries_of_a_prompt_and_counts_none_of_them():
    cache = cache_of((4, 16), 4)
    filled(cache, 100)
    cache.gears.begin_prompt()
    assert cache.update(normal(1, 2, 3, 32), normal(1, 2, 3, 32)) is None
    cache.gears.end_prompt()
    assert cache.gears.meter.take() == ({}, {})
    assert cache.update(normal(1, 2, 1, 32), normal(1, 2, 1, 32)).packed == TOGETHER
    assert cache.gears.meter.take()[1] == {4: 1}


@pytest.mark.parametrize(("ladder", "bits"), [((4, 16), 4), ((4, 8), 8), ((4, 8), 4)])
def test_positions_that_are_trimmed_and_written_again_read_as_if_written_once(ladder, bits):
    cache, straight = cache_of(ladder, bits), cache_of(ladder, bits)
    keys, values = filled(straight, 140)
    filled(cache, 140)
    assert cache.trim(70) == 70
    cache.update_and_fetch(*(-2 * a[:, :, 70:75] for a in (keys, values)))
    cache.trim(5)
    for at in range(70, 140):
        cache.update_and_fetch(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    for got, expected in zip(cache.read(1).unpacked(), straight.read(1).unpacked()):
        assert mx.array_equal(got, expected)


def test_draft_that_is_undone_leaves_the_planes_of_what_was_before_it():
    cache, straight = cache_of((4, 16), 4), cache_of((4, 16), 4)
    keys, values = filled(straight, 140)
    cache.gears.begin_prompt()
    cache.update_and_fetch(*(a[:, :, :100] for a in (keys, values)))
    cache.gears.end_prompt()
    before = Snapshot(cache=[cache])
    cache.update_and_fetch(*(-2 * a[:, :, 100:130] for a in (keys, values)))
    cache.update_and_fetch(*(-2 * a[:, :, 130:131] for a in (keys, values)))
    assert cache.packed == 2 * TOGETHER
    second = before.second()[0]
    before.restore()
    assert cache.offset == second.offset == 100
    assert cache.packed == second.packed == TOGETHER
    cache.update_and_fetch(*(a[:, :, 100:] for a in (keys, values)))
    for got, expected in zip(cache.read(1).unpacked(), straight.read(1).unpacked()):
        assert mx.array_equal(got, expected)


def test_copy_is_a_cache_of_its_own():
    cache = cache_of((4, 8), 8)
    filled(cache, 20)
    second = copy.deepcopy(cache)
    before = [mx.array(a) for a in cache.read(1).unpacked()]
    second.trim(5)
    second.update_and_fetch(normal(1, 2, 5, 32, seed=7), normal(1, 2, 5, 32, seed=8))
    assert all(mx.array_equal(a, b) for a, b in zip(cache.read(1).unpacked(), before))


@pytest.mark.parametrize("ladder", [(4, 16), (4, 8)])
def test_plain_cache_is_what_the_top_gear_reads(ladder):
    cache = cache_of(ladder, ladder[-1])
    filled(cache, 80)
    (plain,) = plain_cache([cache])
    assert type(plain) is KVCache
    read = cache.read(1)
    expected = cache.keys_and_values() if read is None else read.unpacked()
    assert all(mx.array_equal(a, b) for a, b in zip(plain.keys_and_values(), expected))


def test_quantized_cache_has_what_the_top_gear_reads():
    cache = cache_of((4, 8), 8)
    filled(cache, 40)
    made, expected = cache.to_quantized(32, 8), cache.plain().to_quantized(32, 8)
    assert made.offset == 40
    for got, given in zip((*made.keys, *made.values), (*expected.keys, *expected.values), strict=True):
        assert mx.array_equal(got, given)


def test_merged_caches_have_what_the_top_gears_read():
    caches = [cache_of((4, 8), 8), cache_of((4, 16), 16), cache_of((4, 8), 8)]
    filled(caches[0], 20)
    filled(caches[1], 30)
    made, expected = caches[0].merge(caches), BatchKVCache.merge([cache.plain() for cache in caches])
    assert made.left_padding.tolist() == [10, 0, 30]
    assert mx.array_equal(made.keys, expected.keys)
    assert mx.array_equal(made.values, expected.values)


def test_file_that_could_not_be_read_again_is_not_written(tmp_path):
    cache = cache_of((4, 8), 8)
    filled(cache, 20)
    with pytest.raises(ValueError, match=r"write \[part.plain\(\) for part in cache\] instead"):
        save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    assert not list(tmp_path.iterdir())
