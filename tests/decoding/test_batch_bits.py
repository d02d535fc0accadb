"""A batch on native CPU kernels: each sequence has the tokens and the bits of logits that it has alone."""

import contextlib

import mlx.core as mx
import pytest
from conftest import MANY_VECTORS, PROMPT, normal, tiny_model
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from gearbx_mlx import Gearbox
from gearbx_mlx.formats import block

pytestmark = [pytest.mark.usefixtures("native"), MANY_VECTORS]

LENGTHS = [(1, 5), (2, 12), (9, 3), (30, 7), (270, 9), (3, 1), (17, 8), (40, 4)]  # tokens of prompts and texts
FORMATS = ["planes", "affine", "rowwise", "groupwise", "exact"]
MODELS = [("llama", {}), ("llama", {"attention_bias": True, "rope_traditional": True}), ("qwen3", {}), ("phi3", {})]


def boxed(architecture="llama", ladder="4,16", dtype=mx.float32, **how) -> Gearbox:
    change = how.pop("change", {})
    return Gearbox(tiny_model(architecture, dtype=dtype, **change), ladder, kernels="native", **how)


def prompt(length: int) -> list[int]:
    return [(7 * i * i + 3 * length) % 50 for i in range(length)]


def alone(model, length: int, count: int) -> list[tuple[int, mx.array]]:
    """Tokens and log-probabilities (V,) of a text alone."""
    found = [(int(token), row) for token, row in generate_step(mx.array(prompt(length)), model, max_tokens=count)]
    return found[:count]


def together(model, lengths, at_first: int, every: int = 2) -> list[list[tuple[int, mx.array]]]:
    """As `alone` for each, in one batch that begins with `at_first` sequences; one more joins every few steps."""
    generator = BatchGenerator(model, completion_batch_size=8, prefill_batch_size=3, prefill_step_size=64)
    texts: list[list[tuple[int, mx.array]]] = [[] for _ in lengths]
    waiting, steps = list(lengths), 0
    while waiting or sum(map(len, texts)) < sum(count for _, count in lengths):
        joining = waiting[:at_first] if steps == 0 else waiting[: steps % every == 0]
        if joining:
            waiting = waiting[len(joining) :]
            generator.insert([prompt(length) for length, _ in joining], max_tokens=[count for _, count in joining])
        for token in generator.next()[1]:
            texts[token.uid].append((token.token, token.logprobs))
        steps += 1
    generator.close()
    return texts


def check(model, lengths, at_first: int) -> None:
    for text, (length, count) in zip(together(model, lengths, at_first), lengths, strict=True):
        expected = alone(model, length, count)
        assert [token for token, _ in text] == [token for token, _ in expected]
        assert all(mx.array_equal(row, other).item() for (_, row), (_, other) in zip(text, expected, strict=True))


class TestTexts:
    @pytest.mark.parametrize("size", [1, 2, 5, 8])
    def test_of_batches_that_begin_together(self, size):
        check(boxed().model, LENGTHS[-size:], at_first=size)

    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
    @pytest.mark.parametrize("ladder", ["4,16", "16"])
    def test_of_sequences_that_join_and_leave(self, dtype, ladder):
        box = boxed(ladder=ladder, dtype=dtype)
        for gear in box.ladder:
            box.shift(gear)
            check(box.model, LENGTHS, at_first=2)

    @pytest.mark.parametrize(("architecture", "change"), MODELS)
    def test_of_every_form_of_a_block(self, architecture, change):
        check(boxed(architecture, change=change).model, LENGTHS[:4], at_first=3)

    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("activations", ["float", "int16"])
    def test_of_every_format(self, format, activations):
        box = boxed(format=format, activations=activations, dtype=mx.bfloat16)
        for gear in box.ladder:
            box.shift(gear)
            check(box.model, LENGTHS[:4], at_first=3)


def check_rows(model, lengths, rows: int) -> None:
    """A pass over several tokens of each sequence, after prompts of these lengths, gives each its own logits."""
    caches = [make_prompt_cache(model) for _ in lengths]
    for length, cache in zip(lengths, caches, strict=True):
        model(mx.array([prompt(length)]), cache=cache)
    cache = [BatchKVCache.merge(parts) for parts in zip(*caches, strict=True)]
    for passes in range(3):  # the first does not fit into the cache
        tokens = (mx.arange(len(lengths) * rows).reshape(-1, rows) + passes) % 50
        logits = model(tokens, cache=cache)
        for row, own in enumerate(caches):
            assert mx.array_equal(logits[row], model(tokens[row : row + 1], cache=own)[0]).item()


class TestRows:
    """Several tokens of each sequence at once, as in a verification of drafts."""

    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
    @pytest.mark.parametrize("rows", [1, 2, 7, 16])
    def test_have_the_bits_that_a_sequence_alone_gives_them(self, rows, dtype):
        check_rows(boxed(ladder="4,16" if dtype == mx.float32 else "16", dtype=dtype).model, [3, 40, 1, 260], rows)

    @pytest.mark.parametrize("architecture", ["cohere", "deepseek_v3", "gemma", "glm4", "gpt_neox", "mixtral", "phi"])
    def test_of_models_whose_blocks_run_operation_by_operation(self, architecture):
        check_rows(boxed(architecture, ladder="16").model, lengths=[3, 40, 1], rows=4)

    def test_leave_the_cache_as_stock_operations_leave_it(self):
        model = boxed().model
        caches = [[BatchKVCache([2, 0]) for _ in model.layers] for _ in range(2)]
        tokens = mx.array([[0, 0, 5, 9], [1, 2, 3, 4]])
        for cache, kind in zip(caches, (contextlib.nullcontext, block.single_operations)):
            with kind():
                for part in (tokens, tokens[:, :2], tokens[:, :1]):
                    model(part, cache=cache)
            mx.eval([part.state for part in cache])
        for one, other in zip(*caches):
            assert one._idx == other._idx == 7
            assert mx.array_equal(one.offset, other.offset).item()
            assert one.offset.tolist() == [5, 7]
            for name in ("keys", "values"):
                assert mx.array_equal(getattr(one, name)[:, :, 2:7], getattr(other, name)[:, :, 2:7]).item()


def test_blocks_of_a_batch_run_as_one_operation(monkeypatch):
    box, whole = boxed(), []
    native = block.block_kernels(1)
    cache = [BatchKVCache.merge([KVCache(), KVCache()]) for _ in box.model.layers]
    run = native.run_blocks
    monkeypatch.setattr(native, "run_blocks", lambda *args: whole.append(args[1].shape) or run(*args))
    for tokens in (mx.concatenate([PROMPT, PROMPT]), mx.array([[1], [2]]), normal(2, 12) > 0):
        box.model(tokens.astype(mx.int32), cache=cache)
    assert [shape[:2] for shape in whole] == [(2, 1), (2, 12)]
