"""What a pass asks of a Mac's GPU, counted in MLX's graph: no Mac is needed, since nothing is computed."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from pages import table

from gearbx_mlx import Gearbox, load
from gearbx_mlx.gears import gearbox as gearboxes
from gearbx_mlx.kernels.dispatch import NATIVE, KernelChoice
from gearbx_mlx.kernels.metal import Prepared
from gearbx_mlx.kernels.tuner import Tuner

from .studies import Found, study

ROWS = (1, 5)  # a token, and a verification
LADDER = "4,16"
# What launches nothing: other views of an array, and numbers that are there before.
VIEWS = {
    *("Broadcast", "Transpose", "Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze", "Slice", "Split", "View"),
    *("StopGradient", "Full"),
}
STAND_IN = "CustomTransforms"  # with a StopGradient behind it
KINDS = {
    "products": ("Matmul", "matvec", "dense", "exact"),
    "attention": ("attention", "attention_join"),
    "norms": ("rms_norm",),
    "positions": ("rope",),
    "KV cache": ("SliceUpdate",),
}
Shape = tuple[int, ...]


def stand_in(seen: list[str], name: str, shape: Shape, dtype: mx.Dtype, inputs: Sequence[Any]) -> mx.array:
    """One operation of the graph in place of what is one launch on a Mac, and several operations on a CPU."""
    seen.append(name)
    operation = mx.custom_function(lambda *_: mx.zeros(shape, dtype))
    operation.vjp(lambda *_: None)  # else MLX leaves the operation out
    return cast(mx.array, operation(*(each for each in inputs if isinstance(each, mx.array))))


@contextmanager
def as_on_a_mac(seen: list[str]) -> Iterator[None]:
    """Graphs are those of a Mac's GPU, with our kernels where there is one; `seen` gets the names of stand-ins."""

    def launch(kernel: Prepared, *inputs: Any) -> mx.array:
        made = kernel.options
        out = stand_in(seen, kernel.spec.text, kernel.shape, made["output_dtypes"][0], inputs)
        return kernel.result(out)

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
        shape = (*queries.shape[:-1], values.shape[-1])
        return stand_in(seen, "attention", shape, queries.dtype, (queries, keys, values))

    def dequantize(words: mx.array, scales: mx.array, biases: mx.array, group_size: int, *_: Any) -> mx.array:
        shape = (*scales.shape[:-1], scales.shape[-1] * group_size)
        return stand_in(seen, "dequantize", shape, scales.dtype, (words, scales, biases))

    def alike(name: str) -> Callable[..., mx.array]:
        return lambda x, *others, **_: stand_in(seen, name, x.shape, x.dtype, (x, *others))

    changes: list[tuple[Any, str, Any]] = [
        (mx, "default_device", lambda: mx.Device(mx.gpu)),
        (mx.metal, "is_available", lambda: True),
        (mx, "dequantize", dequantize),
        (mx.fast, "rms_norm", alike("rms_norm")),
        (mx.fast, "rope", alike("rope")),
        (mx.fast, "scaled_dot_product_attention", attention),
        (Prepared, "__call__", launch),
        (Tuner, "choose", lambda *_: NATIVE),
        (gearboxes, "check_device", lambda *_: None),
    ]
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(patch.object(*change))
        yield


def geared(form: str) -> Gearbox:
    """SmolLM2 in gears, made by this machine's CPU, on the kernels of a Mac."""
    choose = gearboxes.choose_kernels

    def choose_as_there(*arguments: Any) -> KernelChoice:
        with as_on_a_mac([]):
            return choose(*arguments)

    with patch.object(gearboxes, "choose_kernels", choose_as_there):
        return Gearbox(load("smollm2")[0], LADDER, format=form, kernels="native")


def counted(model: nn.Module, rows: int) -> Counter[str]:
    """The launches of a pass over so many tokens, behind a short prompt, by the name of what is launched."""
    cache, seen = make_prompt_cache(model), list[str]()
    with as_on_a_mac(seen):
        mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
        seen.clear()
        logits = model(mx.array([[4] * rows]), cache=cache)
    written = [array for part in cache for array in (part.keys, part.values)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pass.dot"
        mx.export_to_dot(str(file), logits, *written)
        operations = re.findall(r'label ?= ?"([^"]+)", shape=rectangle', file.read_text())
    found = Counter(name for name in (operation.split()[0] for operation in operations) if name not in VIEWS)
    assert found.pop(STAND_IN, 0) == len(seen), "a kernel's result is not used"
    return found + Counter(seen)


def by_kind(found: Counter[str]) -> list[int]:
    """The number of all launches, then of each kind, then of those of no kind."""
    kinds = [sum(found[name] for name in names) for names in KINDS.values()]
    return [found.total(), *kinds, found.total() - sum(kinds)]


@study("research/tables.md", minutes=1)
def launches() -> Found:
    """What a pass launches on a Mac's GPU, counted in MLX's graph: SmolLM2 by mlx-lm, and in gears on our kernels."""
    model, _ = load("smollm2")
    rows = [["mlx-lm", 16, count, *by_kind(counted(model, count))] for count in ROWS]
    for form in ("planes", "exact"):
        box = geared(form)
        for gear in box.ladder:
            box.shift(gear)
            mx.eval(box.model.parameters())
            rows += [[form, gear.bits, count, *by_kind(counted(box.model, count))] for count in ROWS]
    head = ["format", "bits", "rows", "launches", *KINDS, "others"]
    return Found({"launches": table(head, rows)})
