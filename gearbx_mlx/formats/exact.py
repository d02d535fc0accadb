"""Format `exact`: one copy of bfloat16 weights, bit for bit, smaller than bfloat16, that contains the low gears.

The lowest gear is MLX's own 4-bit or 3-bit module, or the bit planes of 4 and 8 bits are as in format `planes`. The
gear of 16 bits reads the same codes and what is stored beside them: 13.5 bits per weight over one plane, 14.8 over two.
"""

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.mla import MultiLinear

from ..errors import GearbxError
from ..kernels.candidates import NATIVE, Kind
from ..kernels.exact import ExactMatrix, decoded, decoded_by_tiles, exact_experts, exact_product, product_by_tiles
from .base import DENSE, StoredArray, whole_groups
from .exact_decoding import LOW_BITS, decode
from .exact_encoding import encode
from .native import Native, NativeMultiLinear, with_expert_bias
from .nested_planes import NestedPlanes
from .planes import Planes

WIDTHS = {(3, 16): (3,), (4, 16): (4,), (4, 8, 16): (4, 4)}  # ladder to bits of its planes
NEAR_ZERO = {(3,): 0.24, (4,): 0.123, (4, 4): 0.0675}  # share of Gaussian weights that have a byte beside the others


class _ExactModule(nn.Module):
    """A layer whose weight is a matrix of format `exact`; its parameters are frozen, and shared with the low gears."""

    def __init__(self, matrix: ExactMatrix, dense: nn.Module):
        super().__init__()
        self.codes = list(matrix.weights)
        self.group_scales, self.group_biases = matrix.scales, list(matrix.biases)
        self.low, self.high, self.offsets = matrix.low, matrix.high, matrix.offsets
        self.widths, self.group_size = tuple(matrix.widths), matrix.group_size
        if "bias" in dense:
            self.bias = dense.bias
        self.freeze()

    @property
    def matrix(self) -> ExactMatrix:
        """The arrays as they are now."""
        beside = self["low"], self["high"], self["offsets"]
        packed = self["codes"], self["group_scales"], self["group_biases"], *beside
        return ExactMatrix(*packed, list(self["widths"]), self.group_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape (..., O, I) of the weight."""
        return self.matrix.shape

    @property
    def bytes_read(self) -> int:
        """The bytes of the whole weight, of all experts."""
        matrix = self.matrix
        arrays = *matrix.weights, matrix.scales, *matrix.biases, matrix.low, matrix.high, matrix.offsets
        return sum(array.nbytes for array in arrays)

    def dense_weight(self) -> mx.array:
        """The weight (..., O, I), bfloat16."""
        return decoded_by_tiles(self.matrix, decode)

    def rows(self, chosen: mx.array) -> mx.array:
        """Rows of the weight (O, I), (..., I) bfloat16. chosen: (...)."""
        return decode(self.matrix.taken(chosen.flatten())).reshape(*chosen.shape, -1)

    def _extra_repr(self) -> str:
        return f"shape={self.weight_shape}, widths={self.widths}, group_size={self.group_size}, bias={'bias' in self}"


class ExactLinear(_ExactModule):
    """A linear layer (..., I) -> (..., O) over exact weights, with MLX's kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        y = product_by_tiles(x, self.matrix, decode)
        return y + self["bias"].astype(y.dtype) if "bias" in self else y


class NativeExactLinear(Native, ExactLinear):
    """A linear layer over exact weights, with native kernels that decode each weight once for all vectors."""

    def __call__(self, x: mx.array) -> mx.array:
        return exact_product(x, self.matrix, decode, self.get("bias"), self.chosen)

    def kind(self) -> Kind | None:
        form = f"exact {'+'.join(map(str, self.widths))}, group {self.group_size}"
        return Kind(form, self.weight_shape, stock=False, variants=(NATIVE,), rounded=False)

    def part(self, kernels: ModuleType) -> Any:
        return kernels.exact_part(*self.matrix, self.get("bias"))


class ExactSwitchLinear(_ExactModule):
    """A SwitchLinear over exact weights: E experts of one shape, chosen by `indices`."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = exact_experts(x, self.matrix, decode, indices, sorted_indices, isinstance(self, Native))
        return with_expert_bias(self, y, indices)

    @property
    def input_dims(self) -> int:
        return self.weight_shape[-1]

    @property
    def output_dims(self) -> int:
        return self.weight_shape[1]

    @property
    def num_experts(self) -> int:
        return self.weight_shape[0]


class NativeExactSwitchLinear(Native, ExactSwitchLinear):
    """A SwitchLinear over exact weights, with native kernels."""


class ExactMultiLinear(_ExactModule):
    """A MultiLinear over exact weights: a matrix for each head, (..., H, T, I) -> (..., H, T, O)."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        weight = self.dense_weight().astype(x.dtype)
        return x @ (weight.swapaxes(-1, -2) if transpose else weight)


class NativeExactMultiLinear(ExactMultiLinear):
    """A MultiLinear over exact weights, which a native kernel decodes."""

    def dense_weight(self) -> mx.array:
        return decoded(self.matrix, decode)


class Exact:
    """One copy of the weights that is every gear of its ladder, the top gear bit for bit.

    The low gears are those of `planes`, over codes as MLX has them. A layer whose bits in the gears are not a ladder of
    this format (it has a floor) stays dense.
    """

    name = "exact"
    layer_bits: tuple[int, ...] = ()
    native = native_experts = rounds = True
    scales = NestedPlanes.scales
    viewed = frozenset({"group_scales", "group_biases"})
    ladders: tuple[tuple[int, ...], ...] = tuple(WIDTHS)
    types: tuple[mx.Dtype, ...] = (mx.bfloat16,)
    by_rows = True

    def check(self, bits: int) -> None:
        if not any(bits in ladder for ladder in WIDTHS):
            raise GearbxError(f"format exact has gears of 3, 4, 8 and 16 bits, and none of {bits}")

    def fits(self, width: int, group_size: int) -> str | None:
        return whole_groups(width, group_size)

    def span(self, group_size: int) -> int | None:
        return None

    def modules(
        self, dense: nn.Module, bits: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[int, nn.Module]:
        widths = WIDTHS[tuple(ladder)]
        matrix = encode(dense.weight, widths, group_size)
        scales, *biases = (array.view(mx.bfloat16).astype(dtype) for array in (matrix.scales, *matrix.biases))
        planes = Planes(matrix.weights, scales, biases, widths, group_size)
        low = {gear: PLANES.prefix(dense, gear, planes) for gear in ladder[:-1]}
        return low | {DENSE: exact_module(dense, matrix)}

    def module(
        self, dense: nn.Module, bits: int, arrays: Mapping[str, mx.array], ladder: Sequence[int], group_size: int
    ) -> nn.Module:
        if bits != DENSE:
            return PLANES.module(dense, bits, arrays, ladder[:-1], group_size)
        widths = WIDTHS[tuple(ladder)]
        planes = range(len(widths))
        codes, biases = ([arrays[f"{name}.{i}"] for i in planes] for name in ("codes", "group_biases"))
        beside = arrays["low"], arrays["high"], arrays["offsets"]
        check_offsets(arrays["offsets"], arrays["high"].size)
        matrix = ExactMatrix(codes, arrays["group_scales"], biases, *beside, list(widths), group_size)
        return exact_module(dense, matrix)

    def stored_arrays(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[str, StoredArray]:
        if bits != DENSE:
            return PLANES.stored_arrays(shape, bits, ladder[:-1], group_size, dtype)
        highest = PLANES.stored_arrays(shape, ladder[-2], ladder[:-1], group_size, dtype)
        if len(WIDTHS[tuple(ladder)]) == 1:
            highest = {"weights.0": highest["weight"], "scales": highest["scales"], "plane_biases.0": highest["biases"]}
        arrays = {renamed(name): array for name, array in highest.items()}
        low = StoredArray(mx.uint8, tuple(shape), DENSE, "low")
        if len(WIDTHS[tuple(ladder)]) > 1:
            low = StoredArray(mx.uint32, (*shape[:-1], shape[-1] * LOW_BITS // 32), DENSE, "low")
        high = StoredArray(mx.uint8, (None,), DENSE, "high")
        return arrays | {"low": low, "high": high, "offsets": offsets_array(shape)}

    def bytes_read(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, scale_size: int
    ) -> int:
        """An estimate at 16 bits, for Gaussian weights; a module knows its own."""
        if bits != DENSE:
            return PLANES.bytes_read(shape, bits, ladder[:-1], group_size, scale_size)
        widths = WIDTHS[tuple(ladder)]
        weights, low = math.prod(shape), 8 if len(widths) == 1 else LOW_BITS
        per_group = (1 + len(widths)) * 2 * weights // group_size
        return round(weights * (sum(widths) + low + 8 * NEAR_ZERO[widths]) / 8) + per_group + 4 * math.prod(shape[:-1])


PLANES = NestedPlanes()


def renamed(name: str) -> str:
    """The name in the gear of 16 bits of a parameter of planes."""
    return (
        name.replace("weights.", "codes.").replace("plane_biases.", "group_biases.").replace("scales", "group_scales")
    )


def offsets_array(shape: Sequence[int]) -> StoredArray:
    return StoredArray(mx.uint32, (math.prod(shape[:-1]) + 1,), DENSE, "offsets")


def check_offsets(offsets: mx.array, stored: int) -> None:
    """Raises GearbxError unless the bytes of each row begin where those of the row before end: kernels index with them.

    The array may come from a file, whose content nobody has checked. It is read.

    Args:
        stored: how many bytes there are; one where none is used.
    """
    found = np.array(offsets).astype(np.int64)
    if found[0] or (np.diff(found) < 0).any() or max(found[-1], 1) != stored:
        raise GearbxError(f"its offsets do not lead through the {stored} bytes beside its low ones")


def exact_module(dense: nn.Module, matrix: ExactMatrix) -> nn.Module:
    """The module of the gear of 16 bits in the place of a Linear, SwitchLinear or MultiLinear; it shares the bias."""
    native = isinstance(dense, Native)
    if isinstance(dense, MultiLinear):
        return (NativeExactMultiLinear if isinstance(dense, NativeMultiLinear) else ExactMultiLinear)(matrix, dense)
    if dense.weight.ndim == 3:
        return (NativeExactSwitchLinear if native else ExactSwitchLinear)(matrix, dense)
    return (NativeExactLinear if native else ExactLinear)(matrix, dense)


def too_large(module: nn.Module) -> str | None:
    """Why an exact module is of no use, if it takes more bytes than the weight itself."""
    bits = 8 * module.bytes_read / math.prod(module.weight_shape)
    return f"would take {bits:.1f} bits a weight in format exact, and takes 16" if bits > DENSE else None
