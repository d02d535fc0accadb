"""Thresholds that a model finds by itself (GEARBX 4.2): at first use, once for a gearbox.

The entropies of the prompt in the top gear say how sure this model is of text of this kind. A prompt that is too short
says too little: then three short prompts are continued instead, as GEARBX does on MLX.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..gears.gearbox import Gearbox, Observer
from ..ranks.agreement import agreement_of
from ..routing.calibration import FEWEST_SAMPLES, median_thresholds, percentile_thresholds
from ..routing.entropy import entropy_bits
from .known_vocabulary import vocabulary_of
from .prompt import encoded

SHORT_PROMPTS = (
    "Once upon a time there was a king who had three sons.",
    "Tom has 5 apples and buys 7 more. He gives 3 to his sister. How many apples does he have?",
    "Explain why the sum of two odd numbers is always even.",
)
CONTINUED = 16  # tokens after each of them
MOST_READ = 1024  # tokens of a prompt: more say no more about the kind of text
LOGITS = 1 << 24  # numbers at once: 64 MiB in float32


@dataclass(frozen=True)
class AutoThresholds:
    """thresholds: bits, ascending. tokens: whose entropies they come from. source: what these tokens were."""

    thresholds: tuple[float, ...]
    tokens: int
    source: str

    def about(self) -> str:
        shown = ", ".join(f"{threshold:.3f}" for threshold in self.thresholds)
        return f"thresholds {shown} bits, found on {self.source} ({self.tokens} tokens)"


_found: WeakKeyDictionary[Any, AutoThresholds] = WeakKeyDictionary()


def auto_thresholds(gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any = None) -> AutoThresholds:
    """The thresholds of a gearbox, found when it is first asked; they do not change afterwards (GEARBX 18.2).

    Args:
        prompt: text or tokens to find them on; none, or one of fewer than five tokens: on three short prompts.
    """
    if gearbox not in _found:
        before = gearbox.gear
        gearbox.shift(gearbox.ladder.top)
        try:
            _found[gearbox] = find(gearbox, tokenizer, prompt)
        finally:
            gearbox.shift(before)
    return _found[gearbox]


def find(gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> AutoThresholds:
    model, gears = gearbox.model, len(gearbox.ladder)
    tokens = [] if prompt is None else [int(token) for token in np.array(encoded(tokenizer, prompt))[:MOST_READ]]
    entropies = list(prompt_entropies(model, tokens, vocabulary_of(gearbox)))
    if sum(entropy > 0 for entropy in entropies) >= FEWEST_SAMPLES:
        thresholds, source = percentile_thresholds(entropies, gears, vocabulary_of(gearbox)), "the prompt"
    else:
        entropies = [entropy for text in SHORT_PROMPTS for entropy in continued_entropies(model, tokenizer, text)]
        thresholds, source = median_thresholds(entropies, gears), "three short prompts"
    return AutoThresholds(as_rank_0(model, thresholds), len(entropies), source)


def prompt_entropies(model: nn.Module, tokens: list[int], vocabulary: int) -> Iterator[float]:
    """Bits at every position of a prompt, read in parts whose logits take little memory."""
    size, cache = max(LOGITS // vocabulary, 1), make_prompt_cache(model)
    for start in range(0, len(tokens), size):
        logits = model(mx.array(tokens[start : start + size])[None], cache=cache)
        yield from map(float, np.array(entropy_bits(logits)[0]))


def continued_entropies(model: nn.Module, tokenizer: Any, text: str) -> Iterator[float]:
    """Bits of the tokens that a model writes after a prompt, greedily."""
    prompt: Any = text
    if getattr(tokenizer, "chat_template", None):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, CONTINUED):
        yield float(np.array(entropy_bits(response.logprobs)))


def as_rank_0(model: nn.Module, thresholds: tuple[float, ...]) -> tuple[float, ...]:
    """The thresholds of rank 0: machines of different kinds round differently."""
    (shared,) = agreement_of(model).arrays(mx.array(thresholds, mx.float32))
    return tuple(map(float, np.array(shared)))
