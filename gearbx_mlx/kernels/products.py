"""The products of linear layers, each by the kernel that was chosen for the layer (`candidates.py`)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType

import mlx.core as mx

from . import cpu, metal, reference
from .candidates import MLX, NATIVE, RECONSTRUCT, STOCK, Chosen
from .dispatch import cpu_kernels_for, is_metal
from .metal_codebooks import codebook_launch, inputs_of, library_launch
from .metal_formats import GROUPWISE_BITS, groupwise_launch, planes_launch, rowwise_launch
from .metal_rows import dense_launch, takes_dense


def add_bias(y: mx.array, bias: mx.array | None) -> mx.array:
    return y if bias is None else y + bias.astype(y.dtype)


def kernel_for(x: mx.array, chosen: Chosen | None) -> str:
    """The candidate that computes a linear layer's product with activations (..., I).

    Args:
        chosen: for the layer; None: ours, where it takes these activations.
    """
    ours = is_metal(x) or cpu_kernels_for(x) is not None
    if chosen is None or not x.size:
        return NATIVE if ours else MLX
    name = chosen(x.size // x.shape[-1])
    return name if ours or name in STOCK else MLX


def again(x: mx.array, inputs: Sequence[mx.array], bias: mx.array | None, chosen: Chosen | None) -> mx.array | None:
    """The product by the Metal kernel that `launched` prepared for such activations; None if there was none.

    This is the way of every token on a Mac, where each microsecond counts.
    """
    if chosen is None or not chosen.prepared:
        return None
    prepared = chosen.prepared.get((x.shape, x.dtype, bias is None, mx.default_device().type))
    if prepared is None:
        return None
    return prepared(x, *inputs) if bias is None else prepared(x, *inputs, bias)


def launched(launch: metal.Launch, bias: mx.array | None, chosen: Chosen | None) -> mx.array:
    """The product by a Metal kernel, whose launch is kept for the layer."""
    if chosen is not None:
        x = launch.inputs[0]
        chosen.prepared[x.shape, x.dtype, bias is None, mx.default_device().type] = launch.prepared
    return launch.run()


def compiled() -> ModuleType:
    """The native CPU kernels, where `kernel_for` names them."""
    module = cpu.native()
    assert module is not None
    return module


def variant_of(kernel: str) -> str | None:
    """The variant of a Metal kernel that a candidate names; None: the expected one."""
    return None if kernel == NATIVE else kernel


def stack_product(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    bias: mx.array | None = None,
    x_bits: int = 0,
    chosen: Chosen | None = None,
) -> mx.array:
    """x @ W^T + bias over a stack of bit planes; a single plane is an affine weight of MLX.

    Args:
        x, weights, scales, biases, widths, group_size: as for `reference.planes_matmul`.
        bias: (O,) or None.
        x_bits: 8 or 16: CPU kernels round activations to this number of bits, and multiply integers. 0: they do not.
        chosen: as for `kernel_for`.

    Returns:
        (..., O) of x's type, accumulated in float32.
    """
    y = again(x, (*weights, scales, *biases), bias, chosen)
    if y is not None:
        return y
    stack = list(weights), scales, list(biases), list(widths), group_size
    kernel = kernel_for(x, chosen)
    if kernel == MLX:
        return add_bias(reference.planes_matmul(x, *stack).astype(x.dtype), bias)  # scales may be wider
    if kernel == RECONSTRUCT:
        return add_bias(x @ reference.planes_dense(*stack).astype(x.dtype).T, bias)
    if is_metal(x):
        return launched(planes_launch(x, *stack, bias, variant_of(kernel)), bias, chosen)
    return add_bias(compiled().stack_matvec(x, *stack, x_bits).astype(x.dtype), bias)


def rowwise_product(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    bits: int,
    width: int,
    bias: mx.array | None = None,
    x_bits: int = 0,
    chosen: Chosen | None = None,
) -> mx.array | None:
    """x (..., width) @ W^T + bias for per-channel codes, arguments as for `rowwise_launch` and `stack_product`.

    Returns None if none of our kernels computes it: the caller then reconstructs the weight.
    """
    launch = partial(rowwise_launch, x, weight, scales, bits, width, bias)
    return symmetric_product(x, weight, scales, bits, bias, x_bits, chosen, launch)


def groupwise_product(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    width: int,
    bias: mx.array | None = None,
    x_bits: int = 0,
    chosen: Chosen | None = None,
) -> mx.array | None:
    """x (..., width) @ W^T + bias for groupwise codes, arguments as for `groupwise_launch` and `stack_product`.

    Returns None if none of our kernels computes it: the caller then reconstructs the weight.
    """
    launch = partial(groupwise_launch, x, weight, scales, width, bias)
    return symmetric_product(x, weight, scales, GROUPWISE_BITS, bias, x_bits, chosen, launch)


def symmetric_product(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    bits: int,
    bias: mx.array | None,
    x_bits: int,
    chosen: Chosen | None,
    launch: Callable[[str | None], metal.Launch],
) -> mx.array | None:
    """x @ W^T + bias for symmetric codes, with a scale for each row or group; None if none of our kernels computes it.

    Args:
        launch: prepares that of a Metal kernel, given its variant.
    """
    y = again(x, (weight, scales), bias, chosen)
    if y is not None:
        return y
    kernel = kernel_for(x, chosen)
    if kernel in STOCK:
        return None
    if is_metal(x):
        return launched(launch(variant_of(kernel)), bias, chosen)
    return add_bias(compiled().symmetric_matvec(x, weight, scales, bits, x_bits).astype(x.dtype), bias)


def dense_product(x: mx.array, weight: mx.array, chosen: Chosen | None = None) -> mx.array:
    """x (..., I) @ weight (O, I)^T, of x's type; a native kernel reads the weight in its own type."""
    y = again(x, (weight,), None, chosen)
    if y is not None:
        return y
    kernel = kernel_for(x, chosen)
    if kernel in STOCK or (metal.available() and not takes_dense(x, weight)):
        return x @ weight.astype(x.dtype).T
    if is_metal(x):
        return launched(dense_launch(x, weight), None, chosen)
    return compiled().dense_matvec(x, weight).astype(x.dtype)


def codebook_product(
    x: mx.array,
    arrays: Mapping[str, mx.array],
    bits: int,
    dense: Callable[[], mx.array],
    bias: mx.array | None = None,
    chosen: Chosen | None = None,
) -> mx.array:
    """x (..., I) @ W^T + bias over one codebook per row, or over a library of codebooks, of x's type.

    Args:
        arrays: by their names in the format; with a `library`, or else with a `codebook`.
        dense: makes W (O, I) of x's type, for MLX's kernels.
    """
    y = again(x, inputs_of(arrays), bias, chosen)
    if y is not None:
        return y
    library = "library" in arrays
    kernel = kernel_for(x, chosen)
    if kernel in STOCK:
        return add_bias(x @ dense().T, bias)
    if is_metal(x):
        launch = library_launch if library else codebook_launch
        return launched(launch(x, arrays, bits, bias, variant_of(kernel)), bias, chosen)
    product = compiled().library_matvec if library else compiled().codebook_matvec
    return add_bias(product(x, **arrays, bits=bits).astype(x.dtype), bias)
