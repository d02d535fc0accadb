"""Multi-head latent attention (DeepSeek), which computes one token in another order than several."""

import mlx.core as mx
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx import Gearbox, GearbxError, Kickdown, Lossless, Static, stream_generate

PROMPT = [1, 5, 9, 2, 7]


def text(model, tokenizer, mode, gearbox):
    return [r.token for r in stream_generate(model, tokenizer, PROMPT, 30, mode=mode, gearbox=gearbox)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lossless_refuses_latent_attention_in_half_precision(demo, dtype):
    model = tiny_model("deepseek_v3", dtype=mx.bfloat16)
    gearbox = Gearbox(model, "4,16", dtype=dtype)
    with pytest.raises(GearbxError, match=rf"mode 'lossless' in {dtype}: .*give --dtype float32, or use mode 'route'"):
        stream_generate(model, demo.tokenizer, PROMPT, mode=Lossless(), gearbox=gearbox)


def test_lossless_writes_the_text_of_the_top_gear_in_float32(demo):
    model = tiny_model("deepseek_v3", dtype=mx.bfloat16)
    gearbox = Gearbox(model, "4,16", dtype="float32")
    drafted = text(model, demo.tokenizer, Lossless(draft_length=3), gearbox)
    assert drafted == text(model, demo.tokenizer, Static(), gearbox)


def test_kickdown_runs_in_half_precision_for_it_computes_one_token_at_a_time(demo):
    model = tiny_model("deepseek_v3", dtype=mx.bfloat16)
    gearbox = Gearbox(model, "4,16", dtype="bfloat16")
    always = Kickdown(rule=lambda entropy, position, gear: True)
    assert text(model, demo.tokenizer, always, gearbox) == text(model, demo.tokenizer, Static(), gearbox)


def test_the_command_says_so_before_the_text(command, tmp_path):
    save_model(tiny_model("deepseek_v3", dtype=mx.bfloat16, vocab_size=4096), tmp_path / "latent")
    arguments = "--model", tmp_path / "latent", "--mode", "lossless", "--gears", "4,16", "-m", 5
    refused = command("generate", *arguments, "--dtype", "bfloat16")
    assert (refused.status, refused.out) == (2, "")
    assert "give --dtype float32" in refused.err
    assert command("generate", *arguments, "--dtype", "float32").status == 0
