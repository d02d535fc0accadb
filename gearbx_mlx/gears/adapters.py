"""A model with adapters (LoRA, DoRA) as the model under them: the layer inside an adapter has the adapter's path.

So a layer has one name, in gears.json, tables, caps and precision manifests, whether there is an adapter on it or not.
The same goes for what stands around a rank's part of a layer (formats/holders.py): both are holders of a layer.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..formats.holders import OWN, held_name, inner_name, over_gears

Modules = Mapping[str, nn.Module]


def adapters_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of a model's adapters."""
    return {path: module for path, module in model.named_modules() if inner_name(module) is not None}


def holders_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of all that stands around a layer: adapters, and what ranks tell each other."""
    return {path: module for path, module in model.named_modules() if held_name(module) is not None}


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of everything inside a model's holders, as `named_modules` of the model without them."""
    holders, found = holders_of(model), {}
    for path, module in model.named_modules():
        name = plain_name(path, holders)
        if path not in holders and (name != path or path.rpartition(".")[0] not in holders):
            found[name] = module
    return found


def plain_name(name: str, holders: Modules) -> str:
    """The path of a module or parameter in the model without holders; a holder's own keep theirs."""
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
    """Layers by their paths without holders, as `model.update_modules` takes them.

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
    holders, own = holders_of(model), adapter_arrays(model)
    parameters = dict(tree_flatten(model.parameters()))
    return {plain_name(name, holders): array for name, array in parameters.items() if name not in own}
