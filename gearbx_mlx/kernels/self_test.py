"""Products with known results: compiled kernels are used only if they compute these."""

from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType

import mlx.core as mx

from .compiler import Unavailable


def check_kernels(module: ModuleType) -> ModuleType:
    """The module itself, after it has computed known products: bindings of another ABI fail here, not in a model.

    Raises:
        Unavailable: a kernel fails, or gives a wrong result.
    """
    with mx.stream(mx.cpu):
        for compute, expected in known_results(module):
            try:
                right = mx.array_equal(compute(), expected).item()  # small whole numbers: no rounding
            except (TypeError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise Unavailable(
                    f"the compiled CPU kernels do not work with MLX {version('mlx')} and nanobind "
                    f"{version('nanobind')} ({reason}); another version of nanobind may"
                ) from None
            if not right:
                raise Unavailable("the compiled CPU kernels give wrong results")
    return module


def known_results(module: ModuleType) -> list[tuple[Callable[[], mx.array], mx.array]]:
    """Calls of each kind of kernel, with what they must return."""
    x = mx.array([[(i % 7) - 3.0 for i in range(64)]])
    weight = mx.array([[float((i * j) % 16) for i in range(64)] for j in range(3)])
    words = mx.array(
        [[sum((i * j + k) % 16 << 4 * k for k in range(8)) for i in range(8)] for j in range(3)], mx.uint32
    )
    scales, biases = mx.full((3, 1), 0.5), mx.full((3, 1), -2.0)
    codes = mx.dequantize(words, scales, biases, 64, 4)
    dense = (x[:, None] * weight).sum(-1)
    heads, seen = x[None, None], mx.array([[True]])
    return [
        (lambda: module.dense_matvec(x, weight), dense),
        (lambda: module.stack_matvec(x, [words], scales, [biases], [4], 64), (x[:, None] * codes).sum(-1)),
        (lambda: module.dense_experts(x, weight[None], mx.array([0])), dense[None]),
        (lambda: module.rms_norm(mx.full((1, 64), 2.0), x[0], 0.0), x),
        (lambda: module.swiglu(mx.zeros_like(x), x), mx.zeros_like(x)),
        (lambda: module.rope(heads, mx.ones(8), False, 1.0, 0), heads),
        (lambda: module.attention(heads, heads, heads, 1.0, True), heads),
        (lambda: module.attention(heads, heads, heads, 1.0, False, seen), heads),
    ]
