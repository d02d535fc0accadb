"""What the top gear makes of drafts: how many tokens of its own each sequence accepts, and which one comes then."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..entropy import Entropy
from ..near_ties import near_ties, noise_of
from .choosing import choose_all
from .drafts import Beginning, Drafts


@dataclass(frozen=True)
class Accepted:
    """Of one sequence: the tokens that the top gear chose in a row, the last of which nobody drafted.

    logprobs (n, V), entropies (n, bits) and near_ties (n) are of these tokens, n.
    """

    tokens: list[int]
    logprobs: mx.array
    entropies: np.ndarray
    near_ties: np.ndarray


def accept(logits: mx.array, beginnings: Sequence[Beginning], drafts: Drafts, entropy: Entropy) -> list[Accepted]:
    """What every sequence accepts; its random numbers are then those after these tokens.

    Args:
        logits: (B, S, V), of the last token of every sequence and of its draft.
        entropy: in bits, of log-probabilities.
    """
    choosers = [beginning.chooser for beginning in beginnings]
    usable = [tokens[:count] for tokens, count in zip(drafts.tokens, drafts.usable)]
    chosen, logprobs = choose_all(choosers, logits, usable)
    counts = mx.arange(logits.shape[1]) <= mx.array(drafts.usable)[:, None]  # no padding, and no rejected ends of texts
    noise = mx.where(counts, noise_of(logits), 0).max(axis=-1, keepdims=True)
    near = near_ties(logprobs, noise)
    entropies = entropy(logprobs.reshape(-1, logprobs.shape[-1])).reshape(logprobs.shape[:-1])
    mx.eval([one.tokens for one in chosen], near, entropies)
    bits, ties = np.array(entropies), np.array(near)  # of which each token's is taken without another operation of MLX
    done = []
    for row, (one, chooser) in enumerate(zip(chosen, choosers)):
        tokens = np.array(one.tokens).tolist()
        unlike = (i for i, (token, drafted) in enumerate(zip(tokens, usable[row])) if token != drafted)
        count = 1 + next(unlike, len(usable[row]))
        chooser.rewind(one.random[count - 1])
        done.append(Accepted(tokens[:count], logprobs[row, :count], bits[row, :count], ties[row, :count]))
    return done
