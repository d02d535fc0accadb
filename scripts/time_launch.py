"""Time what a launch of a Metal kernel costs before the GPU begins, for docs/performance.md. It needs no Mac.

    python scripts/time_launch.py [--page docs/performance.md] [--trials 31]

MLX writes a kernel's text and puts it into the graph while it traces for an export, Metal or not, so that all of a
launch but Metal's own part happens here. Each trial times every kind of launch once, `calls` of them in a row, by the
time of the processor, so that other work on the machine counts less.
"""

import argparse
import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from pages import fill, table

from gearbx_mlx.formats import CodebookOptions, codebook, codebook_library, get_format, groupwise, rowwise
from gearbx_mlx.formats.native import with_kernels
from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.bit_planes import Planes
from gearbx_mlx.kernels.dispatch import NATIVE, always
from gearbx_mlx.kernels.exact import ExactMatrix
from gearbx_mlx.kernels.metal import Launch, Prepared
from gearbx_mlx.kernels.metal_attention import join_launch, parts_launch, rope_launch
from gearbx_mlx.kernels.metal_exact import exact_launch
from gearbx_mlx.kernels.metal_products import (
    codebook_launch,
    dense_launch,
    groupwise_launch,
    library_launch,
    planes_launch,
    rowwise_launch,
)

WIDTH, GROUP = 512, 64
Times = dict[str, list[float]]


def launchers(x: mx.array) -> dict[str, Callable[[], Launch]]:
    """What makes a launch of each kind for one vector x (1, 1, WIDTH) and a matrix (WIDTH, WIDTH)."""
    weight = mx.random.normal((WIDTH, WIDTH)).astype(x.dtype)
    words, scales, biases = mx.quantize(weight, GROUP, 4)
    stack = split(weight, (4, 4), GROUP)
    codes, row_scales = rowwise.quantize(weight, 8)
    packed = rowwise.pack_symmetric_codes(codes, 8)
    group_codes, group_scales = groupwise.quantize(weight)
    group_packed = rowwise.pack_symmetric_codes(group_codes, groupwise.BITS)
    quick = CodebookOptions(rounds=2)
    tables, library = codebook.encode(weight, 4, quick), codebook_library.encode(weight, 4, quick)
    low, high, offsets = (
        mx.zeros(size, kind) for size, kind in (((WIDTH, WIDTH), mx.uint8), (64, mx.uint8), (WIDTH + 1, mx.uint32))
    )
    beside = low, high, offsets, (4,), GROUP
    exact = ExactMatrix([words], scales.view(mx.uint16), [biases.view(mx.uint16)], *beside)
    queries, keys = mx.zeros((1, 8, 1, 64), x.dtype), mx.zeros((1, 2, 300, 64), x.dtype)
    frequencies, sums = mx.ones((32,)), mx.zeros((1, 8, 1, 3, 66))
    return {
        "affine, 4 bits": lambda: planes_launch(x, Planes([words], scales, [biases], (4,), GROUP)),
        "planes, 4+4 bits": lambda: planes_launch(x, stack),
        "rowwise, 8 bits": lambda: rowwise_launch(x, packed, row_scales, 8, WIDTH),
        "groupwise, 4 bits": lambda: groupwise_launch(x, group_packed, group_scales, WIDTH),
        "codebook, 4 bits": lambda: codebook_launch(x, tables, 4),
        "codebook-library, 4 bits": lambda: library_launch(x, library, 4),
        "exact, 4 bits": lambda: exact_launch(x, exact),
        "dense": lambda: dense_launch(x, weight),
        "rotary positions": lambda: rope_launch(queries, frequencies, 300, False, 1.0),
        "attention, blocks": lambda: parts_launch(queries, keys, keys, 0.125, "causal"),
        "attention, joined": lambda: join_launch(sums, x.dtype),
    }


def layers(x: mx.array) -> dict[str, nn.Module]:
    """Native layers over a matrix (WIDTH, WIDTH), by the names of their launches."""
    dense = nn.Linear(WIDTH, WIDTH, bias=False)
    dense.weight = mx.random.normal((WIDTH, WIDTH)).astype(x.dtype)  # which has outliers
    native = with_kernels(dense, native=True)
    made = {
        name: get_format(format).modules(native, bits, ladder, GROUP, x.dtype)[bits]
        for name, format, bits, ladder in (
            ("affine, 4 bits", "affine", 4, (4,)),
            ("planes, 4+4 bits", "planes", 8, (4, 8)),
            ("rowwise, 8 bits", "rowwise", 8, (8,)),
            ("groupwise, 4 bits", "groupwise", 4, (4,)),
            ("codebook, 4 bits", "codebook", 4, (4,)),
            ("codebook-library, 4 bits", "codebook-library", 4, (4,)),
        )
    }
    return made | {"dense": native}


def with_stub(layer: nn.Module, x: mx.array) -> Callable[[], mx.array]:
    """The call of a layer whose launch is prepared, and gives an array at once."""
    layer.chosen = always(NATIVE)
    with contextlib.suppress(RuntimeError):  # there is no Metal, and what was prepared is kept
        layer(x)
    prepared = layer.chosen.prepared
    prepared.update({key: stubbed(each, x) for key, each in prepared.items()})
    return lambda: layer(x)


def stubbed(made: Prepared, out: mx.array) -> Prepared:
    """The same with a kernel that gives an array at once: what is left is our own."""
    stub = dataclasses.replace(made)
    stub.__dict__["kernel"] = lambda inputs, **options: [out]
    return stub


def works(x: mx.array) -> dict[str, Callable[[], mx.array]]:
    """What is timed: each kind of launch prepared, the same with a stub, and prepared anew each time."""
    words = mx.quantize(mx.random.normal((WIDTH, WIDTH)).astype(x.dtype), GROUP, 4)
    found: dict[str, Callable[[], mx.array]] = {
        "": lambda: mx.quantized_matmul(x, *words, group_size=GROUP, bits=4),
    }
    for name, make in launchers(x).items():
        made = make()
        stub = stubbed(made.prepared, x)
        found[name] = lambda made=made: made.prepared(*made.inputs)
        found[f"{name}, stub"] = lambda made=made, stub=stub: stub(*made.inputs)
        found[f"{name}, anew"] = lambda make=make: make().run()
    stock = nn.QuantizedLinear(WIDTH, WIDTH, bias=False, group_size=GROUP, bits=4)
    found[", layer"] = lambda: stock(x)
    return found | {f"{name}, layer": with_stub(layer, x) for name, layer in layers(x).items()}


def microseconds(found: dict[str, Callable[[], mx.array]], trials: int, calls: int) -> Times:
    """Of one call, by kind and trial. The first trial is not counted: it builds the kernels."""
    times: Times = {name: [] for name in found}
    for trial in range(trials + 1):
        for name, work in found.items():
            start = time.thread_time()
            for _ in range(calls):
                work()
            if trial:
                times[name].append((time.thread_time() - start) / calls * 1e6)
    return times


def rows(times: Times) -> list[list[str]]:
    """A row of the table for each kind: medians, and the spread of the first."""

    def cell(name: str) -> str:
        return f"{statistics.median(times[name]):.1f}" if name in times else ""

    def row(name: str, title: str) -> list[str]:
        spread = f"{cell(name)} ({min(times[name]):.1f}-{max(times[name]):.1f})"
        return [title, spread, cell(f"{name}, stub"), cell(f"{name}, layer"), cell(f"{name}, anew")]

    kinds = [name.removesuffix(", anew") for name in times if name.endswith(", anew")]
    return [
        row("", "`mx.quantized_matmul`, 4 bits; in the fourth column `nn.QuantizedLinear`"),
        *(row(name, name) for name in kinds),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=31)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    metal.available = lambda: metal.Availability(True)  # nothing is evaluated
    x = mx.ones((1, 1, WIDTH), mx.float16)
    found, times = works(x), {}

    def trace(traced: mx.array) -> mx.array:
        times.update(microseconds(found, args.trials, args.calls))
        return traced

    with tempfile.TemporaryDirectory() as folder:
        mx.export_function(str(Path(folder) / "launches.mlxfn"), trace, x)
    head = ["launch", "prepared", "of it our own Python", "our Python of a layer's call", "prepared anew each time"]
    text = table(head, rows(times))
    print(text)
    if args.page:
        fill(args.page, {"launches": lambda: text})


if __name__ == "__main__":
    main()
