"""Every class of the installed mlx_lm.models behind a gearbox, as a tiny random instance."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from architectures import EXPECTED, GROUP, installed, tiny, why_not
from architectures.reading import bytes_read, matrices
from conftest import Script, every_gear

from gearbx_mlx import Gearbox, Lossless, Route, stream_generate

PROMPT = [1, 5, 9, 2, 7, 3, 8, 1, 60, 70, 100, 12]
LONGER = [*PROMPT, 30, 31, 32, 33]  # more than an indexer selects
LENGTH = 24  # tokens that fill a window together with the prompt


def logits(model: nn.Module) -> np.ndarray:
    """The logits of a whole prompt."""
    return np.array(model(mx.array([PROMPT]))[0].astype(mx.float32))


# By default one of each kind: dense, experts, latent attention, states, windows, wrapped, with tables of its own.
FEW = {
    *("llama", "phi3", "gpt2", "gemma3_text", "gemma3n", "olmo2", "cohere2"),
    *("qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "falcon_h1", "rwkv7"),
}
CASES = [name if name in FEW else pytest.param(name, marks=pytest.mark.matrix) for name in installed()]


@pytest.fixture(scope="module", params=CASES)
def built(request, demo):
    """A model in a gearbox, and its logits without one; tests may leave it in any gear."""
    name = request.param
    if reason := why_not(name):
        pytest.skip(reason)
    demo.tokenizer.eos_token_ids = set()
    model = tiny(name)
    plain = logits(model)
    gearbox = Gearbox(model, "4,8,16", group_size=GROUP, kernels="mlx")
    return SimpleNamespace(name=name, model=model, plain=plain, gearbox=gearbox, tokenizer=demo.tokenizer)


def expect(request, kind: str, name: str) -> None:
    """Mark a test that fails today for this architecture and must fail."""
    if reason := EXPECTED[kind].get(name):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


def text(built, mode) -> list:
    return list(stream_generate(built.model, built.tokenizer, PROMPT, LENGTH, mode=mode, gearbox=built.gearbox))


def test_every_matrix_changes_gear_or_is_reported(built, request):
    expect(request, "unmanaged", built.name)
    gearbox = built.gearbox
    gearbox.shift("high")
    accounted = {layer.path for layer in gearbox.layers} | gearbox.unmanaged.keys()
    accounted |= {path.rpartition(".")[0] for path in gearbox.unmanaged}  # of a parameter that is not a layer
    assert matrices(built.model) - accounted == set()
    assert all(gearbox.unmanaged.values())


def test_top_gear_equals_model_bit_for_bit(built):
    assert built.gearbox.layers
    for gear in every_gear(built.gearbox, gears=("high", "low", "mid", "high", "low", "high")):
        same = np.array_equal(logits(built.model), built.plain)
        assert same == (gear == "high"), gear


def test_generation_continues_while_shifting(built):
    responses = text(built, Route(gate=Script([1, 2, 0]), initial_gear="low"))
    assert len(responses) == LENGTH
    assert {r.gear for r in responses} == {"low", "mid", "high"}
    assert all(np.isfinite(r.entropy) for r in responses)


@pytest.mark.filterwarnings("ignore:the top gear goes on alone")  # where a window is full
def test_lossless_output_equals_top_gear_output(built, request):
    expect(request, "lossless", built.name)
    built.gearbox.shift("high")
    theirs = mlx_lm.stream_generate(built.model, built.tokenizer, PROMPT, LENGTH)
    top = [r.token for r in theirs]
    assert len(set(top)) > 2
    responses = text(built, Lossless(draft_length=4))
    assert [r.token for r in responses] == top
    assert sum(r.drafted for r in responses) > 0


def test_counted_bytes_are_weights_of_step(built, request):
    expect(request, "bytes", built.name)
    for gear in every_gear(built.gearbox, gears=("high", "low")):
        counted = built.gearbox.weight_bytes_per_token(built.gearbox.gear)
        assert counted == bytes_read(built.model, LONGER), gear
