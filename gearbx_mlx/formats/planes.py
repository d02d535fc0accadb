"""Formats `affine` and `planes`: MLX's quantization, and nested bit planes of which each gear is a prefix.

An affine code q of R bits is the weight step * q + offset. Format `affine` has a separate copy for each gear. In
format `planes` one matrix of codes is split. Its first w0 bits are the first plane: a coarser affine code with scale
S = step * 2^(R - w0) and a bias B in the middle of the range that the other bits select from. A later plane p of
width w adds (S * p - S (2^w - 1) / 2) * 2^-shift: the same scale, a separate bias, and a power of two.

So every plane is an ordinary affine weight of MLX. 4-bit and 8-bit gears together take 8 bits per weight, and three
half-precision numbers per group: one scale and two biases. A shift makes no copies.
"""

import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from ..compat.classes import bare
from ..errors import GearbxError
from ..kernels.bit_planes import (
    SCALE_FLOOR,
    PanelPlanes,
    Planes,
    packed_planes,
    plane_shifts,
    planes_gather_matmul,
    planes_matmul,
    rounded,
    scale_and_bias,
    split_affine,
)
from ..kernels.dispatch import MatmulKind, cpu_kernels
from ..kernels.products import stack_experts, stack_product
from ..kernels.rounding import Expected, expected_of_planes
from . import SPLIT_CODES
from .base import Arrays, Bits, Format, Gears, PackedExperts, Shape, StoredArray, StoredArrays, kind_for
from .native import (
    AS_PLANES,
    Native,
    NativeExperts,
    NativeQuantizedLinear,
    NativeQuantizedSwitchLinear,
    experts_kind,
    for_kernels,
    over_plane,
    planes_kind,
    stored_planes,
    takes_panels,
    with_expert_bias,
)

SPLIT_WEIGHTS = 2**23  # weights that are split at once; the temporary memory is several times their size


def plane_widths(ladder: Sequence[int]) -> tuple[int, ...]:
    """Return the widths of the planes for a ladder: gears 4,5,6,8 need planes of 4, 1, 1 and 2 bits."""
    return (ladder[0], *(high - low for low, high in itertools.pairwise(ladder)))


def split(weight: mx.array, widths: Sequence[int], group_size: int, dtype: mx.Dtype | None = None) -> Planes:
    """Quantize a matrix (..., O, I), floating, into planes; I is a multiple of group_size: 32, 64 or 128.

    Scale and bias of the first plane are rounded to the weight's type before codes are fitted to them. So the
    rounding costs no accuracy in the top gear. Those of a single plane are also fitted to the codes, by least squares.

    widths: bits of each plane, most significant first; at most 8 in total. dtype: of scales and biases; None: the
    weight's type. Raises GearbxError.
    """
    check_together(widths)
    blocks = min(weight.shape[-2], math.ceil(weight.size / SPLIT_WEIGHTS))
    if blocks < 2:
        return _split(weight, widths, group_size, dtype or weight.dtype)
    parts = []
    for rows in mx.split(weight, [weight.shape[-2] * i // blocks for i in range(1, blocks)], axis=-2):
        parts.append(_split(rows, widths, group_size, dtype or weight.dtype))
        mx.eval(parts[-1].arrays)
    return _join(parts)


def check_together(widths: Sequence[int]) -> None:
    """Validate that planes have at most 8 bits together. Raises GearbxError."""
    if sum(widths) > 8:
        raise GearbxError(f"planes: at most 8 bits in total, got {'+'.join(map(str, widths))}; use fewer bits")


def split_natively(
    dense: nn.Module, widths: Sequence[int], group_size: int, dtype: mx.Dtype, kernels: ModuleType
) -> Planes:
    """Return `split`'s planes of a native layer's weight, in the order of its kernels, made by all cores at once."""
    check_together(widths)
    panels, weight = takes_panels(dense, widths), dense.weight
    how = list(widths), group_size, SCALE_FLOOR[weight.dtype], panels
    try:  # without operations of MLX, so that any thread may do it
        words, scales, biases = kernels.make_planes(weight, *how)
    except ValueError:
        weight = mx.contiguous(weight)
        mx.eval(weight)
        words, scales, biases = kernels.make_planes(weight, *how)
    of_width = dict(zip(dict.fromkeys(widths[1:]), biases[1:]))  # planes of one width share a bias
    kind = PanelPlanes if panels else Planes
    planes = kind(words, scales, [biases[0], *(of_width[width] for width in widths[1:])], tuple(widths), group_size)
    if dtype != weight.dtype:
        cast = {id(array): array.astype(dtype) for array in (scales, *biases)}
        planes = planes.each_scale(lambda array: cast[id(array)])
    return planes if panels else for_kernels(dense, planes)


def _split(weight: mx.array, widths: Sequence[int], group_size: int, dtype: mx.Dtype) -> Planes:
    """Split rows that are few enough to be split at once."""
    rest, own = sum(widths[1:]), weight.dtype
    grouped = weight.astype(mx.float32).reshape(*weight.shape[:-1], -1, group_size)
    scale, first = scale_and_bias(grouped.min(axis=-1), grouped.max(axis=-1), widths, own)
    # Planes of one width share a bias.
    others = {width: rounded(-scale * (2**width - 1) / 2, own) for width in widths[1:]}
    offset = first
    for width, shift in zip(widths[1:], plane_shifts(widths)[1:]):
        offset = offset + others[width] * 2.0**-shift
    weights, step, offset = quantize(weight, scale * 2.0**-rest, offset, widths)
    if not rest:
        scale, first = step, offset
    stored = {width: bias.astype(dtype) for width, bias in others.items()}
    biases = [first.astype(dtype), *(stored[width] for width in widths[1:])]
    return Planes(weights, scale.astype(dtype), biases, tuple(widths), group_size)


def quantize(
    weight: mx.array, step: mx.array, offset: mx.array, widths: Sequence[int]
) -> tuple[list[mx.array], mx.array, mx.array]:
    """Return the planes of a weight (..., O, I), and the final steps and offsets (..., O, G) float32 of its groups.

    Those of a single plane are fitted to its codes once. A second fit hardly changes the predictions of SmolLM2.
    Equals the native `make_planes`, with MLX's operations.
    """
    bits, grouped = sum(widths), weight.astype(mx.float32).reshape(*step.shape, -1)
    codes = nearest_codes(grouped, step, offset, bits)
    if len(widths) == 1:
        other_step, other_offset = least_squares(grouped, codes, weight.dtype)
        others = nearest_codes(grouped, other_step, other_offset, bits)
        # After rounding to the weight's type, the fit may be worse.
        better = error_of(grouped, others, other_step, other_offset) < error_of(grouped, codes, step, offset)
        step, offset = mx.where(better, other_step, step), mx.where(better, other_offset, offset)
        codes = mx.where(better[..., None], others, codes)
    return packed_planes(codes.astype(mx.uint32).reshape(weight.shape), widths), step, offset


def nearest_codes(grouped: mx.array, step: mx.array, offset: mx.array, bits: int) -> mx.array:
    """Return the RTN codes (..., G, g), whole float32 numbers, of weights, given step and offset of their groups."""
    return mx.round(mx.clip((grouped - offset[..., None]) / step[..., None], 0, 2**bits - 1))


def least_squares(grouped: mx.array, codes: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return step and offset (..., G), rounded to `dtype`, that minimize the error of codes (..., G, g)."""
    count = codes.shape[-1]
    middle = sums(codes) / count
    away = codes - middle[..., None]
    best = sums(away * grouped) / mx.maximum(sums(away * away), 1e-9)
    step = rounded(mx.maximum(best, SCALE_FLOOR[dtype]), dtype)
    return step, rounded(sums(grouped) / count - step * middle, dtype)


def error_of(grouped: mx.array, codes: mx.array, step: mx.array, offset: mx.array) -> mx.array:
    """Return the sums of squared errors (..., G) of codes."""
    return sums((grouped - (codes * step[..., None] + offset[..., None])).square())


def sums(grouped: mx.array) -> mx.array:
    """Return sums (..., G) over groups (..., G, g), bit-identical to the native kernel by its order of addition."""
    lanes = grouped.reshape(*grouped.shape[:-1], -1, 16).sum(axis=-2)
    while lanes.shape[-1] > 1:
        lower, upper = mx.split(lanes, 2, axis=-1)
        lanes = lower + upper
    return lanes.squeeze(-1)


def _join(parts: Sequence[Planes]) -> Planes:
    """Return the planes of the whole matrix, given its blocks of rows; planes that shared a bias still do."""

    def whole(arrays: Sequence[mx.array]) -> mx.array:
        return mx.concatenate(list(arrays), axis=-2)

    first = parts[0]
    biases = {id(bias): whole([part.biases[i] for part in parts]) for i, bias in enumerate(first.biases)}
    return first._replace(
        weights=[whole(weights) for weights in zip(*(part.weights for part in parts))],
        scales=whole([part.scales for part in parts]),
        biases=[biases[id(bias)] for bias in first.biases],
    )


class PlanesModule(nn.Module):
    """A layer over the bit planes of its gear; its parameters are frozen, and shared between gears."""

    def __init__(self, planes: Planes, dense: nn.Module):
        super().__init__()
        self.record = type(planes)
        self.weights, self.scales, self.plane_biases = list(planes.weights), planes.scales, list(planes.biases)
        self.widths, self.group_size, self.rest = tuple(planes.widths), planes.group_size, planes.rest
        self.bits = sum(planes.widths)
        if "bias" in dense:
            self.bias = dense.bias
        self.freeze(recurse=False)

    @property
    def planes(self) -> Planes:
        """The layer's current arrays."""
        arrays = self["weights"], self["scales"], self["plane_biases"]
        return self.record(*arrays, self["widths"], self.group_size, self.rest)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape (..., O, I) of the dense weight."""
        return self.planes.shape

    def _extra_repr(self) -> str:
        return f"shape={self.weight_shape}, widths={self.widths}, group_size={self.group_size}, bias={'bias' in self}"

    def dense_weight(self) -> mx.array:
        """Return the dequantized weight (..., O, I), float32."""
        return self.planes.dequantize()

    def rows(self, x: mx.array) -> mx.array:
        """Return rows x of the matrix, (..., I), for planes split from affine codes: as MLX dequantizes those."""
        (codes,), scales, (biases,), (bits,), group_size, _ = self.planes.taken(x.flatten()).joined()
        return mx.dequantize(codes, scales, biases, group_size, bits).reshape(*x.shape, -1)


class PlanesLinear(PlanesModule):
    """A linear layer (..., I) -> (..., O) over a prefix of bit planes."""

    def __call__(self, x: mx.array) -> mx.array:
        y = planes_matmul(x, self.planes)
        return y + self["bias"] if "bias" in self else y


class NativePlanesLinear(Native, PlanesLinear):
    """A linear layer over a prefix of bit planes, with native kernels that read all planes in one pass."""

    def __call__(self, x: mx.array) -> mx.array:
        return stack_product(x, self.planes, self.get("bias"), self.x_bits, self.chosen)

    def kind(self) -> MatmulKind:
        return planes_kind(self.planes)

    def expected(self, x: mx.array) -> Expected:
        return expected_of_planes(x, self.planes, self.get("bias"), self.x_bits)

    def part(self, kernels: ModuleType) -> Any:
        return kernels.stack_part(*self.planes, self.x_bits, self.get("bias"))


class PlanesSwitchLinear(PackedExperts, PlanesModule):
    """A SwitchLinear over a prefix of bit planes: E experts of one shape, chosen by `indices`."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return with_expert_bias(self, planes_gather_matmul(x, self.planes, indices, sorted_indices), indices)


class NativePlanesSwitchLinear(NativeExperts, PlanesSwitchLinear):
    """A SwitchLinear over a prefix of bit planes, with native kernels."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = stack_experts(x, self.planes, indices, sorted_indices, self.x_bits, self.chosen)
        return with_expert_bias(self, y, indices)

    def kind(self) -> MatmulKind | None:
        return experts_kind(planes_kind(self.planes))


class PlanesMultiLinear(PlanesModule):
    """A MultiLinear over a prefix of bit planes: a matrix for each head, (..., H, T, I) -> (..., H, T, O)."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        return planes_matmul(x, self.planes, transpose)


class JoinedLinear(PlanesLinear):
    """A linear layer over planes split from affine codes. MLX's kernel gets the codes joined again."""

    def __call__(self, x: mx.array) -> mx.array:
        (codes,), scales, (biases,), (bits,), group_size, _ = self.planes.joined()
        y = mx.quantized_matmul(x, codes, scales, biases, True, group_size, bits)
        return y + self["bias"] if "bias" in self else y


class JoinedSwitchLinear(PlanesSwitchLinear):
    """A SwitchLinear over planes split from affine codes, joined for MLX's kernel; of many experts, only used ones."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        planes, chosen = self.planes, indices
        if indices.size < self.num_experts:
            planes = planes.taken(indices.flatten())
            chosen = mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
        return with_expert_bias(self, planes_gather_matmul(x, planes.joined(), chosen, sorted_indices), indices)


class JoinedMultiLinear(PlanesMultiLinear):
    """A MultiLinear over planes split from affine codes, joined for MLX's kernel."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        return planes_matmul(x, self.planes.joined(), transpose)


class Affine(Format):
    """Format whose gears are all `nn.QuantizedLinear` (or `QuantizedSwitchLinear`), as `mlx_lm.convert` makes them."""

    name = "affine"
    native = native_experts = rounds = takes_base = True
    scales = frozenset({"scales", "biases"})

    def span(self, group_size: int) -> int | None:
        return group_size

    def modules(self, dense: nn.Module, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> Gears:
        weight, scales, biases = mx.quantize(dense.weight, group_size, bits)
        planes = Planes([weight], scales.astype(dtype), [biases.astype(dtype)], self.widths(bits, ladder), group_size)
        return {bits: planes_module(dense, for_kernels(dense, planes))}

    def nearest(self, weight: mx.array, ladder: Bits, group_size: int) -> Planes | None:
        words, scales, biases = mx.quantize(weight, group_size, ladder[0])
        return Planes([words], scales, [biases], (ladder[0],), group_size)

    def over_base(self, dense: nn.Module, base: Planes, ladder: Bits, dtype: mx.Dtype) -> Gears:
        planes = for_kernels(dense, base.each_scale(lambda array: array.astype(dtype)))
        return {ladder[0]: planes_module(dense, planes)}

    def widths(self, bits: int, ladder: Bits) -> Bits:
        return (bits,)

    def module(self, dense: nn.Module, bits: int, arrays: Arrays, ladder: Bits, group_size: int) -> nn.Module:
        if "weight" in arrays:
            planes = Planes([arrays["weight"]], arrays["scales"], [arrays["biases"]], (bits,), group_size)
        else:
            planes = stored_codes(arrays, AS_PLANES[(bits,)], group_size)  # as `for_kernels` splits them
        return planes_module(dense, stored_planes(dense, planes))

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        return affine_arrays(shape, bits, group_size, dtype)

    def bytes_read(self, shape: Shape, bits: int, ladder: Bits, group_size: int, scale_size: int) -> int:
        weights = math.prod(shape)
        return weights * bits // 8 + 2 * weights // group_size * scale_size


class NestedPlanes(Affine):
    """Format whose quantized gears share one stack of planes; the lowest is MLX's module over the first plane."""

    name = "planes"
    scales = Affine.scales | {"plane_biases"}

    def shows_damage(self, dense: nn.Module) -> bool:
        return isinstance(dense, Native) and cpu_kernels(1) is not None

    def modules(self, dense: nn.Module, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> Gears:
        kernels, widths = cpu_kernels(1) if isinstance(dense, Native) else None, self.widths(bits, ladder)
        if kernels is None:
            planes = for_kernels(dense, split(dense.weight, widths, group_size, dtype))
        else:
            planes = split_natively(dense, widths, group_size, dtype, kernels)
        return {each: planes_module(dense, planes.gear(each)) for each in ladder}

    def nearest(self, weight: mx.array, ladder: Bits, group_size: int) -> Planes | None:
        return split(weight, ladder, group_size) if len(ladder) == 1 else None

    def widths(self, bits: int, ladder: Bits) -> Bits:
        return plane_widths(ladder)

    def module(self, dense: nn.Module, bits: int, arrays: Arrays, ladder: Bits, group_size: int) -> nn.Module:
        count = ladder.index(bits) + 1
        if count == 1:
            return super().module(dense, bits, arrays, ladder, group_size)
        weights, biases = ([arrays[f"{name}.{i}"] for i in range(count)] for name in ("weights", "plane_biases"))
        planes = Planes(weights, arrays["scales"], biases, plane_widths(ladder[:count]), group_size)
        return planes_module(dense, stored_planes(dense, planes))

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        made = affine_arrays(shape, ladder[0], group_size, dtype)
        if bits == ladder[0]:
            return made
        widths = plane_widths(ladder[: ladder.index(bits) + 1])
        arrays = {"scales": made["scales"], "weights.0": made["weight"], "plane_biases.0": made["biases"]}
        for i, width in enumerate(widths[1:], 1):
            plane = affine_arrays(shape, width, group_size, dtype)
            arrays[f"weights.{i}"] = plane["weight"]._replace(bits=ladder[i], name=f"weights.{i}")
            first = widths.index(width, 1)  # planes of one width share a bias
            arrays[f"plane_biases.{i}"] = made["biases"]._replace(bits=ladder[first], name=f"plane_biases.{first}")
        return arrays

    def bytes_read(self, shape: Shape, bits: int, ladder: Bits, group_size: int, scale_size: int) -> int:
        weights = math.prod(shape)
        planes = ladder.index(bits) + 1  # MLX's kernels read the shared scales once for every plane
        return weights * bits // 8 + planes * 2 * weights // group_size * scale_size


class SplitCodes(NestedPlanes):
    """Format of affine codes split by `split_affine`, in a checkpoint converted from a quantized one.

    The lowest gear is the first plane with a separate bias, as mlx-lm reads it. The others share the bias of the codes.
    """

    name = SPLIT_CODES

    def of_codes(self, dense: nn.Module, affine: Planes, ladder: Bits) -> Gears:
        """Return all gears of a layer that is quantized to the highest bits of a ladder."""
        planes = split_affine(affine, plane_widths(ladder))
        made = {bits: planes_module(dense, planes.prefix(bits)) for bits in ladder[1:]}
        return made | {ladder[0]: planes_module(dense, planes.prefix(ladder[0]).with_biases())}

    def module(self, dense: nn.Module, bits: int, arrays: Arrays, ladder: Bits, group_size: int) -> nn.Module:
        if bits == ladder[0]:
            return super().module(dense, bits, arrays, ladder, group_size)
        widths = plane_widths(ladder[: ladder.index(bits) + 1])
        planes = stored_codes(arrays, widths, group_size, ladder[-1] - bits)
        joined = bits == ladder[-1] and not isinstance(dense, Native)
        return planes_module(dense, stored_planes(dense, planes), joined)

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        arrays = super().stored_arrays(shape, bits, ladder, group_size, dtype)
        if bits == ladder[0]:
            return arrays
        shared = arrays["plane_biases.0"]._replace(bits=ladder[-1], name="plane_biases.0")
        return {name: array for name, array in arrays.items() if "biases" not in name} | {"plane_biases.0": shared}

    def bytes_read(self, shape: Shape, bits: int, ladder: Bits, group_size: int, scale_size: int) -> int:
        return math.prod(shape) * bits // 8 + 2 * math.prod(shape) // group_size * scale_size


def stored_codes(arrays: Arrays, widths: Bits, group_size: int, rest: int = 0) -> Planes:
    """Return the planes of affine codes over their stored arrays: all planes share a bias."""
    weights = [arrays[f"weights.{i}"] for i in range(len(widths))]
    return Planes(weights, arrays["scales"], [arrays["plane_biases.0"]], widths, group_size, rest)


def planes_module(dense: nn.Module, planes: Planes, joined: bool = False) -> nn.Module:
    """Return the module over these planes that replaces a Linear, SwitchLinear or MultiLinear; it shares the bias.

    Args:
        joined: True for all planes of affine codes, for MLX's kernels, in their original form.
    """
    if len(planes.widths) == 1:
        return quantized_module(dense, planes)
    kinds: Sequence[type[PlanesModule]] = PlanesLinear, PlanesSwitchLinear, PlanesMultiLinear
    if isinstance(dense, Native):
        kinds = NativePlanesLinear, NativePlanesSwitchLinear, PlanesMultiLinear
    elif joined:
        kinds = JoinedLinear, JoinedSwitchLinear, JoinedMultiLinear
    kind: type[PlanesModule] = kind_for(dense, *kinds)
    return kind(planes, dense)


def quantized_module(dense: nn.Module, planes: Planes) -> nn.Module:
    """Return MLX's quantized module for a Linear, SwitchLinear or MultiLinear, over a single plane; shares the bias.

    A native layer gets a native module. No random numbers are drawn: a shift in the middle of a sequence must not
    change the numbers that sample its tokens.
    """
    kinds: Sequence[type[nn.Module]] = nn.QuantizedLinear, QuantizedSwitchLinear, QuantizedMultiLinear
    if isinstance(dense, Native):
        kinds = NativeQuantizedLinear, NativeQuantizedSwitchLinear, QuantizedMultiLinear
    module = bare(kind_for(dense, *kinds))
    if isinstance(module, QuantizedSwitchLinear):
        module.global_scale = None
    if planes.rest:  # only native kernels read it
        module.rest = planes.rest
    if "bias" in dense:
        module.bias = dense.bias
    return over_plane(module, planes)


def affine_arrays(shape: Sequence[int], bits: int, group_size: int, dtype: mx.Dtype) -> dict[str, StoredArray]:
    """Return `Format.stored_arrays` of a stock quantized module."""
    rows, width = tuple(shape[:-1]), shape[-1]
    groups = (*rows, width // group_size)
    weight = StoredArray(mx.uint32, (*rows, width * bits // 32), bits, "weight")
    return {"weight": weight} | {name: StoredArray(dtype, groups, bits, name) for name in ("scales", "biases")}
