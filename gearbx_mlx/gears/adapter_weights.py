"""An adapter from files is put on a model, or on the base of a geared checkpoint, as mlx-lm does it."""

from collections.abc import Collection, Mapping
from operator import itemgetter
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from msgspec import to_builtins

from ..errors import GearbxError, about, one_line
from ..files.adapter import ARRAYS, Adapter
from .activations import dtype_name
from .adapters import adapter_arrays, layers_of, places_of, put_modules, tree_of
from .saved import SavedGears


def add_adapter(model: nn.Module, adapter: Adapter, directory: Path, saved: SavedGears | None = None) -> None:
    """Put an adapter on a model, for inference.

    Args:
        adapter: the settings in `directory`.
        saved: of a model from a geared checkpoint, whose other gears get the adapter as well.

    Raises:
        GearbxError: it was not made for this model, or has arrays that cannot be read.
    """
    whole = adapter.fine_tune_type == "full"
    with about(directory):
        if whole and saved is not None:
            raise GearbxError(
                "is a full fine-tune, whose layers the gears do not have; fuse it into the original (mlx_lm.fuse) "
                "and convert that"
            )
        if not whole:
            wrap_layers(model, adapter, saved)
        expected = dict(tree_flatten(model.parameters())) if whole else adapter_arrays(model)
        weights = read_arrays(directory / ARRAYS)
        check_arrays(weights, expected, () if whole else expected)
    model.load_weights(list(weights.items()), strict=False)
    model.eval()


def wrap_layers(model: nn.Module, adapter: Adapter, saved: SavedGears | None) -> None:
    """Put mlx-lm's adapters, still untrained, around the layers that the settings name.

    Raises:
        GearbxError: mlx-lm has no such adapter for a layer.
    """
    base = {} if saved is None else {path: layers_of(model)[path] for path in saved.manifest.changing}
    if saved is not None:  # mlx-lm knows dense layers best, and the base may have others
        dense = (*saved.layers(model), *saved.tables(model))
        put_modules(model, tree_of({layer.path: layer.module for layer in dense}, {}))
    try:
        linear_to_lora_layers(
            model, adapter.num_layers, to_builtins(adapter.lora_parameters), adapter.fine_tune_type == "dora"
        )
    except (ValueError, TypeError, KeyError) as error:
        raise GearbxError(f"cannot be put on this model: {one_line(error)}") from error
    put_modules(model, tree_of(base, places_of(model)))


def read_arrays(file: Path) -> dict[str, mx.array]:
    """The arrays of an adapter, in memory. Raises GearbxError where MLX cannot read them."""
    try:
        weights = mx.load(str(file))
        mx.eval(weights)
    except RuntimeError as error:
        raise GearbxError(f"{file.name} cannot be read ({one_line(error)}); download it again") from error
    assert isinstance(weights, dict)
    return weights


def check_arrays(weights: Mapping[str, mx.array], expected: Mapping[str, mx.array], needed: Collection[str]) -> None:
    """Compare the arrays of an adapter with those that its settings give the model.

    Args:
        weights: of the file, by name.
        expected: those that the model has a place for.
        needed: names of those that the file must have.

    Raises:
        GearbxError: an array too many or too few, of another shape, or not of floating-point numbers.
    """
    remedy = "give an adapter that was trained on this model"
    for name, array in sorted(weights.items(), key=itemgetter(0)):
        if name not in expected:
            raise GearbxError(f"{ARRAYS} has {name}, which is not in this model with this adapter; {remedy}")
        if array.shape != expected[name].shape:
            shapes = f"{list(array.shape)}, and this model needs {list(expected[name].shape)}"
            raise GearbxError(f"{name} has the shape {shapes}; {remedy}")
        if not mx.issubdtype(array.dtype, mx.floating):
            raise GearbxError(f"{name} has numbers of type {dtype_name(array.dtype)}; download it again")
    missing = sorted({*needed} - weights.keys())
    if missing:
        raise GearbxError(f"{ARRAYS} has no {missing[0]}, which its settings ask for; download it again")
    if not weights:
        raise GearbxError(f"adapts no layer of this model; {remedy}")
