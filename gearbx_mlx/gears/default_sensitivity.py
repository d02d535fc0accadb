"""The order in which layers are lowered if nothing was measured (Manifest document, "Architecture", "Lessons")."""

from collections.abc import Callable, Iterable, Mapping

import mlx.nn as nn

from .discovery import is_attention

# Bits by which a layer is more sensitive than attention in the middle of the stack.
MIDDLE_ATTENTION, MIDDLE_MLP, OUTER_BLOCK, OUTSIDE = 0, 1, 2, 4
OUTER = 4  # the first and the last block in four count as outer ones


def default_sensitivity(modules: Mapping[str, nn.Module]) -> Callable[[str, int], float]:
    """The cost of a layer at some bits, as a function of its path and the bits; only the order means something.

    Attention in the middle of the stack is least sensitive, then MLPs there, then the first and the last quarter of the
    blocks, then the head. Within these classes, blocks near an end of the stack are more sensitive. The squared error
    of a weight of b bits goes with 4^-b, so a layer that is one bit more sensitive costs as much as another layer at
    one bit less.

    Args:
        modules: path to module, of the layers to be ordered.
    """
    count, outer = block_count(modules), outer_layers(modules)
    extra = {}
    for path, module in modules.items():
        number = block_number(path)
        if number is None:
            extra[path] = float(OUTSIDE)
            continue
        kind = OUTER_BLOCK if path in outer else MIDDLE_ATTENTION if is_attention(path, module) else MIDDLE_MLP
        from_middle = abs(2 * number + 1 - count) / count  # 0 to 1
        extra[path] = kind + from_middle / 2
    return lambda path, bits: 4.0 ** (extra[path] - bits)


def outer_layers(paths: Iterable[str]) -> set[str]:
    """The layers of the first and the last quarter of the blocks, and those outside of the blocks, as the head."""
    paths = list(paths)
    count = block_count(paths)
    quarter = max(1, count // OUTER)
    numbers = {path: block_number(path) for path in paths}
    return {path for path, number in numbers.items() if number is None or not quarter <= number < count - quarter}


def block_count(paths: Iterable[str]) -> int:
    numbers = (block_number(path) for path in paths)
    return max((number + 1 for number in numbers if number is not None), default=1)


def block_number(path: str) -> int | None:
    """The number of the block that a layer is in; None outside of the blocks, as for the head."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)
