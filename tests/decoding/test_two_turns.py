"""A second turn with the KV cache of the first: plain decoding's tokens, whatever the cache and the drafter."""

import mlx.core as mx
import pytest
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless_texts import endless
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, Kickdown, Lossless, Static, stream_generate
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
