"""Which kernel a product of activations and weights runs on, and why: the one place that decides.

| activations                 | native kernels chosen and there | otherwise  |
| ---                         | ---                             | ---        |
| 1 to 16 vectors             | native                          | MLX's own  |
| more (prefill, a batch)     | MLX's own                       | MLX's own  |

"native" reads packed weights, or dense ones of two bytes, once for all vectors, and accumulates in float32. The choice
between "native" and "mlx" is made once for a model (`choose`); the number of vectors decides at each call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from . import cpu, reference

KERNELS = ("auto", "native", "mlx")
MOST_VECTORS = 16


@dataclass(frozen=True)
class Choice:
    """Whether native kernels are used, and the reason in a few words."""

    native: bool
    reason: str


def choose(kernels: str) -> Choice:
    """What a name of KERNELS comes to on this machine; compiles the native kernels if they are wanted."""
    if kernels == "mlx":
        return Choice(False, "as asked")
    if mx.default_device().type != mx.DeviceType.cpu:
        return Choice(False, "native kernels are for the CPU, and MLX computes on a GPU")
    reason = cpu.why_not()
    if reason is not None:
        return Choice(False, reason)
    return Choice(True, f"up to {MOST_VECTORS} vectors, MLX beyond")


def is_native(x: mx.array) -> bool:
    """Whether activations (..., I) are few enough for a native kernel, and there is one."""
    return 0 < x.size <= MOST_VECTORS * x.shape[-1] and cpu.native() is not None


def stack_product(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
) -> mx.array:
    """x @ W^T over a stack of bit planes, of which MLX's affine weight is the one with a single plane.

    Arguments as `reference.planes_matmul`; returns (..., O) of x's type, accumulated in float32.
    """
    module = cpu.native() if is_native(x) else None
    if module is None:
        return reference.planes_matmul(x, weights, scales, biases, widths, group_size)
    return module.stack_matvec(x, list(weights), scales, list(biases), list(widths), group_size).astype(x.dtype)


def dense_product(x: mx.array, weight: mx.array) -> mx.array:
    """x (..., I) @ weight (O, I)^T, of x's type; the weight is used in the type that it is held in."""
    module = cpu.native() if is_native(x) else None
    if module is None:
        return x @ weight.astype(x.dtype).T
    return module.dense_matvec(x, weight).astype(x.dtype)


def native_entropy() -> Callable[[mx.array], mx.array] | None:
    """`routing.entropy.entropy_bits` as a native kernel, 20 times faster on x86; None where there is none."""
    module = cpu.native()
    return module.entropy_bits if module is not None else None
