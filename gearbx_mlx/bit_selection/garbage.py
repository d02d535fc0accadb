"""Whether a model still makes sense: an end-to-end check of what no cosine shows (XFP 6.3).

Two signs of garbage: distributions far from the original's on calibration text, and generated text that falls into
repeating itself where the original's does not.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step

from ..errors import GearbxError

KL_BOUND = 0.5  # nats per token: on models that were measured, text is broken well before
GENERATED = 64  # tokens of each text
LONGEST_PERIOD, LEAST_REPEATS, LEAST_TOKENS = 8, 4, 16


@dataclass(frozen=True)
class Sense:
    """kl: mean over tokens, nats. looped: texts that end in repetition where the original's do not; more than a
    quarter of them are too many. reason: why it does not pass, if so."""

    kl: float
    looped: int
    reason: str

    @property
    def passed(self) -> bool:
        return not self.reason


def log_probabilities(model: nn.Module, tokens: Sequence[int]) -> mx.array:
    """(T, V) float32, of the token after each of T."""
    logits = model(mx.array(list(tokens))[None])[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text ends in one stretch of up to 8 tokens again and again: 4 times, and 16 tokens of it."""
    for period in range(1, LONGEST_PERIOD + 1):
        repeats = max(LEAST_REPEATS, -(-LEAST_TOKENS // period))
        tail = list(tokens[-period * repeats :])
        if len(tail) == period * repeats and tail == tail[-period:] * repeats:
            return True
    return False


def continuation(model: nn.Module, tokens: Sequence[int], length: int, ends: Collection[int] = ()) -> list[int]:
    """The likeliest tokens after these, one by one, up to one of `ends`."""
    steps = (int(token) for token, _ in generate_step(mx.array(list(tokens)), model, max_tokens=length))
    return list(itertools.takewhile(lambda token: token not in ends, steps))


class GarbageCheck:
    """What the original says and writes, kept to compare others with.

    Args:
        model: in its top gear.
        texts: tokens of calibration texts, of which both are taken: distributions all along, and what follows half.
        kl_bound: nats per token, the most that passes.
        written: tokens of each text that is generated.
        ends: tokens that end a text: a tokenizer's `eos_token_ids`.

    Raises:
        GearbxError: no text of two tokens or more.
    """

    def __init__(
        self,
        model: nn.Module,
        texts: Sequence[Sequence[int]],
        kl_bound: float = KL_BOUND,
        written: int = GENERATED,
        ends: Collection[int] = (),
    ):
        self.texts = [list(text) for text in texts if len(text) > 1]
        if not self.texts:
            raise GearbxError("no calibration text has two tokens or more; give longer ones")
        self.kl_bound, self.written, self.ends = kl_bound, written, ends
        self._logprobs = []
        for text in self.texts:
            self._logprobs.append(log_probabilities(model, text))
            mx.eval(self._logprobs[-1])
        self._loops = [loops(self._written(model, text)) for text in self.texts]

    def __call__(self, model: nn.Module) -> Sense:
        kl = self.divergence(model)
        if not kl <= self.kl_bound:  # NaN as well
            return Sense(kl, 0, f"KL {kl:.3g} above {self.kl_bound:g}")
        looped = sum(loops(self._written(model, text)) and not before for text, before in zip(self.texts, self._loops))
        return Sense(kl, looped, "repeats itself" if 4 * looped > len(self.texts) else "")

    def divergence(self, model: nn.Module) -> float:
        """Mean KL(original, model) over all tokens of the texts, nats."""
        total = 0.0
        for text, original in zip(self.texts, self._logprobs):
            total += float(np.array((mx.exp(original) * (original - log_probabilities(model, text))).sum()))
        return total / sum(map(len, self.texts))

    def _written(self, model: nn.Module, text: list[int]) -> list[int]:
        return continuation(model, text[: len(text) // 2], self.written, self.ends) if self.written else []
