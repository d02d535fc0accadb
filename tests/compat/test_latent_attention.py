"""Multi-head latent attention (DeepSeek): mlx-lm computes one token on a different path than several."""

import mlx.core as mx
import pytest
from architectures import tiny
from conftest import tiny_model
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, GearbxWarning, Kickdown, Lossless, Static, stream_generate
from gearbx_mlx.decoding import rows
from gearbx_mlx.decoding.rows import Rows, Verifier

PROMPT = [1, 5, 9, 2, 7]


def text(model, tokenizer, mode, gearbox):
    return [r.token for r in stream_generate(model, tokenizer, PROMPT, 30, mode=mode, gearbox=gearbox)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kernels", ["mlx", "auto"])
def test_lossless_writes_the_text_of_the_top_gear(demo, dtype, kernels):
    for seed in range(3):
        model = tiny_model("deepseek_v3", seed=seed, dtype=mx.bfloat16)
        gearbox = Gearbox(model, "6,16", dtype=dtype, kernels=kernels)
        drafted = text(model, demo.tokenizer, Lossless(draft_length=3), gearbox)
        assert drafted == text(model, demo.tokenizer, Static(), gearbox)


def test_several_tokens_have_the_bits_of_single_ones():
    model = tiny_model("deepseek_v3", dtype=mx.bfloat16)
    gearbox = Gearbox(model, "16", dtype="bfloat16")
    alone, together = make_prompt_cache(model), make_prompt_cache(model)
    for cache in (alone, together):
        model(mx.arange(20)[None], cache=cache)
    tokens = list(range(30, 38))
    rows = Rows(Verifier(gearbox, gearbox.ladder.top), mx.array([tokens]), together)
    single = mx.concatenate([model(mx.array([[token]]), cache=alone) for token in tokens], axis=1)
    assert mx.array_equal(rows.logits, single)


def test_a_class_whose_source_is_not_to_be_had_is_named_before_the_text(demo, monkeypatch):
    model = tiny_model("deepseek_v3", dtype=mx.bfloat16)
    gearbox = Gearbox(model, "4,16", dtype="bfloat16")
    monkeypatch.setattr(rows, "one_token_class", lambda kind: None)
    with pytest.warns(GearbxWarning, match="DeepseekV3Attention computes several tokens in another way than one"):
        stream_generate(model, demo.tokenizer, PROMPT, mode=Lossless(), gearbox=gearbox)


def test_kickdown_runs_in_half_precision_for_it_computes_one_token_at_a_time(demo):
    model = tiny_model("deepseek_v3", dtype=mx.bfloat16)
    gearbox = Gearbox(model, "4,16", dtype="bfloat16")
    always = Kickdown(rule=lambda entropy, position, gear: True)
    assert text(model, demo.tokenizer, always, gearbox) == text(model, demo.tokenizer, Static(), gearbox)


def test_a_class_that_lets_tokens_see_later_ones_is_named_before_the_text(demo):
    gearbox = Gearbox(tiny("phi3small"), "4,16", group_size=32)
    with pytest.warns(GearbxWarning, match="mlx_lm.models.phi3small computes several tokens in another way than one"):
        stream_generate(gearbox.model, demo.tokenizer, PROMPT, mode=Lossless(), gearbox=gearbox)
