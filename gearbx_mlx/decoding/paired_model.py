"""Two models behind the interface of one, and their KV caches in step.

Each has a KV cache of its own. A model that was away has not read what the other one wrote meanwhile. When it comes
back, it reads all of that and the last token in one pass, so that every generated token is one pass of one model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from ..errors import GearbxError
from ..gears.activations import stored_dtype
from ..gears.cost import token_bytes
from ..gears.discovery import tied_head, vocabulary
from ..routing.pair import NAMES, SMALL
from .caches import length, parts

PREFILL_STEP_SIZE = 2048  # mlx-lm's


class TrailingCache:
    """The KV cache of one model of a pair, and the tokens that it has not read yet; one entry of the pair's cache."""

    def __init__(self, entries: list[Any]):
        self.entries = entries
        self.missed: list[mx.array] = []  # each (1, n)

    @property
    def missing(self) -> int:
        """How many tokens the model has not read."""
        return sum(tokens.shape[1] for tokens in self.missed)

    def unread(self, tokens: mx.array) -> mx.array:
        """All that was missed, then `tokens` (1, n); as read from now on."""
        missed, self.missed = self.missed, []
        return mx.concatenate([*missed, tokens], axis=1) if missed else tokens

    # The face of mlx-lm's caches.

    @property
    def state(self) -> list[Any]:
        return [self.missed, [entry.state for entry in self.entries]]

    @property
    def given(self) -> int | None:
        """Tokens that were read or missed; None where the entries are states, which do not count."""
        counted = any(hasattr(part, "offset") for part in parts(self.entries))
        return length(self.entries) + self.missing if counted else None

    @property
    def offset(self) -> int:
        return length(self.entries)

    def size(self) -> int:
        return self.entries[0].size()

    def empty(self) -> bool:
        return not self.missed and self.entries[0].empty()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def is_trimmable(self) -> bool:
        return can_trim_prompt_cache(self.entries)

    def trim(self, n: int) -> int:
        """Forget the last n tokens: first those that were never read."""
        unread = min(n, self.missing)
        if unread:
            kept = self.missing - unread
            self.missed = [mx.concatenate(self.missed, axis=1)[:, :kept]] if kept else []
        return unread + (trim_prompt_cache(self.entries, n - unread) if n > unread else 0)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> "TrailingCache":
        self.entries = [
            entry.to_quantized(group_size=group_size, bits=bits) if hasattr(entry, "to_quantized") else entry
            for entry in self.entries
        ]
        return self


@dataclass(frozen=True)
class Call:
    """The model that ran, the passes over the weights of (small, large), and how many missed tokens they read."""

    engaged: int
    passes: tuple[int, int] = (0, 0)
    caught_up: int = 0


def bytes_read(model: nn.Module) -> int:
    """Bytes of weights that a token reads, in the type of the checkpoint."""
    return token_bytes(model, {}, {"": stored_dtype(model)}, tied_head(model))


class PairedModel(nn.Module):
    """Two models behind the interface of one: the engaged one computes, the other's cache notes what it misses.

    Args:
        small, large: mlx-lm models over the same tokens.
        prefill_step_size: the most tokens that one pass catches up.

    `engaged` is SMALL or LARGE and may be set before any call. Logits are as long as those of the smaller vocabulary:
    models of one tokenizer may be padded to different lengths. `last` tells of the last call, and `weight_bytes` what a
    pass of (small, large) reads.
    """

    def __init__(self, small: nn.Module, large: nn.Module, prefill_step_size: int = PREFILL_STEP_SIZE):
        super().__init__()
        self.small, self.large = small, large
        self.vocab_size = min(vocabulary(small), vocabulary(large))
        self.prefill_step_size = prefill_step_size
        self.engaged = SMALL
        self.last = Call(SMALL)
        self.weight_bytes = bytes_read(small), bytes_read(large)

    def make_cache(self, max_kv_size: int | None = None) -> list[TrailingCache]:
        return [TrailingCache(make_prompt_cache(model, max_kv_size)) for model in (self.small, self.large)]

    def __call__(self, tokens: mx.array, cache: Sequence[TrailingCache]) -> mx.array:
        """Logits (1, n, V) of the engaged model after tokens (1, n).

        Raises:
            GearbxError: a batch of more than one, or a cache that is not of a pair.
        """
        if len(tokens) != 1:
            raise GearbxError(f"two models take turns at one text, and this is a batch of {len(tokens)}")
        check_cache(cache)
        model, own = (self.small, self.large)[self.engaged], cache[self.engaged]
        cache[1 - self.engaged].missed.append(tokens)
        caught_up, new = own.missing, tokens.shape[1]
        unread, passes = own.unread(tokens), 1
        while unread.shape[1] > max(new, self.prefill_step_size):
            step = min(self.prefill_step_size, unread.shape[1] - new)
            model(unread[:, :step], cache=own.entries)
            mx.eval([entry.state for entry in own.entries])
            unread, passes = unread[:, step:], passes + 1
        logits = model(unread, cache=own.entries)
        self.last = Call(self.engaged, (0, passes) if self.engaged else (passes, 0), caught_up)
        if caught_up:
            logits = logits[:, -new:]
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]


def check_cache(cache: Sequence[Any]) -> None:
    """Raises GearbxError for a cache that was not made for a pair."""
    if len(cache) != len(NAMES) or not all(isinstance(entry, TrailingCache) for entry in cache):
        raise GearbxError("the prompt cache is of one model, and a pair has two; make it with PairedModel.make_cache()")
