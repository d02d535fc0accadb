"""Our kernels for a KV cache in planes: packing, and attention over planes."""

import contextlib

import mlx.core as mx
import pytest
from conftest import normal
from mlx_lm.models.cache import make_prompt_cache
from test_kv_cache import cache_of

from gearbx_mlx import Gearbox
from gearbx_mlx.decoding.caches import put_in_gears
from gearbx_mlx.formats import block
from gearbx_mlx.formats.kv_cache import KVGears, pack, unpack
from gearbx_mlx.kernels import dispatch


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("dims", [8, 16, 64, 80])
def test_native_packing_has_the_bits_of_mlx(compiled, planes, dims):
    vectors = mx.concatenate([normal(1, 2, 9, dims), mx.zeros((1, 2, 1, dims))], axis=2)
    group = min(dims, 16)
    expected, scales, offsets = pack(vectors, (4,) * planes, group)
    made = dispatch.pack_kv(vectors, planes, group)
    assert all(mx.array_equal(a, b) for a, b in zip(made, [*expected, scales, offsets], strict=True))


@pytest.mark.parametrize("place", [0, 5, 31])
def test_a_number_that_is_none_makes_its_group_such(compiled, place):
    vectors = normal(1, 1, 1, 64)
    vectors[0, 0, 0, place] = mx.nan
    expected = unpack(*pack(vectors, (4, 4), 32), (4, 4), 8)
    coarse, fine, scales, offsets = dispatch.pack_kv(vectors, 2, 32)
    made = unpack([coarse, fine], scales, offsets, (4, 4), 8)
    assert mx.isnan(made).tolist() == mx.isnan(expected).tolist() == [[[[True] * 32 + [False] * 32]]]


@pytest.mark.parametrize(("dims", "queries", "keys", "packed"), [
    (64, 1, 300, 256), (64, 16, 600, 592), (16, 3, 100, 64), (80, 5, 40, 40), (8, 2, 77, 77),
])  # fmt: skip
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("masked", ["none", "causal", "some"])
def test_native_attention_over_planes_is_that_over_unpacked_keys(compiled, dims, queries, keys, packed, bits, masked):
    nested = nested_of(dims, keys, packed, bits)
    x = normal(2, 4, queries, dims, seed=3)
    mask = {"none": None, "causal": "causal", "some": normal(queries, keys, seed=4) > -0.5}[masked]
    y = dispatch.nested_attention(x, nested, 0.2, mask)
    expected = mx.fast.scaled_dot_product_attention(x, *nested.unpacked(), scale=0.2, mask=mask)
    assert mx.allclose(y, expected, atol=1e-5)


def nested_of(dims: int, keys: int, packed: int, bits: int):
    cache = cache_of((4, 8, 16), bits)
    entries = normal(2, 2, keys, dims), normal(2, 2, keys, dims, seed=1)
    cache.gears.exact = False
    cache.update(*(a[:, :, :packed] for a in entries))
    read = cache._nested(bits // 4)
    return type(read)(entries, read.planes, packed)


def test_query_has_the_same_bits_in_any_company(compiled):
    nested = nested_of(64, 528, 512, 4)
    x = normal(2, 4, 16, 64, seed=3)

    def attend(queries, mask):
        return dispatch.nested_attention(queries, nested, 0.2, mask)

    together = attend(x, "causal")
    assert mx.array_equal(together[:, :, 15:], attend(x[:, :, 15:], None))
    seen = mx.arange(528) <= 515
    assert mx.array_equal(together[:, :, 3:4], attend(x[:, :, 3:4], seen[None]))


@pytest.mark.parametrize(("ladder", "bits"), [((4, 16), 4), ((4, 8, 16), 8), ((4, 8), 4)])
def test_block_over_planes_is_one_operation_or_many_with_the_same_bits(demo, compiled, ladder, bits):
    gearbox = Gearbox(demo.model, "4,16", kernels="native")

    def logits(how) -> list[mx.array]:
        gears, cache = KVGears(ladder, lambda: bits, native=True), make_prompt_cache(gearbox.model)
        put_in_gears(cache, gears)
        gears.begin_prompt()
        gearbox.model(mx.arange(1, 151)[None], cache=cache)
        gears.end_prompt()
        with how():
            return [
                gearbox.model(mx.arange(first, first + count)[None], cache=cache)
                for first, count in ((3, 1), (7, 5), (2, 1), (60, 16), (9, 16), (4, 1))
            ] + [mx.array(list(gears.meter.take()[0].values()))]

    whole, single = logits(contextlib.nullcontext), logits(block.single_operations)
    assert all(mx.array_equal(a, b) for a, b in zip(whole, single, strict=True))
