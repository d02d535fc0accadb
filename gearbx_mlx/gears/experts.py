"""How many of a mixture's experts a token uses. Every architecture of mlx-lm has its own place and name for that."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.nn as nn

from ..errors import GearbxWarning
from .towers import in_tower

CHOSEN = (  # names for the number of experts that a router chooses
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
SETTINGS = ("args", "config")  # attributes of modules that name such numbers too


def used_share(path: str, modules: Mapping[str, nn.Module], positions: int = 1) -> float:
    """The share of a layer's weights that tokens use: all, the chosen experts of a mixture, or nothing of a tower.

    Args:
        path: of the layer.
        modules: of the whole model, by path.
        positions: tokens computed in one pass, as if no two of them used the same expert.
    """
    if in_tower(path):
        return 0.0
    experts = experts_of(path, modules)
    chosen = chosen_experts(path, modules) if experts else None
    return min(1.0, positions * chosen / experts) if chosen else 1.0


def experts_of(path: str, modules: Mapping[str, nn.Module]) -> int:
    """The number of experts that a layer is a stack of, or that it is one of; 0 for other layers."""
    block, _, _ = path.rpartition(".experts.")
    listed = modules[block].get("experts") if block else None
    return getattr(modules[path], "num_experts", 0) or (len(listed) if isinstance(listed, list) else 0)


def chosen_experts(path: str, modules: Mapping[str, nn.Module]) -> int | None:
    """How many experts of a layer a token uses; None where the model does not say."""
    parts = path.split(".")
    for end in range(len(parts) - 1, -1, -1):  # the block that routes is an ancestor of the experts
        block = modules.get(".".join(parts[:end]))
        for place in places(block) if block is not None else ():
            for name in CHOSEN:
                chosen = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
                if isinstance(chosen, int) and chosen > 0:
                    return chosen
    return None


def places(block: nn.Module) -> Iterator[Any]:
    """Where a block may name the number: itself, its router, and the settings that it was made from."""
    yield vars(block)
    yield from (vars(child) for child in block.children().values() if isinstance(child, nn.Module))
    yield from (getattr(block, name) for name in SETTINGS if hasattr(block, name))


def warn_of_unknown_routing(model: nn.Module) -> None:
    """Warn of mixtures that do not say how many experts a token uses: they are counted as if it used all of them."""
    modules = dict(model.named_modules())
    mixtures = [path for path, module in modules.items() if "weight" in module and experts_of(path, modules)]
    unknown = [path for path in mixtures if chosen_experts(path, modules) is None]
    if unknown:
        warnings.warn(
            f"{unknown[0]}: the model does not say how many experts a token uses; its bytes are counted with all of "
            "them, more than a token reads",
            GearbxWarning,
            stacklevel=3,
        )
