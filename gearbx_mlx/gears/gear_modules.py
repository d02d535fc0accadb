"""The modules of every managed layer, by their bits: made when first needed, given up where memory is short."""

from collections.abc import Mapping, Sequence

import mlx.nn as nn

from .discovery import Layer
from .kernel_choices import KernelChoices
from .ladder import DENSE
from .offload import EMPTY, Residency, Resident
from .sources import Source

Bits = Mapping[str, int]
"""Path of a layer to its bits."""


class GearModules:
    """Makes, keeps and gives up modules.

    Args:
        layers: the managed layers.
        source: makes modules, or reads them.
        residency: of modules that are not engaged.
        made: path to the gears of a layer that exist already; None: a layer has its original alone.
        kernels: chooses them for native layers.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        source: Source,
        residency: Residency,
        made: Mapping[str, dict[int, nn.Module]] | None,
        kernels: KernelChoices,
    ):
        self.layers, self.source, self.residency, self.kernels = layers, source, residency, kernels
        self.has_originals = made is None
        self.keeps_all = isinstance(residency, Resident)
        self.made: dict[str, dict[int, nn.Module]] = {
            layer.path: {DENSE: layer.module} if made is None else made[layer.path] for layer in layers
        }
        self._unread: dict[str, list[nn.Module]] = {}  # made, and still to be evaluated
        # Layers whose original belongs to no gear, and the bits that are made of it.
        widths = {layer.path: {*source.widths(layer)} for layer in layers} if self.has_originals else {}
        self._passing = {path: stored for path, stored in widths.items() if DENSE not in stored}

    def make(self, bits: Bits) -> dict[str, nn.Module]:
        """Path to module at these bits; modules that are missing are made, unevaluated."""
        missing = [layer for layer in self.layers if bits[layer.path] not in self.made[layer.path]]
        if self.has_originals:
            self.residency.enter({(layer.path, DENSE): layer.module for layer in missing})
        for layer in missing:
            made = self.source.modules(layer, bits[layer.path])
            self._unread.setdefault(layer.path, []).extend(made.values())
            self.made[layer.path] = made | self.made[layer.path]
        chosen = {path: made[bits[path]] for path, made in self.made.items()}
        self.kernels.take(chosen.values())
        return chosen

    def complete(self, bits: Bits) -> dict[str, nn.Module]:
        """As `make`, evaluated."""
        modules = self.make(bits)
        unread = {path: made for path, made in self._unread.items() if any(m is modules[path] for m in made)}
        try:
            self.source.read(unread)
        except BaseException:
            self._forget(unread)
            raise
        for path in unread:
            del self._unread[path]
        self.kernels.measure(modules.values())
        return modules

    def _forget(self, unread: Mapping[str, Sequence[nn.Module]]) -> None:
        """Drop modules that could not be read, so that other gears do not wait for them."""
        for path, modules in unread.items():
            dropped = {*map(id, modules)}
            self.made[path] = {bits: module for bits, module in self.made[path].items() if id(module) not in dropped}
            del self._unread[path]

    def enter(self, bits: Bits) -> None:
        """Bring modules back into memory that were given up."""
        self.residency.enter({(path, bits[path]): made[bits[path]] for path, made in self.made.items()})

    def give_up_originals(self) -> None:
        """Give up the originals of which everything has been made and that belong to no gear."""
        for path, widths in list(self._passing.items()):
            if widths <= self.made[path].keys():
                self.made[path][DENSE].weight = EMPTY
                del self._passing[path]

    def give_up_idle(self, engaged: Bits, model: nn.Module) -> None:
        """Give up what is not engaged, as the residency says."""
        idle = {
            (path, bits): module
            for path, made in self.made.items()
            for bits, module in made.items()
            if bits != engaged[path]
        }
        self.residency.leave(idle, model)
