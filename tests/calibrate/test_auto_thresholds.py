"""--thresholds auto: found once, on three short prompts or on the first prompt, and used like given thresholds."""

import math
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from gearbx_mlx import Gearbox, GearbxError, load
from gearbx_mlx.decoding import route
from gearbx_mlx.decoding.route import CONTINUED, SHORT_PROMPTS, auto_thresholds

PROMPT = "Tom has 5 apples. He buys 3 more and gives 4 away. How many does he have?"


def new_gearbox():
    return Gearbox(load()[0], "4,8,16")


def entropy_of(logprobs):
    p = np.exp(np.array(logprobs, dtype=np.float64))
    return float(-(p * np.log2(np.maximum(p, 1e-300))).sum())


def by_hand(model, tokens):
    """GEARBX 4.1 and 4.2 on the entropies of a prompt, in numpy."""
    logits = np.array(model(mx.array(tokens)[None])[0].astype(mx.float32), dtype=np.float64)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    e = np.sort(-(p * np.log2(np.maximum(p, 1e-300))).sum(axis=-1))
    n, ceiling = len(e), math.log2(logits.shape[-1])
    low, high = e[max(math.floor(0.3 * n) - 1, 0)], e[min(n - 1, math.floor(0.6 * n))]
    return min(low, 0.06 * ceiling), min(high, 0.12 * ceiling)


def test_thresholds_are_median_of_three_short_prompts(tokenizer):
    gearbox = new_gearbox()
    gearbox.shift("low")
    found = auto_thresholds(gearbox, tokenizer, PROMPT)
    assert gearbox.gear.name == "low"
    assert found.source == "three short prompts"
    gearbox.shift("high")
    asked = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in SHORT_PROMPTS
    ]
    entropies = [
        entropy_of(response.logprobs)
        for prompt in asked
        for response in mlx_lm.stream_generate(gearbox.model, tokenizer, prompt, CONTINUED)
    ]
    median = np.median([entropy for entropy in entropies if entropy > 0])
    assert found.tokens == len(entropies)
    assert found.thresholds == pytest.approx((median, 2.5 * median), rel=1e-4)
    assert auto_thresholds(new_gearbox(), tokenizer) == found


def test_short_prompts_open_an_answer(monkeypatch):
    prompts = []
    template = SimpleNamespace(chat_template="own", apply_chat_template=lambda messages, **flags: (messages, flags))
    monkeypatch.setattr(mlx_lm, "stream_generate", lambda model, tokenizer, prompt, most: prompts.append(prompt) or [])
    assert list(route.continued_entropies(None, template, "Hi")) == []
    assert prompts == [([{"role": "user", "content": "Hi"}], {"add_generation_prompt": True})]


@pytest.fixture
def sure(monkeypatch):
    """The model is sure of all that follows the three prompts."""
    monkeypatch.setattr(route, "continued_entropies", lambda *_: [0.0, 0.0])


@pytest.mark.slow
def test_confident_model_uses_capped_prompt_percentiles(tokenizer, sure):
    gearbox, tokens = new_gearbox(), tokenizer.encode(PROMPT)
    found = auto_thresholds(gearbox, tokenizer, PROMPT)
    assert (found.source, found.tokens) == ("the prompt", len(tokens))
    gearbox.shift("high")
    assert found.thresholds == pytest.approx(by_hand(gearbox.model, tokens), rel=1e-4)


def test_a_short_prompt_is_refused_then(tokenizer, sure):
    with pytest.raises(GearbxError, match="calibration: needs 5 tokens with entropy above 0, got 2"):
        auto_thresholds(new_gearbox(), tokenizer, [1, 2])


def test_they_are_found_once_for_a_gearbox(tokenizer):
    gearbox = new_gearbox()
    first = auto_thresholds(gearbox, tokenizer, PROMPT)
    assert auto_thresholds(gearbox, tokenizer, "Once upon a time there was a king who had three sons.") is first


def test_a_long_prompt_is_read_in_parts(tokenizer, sure, monkeypatch):
    whole = auto_thresholds(new_gearbox(), tokenizer, PROMPT).thresholds
    monkeypatch.setattr("gearbx_mlx.decoding.route.LOGITS", 3 * 4096)
    assert auto_thresholds(new_gearbox(), tokenizer, PROMPT).thresholds == pytest.approx(whole, rel=1e-5)
