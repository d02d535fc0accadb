"""Restored caches: snapshots of every class of cache, and passes over several tokens of which the first are kept."""

import copy
import inspect
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import normal, tiny_model
from lossless_texts import endless, written
from mlx.utils import tree_flatten
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import ArraysCache, KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache

from gearbx_mlx import Gearbox, Kickdown, Lossless, load, stream_generate
from gearbx_mlx.decoding import rows as rows_module
from gearbx_mlx.decoding.caches import Snapshot
from gearbx_mlx.decoding.rows import Verification, Verifier

TOKENS = [6, 7, 8, 9, 10]
CACHES = {
    "appending": lambda: KVCache(),
    "quantized": lambda: caches.QuantizedKVCache(32, 8),
    "concatenating": lambda: caches.ConcatenateKVCache(),
    "rotating": lambda: caches.RotatingKVCache(8),
    "with sinks": lambda: caches.RotatingKVCache(8, 2),
    "chunked": lambda: caches.ChunkedKVCache(6),
    "batch": lambda: caches.BatchKVCache([0]),
    "rotating batch": lambda: caches.BatchRotatingKVCache(8, [0]),
    "states": lambda: ArraysCache(2),
    "list": lambda: caches.CacheList(ArraysCache(1), KVCache(), caches.RotatingKVCache(4)),
}
STATES = ("mamba", "lfm2")


def write(cache, count, seed):
    """What a layer writes for `count` tokens."""
    if isinstance(cache, caches.CacheList):
        for part in cache.caches:
            write(part, count, seed)
    elif isinstance(cache, ArraysCache):
        for index in range(len(cache.cache)):
            before = 0 if cache[index] is None else cache[index]
            cache[index] = before + normal(1, 4, seed=seed + count + index)
    else:
        entries = normal(1, 1, count, 32, seed=seed)
        if isinstance(cache, caches.ChunkedKVCache):
            cache.maybe_trim_front()
        mx.eval(cache.update_and_fetch(entries, -entries))


def contents(cache):
    """Everything that later tokens see. Caches that append have room after their last entry, with arbitrary content."""
    if isinstance(cache, caches.CacheList):
        return [contents(part) for part in cache.caches]
    if isinstance(cache, KVCache | caches.QuantizedKVCache | caches.BatchKVCache):
        return mx.array(cache.offset).tolist(), [leaf.tolist() for _, leaf in tree_flatten(cache.keys_and_values())]
    return [leaf.tolist() if isinstance(leaf, mx.array) else leaf for _, leaf in tree_flatten(cache.state)]


def plain(model, tokens, cache):
    """Logits (1, N, V), computed token by token."""
    return mx.concatenate([model(mx.array([[token]]), cache=cache) for token in tokens], axis=1)


def rows_of(model, tokens, cache):
    gearbox = Gearbox(model, "16")
    return Verification(Verifier(gearbox, gearbox.ladder.top), tokens, cache)


def begun(model, count):
    cache = make_prompt_cache(model)
    model(mx.arange(count)[None], cache=cache)
    return cache


class TestSnapshots:
    def test_every_class_of_cache_is_here(self):
        base = caches._BaseCache
        classes = {kind for _, kind in inspect.getmembers(caches, inspect.isclass) if issubclass(kind, base)}
        assert classes - {base} == {type(make()) for make in CACHES.values()}

    @pytest.mark.parametrize("name", CACHES)
    @pytest.mark.parametrize("length", [0, 3, 13])
    @pytest.mark.parametrize("counts", [(1,), (4,), (1, 1, 5, 1)])
    def test_all_writes_are_undone(self, name, length, counts):
        cache, other = CACHES[name](), CACHES[name]()
        for each in (cache, other):
            for token in range(length):
                write(each, 1, token)
        snapshot = Snapshot([cache])
        for again in (1, 2):  # a snapshot can be used more than once
            for seed, count in enumerate(counts):
                write(cache, count, 100 * again + seed)
            snapshot.restore()
        for seed, count in enumerate((1, 3, 1)):
            for each in (cache, other):
                write(each, count, 50 + seed)
        assert contents(cache) == contents(other)

    def test_interrupt_during_pass_undoes_all_layers(self):
        cache = [KVCache(), caches.RotatingKVCache(8), ArraysCache(1)]
        for part in cache:
            write(part, 5, 0)
        before = [contents(part) for part in cache]

        def interrupted_before_the_last_layer():
            with Snapshot(cache).borrowed():
                write(cache[0], 2, 1)
                write(cache[1], 2, 1)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted_before_the_last_layer()
        assert [part.offset for part in cache[:2]] == [5, 5]
        assert contents(cache[2]) == before[2]


class TestRows:
    @pytest.mark.some(5)
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *STATES])
    @pytest.mark.parametrize("length", [3, 70])
    @pytest.mark.parametrize("rows", [1, 2, 4, 5])
    def test_cache_is_as_without_rejected_tokens(self, architecture, length, rows, tmp_path):
        model = tiny_model(architecture)
        cache, other = begun(model, length), begun(model, length)
        several = rows_of(model, TOKENS, cache)
        several.keep(min(rows + 1, 5))
        several.keep(rows)  # once more, as where a text is closed in the middle of a round
        expected = plain(model, TOKENS[:rows], other)
        assert mx.allclose(several.logits[:, :rows], expected, atol=1e-5)
        second = copy.deepcopy(cache)
        save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
        loaded = load_prompt_cache(str(tmp_path / "c.safetensors"))
        following = plain(model, [3, 4], other)
        for each in (cache, second, loaded):
            assert mx.allclose(plain(model, [3, 4], each), following, atol=1e-5)

    @pytest.mark.parametrize(("architecture", "tokens"), [("llama", 4), ("mamba", 1)])
    def test_layers_without_computed_states_record_none(self, architecture, tokens, monkeypatch):
        def noted(*_):
            raise AssertionError("outputs of layers are kept in vain")

        monkeypatch.setattr(rows_module, "LayerOutputs", noted)
        model = tiny_model(architecture)
        rows_of(model, TOKENS[:tokens], begun(model, 3))

    @pytest.mark.parametrize("architecture", STATES)
    def test_earlier_states_need_no_linear_weights(self, architecture):
        model = tiny_model(architecture)
        gearbox = Gearbox(model, "4,16")
        verifier = Verifier(gearbox, gearbox.ladder.top)
        cache, other = begun(model, 3), begun(model, 3)
        gearbox.shift("low")  # as after a draft
        rows = Verification(verifier, TOKENS, cache)
        mx.eval(rows.logits, plain(model, TOKENS[:3], other))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight = mx.full(module.weight.shape, mx.nan)
        rows.keep(3)
        states = [part for part in cache if not hasattr(part, "keys")]
        assert states
        for part, expected in zip(states, [part for part in other if not hasattr(part, "keys")], strict=True):
            for mine, theirs in zip(part.cache, expected.cache, strict=True):
                assert mx.allclose(mine, theirs, atol=1e-6)

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *STATES])
    def test_none_may_be_kept(self, architecture):
        model = tiny_model(architecture)
        cache, other = begun(model, 70), begun(model, 70)
        rows_of(model, TOKENS, cache).keep(0)
        assert mx.allclose(plain(model, [3, 4], cache), plain(model, [3, 4], other), atol=1e-5)

    def test_failure_during_pass_leaves_cache_unchanged(self):
        model = tiny_model("lfm2")
        cache, other = begun(model, 3), begun(model, 3)

        class Interrupted(type(model)):
            def __call__(self, inputs, cache):
                super().__call__(inputs, cache=cache)
                raise KeyboardInterrupt

        gearbox, own = Gearbox(model, "16"), type(model)
        model.__class__ = Interrupted
        with pytest.raises(KeyboardInterrupt):
            Verification(Verifier(gearbox, gearbox.ladder.top), TOKENS, cache)
        model.__class__ = own
        assert mx.array_equal(plain(model, [3, 4], cache), plain(model, [3, 4], other))


class TestModels:
    """Kickdown on caches of every kind: windows of 64 tokens or less, states, and both."""

    def test_cache_continues_in_other_thread(self):
        model = tiny_model("gemma3_text")
        gearbox, cache = Gearbox(model, "6,16"), make_prompt_cache(model)
        mode, tokenizer = Lossless(draft_length=3), load()[1]
        how = {"gearbox": gearbox, "mode": mode, "prompt_cache": cache}
        run = threading.Thread(target=lambda: list(stream_generate(model, tokenizer, list(range(70)), 11, **how)))
        run.start()
        run.join()
        assert mx.isfinite(model(mx.array([[3]]), cache=cache)).all()

    @pytest.mark.parametrize("architecture", ["gemma3_text", *STATES])
    def test_kickdown_to_top_gear_drops_lower_entries(self, architecture):
        model = tiny_model(architecture)
        gearbox = Gearbox(model, "4,6,16")
        theirs, _ = written(gearbox, list(range(70)), 60)
        ours = list(
            stream_generate(model, endless(), list(range(70)), 60, gearbox=gearbox, mode=Kickdown((-2.0, -1.0)))
        )
        assert [r.token for r in ours] == [token for token, _ in theirs]
        assert {r.passes for r in ours} == {(1, 1, 1)}
