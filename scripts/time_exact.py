"""Time products over exact weights beside dense bfloat16 ones, for docs/exact.md.

    GEARBX_THREADS=1 python scripts/time_exact.py --page docs/exact.md

Matrices of a Llama that is 1024 wide, more of them than fit the caches, are multiplied by 1 and by 8 vectors. Each
trial times every form once, and a ratio is that of two times within one trial. CPU time is counted, so that other work
on the machine counts less; with GEARBX_THREADS=1 it is the time of one thread.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from pages import fill, table

from gearbx_mlx.formats.exact import encode
from gearbx_mlx.kernels import cpu

SHAPES = ((1024, 1024), (2816, 1024), (1024, 2816))
COPIES = 12  # of each shape: 153 MB of bfloat16
FORMS = {"3,16": (3,), "4,16": (4,), "4,8,16": (4, 4)}
VECTORS = (1, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    text = table(["gears", *(f"{count} vector{'s' * (count > 1)}" for count in VECTORS)], rows(args.trials))
    print(text)
    if args.page:
        fill(args.page, {"speed": lambda: text})


def rows(trials: int) -> list[list[str]]:
    module = cpu.native()
    if module is None:
        raise SystemExit(f"there are no native kernels: {cpu.why_not()}")
    weights = [(mx.random.normal(shape) * 0.02).astype(mx.bfloat16) for shape in SHAPES]
    dense = [mx.array(np.array(weight.view(mx.uint16))).view(mx.bfloat16) for weight in weights * COPIES]
    forms: dict[str, Callable[[mx.array, int], mx.array]] = {"": lambda x, i: module.dense_matvec(x, dense[i])}
    for name, widths in FORMS.items():
        made = [encode(weight, widths, 64) for weight in weights]
        copies = [one._replace(low=one.low + 0, weights=[codes + 0 for codes in one.weights]) for one in made * COPIES]
        mx.eval([(one.low, one.weights) for one in copies])
        forms[name] = lambda x, i, copies=copies: module.exact_matvec(x, *copies[i])
    found = {name: [] for name in FORMS}
    for count in VECTORS:
        ratios = np.array([trial(forms, count) for _ in range(trials + 1)])[1:]  # the first fills caches
        for name, values in zip(FORMS, ratios.T):
            low, middle, high = np.quantile(values, (0, 0.5, 1))
            found[name].append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return [[name, *cells] for name, cells in found.items()]


def trial(forms: dict[str, Callable[[mx.array, int], mx.array]], count: int) -> list[float]:
    """The time of each exact form over that of dense weights."""
    inputs = {width: mx.random.normal((count, width)) for width in {width for _, width in SHAPES}}
    mx.eval(inputs)
    seconds = []
    for product in forms.values():
        start = time.process_time()
        for i in range(COPIES * len(SHAPES)):
            mx.eval(product(inputs[SHAPES[i % len(SHAPES)][1]], i))
        seconds.append(time.process_time() - start)
    return [each / seconds[0] for each in seconds[1:]]


if __name__ == "__main__":
    main()
