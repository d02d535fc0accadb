"""The training pass of a draft head: one layer, unrolled on its own states, as pure functions over arrays.

The head is EAGLE-3's (Li et al., 2025, arXiv:2503.01840, sections 3.1 and 3.2). After token x[u] the model holds hidden
states f[u], which give x[u+1] exactly. The head takes f[u] and the embedding of x[u+1], and drafts x[u+2]: place 1. For
place 2 its own output replaces f[u+1], and so on. Training unrolls these places on true tokens ("training-time test").
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .blas import matmul, soft_cross_entropy

Weights = Mapping[str, Any]
"""Nested dictionaries of arrays, named as in a released head."""
PLACES = 3  # draft positions that are trained
DECAY = 0.8  # weight of each place's loss, relative to the place before it


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head, named as in config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the shape (outputs, inputs) of each trained matrix by name."""
        size, mlp = self.hidden_size, self.intermediate_size
        queries, keys = (n * self.head_dim for n in (self.num_attention_heads, self.num_key_value_heads))
        return {
            "fc": (size, 3 * size),
            "layers.0.self_attn.q_proj": (queries, 2 * size),
            "layers.0.self_attn.k_proj": (keys, 2 * size),
            "layers.0.self_attn.v_proj": (keys, 2 * size),
            "layers.0.self_attn.o_proj": (size, queries),
            "layers.0.mlp.gate_proj": (mlp, size),
            "layers.0.mlp.up_proj": (mlp, size),
            "layers.0.mlp.down_proj": (size, mlp),
        }

    @property
    def norms(self) -> tuple[str, ...]:
        layer = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        return (*(f"layers.0.{name}" for name in layer), "norm")

    @property
    def parameters(self) -> int:
        """Number of trained weights."""
        return sum(map(math.prod, self.matrices().values())) + len(self.norms) * self.hidden_size


def linear(x: mx.array, weight: mx.array) -> mx.array:
    """Return x (..., K) times the transposed weight (M, K)."""
    return matmul(x.reshape(-1, x.shape[-1]), weight.T).reshape(*x.shape[:-1], -1)


def initial_weights(shape: HeadShape, norm: mx.array, seed: int = 0) -> dict[str, Any]:
    """Return initial weights, which pass the last recorded state on: the output rows read the space of that state.

    Args:
        norm: (D,) weight of the head's last norm.
    """
    random, size = np.random.default_rng(seed), shape.hidden_size
    found = dict[str, mx.array]()
    for name, (rows, columns) in shape.matrices().items():
        scale = 0.1 if name == "fc" else 0.2 if name.endswith(("o_proj", "down_proj")) else 1.0
        weight = random.normal(0, 0.7 * scale / math.sqrt(columns), (rows, columns))
        if name == "fc":
            weight[:, 2 * size :] += np.eye(size)
        found[f"{name}.weight"] = mx.array(weight.astype(np.float32))
    found |= {f"{name}.weight": mx.ones(size) for name in shape.norms}
    found["norm.weight"] = norm
    return found


def attend(
    queries: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], scale: float, mask: mx.array
) -> mx.array:
    """Return attention (B, H, T, d) of a later place: over the first place's keys up to the same token, and own ones.

    Args:
        queries: (B, H, T, d).
        keys, values: of each place so far, the same shape.
        mask: (T, T), 0 or -inf.
    """
    first = matmul(queries, keys[0].swapaxes(-1, -2)) * scale + mask
    own = [(queries * key).sum(-1, keepdims=True) * scale for key in keys[1:]]
    shares = mx.softmax(mx.concatenate([first, *own], axis=-1), axis=-1)
    tokens = queries.shape[-2]
    found = matmul(shares[..., :tokens], values[0])
    for place, value in enumerate(values[1:]):
        found = found + shares[..., tokens + place, None] * value
    return found


def unrolled(weights: Weights, shape: HeadShape, states: mx.array, embedded: mx.array, places: int) -> list[mx.array]:
    """Return normed outputs (B, T, D) of each place, for the output rows.

    Args:
        states: (B, T, 3D) hidden states of the model, scaled as in training.
        embedded: (B, at least T + places - 1, D) embeddings of the tokens from x[1].
        places: number of drafted tokens.
    """
    batch, tokens, _ = states.shape
    norm_of = {name: weights[f"{name}.weight"] for name in shape.norms}
    mask = mx.triu(mx.full((tokens, tokens), -mx.inf), k=1)
    repeated = shape.num_attention_heads // shape.num_key_value_heads
    keys: list[mx.array] = []
    values: list[mx.array] = []
    found = []
    x = linear(states, weights["fc.weight"])

    def normed(y: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(y, norm_of[name], shape.rms_norm_eps)

    def projected(y: mx.array, name: str) -> mx.array:
        return linear(y, weights[f"layers.0.{name}.weight"])

    def by_head(y: mx.array, place: int | None) -> mx.array:
        y = y.reshape(batch, tokens, -1, shape.head_dim).swapaxes(1, 2)
        if place is not None:
            rope: dict[str, Any] = {"traditional": False, "base": shape.rope_theta, "scale": 1.0, "offset": place}
            y = mx.fast.rope(y, shape.head_dim, **rope)
        return mx.repeat(y, shape.num_attention_heads // y.shape[1], axis=1) if repeated > 1 else y

    for place in range(places):
        token = normed(embedded[:, place : place + tokens], "layers.0.input_layernorm")
        both = mx.concatenate([token, normed(x, "layers.0.hidden_norm")], axis=-1)
        queries, key = (by_head(projected(both, f"self_attn.{name}_proj"), place) for name in "qk")
        keys.append(key)
        values.append(by_head(projected(both, "self_attn.v_proj"), None))
        attended = attend(queries, keys, values, shape.head_dim**-0.5, mask)
        x = x + projected(attended.swapaxes(1, 2).reshape(batch, tokens, -1), "self_attn.o_proj")
        y = normed(x, "layers.0.post_attention_layernorm")
        gate, up = projected(y, "mlp.gate_proj"), projected(y, "mlp.up_proj")
        x = x + projected(gate * mx.sigmoid(gate) * up, "mlp.down_proj")
        found.append(normed(x, "norm"))
    return found


def loss_of(outputs: Sequence[mx.array], rows: mx.array, after: mx.array, at: mx.array, weights: mx.array) -> mx.array:
    """Return the soft cross-entropy in nats, with later places weighted by `DECAY`.

    Args:
        outputs: (B, T, D) of each place.
        rows: (V, D) output rows.
        after: (M, D) the model's normed states, whose distribution place 1 learns; place j learns that of j - 1 later.
        at: (M,) indices into B x T.
        weights: (places, M) 1 for draft positions that count, else 0.
    """
    drafted = mx.stack([output.reshape(-1, output.shape[-1])[at] for output in outputs])
    counted = weights[: len(outputs)]
    decay = mx.array([DECAY**place for place in range(len(outputs))])[:, None]
    return soft_cross_entropy(drafted, after, rows, decay * counted / mx.maximum(counted.sum(-1, keepdims=True), 1))
