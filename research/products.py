"""Matmuls on a CPU: original weights, quantized activations, and the choice of kernels."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from pages import table
from rich.progress import track

from gearbx_mlx import Gearbox, load
from gearbx_mlx.bit_selection.h_process import log_probabilities
from gearbx_mlx.formats import native, planes
from gearbx_mlx.kernels.compiler import CPU_VARIABLE
from gearbx_mlx.kernels.products import dense_product, stack_product

from .studies import HELD_OUT, Found, in_turn, study, table_here

TOKENS = 200  # per text


WAYS = {"float": "float", "int16": "int16", "int8": "int8", "bfloat16": "float"}  # with their activations


@contextmanager
def in_bfloat16() -> Iterator[None]:
    """Products in the block take and give numbers that bfloat16 holds, as all of MLX's do in a model of that type."""

    def rounding(product: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def rounded(x: mx.array, *arguments: Any) -> mx.array:
            y = product(x.astype(mx.bfloat16).astype(x.dtype), *arguments)
            return y.astype(mx.bfloat16).astype(x.dtype)

        return rounded

    native.stack_product = planes.stack_product = rounding(stack_product)
    native.dense_product = rounding(dense_product)
    try:
        yield
    finally:
        native.stack_product = planes.stack_product = stack_product
        native.dense_product = dense_product


ROWS = (1, 2, 4, 8, 16)
GEARS = {  # bits, format, ladder
    "4 bits": (4, "planes", "4,8"),
    "8 bits": (8, "planes", "4,8"),
    "bfloat16": (16, "planes", "4,16"),
    "exact 4,16": (16, "exact", "4,16"),
}


def pass_times(model: str, gear: str, context: int, trials: int, rounding: str) -> list[list[float]]:
    """Return seconds of a pass of each number of ROWS behind a context, `trials` of each, in turn."""
    bits, format, ladder = GEARS[gear]
    gearbox = Gearbox(load(model)[0], ladder, format=format, activations=rounding)
    gearbox.shift(bits)
    cache = make_prompt_cache(gearbox.model)

    def read(count: int) -> None:
        mx.eval(gearbox.model(mx.arange(count)[None] + 500, cache=cache))

    def again(count: int) -> None:
        read(count)
        trim_prompt_cache(cache, count)

    read(context)
    return [*in_turn({count: partial(again, count) for count in ROWS}, trials).values()]


@study("docs/performance.md", "research/tables.md", minutes=3)
def rows(
    model: str = "smollm2", context: int = 64, trials: int = 40, rounding: Literal["int8", "int16"] = "int8"
) -> Found:
    """Time a pass over several rows, as in verification, relative to one row, in each gear on a CPU.

    Passes over different numbers of rows alternate within a trial, and ratios are computed within it. The range is that
    of the middle half of the trials. GEARBX_CPU=avx2 writes a different table.

    Args:
        rounding: Activation quantization; bfloat16 weights use bfloat16 activations if the processor supports them.
    """
    table_rows = []
    for gear in track(GEARS, "gears"):
        alone, *others = (np.array(seconds) for seconds in pass_times(model, gear, context, trials, rounding))
        quarters = [np.quantile(seconds / alone, (0.25, 0.5, 0.75)) for seconds in others]
        cells = [f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in quarters]
        table_rows.append([gear, f"{np.median(alone) * 1e3:.1f}", *cells])
    name = "rows_avx2" if os.environ.get(CPU_VARIABLE) == "avx2" else "rows"
    return Found({name: table_here(["gear", "1 row, ms", *(f"{count} rows" for count in ROWS[1:])], table_rows)})


@study("docs/performance.md", minutes=2)
def activations(texts_file: Path = HELD_OUT, model: str = "smollm2", gears: str = "4,8", texts: int = 6) -> Found:
    """Measure the effect of quantized activations: KL from unquantized ones.

    For comparison, it also measures a model that computes in bfloat16: the same matmuls with activations and results
    rounded to bfloat16.

    Args:
        texts_file: JSON Lines with question and answer, or text.
    """
    _, tokenizer = load(model)
    lines = [json.loads(line) for line in texts_file.read_text().splitlines()[:texts]]
    tokens = [tokenizer.encode(line.get("text") or f"{line['question']}\n{line['answer']}")[:TOKENS] for line in lines]
    exact: dict[int, list[mx.array]] = {}
    rows: list[list[Any]] = []
    for way, rounding in WAYS.items():
        gearbox = Gearbox(load(model)[0], f"{gears},16", kernels="native", activations=rounding)
        with in_bfloat16() if way == "bfloat16" else nullcontext():
            for gear in gearbox.ladder:
                if way == "int8" and gear.dense:  # which rounds as with int16
                    continue
                gearbox.shift(gear)
                found = [log_probabilities(gearbox.model, text) for text in tokens]
                mx.eval(found)
                if way == "float":
                    exact[gear.bits] = found
                    continue
                both = list(zip(exact[gear.bits], found))
                kl = np.concatenate([np.array((mx.exp(p) * (p - q)).sum(-1)) for p, q in both])
                same = np.concatenate([np.array(mx.argmax(p, -1) == mx.argmax(q, -1)) for p, q in both])
                figures = f"{kl.mean():.1e}", f"{np.quantile(kl, 0.99):.1e}", f"{same.mean():.4f}"
                rows.append([gear.bits, way, *figures, len(kl)])
    rows.sort(key=lambda row: int(row[0]))
    return Found({"activations": table(["bits", "activations", "mean KL", "99 %", "top-1 agreement", "tokens"], rows)})
