"""What a format is to the rest of the house."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from .native import Native, NativeQuantizedLinear, NativeQuantizedSwitchLinear, bare


class StoredArray(NamedTuple):
    """An array of a gear, as a file contains it.

    shape: None stands for a length that the data decide. bits, name: of the gear that the array was made for, and its
    name there; gears may share arrays.
    """

    dtype: mx.Dtype
    shape: tuple[int | None, ...]
    bits: int
    name: str


class Format(Protocol):
    """A way to store one weight matrix at several precisions."""

    name: str
    native: bool  # whether its gears have native kernels
    native_experts: bool  # and those of mixtures of experts
    scales: frozenset[str]  # parameters of its modules that are held in the type that is asked for

    @property
    def layer_bits(self) -> Sequence[int]:
        """Bits that a layer with a floor may have, beside those of the ladder, where gears are made one by one."""
        ...

    def check(self, bits: int) -> None:
        """Raises GearbxError if the format has no gear of so many bits."""
        ...

    def fits(self, width: int, group_size: int) -> str | None:
        """Why a matrix of so many inputs cannot be stored, or None if it can."""
        ...

    def modules(
        self, dense: nn.Module, wanted: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[int, nn.Module]:
        """Make the gear of `wanted` bits of one layer, and whatever other gears come with it at no cost.

        Args:
            dense: a Linear or SwitchLinear, weight (O, I) or (E, O, I) in the checkpoint's own type.
            wanted: bits of the gear that is needed now.
            ladder: bits of all quantized gears, ascending.
            group_size: inputs that share a scale, if the format leaves the choice.
            dtype: what the scales are held in. Their values are rounded to the weight's own type first, so that a
                gear is the same whatever type it is computed in.

        Returns:
            bits to module, with `wanted` among them. Unevaluated, but for large matrices.
        """
        ...

    def module(
        self, dense: nn.Module, bits: int, arrays: Mapping[str, mx.array], ladder: Sequence[int], group_size: int
    ) -> nn.Module:
        """The gear of so many bits over arrays that were stored: the parameters of a module of `modules`, by flat name.

        Args:
            dense: gives shape, kernels and bias; its weight is not read.
        """
        ...

    def stored_arrays(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[str, StoredArray]:
        """The arrays that `module` takes for a weight (..., O, I), by name. Arguments are those of `modules`."""
        ...

    def bytes_read(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, scale_size: int
    ) -> int:
        """Bytes that one use of a weight (..., O, I) in a gear reads.

        A scale or bias takes `scale_size` bytes, the checkpoint's own, unless the format says what it takes.
        """
        ...


def whole_groups(width: int, group_size: int) -> str | None:
    """`Format.fits` of formats in which every group of inputs is full."""
    return f"input width {width} is not a multiple of the group size {group_size}" if width % group_size else None


def affine_arrays(shape: Sequence[int], bits: int, group_size: int, dtype: mx.Dtype) -> dict[str, StoredArray]:
    """`Format.stored_arrays` of a stock quantized module."""
    rows, width = tuple(shape[:-1]), shape[-1]
    groups = (*rows, width // group_size)
    weight = StoredArray(mx.uint32, (*rows, width * bits // 32), bits, "weight")
    return {"weight": weight} | {name: StoredArray(dtype, groups, bits, name) for name in ("scales", "biases")}


def quantized_module(
    dense: nn.Module, bits: int, group_size: int, weight: mx.array, scales: mx.array, biases: mx.array
) -> nn.Module:
    """The stock quantized module of a Linear or SwitchLinear, over given arrays; a bias is shared, not copied.

    Of a native layer it is the native one. Nothing random is drawn: a shift in the middle of a text must not touch the
    numbers that its tokens are sampled with.
    """
    native = isinstance(dense, Native)
    if isinstance(dense, nn.Linear):
        module = bare(NativeQuantizedLinear if native else nn.QuantizedLinear)
    else:
        module = bare(NativeQuantizedSwitchLinear if native else QuantizedSwitchLinear)
        module.global_scale = None
    module.group_size, module.bits, module.mode = group_size, bits, "affine"
    module.weight, module.scales, module.biases = weight, scales, biases
    if "bias" in dense:
        module.bias = dense.bias
    module.freeze()
    return module
