"""Linear layers over the arrays of stock ones, whose products go by the table in `kernels/dispatch.py`."""

import mlx.core as mx
import mlx.nn as nn

from ..kernels.dispatch import dense_product, stack_product


class NativeDense(nn.Linear):
    """A Linear whose weight keeps the type of the checkpoint, two bytes as a rule, whatever activations are.

    A layer of this class makes native gears: a format looks at the class of the layer that it is given.
    """

    def __call__(self, x: mx.array) -> mx.array:
        y = dense_product(x, self["weight"])
        return y + self["bias"].astype(x.dtype) if "bias" in self else y


class NativeQuantizedLinear(nn.QuantizedLinear):
    """A QuantizedLinear, affine, over the same arrays."""

    def __call__(self, x: mx.array) -> mx.array:
        stack = [self["weight"]], self["scales"], [self["biases"]], [self.bits], self.group_size
        return stack_product(x, *stack, self.get("bias"))


def is_stock_linear(module: nn.Module) -> bool:
    """Whether a layer computes what nn.Linear does: a subclass may do more, and is left alone."""
    return type(module) in (nn.Linear, NativeDense)


def with_kernels(module: nn.Module, native: bool) -> nn.Module:
    """A linear layer over the same arrays, native or as MLX has it; the module itself where it is that already."""
    kind = NativeDense if native else nn.Linear
    if not is_stock_linear(module) or type(module) is kind:
        return module
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name in ("weight", "bias"):
        if name in module:
            made[name] = module[name]
    made.train(module.training)
    made._no_grad = set(module._no_grad)
    return made
