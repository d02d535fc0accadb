"""Embeddings that are looked up, and are no output heads: which of them change with the gear."""

from collections.abc import Iterable

import mlx.core as mx
import mlx.nn as nn

from ..formats import OF_MLX
from ..formats.base import Format, whole_groups
from .discovery import TABLES, Layer, Predicate, get_predicate, own_predicate
from .ladder import DENSE
from .output_head import tied_head


def tables_to_pack(
    model: nn.Module, manage: str | Predicate, widths: Iterable[int], format: Format, group_size: int
) -> list[Layer]:
    """The embeddings that `mlx_lm.convert` would quantize and that are no output heads.

    None where the base is the original: its format is not one of mlx-lm's, and the ladder has the original weights.
    """
    lowest, *_ = sorted(widths)
    if lowest == DENSE or (DENSE in widths and format.name not in OF_MLX):
        return []
    predicate, own, head, found = get_predicate(manage), own_predicate(model), tied_head(model), []
    for path, module in model.named_modules():
        if type(module) not in TABLES or path == head or not predicate(path, module):
            continue
        floor = own(path, module)
        width, dtype = module.weight.shape[-1], module.weight.dtype
        fits = not whole_groups(width, group_size) and mx.issubdtype(dtype, mx.floating)
        fits = fits and (not format.ladders or dtype in format.types)
        bits = floor.get("bits", 0) if isinstance(floor, dict) else 0
        if floor is not False and fits and bits < DENSE:
            found.append(Layer(path, module, bits, is_table=True))
    return found
