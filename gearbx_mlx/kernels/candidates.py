"""Which kernel computes a linear layer's product: the candidates on a device, and the one that was chosen.

All of ours give a result the same bits; MLX's, and a product with reconstructed weights, differ from them in the last.
"""

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import mlx.core as mx

from . import cpu, metal

MLX, RECONSTRUCT, NATIVE = "mlx", "reconstruct", "native"
STOCK = (MLX, RECONSTRUCT)  # what is not ours
MOST_VECTORS = metal.MAX_VECTORS  # of a product for which kernels are chosen
SMALLEST = 2**18  # weights: of fewer, a launch takes longer than the product

CPU, METAL, GPU = "cpu", "metal", "gpu"  # GPU: one that is not Apple's


def device() -> str:
    """What MLX computes on."""
    if metal.available():
        return METAL
    return CPU if mx.default_device().type == mx.DeviceType.cpu else GPU


@dataclass(frozen=True)
class Kind:
    """What the speed of a layer's product depends on.

    form: how weights are stored, such as "planes 4+4, group 64". shape: (O, I) of the weight. stock: whether MLX has a
    kernel for this form. variants: names of our Metal kernel's. rounded: whether CPU kernels may round activations.
    """

    form: str
    shape: tuple[int, ...]
    stock: bool
    variants: tuple[str, ...] = metal.VARIANTS
    rounded: bool = True

    def candidates(self, vectors: int, dtype: mx.Dtype, ours_alone: bool = False) -> tuple[str, ...]:
        """What can compute a product of this number of vectors here. The first is what is used without measuring.

        A packed kernel of ours spares a token that weights are reconstructed; where MLX has none, nothing else does.

        Args:
            dtype: of the activations. ours_alone: leave MLX's kernels out where there are others.
        """
        ours = self._ours(vectors, dtype)
        if ours_alone and ours:
            return ours
        stock = (MLX,) if self.stock else ()
        reconstructed = (RECONSTRUCT,) if vectors > 1 or not (ours or stock) else ()
        if device() == CPU:
            return (*ours, *stock) or reconstructed
        return (*stock, *ours, *reconstructed)

    def _ours(self, vectors: int, dtype: mx.Dtype) -> tuple[str, ...]:
        if device() == CPU:
            return (NATIVE,) if cpu.native() is not None else ()
        if device() == GPU or vectors > MOST_VECTORS:
            return ()
        fits = metal.fits_threadgroup(self.shape[1], vectors, dtype)
        possible = [name for name in self.variants if name != "threadgroup" or fits]
        return tuple(sorted(possible, key=lambda name: name != metal.expected_variant(vectors)))


def size_class(count: int) -> int:
    """The power of two at `count` or above it: sizes between two powers share what was measured."""
    return 1 << max(0, count - 1).bit_length()


class CannotMeasure(Exception):
    """Nothing can be measured now, inside of mx.compile for instance. `instead`: the candidate to use meanwhile."""

    def __init__(self, instead: str):
        super().__init__(instead)
        self.instead = instead


class Chosen:
    """The candidate for a layer's products, by the number of vectors.

    `prepared`: the layer's launches of Metal kernels, without arrays, by the activations and whether there is a bias.

    Args:
        choose: gives the candidate for a number of vectors; asked once for each, or again after CannotMeasure.
    """

    def __init__(self, choose: Callable[[int], str]):
        self._choose = choose
        self._by_vectors: dict[int, str] = {}
        self.prepared: dict[Hashable, metal.Prepared] = {}

    def __call__(self, vectors: int) -> str:
        found = self._by_vectors.get(vectors)
        if found is None:
            try:
                found = self._by_vectors[vectors] = self._choose(vectors)
            except CannotMeasure as now:
                found = now.instead
        return found

    def __deepcopy__(self, memo: object) -> "Chosen":
        return self

    def __reduce__(self) -> tuple:
        return type(None), ()  # a layer that was pickled has nothing chosen


def always(candidate: str) -> Chosen:
    """The same candidate for any number of vectors."""
    return Chosen(lambda vectors: candidate)


def is_tuning() -> bool:
    """Whether candidates are to be measured: GEARBX_TUNE=0 leaves it at what is expected to be best."""
    return os.environ.get("GEARBX_TUNE", "1") != "0"
