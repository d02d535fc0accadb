"""Which kernel a product of activations and weights runs on, and why: the one place that decides.

| activations                       | native kernels chosen and there        | otherwise  |
| ---                               | ---                                    | ---        |
| 1 to 16 vectors (on Metal, 1 to 8)| native                                 | MLX's own  |
| more (prefill, a batch), Linux    | native, 16 at a time                   | MLX's own  |
| more, macOS                       | MLX's own: Accelerate has matrix units | MLX's own  |
| experts on a CPU                  | by their vectors, as above             | MLX's own  |
| attention, norms, positions,      | native                                 | MLX's own  |
| SwiGLU on a CPU                   |                                        |            |

"native" reads packed weights, or dense ones of two bytes, once for 16 vectors, and accumulates in float32; a vector has
the same bits in any company. MLX's wheels for Linux come with the reference BLAS and scalar quantized products, which
take 25 to 40 times as long for many vectors (docs/performance.md). The choice between "native" and "mlx" is made once
for a model (`choose`); the number of vectors decides at each call. On Metal dense weights and experts stay with MLX,
and `auto` does too: that the kernels there are faster is predicted, and not measured.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from . import cpu, metal, reference
from .metal_codebooks import codebook_launch, library_launch
from .metal_formats import groupwise_launch, planes_launch, rowwise_launch
from .names import ACTIVATIONS

CHUNK = 16  # vectors for which native kernels read the weights once
MOST_VECTORS = CHUNK if sys.platform == "darwin" else None


@dataclass(frozen=True)
class Choice:
    """Whether native kernels are used, and the reason in a few words."""

    native: bool
    reason: str
    x_bits: int = 0  # of the activations that packed weights meet; 0: as they are


def choose(kernels: str, activations: str = "int16") -> Choice:
    """What names of KERNELS and ACTIVATIONS come to on this machine; compiles native kernels if they are wanted."""
    if kernels == "mlx":
        return Choice(False, "as asked")
    if metal.available():
        if kernels == "auto":
            return Choice(False, "the Metal kernels have not been timed yet; 'native' uses them")
        return Choice(True, f"Metal, up to {metal.MAX_VECTORS} vectors of packed codes, MLX beyond")
    if not on_cpu():
        return Choice(False, "native kernels are for the CPU and for Metal, and MLX computes on another GPU")
    reason = cpu.why_not()
    if reason is not None:
        return Choice(False, reason)
    told = f"{CHUNK} vectors at a time" if MOST_VECTORS is None else f"up to {MOST_VECTORS} vectors, MLX beyond"
    notes = [told]
    x_bits = ACTIVATIONS[activations]
    if x_bits:
        notes.append(f"packed weights by activations of {x_bits} bits")
    return Choice(True, "; ".join(notes), x_bits)


def is_native(vectors: int) -> bool:
    """Whether so many vectors go to a native kernel of the CPU, and there is one."""
    few = vectors > 0 and (MOST_VECTORS is None or vectors <= MOST_VECTORS)
    return few and on_cpu() and cpu.native() is not None


def vectors_of(x: mx.array) -> int:
    """How many vectors activations (..., I) are."""
    return x.size // x.shape[-1] if x.size else 0


def on_cpu() -> bool:
    """Where MLX computes. In a model that is native on Metal, the kernels of the CPU are not wanted."""
    return mx.default_device().type == mx.DeviceType.cpu


def is_metal(x: mx.array) -> bool:
    """Whether activations (..., I) go to a Metal kernel, in a model that `choose` has made native."""
    return bool(metal.available()) and metal.takes(x, x.shape[-1])


def stack_product(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    bias: mx.array | None = None,
    x_bits: int = 0,
) -> mx.array:
    """x @ W^T + bias over a stack of bit planes, of which MLX's affine weight is the one with a single plane.

    Arguments as `reference.planes_matmul`, and bias (O,) or None; returns (..., O) of x's type, accumulated in float32.
    With `x_bits` of 8 or 16 native kernels of the CPU round activations to so many bits, and multiply integers.
    """
    if is_metal(x):
        return planes_launch(x, weights, scales, biases, widths, group_size, bias).run()
    module = cpu.native() if is_native(vectors_of(x)) else None
    if module is None:
        y = reference.planes_matmul(x, weights, scales, biases, widths, group_size)
    else:
        y = module.stack_matvec(x, list(weights), scales, list(biases), list(widths), group_size, x_bits).astype(
            x.dtype
        )
    return y if bias is None else y + bias.astype(x.dtype)


def rowwise_product(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    bits: int,
    width: int,
    bias: mx.array | None = None,
    x_bits: int = 0,
) -> mx.array | None:
    """x (..., width) @ W^T + bias for rowwise codes, arguments as `rowwise_launch`; None: reconstruct, and let MLX."""
    if is_metal(x):
        return rowwise_launch(x, weight, scales, bits, width, bias).run()
    return symmetric_product(x, weight, scales, bits, bias, x_bits)


def groupwise_product(
    x: mx.array, weight: mx.array, scales: mx.array, width: int, bias: mx.array | None = None, x_bits: int = 0
) -> mx.array | None:
    """x (..., width) @ W^T + bias for groupwise codes, as `groupwise_launch`; None: reconstruct, and let MLX."""
    if is_metal(x):
        return groupwise_launch(x, weight, scales, width, bias).run()
    return symmetric_product(x, weight, scales, 4, bias, x_bits)


def symmetric_product(
    x: mx.array, weight: mx.array, scales: mx.array, bits: int, bias: mx.array | None, x_bits: int
) -> mx.array | None:
    """Codes without biases, in rows of bytes, with a scale for each row or group; None where there is no kernel."""
    module = cpu.native() if is_native(vectors_of(x)) else None
    if module is None:
        return None
    y = module.symmetric_matvec(x, weight, scales, bits, x_bits).astype(x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)


def dense_product(x: mx.array, weight: mx.array) -> mx.array:
    """x (..., I) @ weight (O, I)^T, of x's type; the weight is used in the type that it is held in."""
    module = cpu.native() if is_native(vectors_of(x)) else None
    if module is None:
        return x @ weight.astype(x.dtype).T
    return module.dense_matvec(x, weight).astype(x.dtype)


def codebook_product(
    x: mx.array,
    arrays: Mapping[str, mx.array],
    bits: int,
    dense: Callable[[], mx.array],
    bias: mx.array | None = None,
) -> mx.array:
    """x (..., I) @ W^T + bias over a codebook for each row, or a library of them, of x's type.

    Args:
        arrays: by the names that formats give them; with `library` a library, else with `codebook`.
        dense: makes W (O, I), of x's type, where no native kernel is used.
    """
    library = "library" in arrays
    if is_metal(x):
        return (library_launch if library else codebook_launch)(x, arrays, bits, bias).run()
    module = cpu.native() if is_native(vectors_of(x)) else None
    if module is None:
        y = x @ dense().T
    else:
        kernel = module.library_matvec if library else module.codebook_matvec
        y = kernel(x, **arrays, bits=bits).astype(x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)


def stack_experts(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    indices: mx.array,
    sorted_indices: bool = False,
    x_bits: int = 0,
) -> mx.array:
    """As stack_product for stacked experts (E, O, ...), of which `indices` names one for each vector (..., 1, I)."""
    module = cpu.native() if are_pairs(x, indices) else None
    if module is None:
        return reference.planes_gather_matmul(
            x, weights, scales, biases, widths, group_size, indices, sorted_indices=sorted_indices
        )
    stack = list(weights), scales, list(biases), list(widths), group_size
    return module.stack_experts(x, *stack, indices, x_bits).astype(x.dtype)


def dense_experts(x: mx.array, weight: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
    """As dense_product for stacked experts (E, O, I), of which `indices` names one for each vector (..., 1, I)."""
    module = cpu.native() if are_pairs(x, indices) else None
    if module is None:
        transposed = weight.astype(x.dtype).swapaxes(-1, -2)
        return mx.gather_mm(x, transposed, rhs_indices=indices, sorted_indices=sorted_indices)
    return module.dense_experts(x, weight, indices).astype(x.dtype)


def are_pairs(x: mx.array, indices: mx.array) -> bool:
    """Whether vectors (..., 1, I) and experts make pairs for a native kernel; MLX takes several vectors an expert."""
    return x.ndim >= 2 and x.shape[-2] == 1 and x.size > 0 and is_native(indices.size)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x (..., D) / sqrt(mean(x^2) + eps) * weight (D,), of the type that MLX gives it: the wider of the two."""
    kernel = fused_kernel("rms_norm") if x.size else None
    if kernel is None or x.dtype not in (mx.float32, weight.dtype):
        return mx.fast.rms_norm(x, weight, eps)
    return kernel(x, weight, eps).astype(x.dtype)


def rope(
    x: mx.array, frequencies: mx.array, offset: int, traditional: bool = False, scale: float = 1.0
) -> mx.array | None:
    """x (B, H, T, D) with rotary positions from `offset` on, of x's type; None: where MLX is to do it.

    Args:
        frequencies: (dims / 2,) float32, radians from position to position; the first `dims` of D are turned.
    """
    takes = x.ndim == 4 and x.size > 0 and isinstance(offset, int)
    kernel = fused_kernel("rope") if takes else None
    return None if kernel is None else kernel(x, frequencies, traditional, scale, offset).astype(x.dtype)


def swiglu(gate: mx.array, up: mx.array) -> mx.array | None:
    """silu(gate) * up, of gate's type; None: where MLX is to do it."""
    kernel = fused_kernel("swiglu") if gate.shape == up.shape and gate.size > 0 else None
    return None if kernel is None else kernel(gate, up).astype(gate.dtype)


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """softmax(scale * queries keys^T) values over heads (B, H, L, D), of float32; None: where MLX is to do it.

    Args:
        keys, values: (B, H / a whole number, S, D).
        mask: "causal", or what each query sees, bool, that can be broadcast to (B, H, L, S); None: all keys.
    """
    arrays = queries, keys, values
    takes = (
        (mask.dtype == mx.bool_ if isinstance(mask, mx.array) else mask in ("causal", None))
        and all(a.ndim == 4 and a.dtype == mx.float32 and a.size > 0 for a in arrays)
        and keys.shape == values.shape
        and queries.shape[1] % keys.shape[1] == 0
        and queries.shape[2] <= keys.shape[2]
    )
    kernel = fused_kernel("attention") if takes else None
    if kernel is None:
        return None
    if isinstance(mask, mx.array):
        return kernel(*arrays, scale, False, mask)
    return kernel(*arrays, scale, mask == "causal")


def fused_kernel(name: str) -> Callable[..., mx.array] | None:
    """A kernel of the CPU for what is no product of weights (cpu/fused.h, cpu/attention.h)."""
    module = cpu.native() if on_cpu() else None
    return getattr(module, name, None)


def native_entropy() -> Callable[[mx.array], mx.array] | None:
    """`routing.entropy.entropy_bits` as a native kernel, 20 times faster on x86; None where there is none."""
    module = cpu.native() if on_cpu() else None
    return module.entropy_bits if module is not None else None
