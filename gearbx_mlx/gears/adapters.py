"""Adapters (LoRA, DoRA): the layer inside an adapter has the adapter's path.

So a layer has the same name in gears.json, tables, caps and precision manifests, with or without an adapter. The module
around a rank's part of a layer (formats/holders.py) is treated alike: both are *holders* of a layer.

An adapter from files is put on a model, or on the base of a geared checkpoint, as in mlx-lm (`add_adapter`).
"""

from collections.abc import Collection, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from msgspec import to_builtins

from ..compat.arrays import dtype_name
from ..compat.classes import named_modules_of
from ..errors import GearbxError, error_context, one_line
from ..files.model_directory import ARRAYS, Adapter
from ..formats.holders import OWN_ARRAYS, held_name, inner_name

Modules = Mapping[str, nn.Module]


def adapters_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return path to module of a model's adapters."""
    return {path: module for path, module in named_modules_of(model) if inner_name(module) is not None}


def holders_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return path to module of all holders: adapters, and modules that communicate between ranks."""
    return {path: module for path, module in named_modules_of(model) if held_name(module) is not None}


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return path to module of everything inside a model's holders, as `named_modules` without holders."""
    modules, found = dict(named_modules_of(model)), {}
    holders = {path: module for path, module in modules.items() if held_name(module) is not None}
    if not holders:
        return modules
    for path, module in modules.items():
        name = plain_name(path, holders)
        if path not in holders and (name != path or path.rpartition(".")[0] not in holders):
            found[name] = module
    return found


def plain_name(name: str, holders: Modules) -> str:
    """Return the path of a module or parameter in the model without holders; a holder's own parameters keep theirs."""
    for end in (place for place, char in enumerate(name) if char == "."):
        outer = name[:end]
        inner = f"{outer}.{held_name(holders[outer])}" if outer in holders else ""
        if inner and f"{name}.".startswith(f"{inner}."):
            return outer + name[len(inner) :]
    return name


def places_of(model: nn.Module) -> dict[str, str]:
    """Return path of each layer in a holder to its path in the model."""
    return {path: f"{path}.{held_name(module)}" for path, module in holders_of(model).items()}


def tree_of(modules: Modules, places: Mapping[str, str]) -> Any:
    """Return layers as the tree that `model.update_modules` takes. modules: by paths without holders."""
    return tree_unflatten([(places.get(path, path), module) for path, module in modules.items()])


def put_layers(model: nn.Module, modules: Modules) -> None:
    """Put layers into a model, by their paths without holders."""
    nn.Module.update_modules(model, tree_of(modules, places_of(model)))


def own_arrays(adapter: nn.Module) -> dict[str, mx.array]:
    """Return name to array of an adapter's own parameters."""
    return {name: adapter[name] for name in OWN_ARRAYS if name in adapter}


def adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Return name to array of all adapters' parameters, as in adapters.safetensors."""
    adapters = adapters_of(model).items()
    return {f"{path}.{name}": array for path, module in adapters for name, array in own_arrays(module).items()}


def base_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Return name to array of all other parameters, by their names in the model without adapters."""
    holders, own = holders_of(model), adapter_arrays(model)
    parameters = dict(tree_flatten(model.parameters()))
    return {plain_name(name, holders): array for name, array in parameters.items() if name not in own}


def add_adapter(model: nn.Module, adapter: Adapter, directory: Path, dense: Modules | None = None) -> None:
    """Put an adapter on a model, for inference.

    dense: for a geared checkpoint, path to the dense form of each layer that changes gear. Raises GearbxError.
    """
    whole = adapter.fine_tune_type == "full"
    with error_context(directory):
        if whole and dense is not None:
            raise GearbxError(
                "is a full fine-tune of layers that the gears replace; fuse it into the original (mlx_lm.fuse) "
                "and use the result with convert"
            )
        if not whole:
            wrap_layers(model, adapter, dense or {})
        expected = dict(tree_flatten(model.parameters())) if whole else adapter_arrays(model)
        try:
            weights = mx.load(str(directory / ARRAYS))
            mx.eval(weights)
        except RuntimeError as error:
            raise GearbxError(f"{ARRAYS} cannot be read ({one_line(error)}); download it again") from error
        assert isinstance(weights, dict)
        check_adapter(weights, expected, () if whole else expected)
    model.load_weights(list(weights.items()), strict=False)
    model.eval()


def wrap_layers(model: nn.Module, adapter: Adapter, dense: Modules) -> None:
    """Put untrained mlx-lm adapters around the layers that the settings name. Raises GearbxError if there are none."""
    now = layers_of(model)
    base = {path: now[path] for path in dense}
    nn.Module.update_modules(model, tree_of(dense, {}))  # mlx-lm knows dense layers best, and the base may be quantized
    try:
        linear_to_lora_layers(
            model, adapter.num_layers, to_builtins(adapter.lora_parameters), adapter.fine_tune_type == "dora"
        )
    except (ValueError, TypeError, KeyError) as error:
        raise GearbxError(f"cannot be put on this model: {one_line(error)}") from error
    put_layers(model, base)


def check_adapter(weights: Mapping[str, mx.array], expected: Mapping[str, mx.array], needed: Collection[str]) -> None:
    """Validate an adapter's arrays against those `expected` of its settings, with all `needed`. Raises GearbxError."""
    remedy = "use an adapter that was trained on this model"
    for name, array in sorted(weights.items(), key=itemgetter(0)):
        if name not in expected:
            raise GearbxError(f"{ARRAYS} has {name}, but this model with this adapter does not; {remedy}")
        if array.shape != expected[name].shape:
            shapes = f"{list(array.shape)} instead of {list(expected[name].shape)}"
            raise GearbxError(f"{name}: wrong shape for this model, got {shapes}; {remedy}")
        if not mx.issubdtype(array.dtype, mx.floating):
            raise GearbxError(f"{name} has numbers of type {dtype_name(array.dtype)}; download it again")
    missing = sorted({*needed} - weights.keys())
    if missing:
        raise GearbxError(f"{ARRAYS} lacks {missing[0]}, required by its settings; download it again")
    if not weights:
        raise GearbxError(f"adapts no layer of this model; {remedy}")
