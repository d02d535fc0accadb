"""Where the bytes of an original tensor are among the model's parameters; model classes stack, exchange and divide.

Arrays here are numpy's, of unsigned numbers as large as those that they stand for: bits, and no values.
"""

import hashlib
import itertools
import math
from collections.abc import Container, Iterator, Mapping

import mlx.core as mx
import numpy as np

from ..errors import GearbxError
from ..gears.manifest import RESTORE, Tensor, View
from ..gears.tensor_files import hash_bytes

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by bytes of a number
COUNTS = (2, 3, 4, 8, 16, 32, 64, 128)  # of equal pieces that classes cut tensors into: gate and up, experts
CUTS = [(axis, count, False) for axis in (-2, -1) for count in COUNTS] + [(axis, 2, True) for axis in (-2, -1)]


def bits_of(array: mx.array) -> np.ndarray:
    """The bits of an evaluated array, of its shape."""
    return np.array(array.reshape(-1).view(UNSIGNED[array.dtype.size]), copy=False).reshape(array.shape)


def hash_bits(array: np.ndarray) -> str:
    """The SHA-256 of an array's bytes, row after row."""
    return hash_bytes(np.ascontiguousarray(array))


def views_of(name: str, array: np.ndarray, wanted: Container[str]) -> dict[str, View]:
    """Hash to view of a parameter, for those views whose hash is wanted.

    None is, where the parameter is a part of an original tensor, or another one: then all of its numbers, as they are
    and transposed.
    """
    whole, view = hash_bits(array), View(name)
    if whole in wanted or array.ndim < 2:
        return {whole: view}
    unmatched = {whole: view}
    for transposed in (False, True):
        digest, found = hashlib.sha256(), {}
        for i, matrix in enumerate(matrices(array)):
            data = np.ascontiguousarray(matrix.T if transposed else matrix)
            digest.update(data.data)
            found[hash_bytes(data)] = View(name, i, transposed)
        if digest.hexdigest() in wanted:
            return {digest.hexdigest(): View(name, None, transposed)}
        if any(hash in wanted for hash in found):
            return {hash: view for hash, view in found.items() if hash in wanted}
        unmatched[digest.hexdigest()] = View(name, None, transposed)
    return unmatched


def matrices(array: np.ndarray) -> np.ndarray:
    """All matrices along the last two axes, (n, rows, columns)."""
    return array.reshape(-1, *array.shape[-2:])


def find(tensor: np.ndarray, hash: str, views: Mapping[str, View]) -> Tensor:
    """An original tensor by its pieces; without pieces where `views` (by hash) do not have it.

    Args:
        hash: of the tensor.
    """
    if hash in views:
        return Tensor(hash, (views[hash],))
    for axis, count, interleaved in CUTS:
        found = (views.get(hash_bits(piece)) for piece in cut(tensor, axis, count, interleaved))
        pieces = tuple(piece for piece in itertools.takewhile(lambda piece: piece is not None, found) if piece)
        if len(pieces) == count:
            return Tensor(hash, pieces, axis, interleaved)
    return Tensor(hash)


def cut(array: np.ndarray, axis: int, count: int, interleaved: bool) -> Iterator[np.ndarray]:
    """Equal pieces of an array, side by side along an axis or taking turns there; none where they are not equal."""
    if array.ndim < -axis or array.shape[axis] % count or not array.size:
        return
    length = array.shape[axis] // count
    for i in range(count):
        chosen = np.s_[i::count] if interleaved else np.s_[i * length : (i + 1) * length]
        yield array[..., chosen] if axis == -1 else array[..., chosen, :]


def seen(array: np.ndarray, view: View) -> np.ndarray:
    """What a view shows of a parameter. Raises GearbxError where the parameter has no such part."""
    if view.matrix is None and not view.transposed:
        return array
    if array.ndim < 2 or (view.matrix is not None and view.matrix >= len(matrices(array))):
        raise GearbxError(f"{view.parameter} of shape {list(array.shape)} has no part {view.matrix}; {RESTORE}")
    part = array if view.matrix is None else matrices(array)[view.matrix]
    return part.swapaxes(-1, -2) if view.transposed else part


def assembled(tensor: Tensor, parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """An original tensor from what its views show, as far as it fits together; its hash says whether it is right.

    Raises:
        GearbxError: parts that are not equal pieces of this shape.
    """
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    if len(shape) < -tensor.axis or shape[tensor.axis] % len(parts) or len({part.dtype for part in parts}) > 1:
        raise GearbxError(f"{list(shape)} does not have {len(parts)} pieces along axis {tensor.axis}; {RESTORE}")
    length = list(shape)
    length[tensor.axis] //= len(parts)
    if any(part.size != math.prod(length) for part in parts):
        raise GearbxError(f"its pieces are not those of {list(shape)}; {RESTORE}")
    shaped = [part.reshape(length) for part in parts]
    whole = np.stack(shaped, tensor.axis) if tensor.interleaved else np.concatenate(shaped, tensor.axis)
    return np.ascontiguousarray(whole)  # numpy keeps the order of transposed parts
