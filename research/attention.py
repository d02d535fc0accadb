"""Error of attention in a low gear (GEARBX 13.2), for every architecture with attention layers.

No knowledge of the model's classes is needed. While the model reads a text, `watched` records each call of attention:
the innermost module that calls it, its queries, keys and values, and the linear layers that are called before and after
it. Then the module is called again with quantized weights, and the attention of its heads is compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.formats import rowwise

PARTS = ("Q and K", "V", "output")
EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the entropy, over the largest possible one
FIRST = 16  # positions that are left out: attention to so few is neither concentrated nor diffuse

Quantizer = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Attended:
    """What attention gets in a call: queries (1, H, S, D), keys and values of as many heads or fewer, mask, sinks."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    mask: Any = None
    sinks: mx.array | None = None

    def scores(self) -> mx.array:
        """(H, S, T) float32, -inf for what a query does not see."""
        heads = self.queries.shape[1]
        queries, keys = (each[0].astype(mx.float32) for each in (self.queries, self.keys))
        scores = self.scale * queries @ mx.repeat(keys, heads // keys.shape[0], axis=0).swapaxes(1, 2)
        if self.mask is None:
            return scores
        if isinstance(self.mask, str):
            longer = keys.shape[1] - queries.shape[1]
            seen = mx.arange(keys.shape[1])[None] <= mx.arange(queries.shape[1])[:, None] + longer
            return mx.where(seen, scores, -mx.inf)
        mask = self.mask.reshape(-1, *self.mask.shape[-2:])
        return mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask.astype(mx.float32)

    def probabilities(self) -> mx.array:
        """(H, S, T): the weight of each position; with sinks, which take a part, they sum to less than 1."""
        scores = self.scores()
        if self.sinks is None:
            return mx.softmax(scores, axis=-1, precise=True)
        sinks = mx.broadcast_to(self.sinks.astype(mx.float32)[:, None, None], (*scores.shape[:2], 1))
        return mx.softmax(mx.concatenate([scores, sinks], axis=-1), axis=-1, precise=True)[..., :-1]

    def spread_values(self) -> mx.array:
        """(H, T, D) float32, a copy for each head of the queries."""
        values = self.values[0].astype(mx.float32)
        return mx.repeat(values, self.queries.shape[1] // values.shape[0], axis=0)


@dataclass
class Call:
    """A call of a module.

    attended: attention's arguments. linears: the layers it called; before: how many of them before attention.
    """

    module: nn.Module
    arguments: tuple
    keywords: Mapping[str, Any]
    linears: list[nn.Linear] = field(default_factory=list)
    attended: Attended | None = None
    before: int = 0

    @property
    def inputs(self) -> list[nn.Linear]:
        """The linear layers whose results attention gets."""
        return self.linears[: self.before]

    @property
    def output(self) -> nn.Linear | None:
        """The layer that attention's result goes into, where it takes all heads as they are."""
        if self.attended is None:
            return None
        width = self.attended.queries.shape[1] * self.attended.values.shape[-1]
        return next((each for each in self.linears[self.before :] if each.weight.shape[1] == width), None)


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Call]]:
    """While this lasts, all calls of modules that attend are noted, in the order in which they end."""
    stack: list[Call] = []
    noted: list[Call] = []
    classes = {type(module): type(module).__call__ for module in model.modules()}
    own = {kind: "__call__" in vars(kind) for kind in classes}
    attend = mx.fast.scaled_dot_product_attention

    def watch(called: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(self, nn.Linear):
                for outer in stack:
                    outer.linears.append(self)
            stack.append(Call(self, arguments, keywords))
            try:
                return called(self, *arguments, **keywords)
            finally:
                ended = stack.pop()
                if ended.attended is not None:
                    noted.append(ended)

        return call

    def seen(
        queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any = None, **more: Any
    ) -> Any:
        if stack and stack[-1].attended is None:
            innermost = stack[-1]
            innermost.attended = Attended(queries, keys, values, scale, mask, more.get("sinks"))
            innermost.before = len(innermost.linears)
        return attend(queries, keys, values, scale=scale, mask=mask, **more)

    for kind, called in classes.items():
        kind.__call__ = watch(called)
    mx.fast.scaled_dot_product_attention = seen  # type: ignore[assignment]
    try:
        yield noted
    finally:
        mx.fast.scaled_dot_product_attention = attend
        for kind, called in classes.items():
            if own[kind]:
                kind.__call__ = called
            else:
                del kind.__call__


def calls_of(model: nn.Module, tokens: Sequence[int]) -> list[Call]:
    """Return the calls that attend while a model reads a text. Raises GearbxError if there are none."""
    with watched(model) as noted:
        mx.eval(model(mx.array([list(tokens)])))
    found = [call for call in noted if call.inputs]
    if not found:
        raise GearbxError("no layer of this model calls MLX's attention on linear layers; there is nothing to analyse")
    return found


def changed(call: Call, quantize: Quantizer) -> Attended:
    """Return the inputs of attention if the layers before it are quantized."""
    layers = list({id(layer): layer for layer in call.inputs}.values())
    weights = [layer.weight for layer in layers]
    try:
        for layer, weight in zip(layers, weights):
            layer.weight = quantize(weight.astype(mx.float32)).astype(weight.dtype)
        with watched(call.module) as noted:
            mx.eval(call.module(*call.arguments, **call.keywords))
    finally:
        for layer, weight in zip(layers, weights):
            layer.weight = weight
    found = next(each.attended for each in noted if each.module is call.module)
    assert found is not None
    return found


def by_head(layer: nn.Linear, heads: int, quantize: Quantizer | None = None) -> mx.array:
    """Return the weights (H, D, O) that a head's result is multiplied with, of the output layer."""
    weight = layer.weight.astype(mx.float32)
    weight = weight if quantize is None else quantize(weight)
    return weight.reshape(weight.shape[0], heads, -1).transpose(1, 2, 0)


def relative_entropy(probabilities: mx.array, seen: mx.array) -> mx.array:
    """Return the entropy of each row of attention (H, S, T), over that of equal shares of the positions in view.

    Args:
        seen: (H, S) how many positions a query sees.

    Returns (H, S): 0 (one position) to 1 (all alike); 1 where only one is in view.
    """
    logs = mx.where(probabilities > 0, mx.log(mx.maximum(probabilities, 1e-38)), 0.0)
    most = mx.log(mx.maximum(seen, 1).astype(mx.float32))
    entropy = -(probabilities * logs).sum(axis=-1)
    return mx.where(most > 0, entropy / mx.maximum(most, 1e-6), 1.0)


def errors_of(call: Call, quantize: Quantizer) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
    """Return, for each head and position (H, S): relative entropy, squared size of its output, squared error by part.

    A head adds its part of the output layer's result. Without such a layer it adds its own result, and there is no part
    `output`.
    """
    exact, other = call.attended, changed(call, quantize)
    assert exact is not None
    scores, shares = exact.scores(), exact.probabilities()
    result, heads = shares @ exact.spread_values(), exact.queries.shape[1]
    output = call.output
    out = by_head(output, heads) if output is not None else None

    def size(difference: mx.array) -> mx.array:
        return mx.square(difference if out is None else difference @ out).sum(axis=-1)

    errors = {
        "Q and K": size(other.probabilities() @ exact.spread_values() - result),
        "V": size(shares @ other.spread_values() - result),
    }
    if output is not None and out is not None:
        errors["output"] = mx.square(result @ (by_head(output, heads, quantize) - out)).sum(axis=-1)
    return relative_entropy(shares, (scores > -mx.inf).sum(axis=-1)), size(result), errors


def attention_errors(
    model: nn.Module, texts: Sequence[Sequence[int]], quantizer: Quantizer | None = None, first: int = FIRST
) -> list[dict[str, Any]]:
    """Return the error of what heads add to the output when one kind of projection is quantized.

    Args:
        texts: tokens. Each head at each position from `first` on is one sample.
        quantizer: for the projections; per-row symmetric codes of 4 bits if not given.

    Returns:
        a row for each kind of projection and bin of entropy: `part`, `low` and `high` (of the bin), `samples`, `error`
        (squared, over the squared size of what these samples add), `shared` (squared, over the mean squared size of
        all samples). Both are None in a bin without samples.

    Raises:
        GearbxError: no layer attends.
    """
    quantize = quantizer or (lambda weight: rowwise.dequantize(*rowwise.quantize(weight, 4)))
    found: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {part: [] for part in PARTS}
    for text in texts:
        for call in calls_of(model, text):
            entropies, sizes, errors = errors_of(call, quantize)
            for part, error in errors.items():
                found[part].append((samples(entropies, first), samples(sizes, first), samples(error, first)))
    return [row for part, each in found.items() if each for row in binned(part, *map(np.concatenate, zip(*each)))]


def samples(values: mx.array, first: int) -> np.ndarray:
    """(H, S) as one row, without the first positions."""
    return np.array(values[:, first:], dtype=np.float64).reshape(-1)


def binned(part: str, entropies: np.ndarray, sizes: np.ndarray, errors: np.ndarray) -> list[dict[str, Any]]:
    """Return the rows of `attention_errors` for one part, from samples: entropies, squared sizes and squared errors."""
    places = np.clip(np.digitize(entropies, EDGES[1:-1]), 0, len(EDGES) - 2)
    rows = []
    for place, (low, high) in enumerate(pairwise(EDGES)):
        inside = places == place
        row: dict[str, Any] = {"part": part, "low": low, "high": high, "samples": int(inside.sum())}
        row["error"] = float(errors[inside].sum() / sizes[inside].sum()) if inside.any() else None
        row["shared"] = float(errors[inside].mean() / sizes.mean()) if inside.any() else None
        rows.append(row)
    return rows
