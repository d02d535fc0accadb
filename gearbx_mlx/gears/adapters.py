"""A model with adapters (LoRA, DoRA) as the model under them: the layer inside an adapter has the adapter's path.

So a layer has one name, in gears.json, tables, caps and precision manifests, whether there is an adapter on it or not.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..formats.adapters import OWN, inner_name, over_gears

Modules = Mapping[str, nn.Module]


def adapters_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of a model's adapters."""
    return {path: module for path, module in model.named_modules() if inner_name(module) is not None}


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of everything under a model's adapters, as `named_modules` of the model without them."""
    adapters, found = adapters_of(model), {}
    for path, module in model.named_modules():
        name = plain_name(path, adapters)
        if path not in adapters and (name != path or path.rpartition(".")[0] not in adapters):
            found[name] = module
    return found


def plain_name(name: str, adapters: Modules) -> str:
    """The path of a module or parameter in the model without its adapters; an adapter's own keep theirs."""
    for end in (place for place, char in enumerate(name) if char == "."):
        outer = name[:end]
        inner = f"{outer}.{inner_name(adapters[outer])}" if outer in adapters else ""
        if inner and f"{name}.".startswith(f"{inner}."):
            return outer + name[len(inner) :]
    return name


def places_of(model: nn.Module) -> dict[str, str]:
    """Path of each layer under an adapter to its path in the model."""
    return {path: f"{path}.{inner_name(module)}" for path, module in adapters_of(model).items()}


def tree_of(modules: Modules, places: Mapping[str, str]) -> Any:
    """Layers by their paths without adapters, as `model.update_modules` takes them.

    Args:
        places: of the model.
    """
    return tree_unflatten([(places.get(path, path), module) for path, module in modules.items()])


def put_modules(model: nn.Module, tree: Any) -> None:
    """`model.update_modules` of the model's class: of a model with a gearbox, what the gearbox alone may do."""
    type(model).update_modules(model, tree)


def put_adapters_over_gears(model: nn.Module) -> None:
    """Give every adapter of a model the form that works over any gear."""
    made = {path: over_gears(module) for path, module in adapters_of(model).items()}
    put_modules(model, tree_unflatten(list(made.items())))


def own_arrays(adapter: nn.Module) -> dict[str, mx.array]:
    """Name to array of what an adapter adds to its layer."""
    return {name: adapter[name] for name in OWN if name in adapter}


def adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Name to array of what all adapters add to a model: its adapters.safetensors."""
    adapters = adapters_of(model).items()
    return {f"{path}.{name}": array for path, module in adapters for name, array in own_arrays(module).items()}


def base_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Name to array of all other parameters, by their names in the model without adapters."""
    adapters, own = adapters_of(model), adapter_arrays(model)
    parameters = dict(tree_flatten(model.parameters()))
    return {plain_name(name, adapters): array for name, array in parameters.items() if name not in own}
