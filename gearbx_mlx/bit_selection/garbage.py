"""An end-to-end check for garbage, which no cosine of weights shows (XFP 6.3).

A quantized model gives garbage if its distributions on a calibration text are far from the original's, or if it repeats
itself where the original does not.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step

from ..errors import GearbxError

KL_BOUND = 0.5  # nats per token: the measured models write broken text well below it
GENERATED = 64  # tokens of each text
LONGEST_PERIOD, LEAST_REPEATS, LEAST_TOKENS = 8, 4, 16


@dataclass(frozen=True)
class Sense:
    """The outcome of the check.

    kl: mean over tokens, nats. looped: texts that end in repetition where the original's do not; more than a quarter of
    the texts fail. reason: why the check failed; empty if it passed.
    """

    kl: float
    looped: int
    reason: str

    @property
    def passed(self) -> bool:
        return not self.reason


def log_probabilities(model: nn.Module, tokens: Sequence[int]) -> mx.array:
    """(T, V) float32: after each of T tokens, the log-probability of every token."""
    logits = model(mx.array(list(tokens))[None])[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text ends in a stretch of up to 8 tokens that repeats: at least 4 times, and over 16 tokens or more."""
    for period in range(1, LONGEST_PERIOD + 1):
        repeats = max(LEAST_REPEATS, -(-LEAST_TOKENS // period))
        tail = list(tokens[-period * repeats :])
        if len(tail) == period * repeats and tail == tail[-period:] * repeats:
            return True
    return False


def continuation(model: nn.Module, tokens: Sequence[int], length: int, ends: Collection[int] = ()) -> list[int]:
    """The tokens that greedy decoding writes after a text, at most `length`, before the first of `ends`."""
    steps = (int(token) for token, _ in generate_step(mx.array(list(tokens)), model, max_tokens=length))
    return list(itertools.takewhile(lambda token: token not in ends, steps))


class GarbageCheck:
    """Compares models with the original, whose distributions and texts it keeps.

    Args:
        model: in its top gear.
        texts: tokens of calibration texts. Distributions are compared over the whole text; what the models write is
            compared after its first half.
        kl_bound: the most nats per token that pass.
        written: tokens to generate for each text.
        ends: tokens that end a text, such as a tokenizer's `eos_token_ids`.

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
        """Mean KL from the original to the model over all tokens of the texts, in nats."""
        total = 0.0
        for text, original in zip(self.texts, self._logprobs):
            total += float(np.array((mx.exp(original) * (original - log_probabilities(model, text))).sum()))
        return total / sum(map(len, self.texts))

    def _written(self, model: nn.Module, text: list[int]) -> list[int]:
        return continuation(model, text[: len(text) // 2], self.written, self.ends) if self.written else []
