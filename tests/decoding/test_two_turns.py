"""A second turn with the KV cache of the first: plain decoding's tokens, whatever the cache and the drafter."""

import itertools

import mlx.core as mx
import pytest
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless_texts import endless
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, GearbxError, Kickdown, Lossless, Static, stream_generate
from gearbx_mlx.decoding.caches import length

pytestmark = pytest.mark.usefixtures("native")

TURNS = [1, 5, 9, 2, 7, 3, 8], [4, 4, 6]
CACHES = {
    "plain": {},
    "quantized": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
    "quantized from 5": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 5},
    "quantized from 20": {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 20},
    "in gears": {"kv_gears": "4,16"},
}
MODES = {
    "lossless": Lossless(),
    "drafts of 3": Lossless(draft_length=3),
    "drafts of 1, lookup": Lossless(draft_length=1, lookup_tokens=4),
    "kickdown": Kickdown(rule=lambda entropy, position, gear: True, prompt_gear="high"),
}


def two_turns(gearbox, mode, counts, draft_model=None, **keywords):
    """Tokens of two texts after each other with one KV cache, and the entries of it."""
    cache, found = make_prompt_cache(gearbox.model), []
    if draft_model is not None:
        cache += make_prompt_cache(draft_model)
        keywords["draft_model"] = draft_model
    for prompt, count in zip(TURNS, counts):
        run = stream_generate(
            gearbox.model, endless(), prompt, count, gearbox=gearbox, mode=mode, prompt_cache=cache, **keywords
        )
        found.append([response.token for response in run])
    return found, {length([part]) for part in cache[: len(gearbox.model.layers)]}


@pytest.mark.parametrize("kind", CACHES)
@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from([*MODES]),
    st.sampled_from(["16", "6,16"]),
    st.sampled_from(["mlx", "native"]),
    st.sampled_from([None, 0, 1]),
    st.tuples(st.integers(1, 30), st.integers(1, 12)),
)
def test_a_second_turn_goes_on_from_the_first(kind, mode, gears, kernels, draft_seed, counts):
    keywords, chosen = CACHES[kind], MODES[mode]
    gearbox = Gearbox(tiny_model(dtype=mx.bfloat16), gears, kernels=kernels)
    theirs = two_turns(gearbox, Static("high"), counts, **keywords)
    draft_model = None
    if draft_seed is not None and isinstance(chosen, Lossless) and "kv_gears" not in keywords:
        draft_model = tiny_model(seed=draft_seed)
    ours = two_turns(gearbox, chosen, counts, draft_model, **keywords)
    assert ours == theirs
    assert ours[1] == {sum(map(len, TURNS)) + sum(counts)}


@pytest.mark.parametrize("start", [9, 12])
@pytest.mark.parametrize("taken", [1, 2, 4, 6])
def test_a_text_that_is_closed_where_its_cache_was_quantized_has_no_entry_too_many(start, taken):
    gearbox = Gearbox(tiny_model(), "6,16", kernels="mlx")
    cache, how = make_prompt_cache(gearbox.model), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    mode = Lossless(draft_length=3, lookup_tokens=0)
    run = stream_generate(gearbox.model, endless(), TURNS[0], 30, gearbox=gearbox, mode=mode, prompt_cache=cache, **how)
    assert len(list(itertools.islice(run, taken))) == taken
    run.close()
    assert {length([part]) for part in cache} == {len(TURNS[0]) + taken}


def test_a_draft_model_knows_the_first_turn_in_the_second():
    gearbox, other = Gearbox(tiny_model(), "16"), tiny_model()
    cache = [*make_prompt_cache(gearbox.model), *make_prompt_cache(other)]
    for prompt in TURNS:
        how = {"gearbox": gearbox, "mode": Lossless(draft_length=3), "prompt_cache": cache, "draft_model": other}
        responses = list(stream_generate(gearbox.model, endless(), prompt, 20, **how))
        assert sum(r.from_draft for r in responses) == sum(r.drafted for r in responses)  # they are one model
    assert len({length([part]) for part in cache}) == 1


@pytest.mark.parametrize("mode", [Lossless(draft_length=3), Kickdown((1.0,))], ids=["lossless", "kickdown"])
@pytest.mark.parametrize("count", [3, 9])
def test_embeddings_that_are_not_those_of_the_prompt_are_refused(mode, count):
    gearbox = Gearbox(tiny_model("qwen3"), "4,16")
    with pytest.raises(GearbxError, match=f"one vector per token of the prompt, got {count} for 7"):
        stream_generate(
            gearbox.model, endless(), TURNS[0], 5, gearbox=gearbox, mode=mode, input_embeddings=mx.zeros((count, 64))
        )
