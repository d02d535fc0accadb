"""The error of attention by the projection that is quantized, and by how diffuse the attention is (GEARBX 13.2)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...errors import GearbxError
from .weights import Quantizer, by_rows

PARTS = {"Q and K": ("q_proj", "k_proj"), "V": ("v_proj",), "output": ("o_proj",)}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NEEDED = (*PROJECTIONS, "rope", "scale", "n_heads", "n_kv_heads")
EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the entropy, over the largest possible one
FIRST = 16  # positions that are left out: attention to so few is neither concentrated nor diffuse


def check_attention(model: nn.Module) -> None:
    """Raises GearbxError unless the attention of all layers is as Llama's."""
    for number, block in enumerate(model.layers):
        attention = getattr(block, "self_attn", None)
        missing = [name for name in NEEDED if not hasattr(attention, name)]
        if missing or hasattr(attention, "q_norm"):
            why = f"has no {missing[0]}" if missing else "normalizes its queries"
            raise GearbxError(
                f"the attention of layer {number} {why}; its error is analysed for models such as Llama alone"
            )


def inputs_of(model: nn.Module, tokens: Sequence[int]) -> list[mx.array]:
    """What the attention of each layer reads, (S, D) in float32, for a text of S tokens."""
    hidden = model.model.embed_tokens(mx.array([tokens]))
    found = []
    for block in model.layers:
        found.append(block.input_layernorm(hidden)[0].astype(mx.float32))
        hidden = block(hidden, "causal")
    return found


def by_head(attention: nn.Module, x: mx.array, weights: Mapping[str, mx.array]) -> tuple[mx.array, mx.array]:
    """What each head adds to the output of attention, and its probabilities.

    Args:
        attention: as Llama's; its own weights are not read.
        x: (S, D).
        weights: by the names of PROJECTIONS, (O, I) in float32.

    Returns:
        (H, S, D), whose sum over heads is the output without bias, and (H, S, S).
    """
    heads, kv_heads, count = attention.n_heads, attention.n_kv_heads, x.shape[0]
    q, k, v = (
        (x @ weights[name].T + getattr(attention, name).get("bias", 0.0)).reshape(1, count, n, -1).swapaxes(1, 2)
        for name, n in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    )
    q, k = attention.rope(q)[0], attention.rope(k)[0]
    k, v = (mx.repeat(each, heads // kv_heads, axis=0) for each in (k, v[0]))
    scores = attention.scale * q @ k.swapaxes(1, 2)
    scores = mx.where(mx.tri(count, dtype=mx.bool_), scores, -mx.inf)
    probabilities = mx.softmax(scores, axis=-1, precise=True)
    out = weights["o_proj"].reshape(-1, heads, v.shape[-1]).transpose(1, 2, 0)
    return (probabilities @ v) @ out, probabilities


def relative_entropy(probabilities: mx.array) -> mx.array:
    """The entropy of each row of causal attention (H, S, S), over that of equal shares of the positions in view.

    Returns (H, S): 0 (one position) to 1 (all alike); 1 at the first position.
    """
    logs = mx.where(probabilities > 0, mx.log(mx.maximum(probabilities, 1e-38)), 0.0)
    most = mx.log(mx.arange(1, probabilities.shape[-1] + 1).astype(mx.float32))
    entropy = -(probabilities * logs).sum(axis=-1)
    return mx.where(most > 0, entropy / mx.maximum(most, 1e-6), 1.0)


def attention_errors(
    model: nn.Module, texts: Sequence[Sequence[int]], quantizer: Quantizer | None = None, first: int = FIRST
) -> list[dict[str, Any]]:
    """The error of what heads add to the output when one kind of projection is quantized.

    Args:
        texts: tokens. Each head at each position from `first` on is one sample.
        quantizer: of the projections; per-row symmetric codes of 4 bits if not given.

    Returns:
        a row for each kind of projection and bin of entropy: `part`, `low` and `high` (of the bin), `samples`, `error`
        (squared, over the squared size of what these samples add), `shared` (squared, over the mean squared size of
        all samples). Both are None in a bin without samples.

    Raises:
        GearbxError: a model whose attention is other than Llama's.
    """
    check_attention(model)
    quantize = quantizer or by_rows(4)
    entropies: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    errors: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
    for text in texts:
        for block, x in zip(model.layers, inputs_of(model, text)):
            attention = block.self_attn
            exact = {name: getattr(attention, name).weight.astype(mx.float32) for name in PROJECTIONS}
            added, probabilities = by_head(attention, x, exact)
            entropies.append(samples(relative_entropy(probabilities), first))
            sizes.append(samples(mx.square(added).sum(axis=-1), first))
            for part, names in PARTS.items():
                changed = exact | {name: quantize(exact[name]) for name in names}
                error = by_head(attention, x, changed)[0] - added
                errors[part].append(samples(mx.square(error).sum(axis=-1), first))
    joined = {part: np.concatenate(each) for part, each in errors.items()}
    return binned(np.concatenate(entropies), np.concatenate(sizes), joined)


def samples(values: mx.array, first: int) -> np.ndarray:
    """(H, S) as one row, without the first positions."""
    return np.array(values[:, first:], dtype=np.float64).reshape(-1)


def binned(entropies: np.ndarray, sizes: np.ndarray, errors: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The rows of `attention_errors` from samples: entropies, squared sizes and, by part, squared errors."""
    places = np.clip(np.digitize(entropies, EDGES[1:-1]), 0, len(EDGES) - 2)
    rows = []
    for part, squared in errors.items():
        for place, (low, high) in enumerate(pairwise(EDGES)):
            inside = places == place
            row: dict[str, Any] = {"part": part, "low": low, "high": high, "samples": int(inside.sum())}
            row["error"] = float(squared[inside].sum() / sizes[inside].sum()) if inside.any() else None
            row["shared"] = float(squared[inside].mean() / sizes.mean()) if inside.any() else None
            rows.append(row)
    return rows
