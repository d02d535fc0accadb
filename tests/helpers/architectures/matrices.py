"""Which modules of a model multiply vectors by a matrix, whatever their class is called."""

import mlx.core as mx
import mlx.nn as nn

from .parts import GROUP

OTHERS = "Embedding", "Norm", "Conv"  # classes whose weights no vector is multiplied by


def matrices(model: nn.Module) -> set[str]:
    """The paths of modules that multiply vectors by a matrix of their own: linear layers of any class."""
    return {
        path
        for path, module in model.named_modules()
        if not any(kind in type(module).__name__ for kind in OTHERS)
        and any(isinstance(array, mx.array) and is_matrix(key, array) for key, array in module.items())
    }


def is_matrix(key: str, array: mx.array) -> bool:
    return array.ndim > 1 and (key == "weight" or min(array.shape[-2:]) >= GROUP)
