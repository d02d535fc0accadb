"""A KV cache in gears: its content, and what passes read of it."""

import contextlib
import copy
from functools import partial
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal, same_arrays, tiny_model
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache, save_prompt_cache
from refusals import refuses

from gearbx_mlx import Gearbox, GearbxError, Kickdown, Lossless, Route, Static, stream_generate
from gearbx_mlx.decoding.caches import Snapshot, cache_in_gears, plain_cache, put_in_gears
from gearbx_mlx.formats import block
from gearbx_mlx.formats.kv_cache import PACKED_AT_ONCE, KVGears, NestedKVCache, block_planes, group_for, pack, unpack
from gearbx_mlx.kernels import cpu, dispatch
from gearbx_mlx.telemetry.summary import Tally, kv_rows, kv_summary


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
    assert same_arrays(cache.read(1) or cache.keys_and_values(), (keys, values))


@pytest.mark.parametrize(("ladder", "bits"), [((4, 16), 4), ((4, 8, 16), 8)])
def test_low_gear_reads_planes_except_latest_entries(ladder, bits):
    cache = cache_of(ladder, bits)
    keys, values = filled(cache, 150)
    for got, given in zip(cache.read(1).unpacked(), (keys, values)):
        begin = given[:, :, : 2 * PACKED_AT_ONCE]
        widths = cache.gears.widths
        assert mx.array_equal(got[:, :, : 2 * PACKED_AT_ONCE], unpack(*pack(begin, widths, 32), widths, bits))
        assert mx.array_equal(got[:, :, 2 * PACKED_AT_ONCE :], given[:, :, 2 * PACKED_AT_ONCE :])


@pytest.mark.parametrize("bits", [4, 8])
def test_planes_hold_every_position(bits):
    cache = cache_of((4, 8), bits)
    keys, values = filled(cache, 70)
    assert cache.keys is None
    read = cache.read(1).unpacked()
    for got, given in zip(read, (keys, values)):
        assert mx.array_equal(got, unpack(*pack(given, (4, 4), 32), (4, 4), bits))
    assert same_arrays(cache.keys_and_values(), read)  # which a layer may ask of another one's cache


@pytest.mark.parametrize("at_once", [1, 16, 30])
def test_prefill_entries_become_planes_with_next_token(at_once):
    cache = cache_of((4, 8), 8)
    cache.gears.begin_prompt()
    keys, _ = filled(cache, 90, at_once=at_once)
    assert mx.array_equal(cache.keys_and_values()[0], keys)
    cache.gears.end_prompt()
    cache.update_and_fetch(normal(1, 2, 1, 32), normal(1, 2, 1, 32))
    assert cache.keys is None
    assert mx.array_equal(cache.read(1).unpacked()[0][:, :, :90], unpack(*pack(keys, (4, 4), 32), (4, 4), 8))


def test_low_gear_prefill_entries_are_not_counted():
    cache = cache_of((4, 16), 4)
    filled(cache, 100)
    cache.gears.begin_prompt()
    assert cache.update(normal(1, 2, 3, 32), normal(1, 2, 3, 32)) is None
    cache.gears.end_prompt()
    assert cache.gears.meter.take() == ({}, {})
    assert cache.update(normal(1, 2, 1, 32), normal(1, 2, 1, 32)).packed == PACKED_AT_ONCE
    assert cache.gears.meter.take()[1] == {4: 1}


@pytest.mark.parametrize(("ladder", "bits"), [((4, 16), 4), ((4, 8), 8), ((4, 8), 4)])
def test_trimmed_and_rewritten_positions_read_equally(ladder, bits):
    cache, straight = cache_of(ladder, bits), cache_of(ladder, bits)
    keys, values = filled(straight, 140)
    filled(cache, 140)
    assert cache.trim(70) == 70
    cache.update_and_fetch(*(-2 * a[:, :, 70:75] for a in (keys, values)))
    cache.trim(5)
    for at in range(70, 140):
        cache.update_and_fetch(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    assert same_arrays(cache.read(1).unpacked(), straight.read(1).unpacked())


def test_undone_draft_leaves_earlier_planes():
    cache, straight = cache_of((4, 16), 4), cache_of((4, 16), 4)
    keys, values = filled(straight, 140)
    cache.gears.begin_prompt()
    cache.update_and_fetch(*(a[:, :, :100] for a in (keys, values)))
    cache.gears.end_prompt()
    before = Snapshot(cache=[cache])
    cache.update_and_fetch(*(-2 * a[:, :, 100:130] for a in (keys, values)))
    cache.update_and_fetch(*(-2 * a[:, :, 130:131] for a in (keys, values)))
    assert cache.packed == 2 * PACKED_AT_ONCE
    before.restore()
    assert cache.offset == 100
    assert cache.packed == PACKED_AT_ONCE
    cache.update_and_fetch(*(a[:, :, 100:] for a in (keys, values)))
    assert same_arrays(cache.read(1).unpacked(), straight.read(1).unpacked())


def test_copy_is_independent_cache():
    cache = cache_of((4, 8), 8)
    filled(cache, 20)
    second = copy.deepcopy(cache)
    before = [mx.array(a) for a in cache.read(1).unpacked()]
    second.trim(5)
    second.update_and_fetch(normal(1, 2, 5, 32, seed=7), normal(1, 2, 5, 32, seed=8))
    assert same_arrays(cache.read(1).unpacked(), before)


@pytest.mark.parametrize("ladder", [(4, 16), (4, 8)])
def test_plain_cache_equals_top_gear_entries(ladder):
    cache = cache_of(ladder, ladder[-1])
    filled(cache, 80)
    (plain,) = plain_cache([cache])
    assert type(plain) is KVCache
    read = cache.read(1)
    expected = cache.keys_and_values() if read is None else read.unpacked()
    assert same_arrays(plain.keys_and_values(), expected)


def test_quantized_cache_equals_top_gear_entries():
    cache = cache_of((4, 8), 8)
    filled(cache, 40)
    made, expected = cache.to_quantized(32, 8), cache.plain().to_quantized(32, 8)
    assert made.offset == 40
    assert same_arrays((*made.keys, *made.values), (*expected.keys, *expected.values))


def test_merged_caches_equal_top_gear_entries():
    caches = [cache_of((4, 8), 8), cache_of((4, 16), 16), cache_of((4, 8), 8)]
    filled(caches[0], 20)
    filled(caches[1], 30)
    made, expected = caches[0].merge(caches), BatchKVCache.merge([cache.plain() for cache in caches])
    assert made.left_padding.tolist() == [10, 0, 30]
    assert same_arrays((made.keys, made.values), (expected.keys, expected.values))


def test_unreadable_file_is_not_written(tmp_path):
    cache = cache_of((4, 8), 8)
    filled(cache, 20)
    with pytest.raises(ValueError, match=r"use \[part.plain\(\) for part in cache\] instead"):
        save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    assert not list(tmp_path.iterdir())


WIDTHS = (4, 4)


def steps(vectors: mx.array, bits: int, group_size: int) -> np.ndarray:
    """The distance between the codes of each number's group, (..., D)."""
    grouped = np.array(vectors.astype(mx.float32)).reshape(*vectors.shape[:-1], -1, group_size)
    spread = np.ptp(grouped, axis=-1) / (2**8 - 1) * 2 ** (8 - bits)
    return np.repeat(spread, group_size, axis=-1)


@pytest.mark.parametrize(("dims", "group_size"), [(64, 64), (64, 32), (80, 16), (16, 16), (8, 8), (128, 32)])
def test_gear_error_is_at_most_half_a_step(dims, group_size):
    vectors = normal(2, 3, 5, dims)
    packed = pack(vectors, WIDTHS, group_size)
    for bits in (4, 8):
        off = np.abs(np.array(unpack(*packed, WIDTHS, bits)) - np.array(vectors))
        assert (off <= steps(vectors, bits, group_size) * 0.5001 + 1e-6).all()


def test_position_is_packed_into_documented_arrays():
    planes, scales, offsets = pack(normal(1, 2, 3, 64).astype(mx.bfloat16), WIDTHS, 32)
    assert [(p.shape, p.dtype) for p in planes] == [((1, 2, 3, 8), mx.uint32)] * 2
    assert scales.shape == offsets.shape == (1, 2, 3, 2)
    assert scales.dtype == offsets.dtype == mx.bfloat16
    vectors = normal(1, 2, 6, 64)
    whole, alone = pack(vectors, WIDTHS, 64), pack(vectors[:, :, 3:4], WIDTHS, 64)
    for bits in (4, 8):
        assert mx.array_equal(unpack(*whole, WIDTHS, bits)[:, :, 3:4], unpack(*alone, WIDTHS, bits))


@pytest.mark.parametrize(
    ("dims", "four", "eight"),
    [(64, 0.3125, 0.5625), (96, 0.3125, 0.5625), (16, 0.375, 0.625), (80, 0.375, 0.625), (8, 0.5, 0.75),
     (24, 0.5, 0.75), (40, 0.5, 0.75)],
)  # fmt: skip
def test_bfloat16_byte_shares_match_page(dims, four, eight):
    vectors = normal(1, 1, 1, dims).astype(mx.bfloat16)
    (coarse, fine), scales, offsets = pack(vectors, WIDTHS, group_for(dims))
    read = coarse.nbytes + scales.nbytes + offsets.nbytes
    assert (read / vectors.nbytes, (read + fine.nbytes) / vectors.nbytes) == (four, eight)


@pytest.mark.parametrize(("dims", "group"), [(64, 32), (96, 32), (80, 16), (40, 8), (36, None)])
def test_group_divides_the_head(dims, group):
    assert group_for(dims) == group


@pytest.mark.parametrize(("widths", "group_size"), [((4, 8), 64), ((3,), 64), ((), 64), ((4, 4), 48), ((4, 4), 4)])
def test_impossible_planes_are_refused(widths, group_size):
    with pytest.raises(GearbxError):
        pack(normal(1, 1, 1, 64), widths, group_size)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("dims", [8, 16, 64, 80])
def test_native_packing_has_the_bits_of_mlx(compiled, planes, dims):
    vectors = mx.concatenate([normal(1, 2, 9, dims), mx.zeros((1, 2, 1, dims))], axis=2)
    group = min(dims, 16)
    expected, scales, offsets = pack(vectors, (4,) * planes, group)
    made = dispatch.pack_kv(vectors, planes, group)
    assert same_arrays(made, [*expected, scales, offsets])


@pytest.mark.parametrize("place", [0, 5, 31])
def test_nan_makes_its_group_nan(compiled, place):
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
def test_native_plane_attention_matches_unpacked_keys(compiled, dims, queries, keys, packed, bits, masked):
    nested = nested_of(dims, keys, packed, bits)
    x = normal(2, 4, queries, dims, seed=3)
    mask = {"none": None, "causal": "causal", "some": normal(queries, keys, seed=4) > -0.5}[masked]
    y = dispatch.nested_attention(x, nested.entries, block_planes(nested), 0.2, mask)
    expected = mx.fast.scaled_dot_product_attention(x, *nested.unpacked(), scale=0.2, mask=mask)
    assert mx.allclose(y, expected, atol=1e-5)


def nested_of(dims: int, keys: int, packed: int, bits: int):
    cache = cache_of((4, 8, 16), bits)
    entries = normal(2, 2, keys, dims), normal(2, 2, keys, dims, seed=1)
    cache.gears.exact = False
    cache.update(*(a[:, :, :packed] for a in entries))
    read = cache._nested(bits // 4)
    return type(read)(entries, read.planes, packed)


def test_query_is_batch_invariant(compiled):
    nested = nested_of(64, 528, 512, 4)
    x = normal(2, 4, 16, 64, seed=3)

    def attend(queries, mask):
        return dispatch.nested_attention(queries, nested.entries, block_planes(nested), 0.2, mask)

    together = attend(x, "causal")
    assert mx.array_equal(together[:, :, 15:], attend(x[:, :, 15:], None))
    seen = mx.arange(528) <= 515
    assert mx.array_equal(together[:, :, 3:4], attend(x[:, :, 3:4], seen[None]))


@pytest.mark.parametrize(("ladder", "bits"), [((4, 16), 4), ((4, 8, 16), 8), ((4, 8), 4)])
def test_block_over_planes_matches_separate_operations_bitwise(demo, compiled, ladder, bits):
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

    single = logits(partial(patch.object, block, "cpu_kernels", lambda vectors: None))
    assert same_arrays(logits(contextlib.nullcontext), single)


SHORT = [1 + i % 50 for i in range(150)]


def logprobs(model, tokenizer, kernels: str, **keywords) -> np.ndarray:
    gearbox = Gearbox(model, "4,16", kernels=kernels, activations="float")
    responses = stream_generate(model, tokenizer, SHORT, 3, gearbox=gearbox, mode=Static(), **keywords)
    return np.array([np.array(response.logprobs) for response in responses])


@pytest.mark.parametrize("architecture", ["minicpm3", "deepseek_v2"])
@pytest.mark.parametrize("ladder", ["4,16", "4,8"])
def test_values_may_be_narrower_than_keys(demo, compiled, architecture, ladder):
    native, mlx = (
        logprobs(tiny_model(architecture), demo.tokenizer, kernels, kv_gears=ladder, kv_gear=4)
        for kernels in ("native", "mlx")
    )
    np.testing.assert_allclose(native, mlx, atol=1e-3)
    assert np.abs(native - logprobs(tiny_model(architecture), demo.tokenizer, "native")).max() > 1e-3


@pytest.fixture(scope="module", params=["mlx", "native"])
def gearbox(request, demo):
    """A gearbox of the demo model, on either kind of kernels; shared by all tests that ask for it."""
    if request.param == "native" and cpu.why_not() is not None:
        pytest.skip(f"no native kernels: {cpu.why_not()}")
    return Gearbox(demo.model, "4,16", kernels=request.param)


@pytest.fixture(scope="module")
def tiny():
    """A gearbox of a random model, whose vocabulary is smaller than that of the tokenizer."""
    return Gearbox(tiny_model(), "4,8,16")


def text(gearbox, tokenizer, prompt, mode, tokens=24, **keywords):
    mx.random.seed(1)
    return list(stream_generate(gearbox.model, tokenizer, prompt, tokens, gearbox=gearbox, mode=mode, **keywords))


@pytest.fixture(scope="module")
def long(demo) -> list[int]:
    """A prompt of more tokens than are packed at once."""
    tokens = demo.tokenizer.encode("Once upon a time there was a king who had three daughters. " * 14)
    assert len(tokens) > 2 * PACKED_AT_ONCE
    return tokens


@pytest.mark.parametrize(("ladder", "bits"), [("4,8", 8), ("4,16", 4)])
def test_mlx_attention_output_equals_native_attention_output(demo, compiled, long, ladder, bits):
    """On a GPU, MLX's attention reads the unpacked planes."""
    tokens = []
    for kernels in ("native", "mlx"):
        made = Gearbox(demo.model, "16", kernels=kernels, activations="float", dtype="float32")
        responses = text(made, demo.tokenizer, long, Static(), 16, kv_gears=ladder, kv_gear=bits)
        tokens.append([response.token for response in responses])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_read_at_most_third_of_top_gear(demo, dtype):
    model = tiny_model()
    gearbox = Gearbox(model, "4,16", dtype=dtype)
    tally = Tally.of(["low", "high"])
    prompt = [1 + i % 50 for i in range(2100)]
    for response in text(gearbox, demo.tokenizer, prompt, Lossless(draft_length=3), 8, kv_gears="4,16"):
        tally.add(response)
    summary = kv_summary(tally, len(model.layers))
    read = summary["kv_bytes_per_pass"]
    assert read["4"] <= 0.35 * read["16"]
    assert f"{read['4'] / read['16']:.2f}" in kv_rows(summary)[0][1]
    assert summary["kv_passes"]["4"] == tally.drafted


@pytest.mark.parametrize(
    ("gears", "ladder", "expected"),
    [
        ("4,8,16", "4,8,16", {"low": 4, "mid": 8, "high": 16}),
        ("4,8,16", "4,16", {"low": 4, "mid": 4, "high": 16}),  # ladders of unlike length go together by their ends
        ("4,16", "4,8,16", {"low": 4, "high": 16}),
        ("16", "4,8", {"high": 8}),
    ],
)
def test_cache_gear_follows_weight_gear(demo, gears, ladder, expected):
    gearbox = Gearbox(tiny_model(), gears)
    for name, bits in expected.items():
        responses = text(gearbox, demo.tokenizer, SHORT, Static(gear=name), 3, kv_gears=ladder)
        assert set().union(*(r.kv_bytes for r in responses)) == {bits}


@pytest.mark.parametrize("mode", [Route(), Kickdown(), Static(), "telemetry-only"])
def test_fixed_cache_gear_may_be_requested(demo, tiny, mode):
    gearbox, model = (None, tiny_model()) if mode == "telemetry-only" else (tiny, tiny.model)
    responses = stream_generate(model, demo.tokenizer, SHORT, 4, gearbox=gearbox, mode=mode, kv_gears=(4, 8), kv_gear=4)
    assert set().union(*(r.kv_bytes for r in responses)) == {4}


def test_kickdown_reads_both_caches_as_it_climbs(demo, tiny):
    responses = text(tiny, demo.tokenizer, SHORT, Kickdown(rule=lambda *_: True), 4, kv_gears="4,16")
    plain = text(tiny, demo.tokenizer, SHORT, Static(), 4)
    assert [r.token for r in responses] == [r.token for r in plain]
    assert [set(r.kv_bytes) for r in responses] == [set(), *[{4, 16}] * 3]


@pytest.mark.slow
def test_generation_continues_from_kept_cache(demo, gearbox, long):
    cache = make_prompt_cache(demo.model)
    first = text(gearbox, demo.tokenizer, long, Static(), 5, kv_gears="4,8", prompt_cache=cache)
    assert {type(part) for part in cache} == {NestedKVCache}
    told = [*long, *(r.token for r in first)]
    for part in cache:
        part.trim(part.offset - len(told) + 1)
    again = text(gearbox, demo.tokenizer, told[-1:], Static(), 5, kv_gears="4,8", prompt_cache=cache)
    whole = text(gearbox, demo.tokenizer, long, Static(), 10, kv_gears="4,8")
    assert [r.token for r in [*first, *again]] == [r.token for r in whole]


@pytest.mark.parametrize(
    ("architecture", "keywords", "complaint"),
    [
        ("llama", {"kv_gears": "4,5"}, "--kv-gears: must ascend, of 4, 8 and 16, got 4,5"),
        ("llama", {"kv_gears": "8,4"}, "--kv-gears: must ascend, of 4, 8 and 16, got 8,4"),
        ("llama", {"kv_gears": "four"}, "--kv-gears: must ascend, of 4, 8 and 16, got four"),
        ("llama", {"kv_gears": ()}, "--kv-gears: must ascend, of 4, 8 and 16, got ;"),
        ("llama", {"kv_gears": "4,16", "kv_gear": 8}, "--kv-gear: must be one of --kv-gears, got 8; choose from 4,16"),
        ("llama", {"kv_gear": 8}, "--kv-gear: needs --kv-gears, got only --kv-gear 8"),
        ("llama", {"kv_gears": "4,16", "kv_bits": 4}, "--kv-gears: cannot be combined with --kv-bits"),
        (
            "llama",
            {"kv_gears": "4,16", "kv_gear": 4, "mode": "lossless"},
            "--kv-gear: mode 'lossless' drafts in the lowest gear, got 4",
        ),
        ("qwen2", {"kv_gears": "4,16", "max_kv_size": 8}, "--kv-gears: a rotating cache"),
        ("gemma3_text", {"kv_gears": "4,16"}, "--kv-gears: a rotating cache"),
        ("mamba", {"kv_gears": "4,16"}, "--kv-gears: ArraysCache has no gears, got 4,16"),
        ("lfm2", {"kv_gears": "4,16"}, "--kv-gears: ArraysCache has no gears, got 4,16"),
    ],
)
def test_invalid_gears_are_refused(demo, architecture, keywords, complaint):
    model = tiny_model(architecture)
    with refuses(complaint):
        stream_generate(model, demo.tokenizer, [1, 5, 9], 5, **keywords)


def test_ladder_different_from_cache_is_refused(demo):
    cache = cache_in_gears(demo.model, None, "4,8")
    with pytest.raises(GearbxError, match="--kv-gears: must be 4,8 as in the prompt cache, got 4,16"):
        cache_in_gears(demo.model, None, "4,16", cache=cache)
