"""Kernels of a model's linear layers: the fastest ones, as measured with the model's own weights."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..compat.classes import as_class
from ..errors import GearbxWarning, check_choice
from ..formats import get_format
from ..formats.block import forget_programs
from ..formats.native import Native, with_kernels
from ..formats.tied import TiedEmbedding
from ..kernels import ACTIVATIONS, KERNELS, MEASURE
from ..kernels.dispatch import (
    CPU,
    MIN_WEIGHTS,
    MLX,
    NATIVE,
    RECONSTRUCT,
    STOCK,
    ChosenKernels,
    KernelChoice,
    MatmulKind,
    always,
    choose,
    device,
    is_tuning,
)
from ..kernels.rounding import trial_activations
from ..kernels.tuner import EXPECTED, FAILED, Times, Tuner, TuningCache, times_of

TRIAL_LAYERS = 32  # layers per trial, so that their matrices do not stay in a cache
TRIAL_BYTES = 2**28
MIN_SHARE = 0.1  # share of a gear's weights: below it, no warning about a refused kernel


def choose_kernels(
    kernels: str, quantized: bool, activations: str, ours_alone: bool = False, rounds: bool = True
) -> KernelChoice:
    """Return the kernels of a Gearbox; warns if native ones were requested and cannot be used.

    With "auto" a ladder without quantized gears stays on MLX's kernels, bit-identical to mlx-lm, if MLX has a kernel
    for the top gear. quantized: True if the ladder has quantized gears. ours_alone: True if MLX has no kernel for the
    top gear. rounds: True if kernels of the format may quantize activations. Raises GearbxError for names that are not
    in KERNELS or ACTIVATIONS.
    """
    check_choice("kernels", kernels, KERNELS)
    check_choice("activations", activations, ACTIVATIONS)
    if kernels in ("auto", MEASURE) and not quantized and not ours_alone:
        return KernelChoice(False, "with only original weights, the model stays bit-identical to mlx-lm")
    choice = choose(kernels, activations)
    expected = kernels == "mlx" or (kernels == "auto" and device() != CPU and not ours_alone)
    if not expected and not choice.native:
        warnings.warn(f"MLX's kernels are used: {choice.reason}", GearbxWarning, stacklevel=3)
    elif activations == "int8" and choice.x_bits and not rounds:
        what = "codebooks do not quantize activations; int8 applies only to layers in other formats, if any"
        warnings.warn(what, GearbxWarning, stacklevel=3)
    elif activations == "int8" and not choice.x_bits:
        warnings.warn("activations are not quantized: only native CPU kernels do that", GearbxWarning, stacklevel=3)
    return choice


class KernelChoices:
    """The kernels of a model's current layers, for activations of a type."""

    def __init__(self, model: nn.Module, choice: KernelChoice, dtype: mx.Dtype):
        self.choice = choice
        self.tuner = Tuner(dtype, choice)
        forget_programs(model)  # and all other choices of an earlier gearbox
        for layer in natives(model.modules()):
            layer.chosen = None
        self.take(model.modules())

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Let layers without kernels choose them at their first matmul.

        Modules of the same kind among `modules` provide weights for measuring.
        """
        if not self.choice.native:
            return
        alike: dict[MatmulKind, list[Native]] = {}
        for layer in natives(modules):
            if layer.chosen is None:
                layer.x_bits = self.choice.x_bits
                if kind := layer.kind():
                    alike.setdefault(kind, []).append(layer)
        total = sum(len(layers) * prod(kind.shape) for kind, layers in alike.items())
        for kind, layers in alike.items():
            members = [weakref.ref(layer) for layer in layers]
            share = len(layers) * prod(kind.shape) / total
            for layer, member in zip(layers, members):
                layer.chosen = ChosenKernels(partial(self._choose, member, kind, members, share))

    def measure(self, modules: Iterable[nn.Module], vectors: Sequence[int] = (1,)) -> None:
        """Choose the kernels for these numbers of vectors now. The weights must be in memory."""
        chosen = {kind: layer.chosen for layer in natives(modules) if layer.chosen and (kind := layer.kind())}
        for kind in sorted(chosen, key=lambda kind: prod(kind.shape)):  # the smallest represents similar sizes
            for count in vectors:
                chosen[kind](count)

    def _choose(
        self,
        layer: "weakref.ref[Native]",
        taken: MatmulKind,
        members: Sequence[weakref.ref],
        share: float,
        vectors: int,
    ) -> str:
        """Choose for a layer that had the kind `taken`; its weights may have a different type by now."""
        now, refused = layer(), {*self.tuner.wrong}
        kind = (now.kind() if now is not None else None) or taken
        name = self.tuner.choose(kind, vectors, partial(products, kind, members))
        self.tuner.cache.save()
        if name in STOCK and share > MIN_SHARE:
            for product in self.tuner.wrong.keys() - refused:
                self._warn_of_refused(product, kind, members, share)
        return name

    def _warn_of_refused(self, product: str, kind: MatmulKind, members: Sequence[weakref.ref], share: float) -> None:
        """Warn that native kernels are not used, with the cost."""
        ((native, difference), *_) = sorted(self.tuner.wrong[product].items(), key=lambda each: each[1])
        found = {name: products(kind, members, name)[:1] for name in (native, MLX)}
        x = trial_activations(1, kind.shape[-1], self.tuner.dtype)
        seconds = times_of(found, x)
        slower = f", {seconds[MLX] / seconds[native]:.1f} times slower" if {native, MLX} <= seconds.keys() else ""
        by = "is not a number" if difference == FAILED else f"differs by {difference:.2g} times the rounding bound"
        warnings.warn(
            f"MLX's kernel multiplies {share:.0%} of the weights ({product}){slower}: the native result {by}; "
            "use --kernels native to force native kernels",
            GearbxWarning,
            stacklevel=2,
        )


def natives(modules: Iterable[nn.Module]) -> list[Native]:
    """Return the native layers among modules and among the heads of tied embeddings."""
    layers = (module.projection if isinstance(module, TiedEmbedding) else module for module in modules)
    return [layer for layer in layers if isinstance(layer, Native)]


def products(kind: MatmulKind, members: Sequence[weakref.ref], candidate: str) -> list[Callable[[mx.array], Any]]:
    """Return a candidate's matmuls with the layers of a kind that are in memory, or the EXPECTED results."""
    found: list[Callable[[mx.array], Any]] = []
    size = 0
    for layer in filter(None, (member() for member in members)):
        if found and (size > TRIAL_BYTES or len(found) == TRIAL_LAYERS):
            break
        sizes = [array.nbytes for _, array in tree_flatten(layer.parameters())]
        if all(sizes) and layer.kind() == kind:  # otherwise its weights are temporarily dropped
            trial = as_class(layer, type(layer))  # the layer itself may be in use
            trial.chosen = always(candidate)
            found.append(trial.expected if candidate == EXPECTED else trial.product)
            reconstructed = 4 * prod(kind.shape)  # bytes at most
            size += reconstructed if candidate == RECONSTRUCT else sum(sizes)
    return found


AS_IT_IS, AS_EXACT, AS_8_BITS = "as it is", "exact", "8 bits"


def seconds_as_stored(model: nn.Module, x_bits: int, group_size: int) -> Times:
    """Time a native matrix-vector product with a model's weights: original, in format exact, and 8-bit.

    The weights are rows of the largest bfloat16 matrix with whole groups. Results are kept with the times of kernels.
    Returns seconds by `AS_IT_IS`, `AS_EXACT` and `AS_8_BITS`; empty if measuring is disabled (GEARBX_TUNE=0), or no
    matrix is large enough.
    """
    matrices = [array for _, array in tree_flatten(model.parameters()) if array.ndim == 2]
    fitting = [array for array in matrices if array.dtype == mx.bfloat16 and not array.shape[1] % group_size]
    weight = max(fitting, key=lambda array: array.size, default=None)
    if weight is None or weight.size < MIN_WEIGHTS or not is_tuning():
        return {}
    weight = weight[: max(1, 2**24 // weight.shape[1])]  # exceeds caches, and is encoded in a second
    cache, name = TuningCache(), f"stored otherwise, {weight.shape}, groups of {group_size}, {x_bits} bits"
    if name not in cache.times:
        cache.keep(name, measure_stored(weight, x_bits, group_size))
        cache.save()
    return cache.times[name]


def measure_stored(weight: mx.array, x_bits: int, group_size: int) -> Times:
    """Return seconds per native matmul with a matrix (O, I), by its storage; medians of interleaved trials."""
    dense = nn.Linear(1, 1, bias=False)
    dense.weight = weight
    dense = with_kernels(dense, native=True)
    dense.x_bits = x_bits
    layers = {
        AS_IT_IS: dense,
        AS_EXACT: get_format("exact").modules(dense, 16, (4, 16), group_size, mx.float32)[16],
        AS_8_BITS: get_format("planes").modules(dense, 8, (8,), group_size, mx.float32)[8],
    }
    for layer in layers.values():
        layer.x_bits, layer.chosen = x_bits, always(NATIVE)
    mx.eval([layer.parameters() for layer in layers.values()])
    x = mx.random.normal((1, weight.shape[1]), key=mx.random.key(0))
    return times_of({name: [layer.product] for name, layer in layers.items()}, x)


def measure_gears(gearbox: Any, vectors: Sequence[int] = (1,)) -> None:
    """Choose the kernels of a Gearbox in every gear now, for these numbers of vectors."""
    with uncounted(gearbox):
        for gear in gearbox.ladder:
            gearbox.shift(gear)
            modules = (m for m in gearbox.model.modules() if gearbox.head or not isinstance(m, nn.Embedding))
            gearbox.kernel_choices.measure(modules, vectors)


@contextmanager
def uncounted(gearbox: Any) -> Iterator[None]:
    """Restore the gear after the block, and do not count the shifts in it."""
    before, shifts, seconds, memory = gearbox.gear, gearbox.shifts, gearbox.shift_seconds, gearbox.active_memory
    gearbox.active_memory = dict(memory)
    try:
        yield
    finally:
        gearbox.shift(before)
        gearbox.shifts, gearbox.shift_seconds, gearbox.active_memory = shifts, seconds, memory
