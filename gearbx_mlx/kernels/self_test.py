"""Products with known results: compiled kernels are used only if they compute these."""

from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any

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
    exact = exact_arrays(words)
    whole = mx.dequantize(words, mx.ones((3, 1)), mx.zeros((3, 1)), 64, 4)
    by_whole = (x[:, None] * whole).sum(-1)
    return [
        (lambda: module.dense_matvec(x, weight), dense),
        (lambda: module.stack_matvec(x, [words], scales, [biases], [4], 64), (x[:, None] * codes).sum(-1)),
        (lambda: module.dense_experts(x, weight[None], mx.array([0])), dense[None]),
        (lambda: module.exact_matvec(x, **exact), by_whole),
        (lambda: module.exact_decode(**exact), whole.astype(mx.bfloat16)),
        (lambda: module.exact_experts(x, **one_expert(exact), indices=mx.array([0])), by_whole[None]),
        (lambda: module.rms_norm(mx.full((1, 64), 2.0), x[0], 0.0), x),
        (lambda: module.swiglu(mx.zeros_like(x), x), mx.zeros_like(x)),
        (lambda: module.rope(heads, mx.ones(8), False, 1.0, 0), heads),
        (lambda: module.attention(heads, heads, heads, 1.0, True), heads),
        (lambda: module.attention(heads, heads, heads, 1.0, False, seen), heads),
    ]


def exact_arrays(words: mx.array) -> dict[str, Any]:
    """The codes of packed words (3, 8) as exact weights 0 to 15. Scale 1 and bias 0: code 0 is the zero cell."""
    one, none = mx.full((3, 1), 0x3F80, mx.uint16), mx.zeros((3, 1), mx.uint16)  # 0x3F80: bf16 of 1
    codes = mx.dequantize(words, mx.ones((3, 1)), mx.zeros((3, 1)), 64, 4).astype(mx.bfloat16)
    offsets = mx.concatenate([mx.array([0]), mx.cumsum((codes == 0).sum(-1))]).astype(mx.uint32)
    return {
        "weights": [words],
        "scales": one,
        "biases": [none],
        "low": (codes.view(mx.uint16) & 255).astype(mx.uint8),
        "high": mx.zeros(3 * 64, mx.uint8),
        "offsets": offsets,
        "widths": [4],
        "group": 64,
    }


def one_expert(exact: dict[str, Any]) -> dict[str, Any]:
    """Exact weights as those of a mixture of one expert."""
    stacked = {name: exact[name][None] for name in ("scales", "low")}
    return exact | stacked | {name: [each[None] for each in exact[name]] for name in ("weights", "biases")}
