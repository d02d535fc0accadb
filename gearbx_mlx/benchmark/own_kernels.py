"""Proofs of this package's Metal kernels for the shapes of a model: they compile, are correct, and are timed.

Correct kernels are kept for this machine (kernels/proven.py) with their times and MLX's. By default no other kernel of
this package runs. metal_checks.py has the checks that need no model.
"""

import statistics
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..cli.terminal import counting, progress_bar
from ..errors import one_line
from ..formats import get_format
from ..formats.native import Native, with_kernels
from ..gears.kernel_choices import products
from ..gears.ladder import DEFAULT_GROUP_SIZE, DENSE, EXACT_FORMAT, EXACT_LADDER, Ladder
from ..kernels import proven
from ..kernels.dispatch import MLX, STOCK, MatmulKind
from ..kernels.exact import decode
from ..kernels.metal import METAL_DTYPES
from ..kernels.metal_exact import decode_launch
from ..kernels.tuner import FAILED, Product, product_errors, timed_in_turn, times_of
from .metal_checks import all_kernels, examine, mixture_checks, product_checks

Rows = list[dict[str, Any]]

CHECKED_VECTORS = (1, 2, 4, 8)
PROVEN_VECTORS = (1, 2, 3, 4, 5, 8, 16)  # rows of verification, with up to four drafted tokens or prompt lookup
OF_ORIGINALS = ("dense 16", "affine 4", "exact")  # kernels that a model of original weights can use by default


class Layers(NamedTuple):
    """Layers of one shape and storage. stored: in words. dtype: of the activations."""

    stored: str
    layers: list[Native]
    dtype: mx.Dtype

    @property
    def kind(self) -> MatmulKind:
        kind = self.layers[0].kind()
        assert kind is not None
        return kind


def check_all(dtype: mx.Dtype | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel: number of comparisons, largest difference, and a sentence for each failure.

    Args:
        dtype: of a model: only kernels that it can use, for original, 4-bit and exact weights; None: all.
    """
    kernels = [each for each in all_kernels(DEFAULT_GROUP_SIZE) if dtype is None or each.name in OF_ORIGINALS]
    dtypes = METAL_DTYPES if dtype is None else (dtype,)
    checks = {kernel.name: product_checks(kernel, CHECKED_VECTORS, dtypes) for kernel in kernels}
    if dtype is None:
        checks |= mixture_checks(kernels, CHECKED_VECTORS)
    with progress_bar() as progress:
        for name, some in progress.track([*checks.items()], description="kernels checked"):
            try:
                yield examine(name, some)
            except (RuntimeError, ValueError) as error:  # the check cannot be made
                yield {"what": name, "checked": 0, "largest_error": 0.0, "wrong": [f"{name}: {one_line(error)}"]}


def prove_all(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield a row for each matmul of the model's shapes, and keep the correct kernels of this machine."""
    proven.keep(proven.decoder_key(DEFAULT_GROUP_SIZE), None)  # MLX's operations then encode
    decodes = True
    with counting("kernels timed", None) as advance:
        for layers in layers_of_shapes(model):
            if layers.stored == EXACT_FORMAT and decodes:
                row = prove_decoding(layers)
                decodes = not row["wrong"]  # one proof covers all shapes
                yield row
            for vectors in PROVEN_VECTORS:
                yield from prove_products(layers, vectors)
                advance()


def layers_of_shapes(model: nn.Module) -> Iterator[Layers]:
    """Yield layers for each shape of a model's linear layers: original, 4-bit, and in format exact."""
    alike: dict[tuple[Any, ...], list[mx.array]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight.shape[-1] % DEFAULT_GROUP_SIZE == 0:
            alike.setdefault((module.weight.shape, module.weight.dtype), []).append(module.weight)
    for (shape, dtype), weights in alike.items():
        # Several layers, to exceed CPU caches, but few enough to encode in seconds.
        some = weights[: max(1, 2**26 // (shape[0] * shape[1]))]
        dense = [native_linear(weight) for weight in some]
        yield Layers("original weights", dense, dtype)
        yield Layers("4 bits", [stored_as("planes", layer, 4, Ladder((4,)), dtype) for layer in dense], dtype)
        if dtype == mx.bfloat16:
            yield Layers(
                EXACT_FORMAT,
                [stored_as(EXACT_FORMAT, layer, DENSE, Ladder.parse(EXACT_LADDER), dtype) for layer in dense],
                dtype,
            )


def native_linear(weight: mx.array) -> Native:
    """Return a layer with an original weight."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = weight
    return with_kernels(layer, native=True)


def stored_as(format: str, layer: Any, bits: int, ladder: Ladder, dtype: mx.Dtype) -> Native:
    """Return a layer's module of a gear in a format."""
    widths = tuple(gear.bits for gear in ladder)
    made: Native = get_format(format).modules(layer, bits, widths, DEFAULT_GROUP_SIZE, dtype)[bits]
    mx.eval(made.parameters())  # type: ignore[attr-defined]
    return made


def prove_products(layers: Layers, vectors: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each of this package's kernels, for matmuls of this number of vectors."""
    kind, dtype = layers.kind, layers.dtype
    members = [weakref.ref(layer) for layer in layers.layers]
    x = mx.random.normal((vectors, kind.shape[-1]), key=mx.random.key(vectors)).astype(dtype)
    by_mlx = products(kind, members, MLX)
    for candidate in kind.candidates(vectors, dtype, ours_alone=True):
        if candidate not in STOCK:
            key = proven.product_key(kind.form, kind.shape, dtype, vectors, candidate)
            found = {MLX: by_mlx, candidate: products(kind, members, candidate)}
            wrong = product_fault(found, candidate, x)
            times = {} if wrong else times_of(found, x)
            seconds = [times.get(name, FAILED) for name in (candidate, MLX)]
            untimed = "cannot be timed" if FAILED in seconds else ""
            yield keep_proofs(layers, key, vectors, candidate, wrong or untimed, *seconds)


def product_fault(found: Mapping[str, Sequence[Product]], candidate: str, x: mx.array) -> str:
    """Return the failure of a candidate's matmul; "" if it agrees with MLX's and is batch-invariant."""
    apart = product_errors(found, x).get(candidate, FAILED)
    if apart == FAILED:
        return "does not run, or is no number"
    if apart > 1:
        return f"differs from MLX's by {apart:.2g}× the rounding bound"
    product = found[candidate][0]
    try:
        same = mx.array_equal(product(x)[:1], product(x[:1])).item()
    except RuntimeError as error:  # the kernel for one row fails
        return one_line(error)
    return "" if same else "a row among others has other bits"


def prove_decoding(layers: Layers) -> dict[str, Any]:
    """Return a row for the kernel that decodes weights of format exact, bit for bit."""
    module: Any = layers.layers[0]
    matrix = module.matrix
    wrong, ours, by_mlx = "", FAILED, FAILED
    try:
        if mx.array_equal(decode_launch(matrix).run(), decode(matrix)).item():
            makes = {"ours": lambda: [decode_launch(matrix).run()], MLX: lambda: [decode(matrix)]}
            times = timed_in_turn(makes)
            ours, by_mlx = (statistics.median(times[name]) for name in makes)
        else:
            wrong = "a weight has other bits"
    except RuntimeError as error:
        wrong = one_line(error)
    return keep_proofs(layers, proven.decoder_key(DEFAULT_GROUP_SIZE), 0, "decoding", wrong, ours, by_mlx)


def keep_proofs(
    layers: Layers, key: str, vectors: int, candidate: str, wrong: str, ours: float, by_mlx: float
) -> dict[str, Any]:
    """Keep the result for a kernel on this machine, and return it as a row."""
    proven.keep(key, None if wrong else proven.Proof(ours, by_mlx))
    return {
        "stored": layers.stored,
        "shape": list(layers.kind.shape),
        "vectors": vectors,
        "kernel": candidate,
        "seconds": ours,
        "seconds_of_mlx": by_mlx,
        "won": not wrong and proven.won(key),
        "wrong": wrong,
    }


def in_short(rows: Rows) -> list[dict[str, str]]:
    """Return a row for each storage and number of vectors: how often this package's kernels won, and by how much."""
    found, key = [], itemgetter("stored", "vectors")
    for (stored, vectors), some in groupby(sorted(rows, key=key), key):
        shapes: dict[tuple[int, ...], Rows] = {}
        for row in some:
            shapes.setdefault(tuple(row["shape"]), []).append(row)
        best = [
            max(0.0 if row["wrong"] else row["seconds_of_mlx"] / row["seconds"] for row in each)
            for each in shapes.values()
        ]
        line = {
            "own kernels": stored,
            "vectors": str(vectors) if vectors else "decoding",
            "of MLX's speed": f"{statistics.median(best):.2f} ({min(best):.2f}-{max(best):.2f})",
            "shapes won": str(sum(any(row["won"] for row in each) for each in shapes.values())),
            "of": str(len(shapes)),
            "wrong": str(sum(bool(row["wrong"]) for each in shapes.values() for row in each)),
        }
        found.append(line)
    return found
