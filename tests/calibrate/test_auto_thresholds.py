"""--thresholds auto: found once, on the first prompt or on three short ones, and used like given thresholds."""

import math

import mlx.core as mx
import numpy as np
import pytest

from gearbx_mlx import Gearbox, load
from gearbx_mlx.decoding.route import auto_thresholds

PROMPT = "Tom has 5 apples. He buys 3 more and gives 4 away. How many does he have?"


def new_gearbox():
    return Gearbox(load()[0], "4,8,16")


def by_hand(model, tokens):
    """GEARBX 4.1 and 4.2 on the entropies of a prompt, in numpy."""
    logits = np.array(model(mx.array(tokens)[None])[0].astype(mx.float32), dtype=np.float64)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    e = np.sort(-(p * np.log2(np.maximum(p, 1e-300))).sum(axis=-1))
    n, ceiling = len(e), math.log2(logits.shape[-1])
    low, high = e[max(math.floor(0.3 * n) - 1, 0)], e[min(n - 1, math.floor(0.6 * n))]
    return min(low, 0.06 * ceiling), min(high, 0.12 * ceiling)


@pytest.mark.slow
def test_they_are_the_percentiles_of_the_prompt_in_the_top_gear_with_caps(tokenizer):
    gearbox, tokens = new_gearbox(), tokenizer.encode(PROMPT)
    gearbox.shift("low")
    found = auto_thresholds(gearbox, tokenizer, PROMPT)
    assert gearbox.gear.name == "low"
    assert found.tokens == len(tokens)
    gearbox.shift("high")
    assert found.thresholds == pytest.approx(by_hand(gearbox.model, tokens), rel=1e-4)


@pytest.mark.slow
def test_a_short_prompt_leaves_it_to_three_short_prompts(tokenizer):
    found = auto_thresholds(new_gearbox(), tokenizer, [1, 2])
    low, high = found.thresholds
    assert found.source == "three short prompts"
    assert high >= 2.4 * low or high - low == pytest.approx(0.3)
    assert auto_thresholds(new_gearbox(), tokenizer) == found


def test_they_are_found_once_for_a_gearbox(tokenizer):
    gearbox = new_gearbox()
    first = auto_thresholds(gearbox, tokenizer, PROMPT)
    assert auto_thresholds(gearbox, tokenizer, "Once upon a time there was a king who had three sons.") is first


def test_a_long_prompt_is_read_in_parts(tokenizer, monkeypatch):
    whole = auto_thresholds(new_gearbox(), tokenizer, PROMPT).thresholds
    monkeypatch.setattr("gearbx_mlx.decoding.route.LOGITS", 3 * 4096)
    assert auto_thresholds(new_gearbox(), tokenizer, PROMPT).thresholds == pytest.approx(whole, rel=1e-5)
