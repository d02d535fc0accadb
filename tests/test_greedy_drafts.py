"""Drafts as one native call a token: what the model itself would write, and nothing that it does not know."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from conftest import PROMPT, normal, tiny_model
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache

from gearbx_mlx import Gearbox, entropy_bits
from gearbx_mlx.formats.block import begin_draft

pytestmark = pytest.mark.usefixtures("native")


def boxed(architecture="llama", format="planes", ladder="4,16", activations="int16", **change) -> Gearbox:
    model = tiny_model(architecture, **change)
    model.set_dtype(mx.bfloat16)
    return Gearbox(model, ladder, format=format, kernels="native", activations=activations)


def begun(box: Gearbox, gear: int = 4) -> list:
    """A cache with a prompt, read in the top gear; the model is then in a gear."""
    cache = make_prompt_cache(box.model)
    box.shift(box.ladder.top)
    mx.eval(box.model(PROMPT, cache=cache))
    box.shift(gear)
    return cache


def greedy(box: Gearbox, cache: list, token: int, count: int) -> list[tuple[int, float]]:
    """Tokens and entropies of the model's own passes, on a copy of the cache."""
    cache, found = copy.deepcopy(cache), []
    for _ in range(count):
        logits = box.model(mx.array([[token]]), cache=cache)[0, 0]
        token = mx.argmax(logits).item()
        found.append((token, entropy_bits(logits).item()))
    return found


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"format": "affine", "activations": "int8"}),
        ("llama", {"format": "exact"}),
        ("llama", {"ladder": "4,8,16", "activations": "float"}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("phi3", {}),
    ],
)
def test_is_what_the_model_writes(architecture, settings):
    box = boxed(architecture, **settings)
    for gear in box.ladder:
        cache = begun(box, gear.bits)
        expected = greedy(box, cache, 3, 5)
        step = begin_draft(box.model, cache)
        assert step is not None
        token = 3
        for place, (following, bits) in enumerate(expected):
            token, entropy = step(token, place)
            assert token == following
            assert entropy == pytest.approx(bits, abs=1e-4)


def test_leaves_the_cache_as_it_was():
    box = boxed()
    cache = begun(box)
    before = [(np.array(part.keys[..., : part.offset, :]), part.offset) for part in cache]
    step = begin_draft(box.model, cache)
    for place in range(4):
        step(place, place)
    for part, (keys, offset) in zip(cache, before):
        assert part.offset == offset
        assert np.array_equal(np.array(part.keys[..., :offset, :]), keys)


def test_follows_a_shift_and_a_weight_that_changes():
    box = boxed()
    cache = begun(box)
    low = begin_draft(box.model, cache)(3, 0)[1]
    box.shift(16)
    top = begin_draft(box.model, cache)(3, 0)[1]
    assert low != top
    box.model.model.norm.weight = 3 * box.model.model.norm.weight
    mx.eval(box.model.parameters())
    assert begin_draft(box.model, cache)(3, 0)[1] not in (low, top)


def test_entries_that_somebody_else_has_are_not_written():
    box = boxed()
    cache = begun(box)
    kept = copy.copy(cache[0].keys)
    assert begin_draft(box.model, cache) is None
    del kept
    assert begin_draft(box.model, cache) is not None


def test_is_refused_where_it_would_leave_the_entries():
    box = boxed()
    cache = begun(box)
    step = begin_draft(box.model, cache)
    room = cache[0].keys.shape[2] - cache[0].offset
    assert step(3, room - 1)
    with pytest.raises(ValueError, match="room"):
        step(3, room)
    with pytest.raises(ValueError, match="token"):
        step(10**6, 0)


def test_other_models_and_caches_have_none():
    box = boxed()
    windows = [RotatingKVCache(8) for _ in box.model.layers]
    batch = [BatchKVCache.merge([KVCache(), KVCache()]) for _ in box.model.layers]
    for cache in (windows, batch):
        mx.eval(box.model(PROMPT if cache is windows else mx.concatenate([PROMPT, PROMPT]), cache=cache))
        assert begin_draft(box.model, cache) is None
    assert begin_draft(box.model, make_prompt_cache(box.model)) is None
    other = Gearbox(tiny_model("gpt_neox"), "4,16", kernels="native")
    assert begin_draft(other.model, begun(other)) is None


def test_a_layer_that_is_not_known_is_run_by_mlx():
    box = boxed()
    cache = begun(box)
    layer = box.model.layers[0].mlp.down_proj
    known = type(layer)
    layer.__class__ = type("Derived", (known,), {"__call__": lambda self, x: known.__call__(self, x) + 1})
    assert begin_draft(box.model, cache) is None


@pytest.mark.parametrize("values", [normal(3, 5000), normal(2, 49152, seed=1), normal(4, 17, seed=2), normal(1, 1)])
def test_what_is_read_off_logits(values):
    from gearbx_mlx.decoding.sampling import MLX_READER, reader_of

    reader = reader_of(boxed())
    x = 7 * values
    assert np.allclose(np.array(reader.normalized(x)), np.array(MLX_READER.normalized(x)), atol=2e-5)
    assert mx.array_equal(reader.noise(x), MLX_READER.noise(x))
    if x.shape[-1] > 1:
        gap = np.sort(np.array(x), axis=-1)
        noise = mx.array((gap[:, -1] - gap[:, -2]) * 1.001)
        assert reader.near_ties(x, noise).all()
        assert not reader.near_ties(x, 0.9 * noise).any()
    rows = mx.concatenate([reader.logsumexp(row) for row in mx.split(x, len(x))])
    assert mx.array_equal(rows, reader.logsumexp(x))  # a row has the same bits in any company


def test_logits_that_are_masked_or_no_numbers():
    from gearbx_mlx.decoding.sampling import reader_of

    reader = reader_of(boxed())
    rows = np.array(normal(5, 300))
    rows[0, 5:] = -np.inf
    rows[1, 7] = np.inf
    rows[2, 9] = np.nan
    rows[3] = -np.inf
    found, expected = np.array(reader.logsumexp(mx.array(rows))), np.array(mx.logsumexp(mx.array(rows), -1, True))
    assert np.allclose(found, expected, atol=1e-5, equal_nan=True)
