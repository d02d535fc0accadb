"""The model's linear layers, whose weights some pictures quantize."""

import mlx.nn as nn

from ...errors import GearbxError
from ...gears.discovery import discover
from .subject import Subject


def matrices(subject: Subject) -> dict[str, nn.Linear]:
    """Path to layer, of every dense linear layer that all formats can store.

    Raises:
        GearbxError: the model has none.
    """
    managed, _ = discover(subject.model, "all", format="affine")
    found = {layer.path: layer.module for layer in managed if isinstance(layer.module, nn.Linear)}
    if not found:
        raise GearbxError(f"{subject.name}: has no dense linear layer to quantize; choose an original model")
    return found
