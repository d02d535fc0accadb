"""Passes and drafts as one native call: the same results as the model's own, and only for known models."""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import PROMPT, normal, on_disk, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache

from gearbx_mlx import Gearbox, entropy_bits, make_sampler
from gearbx_mlx.decoding.drafters.low_gear import (
    RESCORE_TOP_K,
    RescoringHead,
    largest,
    native_step,
    rescoring,
    rescoring_head,
)
from gearbx_mlx.decoding.hidden import recorded
from gearbx_mlx.decoding.response import GeneratedText
from gearbx_mlx.decoding.sampling import MLX_READER, Choice, Chooser, has_nan, reader_of
from gearbx_mlx.formats.block import begin_draft, pass_logits, pass_parts
from gearbx_mlx.formats.tied import IN_DRAFTS, QuantizedTied, linear_of

pytestmark = pytest.mark.usefixtures("native")


def boxed(architecture="llama", format="planes", ladder="4,16", activations="int16", **change) -> Gearbox:
    model = tiny_model(architecture, dtype=mx.bfloat16, **change)
    return Gearbox(model, ladder, format=format, kernels="native", activations=activations)


def begun(box: Gearbox, gear: int = 4) -> list:
    """A cache with a prompt that was read in the top gear; then the model shifts to a gear."""
    cache = make_prompt_cache(box.model)
    box.shift(box.ladder.top)
    mx.eval(box.model(PROMPT, cache=cache))
    box.shift(gear)
    return cache


def drafted(box: Gearbox, cache: list):
    """A draft in the engaged gear; None if there is none."""
    parts = pass_parts(box.model)
    return None if parts is None else begin_draft(parts, cache)


def greedy(box: Gearbox, cache: list, token: int, count: int) -> list[tuple[int, float]]:
    """Tokens and entropies of the model's own passes over a copy of the cache."""
    cache, found = copy.deepcopy(cache), []
    for _ in range(count):
        logits = box.model(mx.array([[token]]), cache=cache)[0, 0]
        token = mx.argmax(logits).item()
        found.append((token, entropy_bits(logits).item()))
    return found


MODELS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"format": "affine", "activations": "int8"}),
    ("llama", {"format": "exact"}),
    ("llama", {"ladder": "4,8,16", "activations": "float"}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("phi3", {}),
]


@pytest.mark.parametrize(("architecture", "settings"), MODELS)
def test_pass_equals_model_bit_for_bit(architecture, settings):
    box = boxed(architecture, **settings)
    for gear in box.ladder:
        for count in (1, 2, 5, 16):
            tokens, own, cache = range(3, 3 + count), begun(box, gear.bits), begun(box, gear.bits)
            with recorded(box.model, (1, 2)) as states:
                expected = box.model(mx.array([[*tokens]]), cache=own)
            logits, hidden = pass_logits(pass_parts(box.model), tokens, cache, (1, 2))
            assert np.array_equal(np.array(logits), np.array(expected))
            assert all(np.array_equal(np.array(hidden[tap]), np.array(states[tap][0])) for tap in (1, 2))
            for part, its in zip(cache, own):
                assert part.offset == its.offset
                for a, b in zip(part.state, its.state):
                    assert np.array_equal(np.array(a), np.array(b))


def test_pass_is_declined_without_room_or_known_cache():
    box = boxed()
    cache = begun(box)
    assert pass_logits(pass_parts(box.model), [0] * 17, cache) is None
    assert pass_logits(pass_parts(box.model), [0], [RotatingKVCache(8) for _ in cache]) is None
    assert pass_logits(pass_parts(box.model), [0], None) is None
    assert cache[0].offset == PROMPT.size


@pytest.mark.parametrize(("architecture", "settings"), MODELS)
def test_native_draft_equals_model_output(architecture, settings):
    box = boxed(architecture, **settings)
    for gear in box.ladder:
        cache = begun(box, gear.bits)
        expected = greedy(box, cache, 3, 5)
        step = drafted(box, cache)
        assert step is not None
        token = 3
        for place, (following, bits) in enumerate(expected):
            token, entropy, _ = step.best(token, place)
            assert token == following
            assert entropy == pytest.approx(bits, abs=1e-4)


def test_native_draft_holds_cache_memory():
    box = boxed()
    cache = begun(box)
    expected = drafted(box, cache).best(3, 0)
    step = drafted(box, begun(box))
    taken = [mx.full(part.keys.shape, mx.nan) for part in cache for _ in range(2)]  # the memory of a cache that is gone
    mx.eval(taken)
    assert step.best(3, 0) == expected


def test_native_draft_leaves_cache_unchanged():
    box = boxed()
    cache = begun(box)
    before = [(np.array(part.keys[..., : part.offset, :]), part.offset) for part in cache]
    step = drafted(box, cache)
    for place in range(4):
        step.best(place, place)
    for part, (keys, offset) in zip(cache, before):
        assert part.offset == offset
        assert mx.array_equal(part.keys[..., :offset, :], mx.array(keys))


def test_native_draft_follows_shifts_and_changed_weights():
    box = boxed()
    cache = begun(box)
    low = drafted(box, cache).best(3, 0)[1]
    box.shift(16)
    top = drafted(box, cache).best(3, 0)[1]
    assert low != top
    box.model.model.norm.weight = 3 * box.model.model.norm.weight
    mx.eval(box.model.parameters())
    assert drafted(box, cache).best(3, 0)[1] not in (low, top)


def test_native_draft_continues_until_weights_are_freed(tmp_path):
    model = tiny_model(dtype=mx.bfloat16)
    box = Gearbox(model, "4,16", kernels="native", **on_disk(model, tmp_path))
    cache = begun(box, 16)
    parts = pass_parts(box.model)
    assert begin_draft(parts, cache) is not None
    box.shift(4)
    assert begin_draft(parts, cache) is None

    box = boxed()
    cache = begun(box)
    parts, expected = pass_parts(box.model), greedy(box, cache, 3, 1)
    box.shift(16)
    token, bits, _ = begin_draft(parts, cache).best(3, 0)
    assert (token, bits) == (expected[0][0], pytest.approx(expected[0][1], abs=1e-4))


def test_native_draft_needs_unshared_entries():
    box = boxed()
    cache = begun(box)
    kept = copy.copy(cache[0].keys)
    assert drafted(box, cache) is None
    del kept
    assert drafted(box, cache) is not None


def test_native_draft_refuses_places_beyond_room():
    box = boxed()
    cache = begun(box)
    step = drafted(box, cache)
    room = cache[0].keys.shape[2] - cache[0].offset
    assert step.room == room
    assert step.best(3, room - 1)
    with pytest.raises(ValueError, match="room"):
        step.best(3, room)
    with pytest.raises(ValueError, match="token"):
        step.best(10**6, 0)


def test_other_models_and_caches_have_none():
    box = boxed()
    windows = [RotatingKVCache(8) for _ in box.model.layers]
    batch = [BatchKVCache.merge([KVCache(), KVCache()]) for _ in box.model.layers]
    for cache in (windows, batch):
        mx.eval(box.model(PROMPT if cache is windows else mx.concatenate([PROMPT, PROMPT]), cache=cache))
        assert drafted(box, cache) is None
    assert drafted(box, make_prompt_cache(box.model)) is None
    other = Gearbox(tiny_model("gpt_neox"), "4,16", kernels="native")
    assert drafted(other, begun(other)) is None


def test_unknown_layer_disables_native_draft():
    box = boxed()
    cache = begun(box)
    layer = box.model.layers[0].mlp.down_proj
    known = type(layer)
    layer.__class__ = type("Derived", (known,), {"__call__": lambda self, x: known.__call__(self, x) + 1})
    assert drafted(box, cache) is None


@pytest.mark.parametrize("values", [normal(3, 5000), normal(2, 49152, seed=1), normal(4, 17, seed=2), normal(1, 1)])
def test_native_logits_reader_matches_mlx(values):
    reader = reader_of(boxed())
    x = 7 * values
    assert np.allclose(np.array(reader.normalized(x)), np.array(MLX_READER.normalized(x)), atol=2e-5)
    own, expected = np.array(reader.choices(x)), np.array(MLX_READER.choices(x))
    assert np.array_equal(own[:, [0, 4]], expected[:, [0, 4]])  # tokens, and the largest magnitude
    np.testing.assert_allclose(own[:, 1:4], expected[:, 1:4], atol=2e-4)
    logprobs = np.array(reader.normalized(x))
    assert np.array_equal(own[:, 2], logprobs.max(axis=-1))
    if x.shape[-1] > 1:
        assert np.array_equal(own[:, 3], np.sort(logprobs, axis=-1)[:, -2])
    (token, margin), (other, gap) = reader.best(x), MLX_READER.best(x)
    assert mx.array_equal(token, other)
    assert mx.allclose(margin, gap, atol=1e-4)
    alone = np.concatenate([np.array(reader.choices(row)) for row in mx.split(x, len(x))])
    assert np.array_equal(alone, own)
    rows = mx.concatenate([reader.logsumexp(row) for row in mx.split(x, len(x))])
    assert mx.array_equal(rows, reader.logsumexp(x))  # a row has the same bits in any company


def test_native_logits_reader_handles_masked_and_nonfinite():
    reader = reader_of(boxed())
    rows = np.array(normal(5, 300))
    rows[0, 5:] = -np.inf
    rows[1, 7] = np.inf
    rows[2, 9] = np.nan
    rows[3] = -np.inf
    found, expected = np.array(reader.logsumexp(mx.array(rows))), np.array(mx.logsumexp(mx.array(rows), -1, True))
    assert np.allclose(found, expected, atol=1e-5, equal_nan=True)
    rows[4, [3, 8]] = np.inf
    logits = mx.array(rows)
    entropies = np.array(reader.choices(logits))[:, Choice.ENTROPY]
    found = [has_nan(row, float(bits)) for row, bits in zip(reader.normalized(logits), entropies)]
    assert found == [False, True, True, True, True]


UNTIED, TIED = {}, {"tie_word_embeddings": True}
SAMPLINGS = [{"temp": 0.7}, {"temp": 1.5, "top_p": 0.6}, {"temp": 0.3, "min_p": 0.1}]
SAMPLINGS += [{"temp": 2.0, "top_p": 0.9, "top_k": 3}]


@pytest.mark.parametrize("change", [UNTIED, TIED])
@pytest.mark.parametrize("gears", ["planes 4,16", "planes 4,8", "affine 4,8", "exact 4,16"])
def test_the_head_of_a_draft_rescores(gears, change):
    format, ladder = gears.split()
    box = boxed(format=format, ladder=ladder, **change)
    cache = begun(box)
    second = rescoring_head(box, box.ladder[0])
    # The output of the low gear's blocks, through the low gear's head and through the top gear's.
    hidden = box.model.model(mx.array([[3]]), cache=copy.deepcopy(cache))[0]
    low = np.array(linear_of(second.holder if change else second.holder[second.name])(hidden)[0])
    top = np.array(linear_of(second.top)(hidden)[0])
    best = np.argsort(-low)[:RESCORE_TOP_K]
    expected = low.copy()
    expected[best] = top[best]
    assert abs(expected - low).max() > 1e-3

    draft = begin_draft(pass_parts(box.model, second.top), cache)
    np.testing.assert_allclose(np.array(draft.logits(3, 0))[0], expected, atol=1e-5)
    token, bits, _ = draft.best(3, 0)
    assert token == expected.argmax()
    assert bits == pytest.approx(entropy_bits(mx.array(expected)).item(), abs=1e-4)


@pytest.mark.parametrize("vocabulary", [600, 131])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_like_mlxs_operations(sampling, vocabulary):
    box = boxed(vocab_size=vocabulary)
    cache, sampler = begun(box), make_sampler(**sampling)
    draft = begin_draft(pass_parts(box.model, rescoring_head(box, box.ladder[0]).top), cache)
    logits = draft.logits(3, 0)
    for seed in range(40):
        mx.random.seed(seed)
        expected = sampler.by_mlx(logits - mx.logsumexp(logits)).item()
        mx.random.seed(seed)
        token, margin = native_step(draft, Chooser(sampler), GeneratedText([3]), MLX_READER)(3, 0)
        mx.random.seed(seed)
        assert token == sampler(logits - mx.logsumexp(logits)).item() == expected
        mx.random.seed(seed)
        _, other = Chooser(sampler.by_mlx).drafted(logits, MLX_READER)
        assert margin == pytest.approx(other.item(), abs=1e-3)


@pytest.mark.parametrize("change", [UNTIED, TIED])
def test_the_head_rescores_without_native_passes_too(change):
    box = boxed(activations="float", **change)  # MLX computes the best again
    cache = begun(box)
    second, tokens = rescoring_head(box, box.ladder[0]), mx.array([[3, 5, 7]])
    low = np.array(box.model(tokens, cache=copy.deepcopy(cache))[0])
    with rescoring(second):
        twice = np.array(box.model(tokens, cache=copy.deepcopy(cache))[0])
    for row, token in enumerate(tokens[0].tolist()):
        step = begin_draft(pass_parts(box.model, second.top), cache)
        for place, before in enumerate(tokens[0].tolist()[:row]):
            step.best(before, place)
        np.testing.assert_allclose(twice[row], np.array(step.logits(token, row))[0], atol=1e-4)
    assert (twice != low).sum() == 3 * RESCORE_TOP_K
    assert np.array_equal(np.array(box.model(tokens, cache=copy.deepcopy(cache))[0]), low)


def test_packed_tied_head_rescores():
    mx.random.seed(1)
    top = nn.Linear(64, 96, bias=False)
    tied = QuantizedTied(nn.QuantizedLinear.from_linear(top, 32, 4), mx.float32)
    x, tokens = mx.random.normal((1, 2, 64)), mx.array([[3, 5]])
    low, rows = np.array(tied.as_linear(x)), np.array(tied(tokens))
    with rescoring(RescoringHead(top, tied, IN_DRAFTS)):
        twice = np.array(tied.as_linear(x))
        assert np.array_equal(np.array(tied(tokens)), rows)
    assert (twice != low).sum() == 2 * RESCORE_TOP_K
    np.testing.assert_allclose(twice[twice != low], np.array(top(x))[twice != low], atol=1e-5)
    assert np.array_equal(np.array(tied.as_linear(x)), low)


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 6), st.integers(0, 2**31))
def test_the_largest_logits_are_found(size, count, seed):
    logits = np.random.default_rng(seed).standard_normal((2, 1, size)).astype(np.float32)
    count = min(count, size)
    found = np.array(largest(mx.array(logits), count))
    expected = np.argsort(-logits, axis=-1)[..., :count]
    assert np.array_equal(np.sort(found, axis=-1), np.sort(expected, axis=-1))


def test_shared_or_released_head_never_rescores(tmp_path):
    model = tiny_model(dtype=mx.bfloat16)
    idle = Gearbox(model, "4,16", kernels="native", **on_disk(model, tmp_path))
    assert rescoring_head(idle, idle.ladder[0]) is None
    box = boxed(ladder="4,16")
    assert rescoring_head(box, box.ladder.top) is None
