"""The output head: how long the logits are, and whether an embedding table is the matrix that they come from.

A model's own code answers, however it is written: it runs on one token without computing anything. MLX only works out
shapes until somebody asks for values.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from ..errors import GearbxError
from ..formats.tied import TiedEmbedding, linear_with
from .adapters import adapters_of, layers_of, own_arrays, put_modules

only_shapes: ContextVar[bool] = ContextVar("only_shapes", default=False)
"""Whether a model runs for the shapes of its outputs: layers that need values do without them."""

TOKEN = mx.zeros((1, 1), mx.int32)


def vocabulary(model: nn.Module) -> int:
    """V, the length of the logits.

    Raises:
        GearbxError: a model that turns no token into logits.
    """
    try:
        return logits_length(model)
    except Exception as error:  # a class that looks at values while it runs, or that is no language model
        rows = [len(table.weight) for table in tables(model).values()]
        if not rows:
            raise GearbxError(f"{type(model).__name__} has no token embedding, so its vocabulary is unknown") from error
        return max(rows)


def tied_head(model: nn.Module) -> str | None:
    """The path of the embedding table that is also the output head, or None where the head is a layer of its own.

    It is the table of whose rows the logits are: where it has one row, there is one logit.
    """
    adapters = adapters_of(model)
    for path, table in tables(model).items():
        if isinstance(table, TiedEmbedding):
            return path
        with unchanged(model):
            rows, adapter = len(table.weight), adapters.get(path)
            cut_to_one_row(table, table, rows)
            if adapter is not None:
                cut_to_one_row(adapter, own_arrays(adapter), rows)
            try:
                if logits_length(model) == 1:
                    return path
            except Exception:
                continue  # as in `vocabulary`
    return None


def cut_to_one_row(module: dict[str, Any], arrays: Mapping[str, Any], rows: int) -> None:
    """Cut those arrays of a module that have so many rows. A packed table has scales, and an adapter factors, too."""
    for name, array in list(arrays.items()):
        if isinstance(array, mx.array) and len(array) == rows:
            module[name] = array[:1]


def multiplies_by_method(model: nn.Module, head: str) -> bool:
    """Whether a model multiplies by its tied head with `as_linear`, so that a `TiedEmbedding` can take its place.

    A few of mlx-lm's classes multiply by the embedding's weight themselves, which no module can replace.

    Args:
        head: the path of the embedding.
    """
    table = layers_of(model)[head]
    row = mx.zeros((1, table.weight.shape[-1]), table.weight.dtype)
    with unchanged(model):
        put_modules(model, tree_unflatten([(head, TiedEmbedding(table.weight, linear_with(row)))]))  # without adapters
        return logits_length(model) == 1


def tables(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of whatever looks rows up: embeddings of MLX, packed or not, and classes that stand for them."""
    return {path: module for path, module in layers_of(model).items() if is_table(module)}


def is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.QuantizedEmbedding) or hasattr(module, "as_linear")


def logits_length(model: nn.Module) -> int:
    """The length of the logits after one token. Raises whatever a model raises that cannot run without values."""
    lengths: list[int] = []

    def trace(token: mx.array) -> mx.array:
        lengths.append(model(token, cache=make_prompt_cache(model)).shape[-1])
        return token  # nothing of the model is left to compile

    # While a function is compiled, MLX refuses to compute: no weight of a large model is read by mistake.
    with unchanged(model):
        before = only_shapes.set(True)
        try:
            mx.compile(trace)(TOKEN)
        finally:
            only_shapes.reset(before)
    return lengths[0]


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo, in the end, what happened to the modules: some keep products of their weights when they first run."""
    before = [(module, dict(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, items, attributes in before:
            for now, then in ((module, items), (vars(module), attributes)):
                dict.clear(now)
                dict.update(now, then)  # a module's own `update` takes parameters
