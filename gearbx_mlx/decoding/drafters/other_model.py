"""Drafts by a smaller model with the same tokenizer and its own KV cache (Leviathan et al., 2211.17192)."""

import warnings
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ...errors import GearbxError, GearbxWarning
from ...gears.gearbox import model_fingerprint
from ..caches import check_draftable
from ..heads import Head
from ..hidden import Hidden
from ..pair import bytes_read
from ..policy import MAX_DRAFTED, LearnedPolicy
from ..response import DRAFT, GeneratedText
from ..rows import Proposal, Verification
from . import Drafter, DraftTarget, last_logits, queue_draft

COST = 0.25  # plain tokens per drafted token: a draft model has at most about a quarter of the weights


class OtherModel(Drafter):
    """Drafter that uses a second model.

    Args:
        cache: of the draft model. It lacks the last token, and the tokens that the model has not read since its draft.
    """

    cost = COST

    def __init__(self, target: DraftTarget, model: nn.Module, cache: list[Any]):
        self._target, self._model, self._cache = target, model, cache
        self.name = f"model {model_fingerprint(model)[:8]}"
        self._weight_bytes = bytes_read(model)
        self._read = 0  # tokens of the sequence in the cache

    @classmethod
    def of(cls, target: DraftTarget) -> "OtherModel | None":
        """Return the drafter of the draft model; None without one, or, with a warning, if its cache cannot be cut.

        A draft head has its own drafter.
        """
        if target.draft_model is None or isinstance(target.draft_model, Head):
            return None
        cache = target.draft_cache
        cache[:] = cache or make_prompt_cache(target.draft_model)
        try:
            check_draftable(cache, target.room + MAX_DRAFTED)
        except GearbxError as error:
            warnings.warn(f"{error}; drafting is disabled", GearbxWarning, stacklevel=7)
            return None
        return cls(target, target.draft_model, cache)

    def prefill(self, tokens: mx.array, hidden: Hidden) -> None:
        self._model(tokens[None], cache=self._cache)
        mx.eval([part.state for part in self._cache])
        self._read += tokens.size

    def length(self, text: GeneratedText, room: int, policy: LearnedPolicy) -> int:
        return policy.length(min(room, self._target.most))

    def propose(self, text: GeneratedText, length: int, policy: LearnedPolicy) -> Proposal:
        run = partial(last_logits, self._model, self._cache)
        with self._target.chooser.rewound():
            drafted = queue_draft(run, text.tokens[self._read :], text, length, self._target)
        self._read = len(text.tokens) + length - 1  # the last drafted token is not in the cache
        return Proposal(*drafted, DRAFT, weight_bytes=self._weight_bytes)

    def update(self, text: GeneratedText, found: Verification | None) -> None:
        """Cut the cache to all tokens but the last; at the end of the sequence, prefill the missing ones."""
        right = len(text.tokens) - 1
        if self._read > right:
            for part in self._cache:
                part.trim(self._read - right)
            self._read = right
        if found is None and self._read <= right:
            self.prefill(mx.array(text.tokens[self._read :], mx.uint32), {})
