"""The order in which layers are lowered if nothing was measured (Manifest document, "Architecture", "Lessons")."""

from collections.abc import Callable, Mapping

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
    blocks = {path: block_number(path) for path in modules}
    count = max((number + 1 for number in blocks.values() if number is not None), default=1)
    quarter = max(1, count // OUTER)
    extra = {}
    for path, module in modules.items():
        number = blocks[path]
        if number is None:
            extra[path] = float(OUTSIDE)
            continue
        middle = quarter <= number < count - quarter
        kind = (MIDDLE_ATTENTION if is_attention(path, module) else MIDDLE_MLP) if middle else OUTER_BLOCK
        from_middle = abs(2 * number + 1 - count) / count  # 0 to 1
        extra[path] = kind + from_middle / 2
    return lambda path, bits: 4.0 ** (extra[path] - bits)


def block_number(path: str) -> int | None:
    """The number of the block that a layer is in; None outside of the blocks, as for the head."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)
