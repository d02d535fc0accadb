"""What every layer runs on in each gear, and why: the rows of `--describe`."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import mlx.nn as nn

from ..formats.base import Format
from ..formats.native import Native, NativeSwitchLinear
from ..kernels.dispatch import Choice


@dataclass(frozen=True)
class LayerPath:
    """What one layer runs on.

    bits: in each gear of the ladder. kernels: that it runs on; why: the reason. fixed: why it does not change gear, if
    it does not.
    """

    path: str
    bits: tuple[int, ...]
    kernels: str
    why: str
    fixed: str | None = None

    def __str__(self) -> str:
        bits = ", ".join(map(str, self.bits)) if self.fixed is None else f"dense ({self.fixed})"
        return f"{self.path}: {bits}; {self.kernels} ({self.why})"


def kernels_of(module: nn.Module, choice: Choice, format: Format | None) -> tuple[str, str]:
    """The kernels that a layer runs on, and the reason.

    Args:
        module: the layer's module in the top gear.
        choice: the kernels that were chosen for the model.
        format: of the layer's quantized gears; None without such gears.
    """
    if not choice.native:
        return "mlx", choice.reason
    if not isinstance(module, Native):
        return "mlx", f"no native kernel for {type(module).__name__}"
    experts = isinstance(module, NativeSwitchLinear)
    if format is not None and not (format.native_experts if experts else format.native):
        what = f"experts in {format.name}" if experts else format.name
        return "mlx, native at 16 bits", f"no native kernel for {what}"
    return "native", choice.why(format is None or format.rounds)


def grouped(layers: Iterable[LayerPath]) -> Iterator[tuple[str, LayerPath, int]]:
    """Groups of layers that differ only in the numbers in their paths, in the order of their first layers.

    Yields:
        a path such as "layers.0-23.mlp.up_proj", the first layer, and the number of layers.
    """
    groups: dict[tuple, list[LayerPath]] = {}
    for layer in layers:
        words = tuple("#" if part.isdigit() else part for part in layer.path.split("."))
        groups.setdefault((words, layer.bits, layer.kernels, layer.why, layer.fixed), []).append(layer)
    for (words, *_), members in groups.items():
        columns = zip(*(layer.path.split(".") for layer in members))
        path = ".".join(numbers(map(int, set(c))) if word == "#" else word for word, c in zip(words, columns))
        yield path, members[0], len(members)


def numbers(values: Iterable[int]) -> str:
    """Numbers as text: 0, 1, 2, 5 -> "0-2,5"."""
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(values)), key=lambda item: item[1] - item[0]):
        members = [value for _, value in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(runs)
