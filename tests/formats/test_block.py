"""A transformer block as one native operation: the same bits as its operations, and only for known blocks."""

import copy
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import MANY_VECTORS, PROMPT, active_memory, every_gear, normal, on_disk, same_arrays, tiny_model
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from gearbx_mlx import Gearbox
from gearbx_mlx.formats import block

pytestmark = pytest.mark.usefixtures("native")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
MODELS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_traditional": True}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("phi3", {}),
    ("gemma3_text", {}),
]
FORMATS = ["planes", "affine", "rowwise", "groupwise", "exact"]


def boxed(architecture="llama", change=(), format="planes", activations="int16") -> Gearbox:
    model = tiny_model(architecture, **dict(change))
    for i, (path, module) in enumerate(model.named_modules()):
        if "norm" in path:
            module.weight = 0.3 * normal(*module.weight.shape, seed=i)
    model.set_dtype(mx.bfloat16)
    return Gearbox(model, "4,16", format=format, kernels="native", activations=activations)


@pytest.fixture
def calls(monkeypatch) -> SimpleNamespace:
    """Counts blocks that ran as one operation, alone or in chains; with `enabled` false there are none."""
    count, run, run_layers = SimpleNamespace(native=0, enabled=True, together=0), block.run_block, block.run_layers

    def counted(*arguments):
        y = run(*arguments) if count.enabled else None
        count.native += y is not None
        return y

    def counted_together(model, *arguments):
        y = run_layers(model, *arguments) if count.enabled else None
        if y is not None:
            count.native += len(model.layers)
            count.together += 1
        return y

    monkeypatch.setattr(block, "run_block", counted)
    monkeypatch.setattr(block, "run_layers", counted_together)
    return count


def text(model: nn.Module) -> list[mx.array]:
    """Logits of a prompt, tokens one by one and in groups, after cutting the cache, and without a cache."""
    cache = make_prompt_cache(model)
    passes = [PROMPT, [[3]], [[5]], [[1, 2, 3]], [[7]]]
    found = [model(mx.array(tokens), cache=cache) for tokens in passes]
    mx.eval(found)
    for part in cache:
        part.trim(2)
    found += [model(mx.array(tokens), cache=cache) for tokens in ([[3, 4]], [[5]])]
    return [*found, model(PROMPT)]


def check_every_gear(box: Gearbox, calls: SimpleNamespace) -> None:
    """All blocks run as one operation, with the bits of their operations."""
    for _ in every_gear(box):
        calls.native, calls.enabled = 0, True
        as_blocks = text(box.model)
        assert calls.native == 8 * len(box.model.layers)
        in_one = isinstance(box.model.model, block.NativeLayers)
        assert calls.together == 6 * in_one  # all but a prompt, and a pass without a cache
        calls.enabled, calls.together = False, 0
        assert same_arrays(as_blocks, text(box.model))


def check_once(logits, calls: SimpleNamespace, blocks: int) -> None:
    """So many blocks run as one operation, with the bits of their operations."""
    native = logits()
    assert calls.native == blocks
    calls.enabled = False
    assert same_arrays(native, logits())


class TestBits:
    @pytest.mark.parametrize(("architecture", "change"), MODELS)
    def test_bits_equal_separate_operations(self, architecture, change, calls):
        check_every_gear(boxed(architecture, change), calls)

    @pytest.mark.some(5)
    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("activations", ["float", "int16", "int8"])
    def test_of_every_format(self, format, activations, calls):
        check_every_gear(boxed(format=format, activations=activations), calls)

    def test_wrapping_sliding_window_has_equal_bits(self, calls):
        box = boxed()

        def logits() -> list[mx.array]:
            cache = [RotatingKVCache(max_size=8) for _ in box.model.layers]
            return [box.model(PROMPT, cache=cache), *(box.model(mx.array([[t]]), cache=cache) for t in range(12))]

        check_once(logits, calls, 13 * len(box.model.layers))

    @MANY_VECTORS
    def test_threaded_long_prompt_has_equal_bits(self, calls):
        box = boxed()
        tokens = mx.arange(700)[None] % 50
        check_once(lambda: [box.model(tokens)], calls, len(box.model.layers))


class TestCache:
    @pytest.mark.parametrize("evaluate", [mx.eval, mx.async_eval])
    def test_entries_are_written_in_place(self, evaluate, calls):
        box = boxed()
        cache = make_prompt_cache(box.model)
        box.model(PROMPT, cache=cache)
        for part in cache:
            _, heads, _, width = part.keys.shape
            part.keys, part.values = (mx.zeros((1, heads, 20000, width)) for _ in range(2))
            mx.eval(part.keys, part.values)
        before = active_memory()
        mx.reset_peak_memory()
        for token in range(5):
            evaluate(box.model(mx.array([[token]]), cache=cache))
        assert mx.get_peak_memory() - before < cache[0].keys.nbytes / 10
        assert calls.native == 6 * len(cache)

    def test_holders_of_entries_keep_their_values(self, calls):
        box = boxed()
        cache = make_prompt_cache(box.model)
        mx.eval(box.model(PROMPT, cache=cache))
        kept = [copy.copy(part.keys) for part in cache]
        values = [mx.array(keys.tolist()) for keys in kept]
        mx.eval(box.model(mx.array([[1]]), cache=cache))
        assert calls.native == 2 * len(cache)
        assert same_arrays(kept, values)
        assert not mx.array_equal(cache[0].keys, values[0]).item()

    def test_late_evaluated_passes_see_their_own_entries(self, calls):
        box = boxed()

        def logits() -> list[mx.array]:
            cache = make_prompt_cache(box.model)
            found = [box.model(PROMPT, cache=cache)]
            for _ in range(3):
                found.append(box.model(mx.array([[1, 2, 3]]), cache=cache))
                for part in cache:
                    part.trim(2)
            mx.eval(found[::-1])
            return found

        check_once(logits, calls, 4 * len(box.model.layers))


class TestModules:
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_changes_take_effect_at_once(self, architecture, calls):
        box = boxed(architecture)
        layer = box.model.layers[0]
        down, norm, rope = layer.mlp.down_proj, layer.input_layernorm, layer.self_attn.rope
        views = mx.concatenate([2 * down.weight, 3 * down.weight])
        half = down.weight.shape[0]

        def write_into_norm():
            norm.weight[0] = 5
            mx.eval(norm.weight)

        changes = [
            lambda: setattr(down, "weight", views[:half]),
            lambda: setattr(down, "weight", views[half:]),
            write_into_norm,
            lambda: setattr(norm, "eps", 0.1),
            lambda: setattr(rope, "base", 100.0),
            lambda: setattr(rope, "scale", 0.5),
            lambda: setattr(layer.self_attn, "scale", 0.01),
        ]
        before = box.model(PROMPT)
        for change in changes:
            change()
            calls.native, calls.enabled = 0, True
            after = box.model(PROMPT)
            assert calls.native == len(box.model.layers)
            calls.enabled = False
            assert mx.array_equal(after, box.model(PROMPT)).item()
            assert not mx.array_equal(before, after).item()
            before = after

    def test_noncontiguous_weights_run_unchanged(self, calls):
        box = boxed()
        before = box.model(PROMPT)
        calls.native = 0
        output = box.model.layers[0].self_attn.o_proj
        output.weight = mx.contiguous(output.weight.T).T
        assert mx.array_equal(box.model(PROMPT), before).item()
        assert calls.native == len(box.model.layers) - 1

    def test_within_a_compiled_function(self):
        box = boxed()
        expected = box.model(PROMPT)
        model, state = box.model, box.model.state
        assert mx.allclose(mx.compile(model.__call__, inputs=state)(PROMPT), expected, atol=1e-5).item()
        assert mx.array_equal(box.model(PROMPT), expected).item()

    def test_other_modules_run_as_they_did(self, calls):
        class Twice(nn.Sequential):
            def __call__(self, x):
                return 2 * super().__call__(x)

        box = boxed()
        before = box.model(PROMPT)
        calls.native = 0
        layer = box.model.layers[0]
        layer.mlp.down_proj = Twice(layer.mlp.down_proj)
        after = box.model(PROMPT)
        assert calls.native == len(box.model.layers) - 1
        assert not mx.array_equal(before, after).item()

    def test_memory_of_released_gear_is_free(self, calls, request, tmp_path):
        cached = mx.set_cache_limit(0)  # a buffer that is used again may be larger than its array
        request.addfinalizer(lambda: mx.set_cache_limit(cached))
        model = tiny_model("llama", hidden_size=256, intermediate_size=1024)
        model.set_dtype(mx.bfloat16)
        box = Gearbox(model, "4,16", kernels="native", **on_disk(model, tmp_path))
        for _ in every_gear(box, gears=(16, 4, 16, 4)):
            mx.eval(box.model(PROMPT))
        low = active_memory()
        box.shift(16)
        mx.eval(box.model(PROMPT))
        high = active_memory()
        box.shift(4)
        assert active_memory() <= low  # less, if the pass before held its results a moment longer
        assert high > low
        assert calls.native == 5 * len(box.model.layers)

    def test_experts_and_other_blocks_run_as_they_did(self, calls):
        for architecture in ("gpt_neox", "qwen3_moe"):
            box = boxed(architecture)
            calls.native = 0
            assert mx.isfinite(box.model(PROMPT)).all().item()
            assert calls.native == 0

    def test_a_model_can_be_copied(self, calls):
        box = boxed()
        expected = box.model(PROMPT)
        assert calls.native
        layer, x = box.model.layers[0], mx.ones((1, 2, 64))
        assert mx.array_equal(copy.deepcopy(layer)(x), layer(x)).item()
        assert mx.array_equal(box.model(PROMPT), expected).item()
