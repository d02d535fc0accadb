"""Products on a CPU: dense weights, rounded activations, and choosing kernels."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from pages import table
from rich.progress import track

from gearbx_mlx import Gearbox, load
from gearbx_mlx.bit_selection.h_process import log_probabilities
from gearbx_mlx.formats import native, planes
from gearbx_mlx.kernels import ACTIVATIONS
from gearbx_mlx.kernels.products import dense_product, stack_product

from .studies import Found, in_turn, study

TOKENS = 200  # per text


def in_bfloat16(product: Callable[..., mx.array], x: mx.array, *arguments) -> mx.array:
    y = product(x.astype(mx.bfloat16).astype(x.dtype), *arguments)
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
    native.stack_product = planes.stack_product = partial(in_bfloat16, stack_product)
    native.dense_product = partial(in_bfloat16, dense_product)
    yield "bfloat16"
    native.stack_product = planes.stack_product = stack_product
    native.dense_product = dense_product


ROWS = (1, 2, 4, 8, 16)
GEARS = {"4 bits": (4, "planes", "4,8"), "8 bits": (8, "planes", "4,8"), "bfloat16": (16, "planes", "4,16")}
GEARS["exact 4,16"] = (16, "exact", "4,16")


def pass_times(model: str, gear: str, context: int, trials: int) -> list[list[float]]:
    """Seconds of a pass of each number of ROWS behind a context, `trials` of each, in turn."""
    bits, format, ladder = GEARS[gear]
    gearbox = Gearbox(load(model)[0], ladder, format=format, activations="int8")
    gearbox.shift(bits)
    cache = make_prompt_cache(gearbox.model)

    def read(count: int) -> None:
        mx.eval(gearbox.model(mx.arange(count)[None] + 500, cache=cache))

    def again(count: int) -> None:
        read(count)
        trim_prompt_cache(cache, count)

    read(context)
    times = in_turn({str(count): partial(again, count) for count in ROWS}, trials)
    return [times[str(count)] for count in ROWS]


@study("docs/performance.md", minutes=3)
def rows(model: str = "smollm2", context: int = 64, trials: int = 40) -> Found:
    """What a pass of several rows takes, as a verification has, over a pass of one, in each gear on a CPU.

    Rows of one trial follow each other, and a ratio holds within one trial. Activations are rounded to 8 bits, for
    weights of bfloat16 to that type. The range is that of the middle half of the trials.
    """
    table_rows = []
    for gear in track(GEARS, "gears"):
        alone, *others = (np.array(seconds) for seconds in pass_times(model, gear, context, trials))
        quarters = [np.quantile(seconds / alone, (0.25, 0.5, 0.75)) for seconds in others]
        cells = [f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in quarters]
        table_rows.append([gear, f"{np.median(alone) * 1e3:.1f}", *cells])
    return Found({"rows": table(["gear", "1 row, ms", *(f"{count} rows" for count in ROWS[1:])], table_rows)})


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
    for gear in gearbox.ladder:
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
