"""Which part of a conversation a chat reads again, and which part its KV cache holds."""

import mlx.core as mx
import pytest
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import GearbxError
from gearbx_mlx.decoding.caches import KeptCache, length, shared
from gearbx_mlx.decoding.pair import PairedModel

TOKENS = st.lists(st.integers(1, 3), max_size=6)
FIRST = [5, 9, 2, 7, 11, 6, 3]
WINDOW = len(FIRST)


def kept(model, max_kv_size=None) -> KeptCache:
    return KeptCache(lambda: make_prompt_cache(model, max_kv_size))


def read(model, cache: KeptCache, tokens: list[int], surplus: list[int] | None = None) -> mx.array:
    """The logits after a conversation, whose unread part the model reads; then it runs ahead."""
    unread = cache.unread(tokens)
    logits = model(mx.array([unread]), cache=cache.entries)[0, -1]
    for token in surplus or []:
        model(mx.array([[token]]), cache=cache.entries)
    cache.note(unread, whole=not surplus)
    return logits


def again(model, tokens: list[int], max_kv_size=None) -> mx.array:
    return model(mx.array([tokens]), cache=make_prompt_cache(model, max_kv_size))[0, -1]


def assert_close(a: mx.array, b: mx.array) -> None:
    assert mx.allclose(a, b, rtol=1e-4, atol=1e-5)


@given(TOKENS, TOKENS)
def test_what_two_sequences_share_is_their_longest_common_beginning(a, b):
    count = shared(a, b)
    assert a[:count] == b[:count]
    assert a[count : count + 1] != b[count : count + 1] or count == len(a) == len(b)


CONTINUED = [*FIRST, 4, 8]
CHANGED = [*FIRST[:3], 1, 1, 4, 8]
SHORTER = FIRST[:4]


@pytest.mark.parametrize(
    ("architecture", "next_turn", "unread"),
    [
        ("llama", CONTINUED, [4, 8]),
        ("llama", CHANGED, [1, 1, 4, 8]),
        ("llama", SHORTER, SHORTER[-1:]),
        ("llama", FIRST, FIRST[-1:]),
        ("gemma3_text", CHANGED, [1, 1, 4, 8]),
        ("mamba", CONTINUED, [4, 8]),
        ("mamba", CHANGED, CHANGED),  # a state cannot be cut
        ("lfm2", CONTINUED, [4, 8]),
        ("lfm2", CHANGED, CHANGED),
    ],
)
def test_only_what_is_new_is_read_and_the_logits_are_those_of_reading_everything(architecture, next_turn, unread):
    model = tiny_model(architecture)
    cache = kept(model)
    read(model, cache, FIRST)
    assert cache.unread(next_turn) == unread
    assert_close(read(model, cache, next_turn), again(model, next_turn))
    assert cache.tokens == next_turn


@pytest.mark.parametrize("architecture", ["llama", "mamba", "lfm2"])
def test_a_token_that_was_read_ahead_and_not_shown_is_forgotten(architecture):
    model = tiny_model(architecture)
    cache = kept(model)
    read(model, cache, FIRST, surplus=[12])
    assert_close(read(model, cache, CONTINUED), again(model, CONTINUED))


def test_caches_that_were_cut_too_short_are_read_again():
    model = tiny_model()
    cache = kept(model)
    read(model, cache, FIRST)
    cache.entries[0].trim(3)  # an interrupt came in the middle of cutting
    assert cache.unread(CONTINUED) == CONTINUED


def test_a_window_that_slid_goes_on_and_cannot_be_cut():
    model = tiny_model("qwen2")  # whose class leaves the window to mlx-lm
    cache = kept(model, WINDOW)
    read(model, cache, FIRST)
    assert cache.unread(CONTINUED) == [4, 8]
    read(model, cache, CONTINUED)
    assert cache.unread(CHANGED) == CHANGED


def test_a_prompt_that_was_stopped_goes_on_where_it_was():
    model = tiny_model()
    cache = kept(model)
    model(mx.array([cache.unread(FIRST)[:4]]), cache=cache.entries)
    cache.note(FIRST, whole=False)
    assert cache.unread(FIRST) == FIRST[4:]
    assert_close(read(model, cache, FIRST), again(model, FIRST))


def test_a_draft_model_that_is_behind_shortens_what_is_known():
    model, draft = tiny_model(), tiny_model(seed=1)
    cache = KeptCache(lambda: [*make_prompt_cache(model), *make_prompt_cache(draft)])
    unread = cache.unread(FIRST)
    own, drafts = cache.entries[: len(model.layers)], cache.entries[len(model.layers) :]
    model(mx.array([FIRST]), cache=own)
    draft(mx.array([FIRST[:-2]]), cache=drafts)
    cache.note(unread)
    assert cache.unread(CONTINUED) == CONTINUED[len(FIRST) - 2 :]
    assert {length([entry]) for entry in cache.entries} == {len(FIRST) - 2}


def test_both_models_of_a_pair_are_cut_and_what_one_missed_counts():
    pair = PairedModel(tiny_model(), tiny_model(seed=1))
    cache = KeptCache(pair.make_cache)
    pair.engaged = 0
    read(pair, cache, FIRST)
    pair.engaged = 1
    assert_close(read(pair, cache, CHANGED), again(pair, CHANGED))
    assert [entry.given for entry in cache.entries] == [len(CHANGED)] * 2


def test_a_pair_of_states_begins_again():
    pair = PairedModel(tiny_model("mamba"), tiny_model("mamba", seed=1))
    cache = KeptCache(pair.make_cache)
    read(pair, cache, FIRST)
    assert cache.unread(CONTINUED) == [4, 8]
    assert cache.unread(CHANGED) == CHANGED


def test_the_entries_are_cut_to_what_was_shown():
    model = tiny_model()
    cache = kept(model)
    read(model, cache, FIRST, surplus=[12])
    assert length(cache.cut_to_tokens()) == len(FIRST)


def test_entries_that_cannot_be_cut_are_refused_and_read_again():
    model = tiny_model("qwen2")  # whose class leaves the window to mlx-lm
    cache = kept(model, WINDOW)
    read(model, cache, FIRST, surplus=[12])
    with pytest.raises(GearbxError, match="cannot be cut"):
        cache.cut_to_tokens()
    assert cache.unread(FIRST) == FIRST


def test_a_signal_while_caches_are_made_leaves_one_that_reads_everything_again():
    model = tiny_model("llama")
    signals = iter([None, KeyboardInterrupt])

    def make():
        if next(signals, None):
            raise KeyboardInterrupt
        return make_prompt_cache(model)

    cache = KeptCache(make)
    read(model, cache, FIRST)
    with pytest.raises(KeyboardInterrupt):
        cache.forget()
    assert cache.tokens == []
    assert mx.array_equal(read(model, cache, CONTINUED), again(model, CONTINUED))
    assert cache.tokens == CONTINUED
