"""Products on a CPU: dense weights, rounded activations, and choosing kernels."""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from pages import table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.bit_selection.h_process import log_probabilities
from gearbx_mlx.formats import native, planes
from gearbx_mlx.kernels import ACTIVATIONS
from gearbx_mlx.kernels.products import stack_product

from .studies import Found, in_turn, native_kernels, study

ROWS, WIDTHS, BYTES = 1024, (1024, 4096), 160 << 20
VECTORS = (1, 2, 4, 8, 12, 16, 64, 512)
READ = "reading the weights"


def time_width(module: Any, width: int, trials: int) -> dict[str, list[str]]:
    """Cells for each number of vectors: time over that of reading the weights, and operations per second."""
    count = BYTES // (ROWS * width * 2)
    words = mx.zeros((BYTES // 4,), mx.uint32) + 0x3C003C00
    dense = mx.contiguous(words.view(mx.bfloat16)[: count * ROWS * width].reshape(count, ROWS, width))
    matrices = [mx.array(np.array(dense[i].view(mx.uint16))).view(mx.bfloat16) for i in range(count)]
    wide = matrices[0].astype(mx.float32)
    mx.eval(words, matrices, wide)
    inputs = {vectors: mx.random.normal((vectors, width)) for vectors in VECTORS}
    mx.eval(inputs)
    works: dict[str, Callable[[], object]] = {READ: lambda: module.read_sum(words)}
    products = {}
    for vectors, x in inputs.items():
        some = matrices[: max(2, count * 16 // max(vectors, 16))]  # enough of them for a long time
        works[str(vectors)] = partial(multiply_all, module, x, some)
        products[str(vectors)] = vectors, vectors * len(some)
    last = VECTORS[-1]
    works[f"{last}, MLX, float32"] = lambda: mx.eval(inputs[last] @ wide.T)
    products[f"{last}, MLX, float32"] = last, last
    seconds = {name: np.array(each) for name, each in in_turn(works, trials, time.process_time).items()}
    found = {}
    for name, (vectors, done) in products.items():
        times = seconds[name] / seconds[READ] * (count * vectors / done)
        low, middle, high = np.quantile(times, (0, 0.5, 1))
        speed = 2 * done * ROWS * width / np.median(seconds[name]) / 1e9
        found[name] = [f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{speed:.0f}"]
    return found


def multiply_all(module: Any, x: mx.array, matrices: list[mx.array]) -> None:
    for matrix in matrices:
        mx.eval(module.dense_matvec(x, matrix))


TOKENS = 200  # per text


def in_bfloat16(x: mx.array, *arguments) -> mx.array:
    y = stack_product(x.astype(mx.bfloat16).astype(x.dtype), *arguments)
    return y.astype(mx.bfloat16).astype(x.dtype)


def ways(gearbox: Gearbox) -> Iterator[str]:
    """Make the modules compute in one way after the other, and yield its name; the exact one comes first."""
    modules = [m for m in gearbox.model.modules() if isinstance(m, native.Native)]
    for name in ("float", "int16", "int8"):
        for module in modules:
            module.x_bits = ACTIVATIONS[name]
        yield name
    for module in modules:
        module.x_bits = 0
    native.stack_product = planes.stack_product = in_bfloat16  # type: ignore[assignment]
    yield "bfloat16"
    native.stack_product = planes.stack_product = stack_product


@study("docs/performance.md", minutes=2)
def vectors(trials: int = 7) -> Found:
    """Products over dense bfloat16 weights: what more vectors cost, beside reading them; GEARBX_THREADS=1 for one
    thread.

    Matrices that are together larger than the caches are multiplied by 1 to 512 vectors. Ratios hold within one
    trial. CPU time is counted, so that other work on the machine counts less.
    """
    mx.set_default_device(mx.cpu)
    columns = [time_width(native_kernels(), width, trials) for width in WIDTHS]
    head = ["vectors", *(f"width {width}: {what}" for width in WIDTHS for what in ("times reading", "GFlop/s"))]
    rows = [[name, *(cell for found in columns for cell in found[name])] for name in columns[0]]
    return Found({"vectors": table(head, rows)})


@study(minutes=3)
def activations(texts_file: Path, model: str | None = None, gears: str = "4,8", texts: int = 12) -> Found:
    """What rounding activations does to predictions: KL from activations as they are (docs/performance.md).

    For comparison it measures the noise of a model that computes in bfloat16: the same products, with activations and
    results rounded to bfloat16.

    Args:
        texts_file: JSON Lines with question and answer, or text.
    """
    loaded, tokenizer = load(model)
    lines = [json.loads(line) for line in texts_file.read_text().splitlines()[:texts]]
    tokens = [tokenizer.encode(line.get("text") or f"{line['question']}\n{line['answer']}")[:TOKENS] for line in lines]
    gearbox, rows = Gearbox(loaded, f"{gears},16", kernels="native"), []
    for gear in list(gearbox.ladder)[:-1]:
        gearbox.shift(gear)
        exact: list[mx.array] = []
        for name in ways(gearbox):
            found = [log_probabilities(loaded, text) for text in tokens]
            mx.eval(found)
            exact = exact or found
            kl = np.concatenate([np.array((mx.exp(p) * (p - q)).sum(-1)) for p, q in zip(exact, found)])
            same = np.concatenate([np.array(mx.argmax(p, -1) == mx.argmax(q, -1)) for p, q in zip(exact, found)])
            if name != "float":
                tail = f"{np.quantile(kl, 0.99):.1e}"
                rows.append([gear.bits, name, f"{kl.mean():.1e}", tail, f"{same.mean():.4f}", len(kl)])
    return Found({"activations": table(["bits", "activations", "mean KL", "99 %", "same favourite", "tokens"], rows)})
