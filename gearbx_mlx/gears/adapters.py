"""A model with adapters (LoRA, DoRA) as the model under them: the layer inside an adapter has the adapter's path.

So a layer has one name, in gears.json, tables, caps and precision manifests, whether there is an adapter on it or not.
The same goes for what stands around a rank's part of a layer (formats/holders.py): both are holders of a layer.

An adapter from files is put on a model, or on the base of a geared checkpoint, as mlx-lm does it (`add_adapter`).
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
    """Path to module of a model's adapters."""
    return {path: module for path, module in named_modules_of(model) if inner_name(module) is not None}


def holders_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of all that stands around a layer: adapters, and what ranks tell each other."""
    return {path: module for path, module in named_modules_of(model) if held_name(module) is not None}


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of everything inside a model's holders, as `named_modules` of the model without them."""
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
    """Return the path of a module or parameter in the model without holders; a holder's own keep theirs."""
    for end in (place for place, char in enumerate(name) if char == "."):
        outer = name[:end]
        inner = f"{outer}.{held_name(holders[outer])}" if outer in holders else ""
        if inner and f"{name}.".startswith(f"{inner}."):
            return outer + name[len(inner) :]
    return name


def places_of(model: nn.Module) -> dict[str, str]:
    """Path of each layer in a holder to its path in the model."""
    return {path: f"{path}.{held_name(module)}" for path, module in holders_of(model).items()}


def tree_of(modules: Modules, places: Mapping[str, str]) -> Any:
    """Layers by their paths without holders, as `model.update_modules` takes them. places: of the model."""
    return tree_unflatten([(places.get(path, path), module) for path, module in modules.items()])


def put_layers(model: nn.Module, modules: Modules) -> None:
    """Put layers into a model, by their paths without holders."""
    nn.Module.update_modules(model, tree_of(modules, places_of(model)))


def own_arrays(adapter: nn.Module) -> dict[str, mx.array]:
    """Name to array of what an adapter adds to its layer."""
    return {name: adapter[name] for name in OWN_ARRAYS if name in adapter}


def adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Name to array of what all adapters add to a model: its adapters.safetensors."""
    adapters = adapters_of(model).items()
    return {f"{path}.{name}": array for path, module in adapters for name, array in own_arrays(module).items()}


def base_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Name to array of all other parameters, by their names in the model without adapters."""
    holders, own = holders_of(model), adapter_arrays(model)
    parameters = dict(tree_flatten(model.parameters()))
    return {plain_name(name, holders): array for name, array in parameters.items() if name not in own}


def add_adapter(model: nn.Module, adapter: Adapter, directory: Path, dense: Modules | None = None) -> None:
    """Put an adapter on a model, for inference. Raises GearbxError where it does not fit, or cannot be read.

    dense: of a model from a geared checkpoint: path to the dense form of each layer that changes with the gear.
    """
    whole = adapter.fine_tune_type == "full"
    with error_context(directory):
        if whole and dense is not None:
            raise GearbxError(
                "is a full fine-tune, whose layers the gears do not have; fuse it into the original (mlx_lm.fuse) "
                "and convert that"
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
    """Put mlx-lm's adapters, untrained, around the layers that the settings name. Raises GearbxError if it has none."""
    now = layers_of(model)
    base = {path: now[path] for path in dense}
    nn.Module.update_modules(model, tree_of(dense, {}))  # mlx-lm knows dense layers best, and the base may have others
    try:
        linear_to_lora_layers(
            model, adapter.num_layers, to_builtins(adapter.lora_parameters), adapter.fine_tune_type == "dora"
        )
    except (ValueError, TypeError, KeyError) as error:
        raise GearbxError(f"cannot be put on this model: {one_line(error)}") from error
    put_layers(model, base)


def check_adapter(weights: Mapping[str, mx.array], expected: Mapping[str, mx.array], needed: Collection[str]) -> None:
    """Raises GearbxError unless an adapter's arrays fit those `expected` of its settings, with all `needed`."""
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
