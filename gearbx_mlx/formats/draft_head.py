"""Drafts of a draft head (decoding/heads.py) as native passes: one call for each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..compat.loops import positions_in
from ..kernels.dispatch import cpu_kernels
from .block import (
    FEW_TOKENS,
    NativeDraft,
    PassParts,
    begin_pass,
    is_plain_table,
    native_block,
    native_part,
    norm_of,
    part_of_head,
)

NORMS = ("hidden_norm", "post_attention_layernorm")


def head_parts(head: Any, embedding: nn.Module) -> PassParts | None:
    """Return the parts of a `Head`'s passes; None if one is not native. embedding: of the tokens."""
    kernels = cpu_kernels(1)
    if kernels is None or "fc_norm" in head or "input_norm" in head or head.layer.norm_before_residual:
        return None
    try:
        block = native_block(head.layer, kernels, NORMS, (), "input_layernorm")
        norm, fuse = norm_of(head.norm, kernels), native_part(head.fc, kernels)
        rows = part_of_head(head.lm_head, kernels)
        if None in (block, norm, rows, fuse):
            return None
        draft_head = kernels.draft_head(fuse, [] if head.tokens is None else head.tokens.tolist(), head.vocabulary)
        chain = kernels.chain([block], norm)
    except ValueError:  # arrays that are not contiguous
        return None
    table = embedding.weight if is_plain_table(embedding) else None
    return PassParts(kernels, head, chain, rows, embedding, table, None, draft_head)


@dataclass(frozen=True)
class HeadDraft(NativeDraft):
    """A draft of a head. Its first pass reads the tokens of hidden states that the head has not read yet."""

    tokens: Sequence[int]

    def inputs(self, token: int, place: int) -> tuple[mx.array, Sequence[int], int]:
        first = self.tokens if place == 0 else [token]
        return *self.parts.rows(first), self.entries + (place and place + len(self.tokens) - 1)


def begin_head_draft(parts: PassParts, cache: Any, tokens: Sequence[int], states: mx.array) -> HeadDraft | None:
    """Return a draft after hidden states (K, taps x D) and the K tokens after them; None if the head's module must run.

    The cache counts no entry of the draft, also none of these tokens.
    """
    passes = begin_pass(parts, cache, len(tokens)) if len(tokens) <= FEW_TOKENS else None
    if passes is None:
        return None
    parts.kernels.fuse_states(passes, mx.contiguous(states.astype(mx.float32)))
    before = positions_in(cache[0])
    return HeadDraft(parts, passes, cache, before, cache[0].keys.shape[2] - before - len(tokens) + 1, tokens)
