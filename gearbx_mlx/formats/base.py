"""The interface of formats, and their common code.

Formats without an MLX kernel share `Reconstructed`: their modules reconstruct the dense weight, then multiply with
MLX (GEARBX 7.1).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.mla import MultiLinear

from ..errors import GearbxError
from ..kernels import DENSE
from ..kernels.bit_planes import Planes
from .native import FLOATING, Native

Arrays = Mapping[str, mx.array]
Bits = Sequence[int]  # bits of several gears, ascending, or of planes
Shape = Sequence[int]
Gears = dict[int, nn.Module]  # bits to module
K = TypeVar("K")


class StoredArray(NamedTuple):
    """An array of a gear, as a file contains it.

    shape: None is a length that depends on the data. bits, name: of the gear that the array was made for, and its
    name there; gears may share arrays.
    """

    dtype: mx.Dtype
    shape: tuple[int | None, ...]
    bits: int
    name: str


StoredArrays = dict[str, StoredArray]
Window = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Weights, values of their codes and scales, all (n,) float32, to masks: restorable weights, those with a byte more."""


class Format:
    """Storage of one weight matrix at several precisions.

    A 16-bit gear has the original weights, unless the format has `ladders`. Arguments of the methods:
        dense: the layer: a Linear, weight (O, I), or a SwitchLinear or MultiLinear, (E, O, I).
        shape: of a weight, (..., O, I).
        bits: of the gear that is needed.
        ladder: bits of all gears that the format stores, ascending.
        group_size: inputs that share a scale; formats with a group size of their own ignore it.
        dtype: of the scales. Their values are rounded to the weight's own type first, so that a gear is the same in
            every `dtype`.
    """

    name: str
    native: bool  # True if native kernels compute its linear layers
    native_experts: bool  # True if native kernels compute its mixtures of experts
    rounds: bool  # True if native CPU kernels may quantize activations for its packed weights
    scales: frozenset[str]  # parameters of its modules that have the `dtype` of `modules`
    viewed: frozenset[str] = frozenset()  # parameters that are the bits of stored halves, as uint16
    ladders: tuple[tuple[int, ...], ...] = ()  # the only possible ones, including top gears; empty: any, without 16
    layer_bits: Sequence[int] = ()  # outside the ladder, for layers with floors; empty if gears are not made one by one
    types: tuple[mx.Dtype, ...] = FLOATING  # types of the weights that it stores
    by_rows: bool = True  # True if the storage of a row does not depend on the other rows of its matrix
    takes_base: bool = False  # True if its lowest gear may have codes of a calibrated base
    window: Window | None = None  # codes of a calibrated base that the other gears can use; None: all

    def check(self, bits: int) -> None:
        """Validate this number of bits. Raises GearbxError if the format does not support it."""

    def fits(self, width: int, group_size: int) -> str | None:
        """Return the reason why a matrix with `width` inputs cannot be stored, or None if it can."""
        return whole_groups(width, group_size)

    def span(self, group_size: int) -> int | None:
        """Return how many inputs of a row are stored together, so that a row can be cut between them; None: all."""
        return None

    def widths(self, bits: int, ladder: Bits) -> Bits:
        """Return the bits of each plane of the stack that has the gear with `bits`; none without planes."""
        return ()

    def modules(self, dense: nn.Module, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> Gears:
        """Quantize one layer: the gear with `bits`, and any other gears that come with it at no cost.

        The weight has the checkpoint's own type. The arrays are lazy, except for large matrices.
        """
        raise NotImplementedError

    def shows_damage(self, dense: nn.Module) -> bool:
        """Return True if a weight that is not finite shows in the scales that `modules` makes from it."""
        return False

    def module(self, dense: nn.Module, bits: int, arrays: Arrays, ladder: Bits, group_size: int) -> nn.Module:
        """Return the gear with `bits` over stored arrays.

        Args:
            dense: has the shape, the kernels and the bias; its weight is not read.
            arrays: flat name to parameter, as in a module from `modules`: with consecutive rows, or in panels
                (`PanelPlanes`).
        """
        raise NotImplementedError

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        """Return the arrays that `module` takes, by name."""
        raise NotImplementedError

    def bytes_read(self, shape: Shape, bits: int, ladder: Bits, group_size: int, scale_size: int) -> int:
        """Return the bytes that one matmul with a weight of this shape reads.

        A scale or bias takes `scale_size` bytes, as in the checkpoint, except in formats that fix its type.
        """
        raise NotImplementedError

    def nearest(self, weight: mx.array, ladder: Bits, group_size: int) -> Planes | None:
        """Return the RTN plane of a matrix's (O, I) lowest gear, with floating scales; None if other gears need it."""
        raise NotImplementedError

    def over_base(self, dense: nn.Module, base: Planes, ladder: Bits, dtype: mx.Dtype) -> Gears:
        """Return the modules of the lowest gear, with the codes, scales and biases of `base`."""
        raise NotImplementedError


def stored_bits(format: Format, widths: Sequence[int]) -> tuple[int, ...]:
    """Return the bits of a layer that the format stores; 16 bits are otherwise the original weights."""
    return tuple(widths) if tuple(widths) in format.ladders else tuple(bits for bits in widths if bits != DENSE)


def check_supported(format: Format, ladder: Sequence[int], others: Iterable[int] = ()) -> None:
    """Validate that a format has gears of these bits, with `others` for some layers. Raises GearbxError."""
    shown = ",".join(map(str, ladder))
    for bits in sorted({*ladder, *others} - {DENSE}):
        format.check(bits)
    if not format.ladders:
        return
    if tuple(ladder) not in format.ladders or others:
        choices = " or ".join(",".join(map(str, known)) for known in format.ladders)
        shown += " with other bits for some layers" if others else ""
        raise GearbxError(f"format {format.name} has gears {choices}, got {shown}; use these, or choose format planes")


INFINITY = {mx.bfloat16: (mx.uint16, 0x7F80), mx.float16: (mx.uint16, 0x7C00), mx.float32: (mx.uint32, 0x7F800000)}
"""Type and value of infinity's bits; without the sign, a NaN has larger ones."""


def is_finite(*arrays: mx.array) -> bool:
    """Return True if all numbers are finite; arrays are evaluated together, since each evaluation takes 0.2 ms."""
    return not arrays or bool(mx.stack([_finite(array) for array in arrays]).all().item())


def _finite(array: mx.array) -> mx.array:
    """Return a bool (), not yet evaluated. Comparing the largest bits takes a CPU a third of `isfinite`'s time."""
    if array.dtype not in INFINITY or not array.size:
        return mx.isfinite(array).all() if mx.issubdtype(array.dtype, mx.floating) else mx.array(True)
    bits, infinity = INFINITY[array.dtype]
    sign = 1 << 8 * bits.size - 1
    return (array.view(bits) & (sign - 1)).max() < infinity


def is_finite_by_strips(weight: mx.array) -> bool:
    """Return `is_finite` of a weight (..., I), without temporary memory as large as the weight."""
    rows = weight.reshape(-1, weight.shape[-1])
    return all(is_finite(rows[block]) for block in row_blocks(*rows.shape))


def check_quantized(path: str, weight: mx.array, arrays: Iterable[mx.array]) -> None:
    """Validate a weight and the `arrays` made from it as finite. Raises GearbxError."""
    if not is_finite_by_strips(weight):
        raise GearbxError(f"{path}: weights are not finite and cannot be quantized; check the checkpoint")
    if not is_finite(*arrays):
        largest = mx.abs(weight).max().item()
        raise GearbxError(f"{path}: has weights up to {largest:.3g}, too large to be quantized; check the checkpoint")


def whole_groups(width: int, group_size: int) -> str | None:
    """Return why rows of `width` inputs do not consist of whole groups; None if they do."""
    return f"input width {width} is not a multiple of the group size {group_size}" if width % group_size else None


def row_blocks(rows: int, width: int) -> list[slice]:
    """Return slices of a few rows each, so that an encoder's temporary memory does not grow with the matrix."""
    height = max(1, 2**22 // width)  # an encoder's temporary memory is several times the size of these weights
    return [slice(first, first + height) for first in range(0, rows, height)]


def dense_weight(linear: nn.Module) -> mx.array:
    """Return the weight (..., O, I) of a linear layer of any format, in the type of its scales or its own."""
    if hasattr(linear, "dense_weight"):
        return linear.dense_weight()
    if "scales" not in linear:
        return linear.weight
    packed = linear.weight, linear.scales, linear.get("biases")
    return mx.dequantize(*packed, group_size=linear.group_size, bits=linear.bits, mode=linear.mode)


class Reconstructed(nn.Module):
    """A frozen layer over packed rows, with the dense layer's bias.

    Args:
        dense: the Linear, SwitchLinear or MultiLinear that this layer replaces; only its shape and bias are used.
        bits: of a code.
        arrays: name to array: `weight` (..., O, words), the packed codes, and others such as `scales`. For experts,
            each has a leading dimension E.
        format: reconstructs the weight. With its `cache` the reconstruction is kept after its first use, until
            `forget`. That saves time, and costs as much memory as the dense weight. Not for use inside `mx.compile`.
    """

    def __init__(self, dense: nn.Module, bits: int, arrays: Arrays, format: "ReconstructedFormat"):
        super().__init__()
        self.bits = bits
        self.input_dims = dense.weight.shape[-1]
        self.format = format
        # MLX does not treat names with _ as parameters, so the reconstruction is neither saved nor offloaded.
        self._kept: mx.array | None = None
        self._names = tuple(arrays)
        for name, array in arrays.items():
            self[name] = array
        if "bias" in dense:
            self.bias = dense.bias
        self.freeze(recurse=False)

    def packed(self) -> dict[str, mx.array]:
        """Return the packed weight: the arrays by name."""
        return {name: self[name] for name in self["_names"]}  # attribute access would be slower

    def dense_weight(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Return the whole weight (..., O, I), from the cache if it has it in this type."""
        if self._kept is not None and self._kept.dtype == dtype:
            return self._kept
        weight = self.format.reconstruct(self.packed(), self.bits, self.input_dims, dtype)
        self._kept = weight if self.format.cache else None
        return weight

    def forget(self) -> None:
        """Empty the cache."""
        self._kept = None

    @property
    def output_dims(self) -> int:
        return self.weight.shape[-2]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape (..., O, I) of the dense weight."""
        return (*self.weight.shape[:-1], self.input_dims)

    def _extra_repr(self) -> str:
        form = f"format={self.format.name}, bits={self.bits}, cache={self.format.cache}"
        return f"shape={self.weight_shape}, bias={'bias' in self}, {form}"


class ReconstructedLinear(Reconstructed):
    """A linear layer (..., I) -> (..., O) over packed rows."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.dense_weight(x.dtype).T
        return mx.addmm(self["bias"], x, weight) if "bias" in self else x @ weight


class ReconstructedSwitchLinear(Reconstructed):
    """A SwitchLinear over packed rows: E experts of one shape, chosen by `indices`."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if self.format.cache or indices.size >= self.num_experts:
            weight, chosen = self.dense_weight(x.dtype), indices
        else:  # a token uses few of many experts, so only those are reconstructed
            picked = indices.flatten()
            packed = {name: array[picked] for name, array in self.packed().items()}
            weight = self.format.reconstruct(packed, self.bits, self.input_dims, x.dtype)
            chosen = mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
        y = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=chosen, sorted_indices=sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]


class PackedExperts:
    """Attributes of packed experts, as in mlx-lm's SwitchLinear."""

    weight_shape: tuple[int, ...]  # (E, O, I)

    @property
    def num_experts(self) -> int:
        return self.weight_shape[0]

    @property
    def output_dims(self) -> int:
        return self.weight_shape[1]

    @property
    def input_dims(self) -> int:
        return self.weight_shape[2]


class ReconstructedMultiLinear(Reconstructed):
    """A MultiLinear over packed rows: a matrix for each head, (..., H, T, I) -> (..., H, T, O)."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        weight = self.dense_weight(x.dtype)
        return x @ (weight.swapaxes(-1, -2) if transpose else weight)


class ReconstructedFormat(Format):
    """Base of formats whose modules reconstruct the dense weight, unless a native kernel reads the packed one.

    cache: True to keep reconstructed weights until the gear is left.
    """

    native_kinds: tuple[type[Reconstructed], type[Reconstructed]]  # classes for linear layers, for experts

    def __init__(self, cache: bool = False):
        self.cache = cache

    def reconstruct(self, arrays: Arrays, bits: int, width: int, dtype: mx.Dtype) -> mx.array:
        """Return the dense weight (..., O, width) for packed rows, of type `dtype`."""
        raise NotImplementedError

    def module(self, dense: nn.Module, bits: int, arrays: Arrays, ladder: Bits, group_size: int) -> nn.Module:
        stock = ReconstructedLinear, ReconstructedSwitchLinear
        kinds = self.native_kinds if self.native and isinstance(dense, Native) else stock
        return kind_for(dense, *kinds, ReconstructedMultiLinear)(dense, bits, arrays, self)


def kind_for(dense: nn.Module, linear: K, experts: K, heads: K) -> K:
    """Return the class for a layer: `linear` for a Linear, `experts` for a SwitchLinear, `heads` for a MultiLinear."""
    if isinstance(dense, MultiLinear):
        return heads
    return linear if dense.weight.ndim == 2 else experts
