"""The model that ships: its properties, and that it has learned what its card says."""

import math
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from gearbx_mlx.loading import DEMO_MODEL

MEGABYTE = 2**20


def mean_loss(model: nn.Module, tokenizer, problems: list[dict]) -> float:
    """Nats per token over whole problems with their worked answers."""
    total, count = 0.0, 0
    for problem in problems:
        tokens = tokenizer.encode(f"Question: {problem['question']}\nAnswer: {problem['answer']}")
        logits = model(mx.array(tokens[:-1])[None]).astype(mx.float32)[0]
        total += nn.losses.cross_entropy(logits, mx.array(tokens[1:]), reduction="sum").item()
        count += len(tokens) - 1
    return total / count


def test_it_is_small_and_complete():
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) <= 16 * MEGABYTE
    names = {file.name for file in DEMO_MODEL.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}


def test_tokenizer_splits_digits_and_restores_any_text(demo):
    pieces = [demo.tokenizer.decode([i]) for i in demo.tokenizer.encode("1024")]
    assert pieces[-4:] == ["1", "0", "2", "4"]
    for text in ("<<48/2=24>>24", "Ünïcödé → 漢字 🎈\n\ttabs  and  spaces"):
        assert demo.tokenizer.decode(demo.tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.mark.slow
@pytest.mark.usefixtures("geared_demo")  # whose kernels read a text ten times as fast
def test_perplexity_on_problems_it_never_saw(demo, held_out):
    """Its card gives the loss on held-out training problems; the loss on test problems is close to that."""
    stated = float(re.search(r"\| gsm8k \|.*\| ([\d.]+) \|", (DEMO_MODEL / "README.md").read_text()).group(1))
    assert stated < 12
    assert math.exp(mean_loss(demo.model, demo.tokenizer, held_out)) < 1.15 * stated


def test_every_weight_is_finite():
    for name, weight in mx.load(str(DEMO_MODEL / "model.safetensors")).items():
        assert np.isfinite(np.array(weight.astype(mx.float32))).all(), name
