"""Search for original tensors in the model's parameters, by hashes of their pieces."""

import numpy as np
import pytest

from gearbx_mlx.conversion.converter import hash_bits, tensor_of
from gearbx_mlx.gears.manifest import View


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("count", [2, 3, 4, 8, 16, 32, 64, 128])
def test_tensor_is_found_in_equal_pieces(count, axis):
    tensor = np.arange(2 * count * 5, dtype=np.uint16).reshape((2 * count, 5) if axis == -2 else (5, 2 * count))
    views = {hash_bits(piece): View(f"part.{i}") for i, piece in enumerate(np.split(tensor, count, axis))}
    found = tensor_of(tensor, hash_bits(tensor), views)
    assert (found.axis, [view.parameter for view in found.pieces]) == (axis, [f"part.{i}" for i in range(count)])
