"""Caches that a model gets or makes: from a file, quantized, and with a draft model."""

import mlx.core as mx
import mlx_lm
import pytest
from conftest import save_model, tiny_model
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache, save_prompt_cache

from gearbx_mlx import Gearbox, GearbxError, stream_generate
from gearbx_mlx.loading import DEMO_MODEL

BEGUN = [5, 9, 2, 7, 11, 6, 3]


def read_by(model, max_kv_size=None):
    cache = make_prompt_cache(model, max_kv_size)
    model(mx.array([BEGUN]), cache=cache)
    return cache


def saved(cache, path, model=DEMO_MODEL):
    file = path / "cache.safetensors"
    save_prompt_cache(str(file), cache, {"model": str(model), "tokenizer_config": "{}"})
    return file


def keys(change):
    """A change to one array: the keys of the third layer."""

    def damage(cache):
        cache[2].keys = change(cache[2].keys)
        return cache

    return damage


def other_offset(cache):
    cache[1].offset = 10**6
    return cache


def rotating(cache):
    cache[4] = RotatingKVCache.from_state((*cache[4].state, 4, 64, 7))
    return cache


def quantized_otherwise(cache):
    cache[0] = cache[0].to_quantized(group_size=64, bits=4)
    cache[0].bits = 8
    return cache


DAMAGED = {
    "too few": (lambda cache: cache[:3], "holds 3 caches, and the model has 6"),
    "too many": (lambda cache: [*cache, KVCache.from_state(cache[0].state)], "holds 7 caches, and the model has 6"),
    "none": (lambda cache: [], "cache"),
    "another kind": (rotating, "cache 4 is RotatingKVCache"),
    "heads": (keys(lambda a: a[:, :1]), "cache 2 is KVCache(float 1x1x*x64, float 1x2x*x64)"),
    "head size": (keys(lambda a: a[..., :32]), "cache 2 is KVCache(float 1x2x*x32, float 1x2x*x64)"),
    "a batch": (keys(lambda a: mx.concatenate([a, a])), "cache 2 is KVCache(float 2x2x*x64"),
    "dtype": (keys(lambda a: a.astype(mx.int32)), "cache 2 is KVCache(int32 1x2x*x64"),
    "keys without values": (keys(lambda a: a[:, :, :3]), "cache 2 says another number of tokens than it has"),
    "offset": (other_offset, "cache 1 says another number of tokens than it has"),
    "bits": (quantized_otherwise, "cache 0 is QuantizedKVCache(uint32 1x2x*x8, "),
    "NaN": (keys(lambda a: a * float("nan")), "has values that are not finite"),
}


@pytest.mark.parametrize(("damage", "complaint"), DAMAGED.values(), ids=DAMAGED)
def test_a_prompt_cache_that_does_not_suit_the_model_is_refused(command, demo, tmp_path, damage, complaint):
    file = saved(damage(read_by(demo.model)), tmp_path)
    result = command("generate", "--prompt-cache-file", file, "-m", 5)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {file}: ")
    assert complaint in result.err
    assert "make it again" in result.err or "make one" in result.err


def test_a_truncated_prompt_cache_is_refused(command, demo, tmp_path):
    file = saved(read_by(demo.model), tmp_path)
    whole = file.read_bytes()
    for length in (len(whole) - 1000, len(whole) // 2, 100, 0):
        file.write_bytes(whole[:length])
        result = command("generate", "--prompt-cache-file", file, "-m", 5)
        assert (result.status, result.out) == (2, "")
        assert f"{file}: not a prompt cache" in result.err


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("architecture", "further", "max_kv_size"),
    [
        ("mamba", {}, None),
        ("lfm2", {}, None),
        ("gemma3_text", {"sliding_window": 8}, None),
        ("qwen2", {}, 64),
        ("deepseek_v3", {}, None),
    ],
)
def test_every_kind_of_cache_goes_on_as_in_mlx_lm(command, demo, tmp_path, architecture, further, max_kv_size):
    model = tiny_model(architecture, vocab_size=4096, **further)
    save_model(model, tmp_path / "model")
    cache = read_by(model, max_kv_size)
    file = saved(cache, tmp_path, tmp_path / "model")
    result = command(
        "generate", "--prompt-cache-file", file, "--gears", 16, "--ignore-chat-template", "-p", "one two", "-m", 12
    )
    tokens = demo.tokenizer.encode("one two")
    assert result.out == mlx_lm.generate(model, demo.tokenizer, tokens, max_tokens=12, prompt_cache=cache) + "\n"


def test_a_quantized_cache_goes_on_as_in_mlx_lm(command, demo, tmp_path):
    cache = [part.to_quantized(group_size=32, bits=8) for part in read_by(demo.model)]
    file = saved(cache, tmp_path)
    result = command(
        "generate", "--prompt-cache-file", file, "--gears", 16, "--ignore-chat-template", "-p", "one two", "-m", 12
    )
    tokens = demo.tokenizer.encode("one two")
    assert result.out == mlx_lm.generate(demo.model, demo.tokenizer, tokens, max_tokens=12, prompt_cache=cache) + "\n"


def test_tokens_in_a_cache_of_states_and_entries_count_for_the_context(command, tmp_path):
    model = tiny_model("lfm2", vocab_size=4096)
    save_model(model, tmp_path / "model")
    cache = make_prompt_cache(model)
    model(mx.array([[5] * 250]), cache=cache)
    result = command("generate", "--prompt-cache-file", saved(cache, tmp_path, tmp_path / "model"))
    assert result.status == 2
    assert "the prompt is 2" in result.err
    assert "context 256" in result.err


@pytest.mark.parametrize(
    ("architecture", "keywords", "complaint"),
    [
        ("llama", {"kv_group_size": 64}, "--kv-group-size is 64, and the model's heads have 32 numbers"),
        ("qwen2", {"max_kv_size": 8}, "--kv-bits is 4, and a cache that rotates"),
        ("gemma3_text", {}, "--kv-bits is 4, and a cache that rotates"),
        ("mamba", {}, "--kv-bits is 4, and ArraysCache cannot be quantized"),
    ],
)
def test_a_cache_that_cannot_be_quantized_is_refused_before_the_text(demo, architecture, keywords, complaint):
    model = tiny_model(architecture)
    with pytest.raises(GearbxError, match=complaint):
        stream_generate(model, demo.tokenizer, [1, 5, 9], 5, kv_bits=4, **{"kv_group_size": 32} | keywords)


def test_caches_of_states_and_entries_are_quantized_as_in_mlx_lm(demo):
    model, keywords = tiny_model("lfm2"), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4}
    cache = make_prompt_cache(model)
    expected = mlx_lm.generate(model, demo.tokenizer, BEGUN, max_tokens=12, **keywords)
    responses = stream_generate(
        model, demo.tokenizer, BEGUN, 12, gearbox=Gearbox(model, "16"), prompt_cache=cache, **keywords
    )
    assert "".join(response.text for response in responses) == expected
    assert [type(part) for part in cache][1] is QuantizedKVCache


@pytest.mark.parametrize(
    ("target", "draft", "complaint"),
    [
        ("lfm2", "llama", "the ArraysCache of the model keeps a state"),
        ("llama", "mamba", "the ArraysCache of the draft model keeps a state"),
        ("gemma3_text", "llama", "the RotatingKVCache of the model has room for 64 tokens"),
    ],
)
def test_drafts_that_cannot_be_taken_back_are_refused_before_the_text(demo, target, draft, complaint):
    model, draft_model = tiny_model(target), tiny_model(draft)
    with pytest.raises(GearbxError, match=complaint):
        next(stream_generate(model, demo.tokenizer, BEGUN, 60, mode="static", draft_model=draft_model))


def test_drafts_within_a_sliding_window_leave_the_text_as_it_is(demo):
    model, draft_model = tiny_model("gemma3_text"), tiny_model("llama")
    gearbox = Gearbox(model, "16")
    drafted = stream_generate(model, demo.tokenizer, BEGUN, 40, gearbox=gearbox, draft_model=draft_model)
    alone = stream_generate(model, demo.tokenizer, BEGUN, 40, gearbox=gearbox)
    assert [r.token for r in drafted] == [r.token for r in alone]


def test_a_mixture_in_half_precision_drafts(command, tmp_path):
    save_model(tiny_model("qwen3_moe", dtype=mx.bfloat16, vocab_size=4096), tmp_path / "mixture")
    done = command("generate", "--draft-model", tmp_path / "mixture", "-m", 4, "--gears", "4,16")
    assert done.status == 0, done.err


@pytest.mark.slow
def test_a_draft_model_drafts_after_a_prompt_cache(command, demo, tmp_path):
    file = saved(read_by(demo.model), tmp_path)
    arguments = "--prompt-cache-file", file, "--mode", "static", "-p", "one two", "-m", 20
    alone = command("generate", *arguments)
    drafted = command("generate", *arguments, "--draft-model", DEMO_MODEL)
    assert (drafted.status, drafted.out) == (0, alone.out)
