"""MLX's layers with native kernels, over the same arrays; `kernels/dispatch.py` chooses the kernel."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..compat.classes import as_class, modules_of, stock_class
from ..compat.versions import is_tested
from ..kernels.bit_planes import PanelPlanes, Planes, planes_dense, scaled_for, side_by_side, split_affine
from ..kernels.dispatch import METAL, ChosenKernels, MatmulKind, bits_beside_bfloat16, cpu_kernels, device
from ..kernels.dispatch import NATIVE as OURS
from ..kernels.products import (
    MAX_PAIRS,
    dense_experts,
    dense_product,
    panel_rows,
    stack_experts,
    stack_product,
)
from ..kernels.rounding import Expected, expected_of_dense, expected_of_planes
from .block import coded_class
from .fused import BY_PRIVATE_NAMES, FUSED, native_class


class Native:
    """Base of layers whose arrays keep the checkpoint's type, usually of two bytes, with activations of any type.

    A format that quantizes a native dense layer makes native gears. `x_bits`: bits to which a CPU kernel quantizes the
    activations for packed weights; 0: it does not. With bfloat16 weights, a kernel may also round activations to that
    type unless it is 0. `chosen`: the kernels of its matmuls; None: native ones on a CPU, if there are any.
    """

    x_bits = 0
    chosen: ChosenKernels | None = None

    def kind(self) -> MatmulKind | None:
        """Return the properties that determine the speed of its matmuls; None if there is no choice of kernels."""
        return None

    def product(self, x: mx.array) -> mx.array:
        """Return the matmul (..., O) that `kind` describes."""
        return self(x)  # type: ignore[operator]

    def expected(self, x: mx.array) -> Expected:
        """Return the expected product with x (V, I), if `kind` has a stock kernel."""
        raise NotImplementedError

    def part(self, kernels: ModuleType) -> Any:
        """Return the layer as a part of a native block (block.py); None if blocks cannot contain it.

        It is valid only for the exact class that defines it, since a derived class may compute something else.
        """
        return None


def native_rounding(layer: nn.Module) -> int | None:
    """Return the `x_bits` of a native layer, None for other layers."""
    return layer.x_bits if isinstance(layer, Native) else None


@contextlib.contextmanager
def rounded_to(bits: int, model: nn.Module) -> Iterator[None]:
    """Limit the quantized activations of the engaged gear's layers to `bits` in the block."""
    layers = [layer for layer in modules_of(model) if isinstance(layer, Native) and layer.x_bits > bits]
    before = [layer.x_bits for layer in layers]
    try:
        for layer in layers:
            layer.x_bits = bits
        yield
    finally:
        for layer, own in zip(layers, before):
            layer.x_bits = own


class NativeDense(Native, nn.Linear):
    """A Linear with native kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        return dense_product(x, self["weight"], self.chosen, self.x_bits, self.get("bias"))

    def kind(self) -> MatmulKind:
        return dense_kind(self["weight"])

    def expected(self, x: mx.array) -> Expected:
        return expected_of_dense(x, self["weight"], self.get("bias"))

    def part(self, kernels: ModuleType) -> Any:
        return kernels.dense_part(self["weight"], self.get("bias"), self.x_bits)


class NativeQuantizedLinear(Native, nn.QuantizedLinear):
    """An affine QuantizedLinear with native kernels, whose rows may be in panels."""

    def _extra_repr(self) -> str:
        rows, width = affine_planes(self).shape
        kind = f"group_size={self.group_size}, bits={self.bits}, mode={self.mode}"
        return f"input_dims={width}, output_dims={rows}, bias={'bias' in self}, {kind}"

    def __call__(self, x: mx.array) -> mx.array:
        return stack_product(x, affine_planes(self), self.get("bias"), self.x_bits, self.chosen)

    def dense_weight(self) -> mx.array:
        """Return the dequantized weight (O, I), of the scales' type."""
        return planes_dense(affine_planes(self).by_row())

    def kind(self) -> MatmulKind:
        return planes_kind(affine_planes(self))

    def expected(self, x: mx.array) -> Expected:
        return expected_of_planes(x, affine_planes(self), self.get("bias"), self.x_bits)

    def part(self, kernels: ModuleType) -> Any:
        return kernels.stack_part(*affine_planes(self), self.x_bits, self.get("bias"))


class NativeExperts(Native):
    """Base of packed experts (E, O, I) with native kernels; they are chosen only on Metal (`Native.kind`)."""

    def product(self, x: mx.array) -> mx.array:
        """Return the product (V, n, 1, O) of vectors x (V, I) with the first n experts, as many as a kernel takes."""
        layer: Any = self
        indices = mx.arange(min(layer.num_experts, MAX_PAIRS // len(x)), dtype=mx.uint32)
        y: mx.array = layer(x[:, None, None], mx.broadcast_to(indices, (len(x), len(indices))))
        return y


def experts_kind(kind: MatmulKind) -> MatmulKind | None:
    """Return the kind of matmuls with packed experts; None on a CPU with its single kernel."""
    return replace(kind, form=f"experts of {kind.form}") if device() == METAL else None


class NativeSwitchLinear(Native, SwitchLinear):
    """A SwitchLinear with native kernels: E experts of one shape, each vector using one."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return with_expert_bias(self, dense_experts(x, self["weight"], indices, sorted_indices, self.x_bits), indices)


class NativeQuantizedSwitchLinear(NativeExperts, QuantizedSwitchLinear):
    """An affine QuantizedSwitchLinear with native kernels."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = stack_experts(x, affine_planes(self), indices, sorted_indices, self.x_bits, self.chosen)
        return with_expert_bias(self, y, indices)

    def kind(self) -> MatmulKind | None:
        return experts_kind(planes_kind(affine_planes(self)))

    def dense_weight(self) -> mx.array:
        """Return the dequantized weights (E, O, I), of the scales' type."""
        return planes_dense(affine_planes(self))


class NativeMultiLinear(MultiLinear):
    """A MultiLinear in a model with native kernels: it has none itself, but its packed weights may."""


class NativeEmbedding(Native, nn.Embedding):
    """An Embedding with native kernels; it may also be the output head (`as_linear`).

    `dtype`: of the activations and of input rows, as long as the weight has the type `stored`. If the weight's
    type changes, its rows have that type, as in stock embeddings.
    """

    stored = dtype = mx.float32

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        return weight[x].astype(self.dtype if weight.dtype == self.stored else weight.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return dense_product(x, self["weight"], self.chosen, self.x_bits)

    def kind(self) -> MatmulKind:
        return dense_kind(self["weight"])

    def product(self, x: mx.array) -> mx.array:
        return self.as_linear(x)

    def expected(self, x: mx.array) -> Expected:
        return expected_of_dense(x, self["weight"], None)


MATMULS: dict[type[nn.Module], type[nn.Module]] = {  # MLX's layer to its native form
    nn.Linear: NativeDense,
    SwitchLinear: NativeSwitchLinear,
    MultiLinear: NativeMultiLinear,
    nn.Embedding: NativeEmbedding,
}
STOCK_OF = {native: stock for stock, native in (MATMULS | FUSED).items()}
FLOATING = (mx.float32, mx.bfloat16, mx.float16)
# Widths of stacks whose rows native CPU kernels read as panels.
IN_PANELS = ((4,), (8,), (4, 4), (4, 2), (4, 1))
AS_PLANES: dict[tuple[int, ...], tuple[int, ...]] = {(5,): (4, 1), (6,): (4, 2)}  # codes split for panels


def dense_kind(weight: mx.array) -> MatmulKind:
    """Return the kind of matmuls with a dense weight (O, I)."""
    bits = bits_beside_bfloat16() if weight.dtype == mx.bfloat16 else 0
    form = f"weights of {8 * weight.dtype.size} bits"
    return MatmulKind(form, weight.shape, stock=True, variants=(OURS,), most_bits=bits)


def affine_planes(module: nn.Module) -> Planes:
    """Return the single plane of a quantized module of MLX, or of a native one, possibly in panels."""
    kind = getattr(module, "record", Planes)
    arrays = [module["weight"]], module["scales"], [module["biases"]]
    return kind(*arrays, (module.bits,), module.group_size, getattr(module, "rest", 0))


def over_plane(module: nn.Module, planes: Planes) -> nn.Module:
    """Give a bare module of a quantized class of MLX its single plane, frozen: the inverse of `affine_planes`."""
    module.record, module.mode = type(planes), "affine"
    (module.bits,), module.group_size = planes.widths, planes.group_size
    (module.weight,), module.scales, (module.biases,) = planes.weights, planes.scales, planes.biases
    module.freeze(recurse=False)
    return module


def for_kernels(dense: nn.Module, planes: Planes) -> Planes:
    """Return a packed weight in the order that its layer's kernels read: in panels, or row by row."""
    widths = AS_PLANES.get(tuple(planes.widths))
    if widths is not None and takes_panels(dense, widths):
        return split_for_kernels(dense, planes, widths)
    return planes.in_panels(panel_rows()) if takes_panels(dense, planes.widths) else planes


def split_for_kernels(dense: nn.Module, affine: Planes, widths: Sequence[int]) -> Planes:
    """Return the codes of an affine weight as a stack of planes in the order of its layer's kernels."""
    kernels = cpu_kernels(1) if isinstance(dense, Native) else None
    if kernels is None or tuple(widths) == tuple(affine.widths):
        return for_kernels(dense, split_affine(affine, widths))
    codes, (bits,) = mx.contiguous(affine.weights[0]), affine.widths
    mx.eval(codes)
    panels, scaled = takes_panels(dense, widths), scaled_for(affine, widths)
    words = kernels.split_codes(codes, bits, list(widths), panels)
    if not panels:
        return scaled._replace(weights=words)
    return PanelPlanes(*scaled.each_scale(partial(side_by_side, rows=panel_rows())))._replace(weights=words)


def takes_panels(dense: nn.Module, widths: Sequence[int]) -> bool:
    """Return True if kernels read a layer's weight (O, I) in panels of rows, given the widths of its planes.

    A CPU that quantizes activations does, with codes that it multiplies without unpacking them first.
    """
    rounds = isinstance(dense, Native) and dense.x_bits and cpu_kernels(1) is not None
    fits = tuple(widths) in IN_PANELS and dense.weight.ndim == 2
    return bool(rounds and fits and len(dense.weight) % panel_rows() == 0)


def stored_planes(dense: nn.Module, planes: Planes) -> Planes:
    """Return a stack of planes over a layer's stored arrays, in panels if they have one more axis than its weight."""
    return PanelPlanes(*planes) if planes.scales.ndim > dense.weight.ndim else planes


def planes_kind(planes: Planes) -> MatmulKind:
    """Return the kind of matmuls with bit planes, or with a single one (MLX's affine weight)."""
    form = "affine" if len(planes.widths) == 1 else "planes"
    bits = "+".join(map(str, planes.widths))
    return MatmulKind(f"{form} {bits}, group {planes.group_size}", planes.shape, stock=True)


def with_expert_bias(module: nn.Module, y: mx.array, indices: mx.array) -> mx.array:
    """Return y (..., 1, O) plus the bias of each vector's expert, if the module has one."""
    return y + mx.expand_dims(module["bias"][indices].astype(y.dtype), -2) if "bias" in module else y


def with_kernels(module: nn.Module, native: bool, fused: bool = True) -> nn.Module:
    """Return the native form of a layer or fused operation, or MLX's form, over the same arrays.

    fused: True if operations besides matmuls have a native form, as on a CPU. Returns the module itself if it has that
    form already. The same holds for unknown classes, which may compute something else, and for types of weights that
    native kernels do not read.
    """
    own: Any = type(module)
    stock = STOCK_OF.get(own) or stock_class(own) or own
    kind = native_form(stock, fused) if native else stock
    if kind is own or ("weight" in module and module["weight"].dtype not in FLOATING):
        return module
    return as_class(module, kind)


def native_form(stock: Any, fused: bool) -> Any:
    """Return the native class for mlx-lm's class; that class itself if there is none. fused: as for `with_kernels`.

    With untested versions of mlx-lm, classes that are known by their code or by private names are not replaced.
    """
    if stock in MATMULS or not fused:
        return MATMULS.get(stock, stock)
    if is_tested():
        return FUSED.get(stock) or coded_class(stock) or native_class(stock) or stock
    return stock if stock in BY_PRIVATE_NAMES else FUSED.get(stock, stock)
