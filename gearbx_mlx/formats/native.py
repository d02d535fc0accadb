"""Layers over the arrays of stock ones, computed as the table in `kernels/dispatch.py` says."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..kernels.dispatch import dense_experts, dense_product, stack_experts, stack_product
from .fused import FUSED, native_class, stock_class


class Native:
    """A layer whose arrays keep the type of the checkpoint, two bytes as a rule, whatever activations are.

    A dense one makes native gears: a format looks at the class of the layer that it is given. `x_bits` are those of
    the activations that packed weights meet on a CPU; 0: as they are, which dense ones always do.
    """

    x_bits = 0


class NativeDense(Native, nn.Linear):
    """A Linear."""

    def __call__(self, x: mx.array) -> mx.array:
        y = dense_product(x, self["weight"])
        return y + self["bias"].astype(x.dtype) if "bias" in self else y


class NativeQuantizedLinear(Native, nn.QuantizedLinear):
    """A QuantizedLinear, affine."""

    def __call__(self, x: mx.array) -> mx.array:
        stack = [self["weight"]], self["scales"], [self["biases"]], [self.bits], self.group_size
        return stack_product(x, *stack, self.get("bias"), self.x_bits)


class NativeSwitchLinear(Native, SwitchLinear):
    """A SwitchLinear: E experts of one shape, one of them for each vector."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return with_expert_bias(self, dense_experts(x, self["weight"], indices, sorted_indices), indices)


class NativeQuantizedSwitchLinear(Native, QuantizedSwitchLinear):
    """A QuantizedSwitchLinear, affine."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        stack = [self["weight"]], self["scales"], [self["biases"]], [self.bits], self.group_size
        return with_expert_bias(self, stack_experts(x, *stack, indices, sorted_indices, self.x_bits), indices)


class NativeEmbedding(Native, nn.Embedding):
    """An Embedding, which may be the output head as well (`as_linear`).

    `activations` is the type that rows are looked up in: that of the model's activations.
    """

    activations = mx.float32

    def __call__(self, x: mx.array) -> mx.array:
        return self["weight"][x].astype(self.activations)

    def as_linear(self, x: mx.array) -> mx.array:
        return dense_product(x, self["weight"])


NATIVE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: NativeDense,
    SwitchLinear: NativeSwitchLinear,
    nn.Embedding: NativeEmbedding,
    **FUSED,
}
STOCK = {native: stock for stock, native in NATIVE.items()}
FLOATING = (mx.float32, mx.bfloat16, mx.float16)


def with_expert_bias(module: nn.Module, y: mx.array, indices: mx.array) -> mx.array:
    return y + mx.expand_dims(module["bias"][indices].astype(y.dtype), -2) if "bias" in module else y


def with_kernels(module: nn.Module, native: bool) -> nn.Module:
    """A layer, or what stands between layers, over the same arrays, native or as MLX has it.

    The module itself where it is that already, where a subclass may compute something of its own, or where its weights
    are of a type that native kernels do not read.
    """
    own: Any = type(module)
    kind = NATIVE.get(own) or native_class(own) if native else STOCK.get(own) or stock_class(own)
    if kind is None or ("weight" in module and module["weight"].dtype not in FLOATING):
        return module
    made = bare(kind)
    dict.update(made, module)
    vars(made).update(vars(module))
    made._no_grad = set(module._no_grad)
    return made


def bare(kind: type[nn.Module]) -> nn.Module:
    """A module without arrays: the constructors of MLX's draw random numbers, which must not change with a shift."""
    module: nn.Module = kind.__new__(kind)  # type: ignore[call-overload]
    nn.Module.__init__(module)
    return module
