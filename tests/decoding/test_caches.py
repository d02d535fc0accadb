"""Caches that a model gets or makes: from a file, quantized, and with a draft model."""

import shutil

import mlx.core as mx
import mlx_lm
import pytest
from adapters import save_adapter
from chats import chat
from conftest import save_model, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from refusals import assert_refused

from gearbx_mlx import GearbxError, stream_generate
from gearbx_mlx.decoding.caches import KeptCache, in_common, length
from gearbx_mlx.decoding.pair import PairVerifier, pair_cache
from gearbx_mlx.loading import DEMO_MODEL

BEGUN = [5, 9, 2, 7, 11, 6, 3]


def read_by(model, max_kv_size=None):
    cache = make_prompt_cache(model, max_kv_size)
    model(mx.array([BEGUN]), cache=cache)
    return cache


def saved(cache, path, model=DEMO_MODEL, **metadata):
    file = path / "cache.safetensors"
    save_prompt_cache(str(file), cache, {"model": str(model), "tokenizer_config": "{}", **metadata})
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
    "too few": (lambda cache: cache[:3], "must have 6 caches for this model, got 3"),
    "too many": (
        lambda cache: [*cache, KVCache.from_state(cache[0].state)],
        "must have 6 caches for this model, got 7",
    ),
    "none": (lambda cache: [], "cache"),
    "another kind": (rotating, "got RotatingKVCache"),
    "heads": (keys(lambda a: a[:, :1]), "got KVCache(float 1x1x*x64, float 1x2x*x64)"),
    "head size": (keys(lambda a: a[..., :32]), "got KVCache(float 1x2x*x32, float 1x2x*x64)"),
    "a batch": (keys(lambda a: mx.concatenate([a, a])), "got KVCache(float 2x2x*x64"),
    "dtype": (keys(lambda a: a.astype(mx.int32)), "got KVCache(int32 1x2x*x64"),
    "keys without values": (keys(lambda a: a[:, :, :3]), "cache 2: has a wrong number of tokens"),
    "offset": (other_offset, "cache 1: has a wrong number of tokens"),
    "bits": (quantized_otherwise, "got QuantizedKVCache(uint32 1x2x*x8, "),
    "NaN": (keys(lambda a: a * float("nan")), "has values that are not finite"),
}


@pytest.mark.parametrize(("damage", "complaint"), DAMAGED.values(), ids=DAMAGED)
def test_mismatched_prompt_cache_is_refused(command, demo, tmp_path, damage, complaint):
    file = saved(damage(read_by(demo.model)), tmp_path)
    result = command("generate", "--prompt-cache-file", file, "-m", 5)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {file}: ")
    assert complaint in result.err
    assert "use mlx_lm.cache_prompt" in result.err or "make one" in result.err


NO_CONVERSATIONS = "[]", "{", '{"before": 1, "templated": true, "tokens": []}'


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"model": "somebody/else"}, "somebody/else"),
        *(({"conversation": told}, "not a prompt cache (") for told in NO_CONVERSATIONS),
    ],
)
def test_prompt_cache_with_false_metadata_is_refused(command, demo, tmp_path, metadata, said):
    file = saved(read_by(demo.model), tmp_path, **metadata)
    assert_refused(command("generate", "--model", DEMO_MODEL, "--prompt-cache-file", file), f"{file}: ", said)


def test_a_truncated_prompt_cache_is_refused(command, demo, tmp_path):
    file = saved(read_by(demo.model), tmp_path)
    whole = file.read_bytes()
    for size in (len(whole) - 1000, len(whole) // 2, 100, 0):
        file.write_bytes(whole[:size])
        result = command("generate", "--prompt-cache-file", file, "-m", 5)
        assert (result.status, result.out) == (2, "")
        assert f"{file}: not a prompt cache" in result.err


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("architecture", "further", "max_kv_size", "bits"),
    [
        ("mamba", {}, None, None),
        ("lfm2", {}, None, None),
        ("gemma3_text", {"sliding_window": 8}, None, None),
        ("qwen2", {}, 64, None),
        ("deepseek_v3", {}, None, None),
        ("llama", {}, None, 8),
    ],
)
def test_every_cache_kind_continues_as_in_mlx_lm(command, demo, tmp_path, architecture, further, max_kv_size, bits):
    model = tiny_model(architecture, vocab_size=4096, **further)
    save_model(model, tmp_path / "model")
    cache = read_by(model, max_kv_size)
    if bits is not None:
        cache = [part.to_quantized(group_size=32, bits=bits) for part in cache]
    file = saved(cache, tmp_path, tmp_path / "model")
    flags = "--gears", 16, "--ignore-chat-template", "-p", "one two", "-m", 12
    result = command("generate", "--prompt-cache-file", file, *flags)
    tokens = demo.tokenizer.encode("one two")
    assert result.out == mlx_lm.generate(model, demo.tokenizer, tokens, max_tokens=12, prompt_cache=cache) + "\n"


def test_mixed_cache_tokens_count_for_context(command, tmp_path):
    model = tiny_model("lfm2", vocab_size=4096)
    save_model(model, tmp_path / "model")
    cache = make_prompt_cache(model)
    model(mx.array([[5] * 250]), cache=cache)
    result = command("generate", "--prompt-cache-file", saved(cache, tmp_path, tmp_path / "model"))
    assert_refused(result, "the prompt: exceeds the model's context of 256, got 2")


@pytest.mark.parametrize(
    ("architecture", "keywords", "complaint"),
    [
        ("llama", {"kv_group_size": 64}, "--kv-group-size: must divide the heads' 32 numbers, got 64"),
        ("qwen2", {"max_kv_size": 8}, "--kv-bits: a rotating cache .* cannot be quantized, got 4"),
        ("gemma3_text", {}, "--kv-bits: a rotating cache .* cannot be quantized, got 4"),
        ("mamba", {}, "--kv-bits: ArraysCache cannot be quantized, got 4"),
    ],
)
def test_unquantizable_cache_is_refused_before_generation(demo, architecture, keywords, complaint):
    model = tiny_model(architecture)
    with pytest.raises(GearbxError, match=complaint):
        stream_generate(model, demo.tokenizer, [1, 5, 9], 5, kv_bits=4, **{"kv_group_size": 32} | keywords)


TOKENS = st.lists(st.integers(1, 3), max_size=6)


def read(model, cache: KeptCache, tokens: list[int], surplus: list[int] | None = None) -> mx.array:
    """The logits after a conversation, whose unread part the model reads; then it runs ahead."""
    unread = cache.unread(tokens)
    logits = model(mx.array([unread]), cache=cache.entries)[0, -1]
    for token in surplus or []:
        model(mx.array([[token]]), cache=cache.entries)
    cache.note(unread, whole=not surplus)
    return logits


def begun(architecture="llama", max_kv_size=None, surplus=None):
    """A model, and a cache with which it has read a conversation."""
    model = tiny_model(architecture)
    cache = KeptCache(lambda: make_prompt_cache(model, max_kv_size))
    read(model, cache, BEGUN, surplus)
    return model, cache


def assert_read(model, cache: KeptCache, tokens: list[int]) -> None:
    """The logits are those of reading everything."""
    everything = model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
    assert mx.allclose(read(model, cache, tokens), everything, rtol=1e-4, atol=1e-5)


@given(TOKENS, TOKENS)
def test_shared_prefix_is_longest_common_prefix(a, b):
    count = in_common(a, b)
    assert a[:count] == b[:count]
    assert a[count : count + 1] != b[count : count + 1] or count == len(a) == len(b)


CONTINUED = [*BEGUN, 4, 8]
CHANGED = [*BEGUN[:3], 1, 1, 4, 8]
SHORTER = BEGUN[:4]


@pytest.mark.parametrize(
    ("architecture", "next_turn", "unread"),
    [
        ("llama", CONTINUED, [4, 8]),
        ("llama", CHANGED, [1, 1, 4, 8]),
        ("llama", SHORTER, SHORTER[-1:]),
        ("llama", BEGUN, BEGUN[-1:]),
        ("gemma3_text", CHANGED, [1, 1, 4, 8]),
        ("mamba", CONTINUED, [4, 8]),
        ("mamba", CHANGED, CHANGED),  # a state cannot be cut
        ("lfm2", CONTINUED, [4, 8]),
        ("lfm2", CHANGED, CHANGED),
    ],
)
def test_only_new_tokens_are_read_with_equal_logits(architecture, next_turn, unread):
    model, cache = begun(architecture)
    assert cache.unread(next_turn) == unread
    assert_read(model, cache, next_turn)
    assert cache.tokens == next_turn


@pytest.mark.parametrize("architecture", ["llama", "mamba", "lfm2"])
def test_unshown_lookahead_token_is_forgotten(architecture):
    assert_read(*begun(architecture, surplus=[12]), CONTINUED)


def test_overtrimmed_caches_are_read_again():
    _, cache = begun()
    cache.entries[0].trim(3)  # an interrupt came in the middle of cutting
    assert cache.unread(CONTINUED) == CONTINUED


def test_slid_window_continues_and_cannot_be_trimmed():
    model, cache = begun("qwen2", len(BEGUN))  # whose class leaves the window to mlx-lm
    assert cache.unread(CONTINUED) == [4, 8]
    read(model, cache, CONTINUED)
    assert cache.unread(CHANGED) == CHANGED


def test_stopped_prefill_continues():
    model = tiny_model()
    cache = KeptCache(lambda: make_prompt_cache(model))
    model(mx.array([cache.unread(BEGUN)[:4]]), cache=cache.entries)
    cache.note(BEGUN, whole=False)
    assert cache.unread(BEGUN) == BEGUN[4:]
    assert_read(model, cache, BEGUN)


def test_lagging_draft_model_shortens_known_prefix():
    model, draft = tiny_model(), tiny_model(seed=1)
    cache = KeptCache(lambda: [*make_prompt_cache(model), *make_prompt_cache(draft)])
    unread = cache.unread(BEGUN)
    own, drafts = cache.entries[: len(model.layers)], cache.entries[len(model.layers) :]
    model(mx.array([BEGUN]), cache=own)
    draft(mx.array([BEGUN[:-2]]), cache=drafts)
    cache.note(unread)
    assert cache.unread(CONTINUED) == CONTINUED[len(BEGUN) - 2 :]
    assert {length([entry]) for entry in cache.entries} == {len(BEGUN) - 2}


class BothModels:
    """A pair, called as a model is."""

    def __init__(self):
        self.turns = PairVerifier(tiny_model(), tiny_model(seed=1), 0)

    def make_cache(self):
        return pair_cache(*self.turns.models)

    def __call__(self, tokens, cache):
        self.turns.prefill(tokens[0, :-1], cache)
        return self.turns.verify([tokens[0, -1].item()], cache).logits


def test_pair_trims_both_models_and_counts_missed_tokens():
    pair = BothModels()
    cache = KeptCache(pair.make_cache)
    read(pair, cache, BEGUN)
    pair.turns.engaged = 1
    assert_read(pair, cache, CHANGED)
    assert [entry.total_tokens for entry in cache.entries] == [len(CHANGED)] * 2


def test_untrimmable_entries_are_refused_and_read_again():
    _, cache = begun("qwen2", len(BEGUN), surplus=[12])
    with pytest.raises(GearbxError, match="cannot be cut"):
        cache.cut_to_tokens()
    assert cache.unread(BEGUN) == BEGUN


ASKED = "one two"


@pytest.fixture
def of_a_chat(tmp_path):
    """A model's directory, and the cache of a chat with it."""
    model, file = tmp_path / "model", tmp_path / "cache.safetensors"
    save_model(tiny_model(vocab_size=4096), model)
    with chat(model=str(model), gears="16", max_tokens=6) as session:
        session.answer(ASKED)
        session.save_cache(file)
    return model, file


def go_on(command, file, *flags):
    return command("generate", "--prompt-cache-file", file, "-p", ASKED, "-m", 4, *flags)


@pytest.mark.parametrize("flags", [("--gears", 16), ("--gears", "4,16"), ("--mode", "telemetry-only")])
def test_same_weights_continue_in_any_gears(command, of_a_chat, flags):
    done = go_on(command, of_a_chat[1], *flags)
    assert done.status == 0, done.err


def test_other_weights_of_the_same_name_are_refused(command, of_a_chat):
    model, file = of_a_chat
    shutil.rmtree(model)
    save_model(tiny_model(seed=1, vocab_size=4096), model)
    done = go_on(command, file, "--gears", 16)
    made_with = load_prompt_cache(str(file), return_metadata=True)[1]["fingerprint"]
    assert (done.status, done.out) == (2, "")
    *_, line = done.err.splitlines()  # after what --gears 16 says
    assert line.startswith(f"error: {file}: ")
    assert made_with[:8] in line
    assert str(model) in line


def test_an_adapter_makes_other_weights(command, of_a_chat, tmp_path):
    adapter = save_adapter(tiny_model(vocab_size=4096), tmp_path / "adapter", "lora")
    done = go_on(command, of_a_chat[1], "--gears", 16, "--adapter-path", adapter)
    assert (done.status, done.out) == (2, "")
    assert f"error: {of_a_chat[1]}: " in done.err
