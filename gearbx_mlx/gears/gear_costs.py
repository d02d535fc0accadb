"""What the gears of a gearbox read, take and promise; and what every layer runs on."""

import copy
import dataclasses
import math
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from ..formats.base import Format
from .adapters import layers_of
from .cost import token_bytes, whole_model_speedup
from .description import LayerPath, kernels_of
from .discovery import Layer
from .experts import used_share
from .gear_modules import GearModules
from .ladder import DENSE, Gear, Ladder
from .parts import Part
from .settings import Choice
from .sharding import sharding_of
from .sources import Original, Source
from .streaming import StreamedFiles


class GearCosts:
    """The part of a Gearbox that answers questions and changes nothing."""

    model: nn.Module
    ladder: Ladder
    format: Format
    kernels: Choice
    layers: list[Layer]
    unmanaged: dict[str, str]
    _embeddings: list[Layer]  # of which each token reads a row, in a precision that changes with the gear
    storage: dict[str, mx.Dtype]
    head: str | None
    source: Source
    _modules: GearModules
    _shapes: Mapping[str, tuple[int, ...]]
    _biases: Mapping[str, int]
    _token_bytes: dict[tuple[Gear, int], int]
    _trees: dict[Gear, dict]

    def bits_of(self, layer: Layer, gear: Gear) -> int:
        """The bits of a layer in a gear."""
        raise NotImplementedError

    @property
    def _changing(self) -> list[Layer]:
        """Everything that changes with the gear."""
        return [*self.layers, *self._embeddings]

    def layer_bytes(self, layer: Layer, at: Gear | int) -> int:
        """Bytes that one use of a layer reads in a gear or at a width, scales and bias included; of experts, of all."""
        bits = at if isinstance(at, int) else self.bits_of(layer, at)
        read = self.source.bytes_read(layer, bits, self._modules.made[layer.path].get(bits))
        return read + self._biases[layer.path] * self._size(layer)

    def bits_per_weight(self, gear: Gear) -> float:
        """Bits that a managed weight takes in a gear as it is read, scales included."""
        weights = sum(map(math.prod, self._shapes.values()))
        if not weights:
            return 8.0 * self.storage[""].size
        return 8 * sum(self.layer_bytes(layer, gear) for layer in self.layers) / weights

    def ladder_report(self) -> list[dict]:
        """Name, bits and bytes per weight of each gear."""
        return [{"name": g.name, "bits": g.bits, "bytes_per_weight": self.bits_per_weight(g) / 8} for g in self.ladder]

    def weight_bytes_per_token(self, gear: Gear, positions: int = 1) -> int:
        """Bytes of weights that one token reads from the whole model in a gear; or one pass over several positions."""
        key = gear, positions
        if key in self._token_bytes:
            return self._token_bytes[key]
        read = token_bytes(self.model, self._managed_bytes(gear, positions), self.storage, self.head, positions)
        if gear in self._trees:  # made, so that its layers have been counted
            self._token_bytes[key] = read
        return read

    def undivided_bytes_per_token(self, gear: Gear) -> int:
        """The part of `weight_bytes_per_token` that every rank reads: layers that the ranks have not divided."""
        divided = dict.fromkeys(self._parts, 0.0)
        return token_bytes(self.model, self._managed_bytes(gear, 1) | divided, self.storage, self.head)

    @property
    def _parts(self) -> Mapping[str, Part]:
        """Path of a layer to what this rank has of it, where ranks have divided it."""
        sharding = sharding_of(self.model)
        return {} if sharding is None else sharding.parts

    def _managed_bytes(self, gear: Gear, positions: int) -> dict[str, float]:
        """Path of everything that changes with the gear to the bytes that a pass over so many tokens reads of it."""
        managed: dict[str, float] = {layer.path: self.layer_bytes(layer, gear) for layer in self.layers}
        for layer in self.layers:
            if layer.path != self.head:
                continue
            bits = self.bits_of(layer, gear)
            if self.source.rows_at(layer, bits) != bits:  # which the head does not read
                managed[layer.path] += positions * self._shapes[layer.path][-1] * self._size(layer)
        for table in self._embeddings:
            bits = self.bits_of(table, gear)
            rows = self.source.bytes_read(table, bits, self._modules.made[table.path].get(bits))
            managed[table.path] = rows * min(1.0, positions / len(table.module.weight))
        return managed

    def original_bytes_per_token(self) -> int:
        """Bytes of weights that one token would read if every layer had its original weight."""
        managed = {
            layer.path: float((math.prod(self._shapes[layer.path]) + self._biases[layer.path]) * self._size(layer))
            for layer in self.layers
        }
        managed |= {table.path: float(table.module.weight.shape[-1] * self._size(table)) for table in self._embeddings}
        return token_bytes(self.model, managed, self.storage, self.head)

    def _size(self, layer: Layer) -> int:
        """Bytes of a number of a layer, as the checkpoint stores it."""
        return self.storage[layer.path].size

    def disk_bytes_per_token(self, gear: Gear, positions: int = 1) -> int:
        """The part of `weight_bytes_per_token` that is read from the disk at every pass: with residency stream."""
        if not isinstance(self.source, StreamedFiles):
            return 0
        modules, read = layers_of(self.model), 0.0
        for layer in self.layers:
            share = used_share(layer.path, modules, positions)
            read += share * self.source.disk_bytes(layer, self.bits_of(layer, gear))
        return round(read)

    def predicted_speedup(self, gear: Gear) -> float:
        """Decoding speed in a gear against the ladder's top gear, if time is bytes of weights (GEARBX 15)."""
        if not self.layers:
            return 1.0
        unmanaged = token_bytes(self.model, {layer.path: 0 for layer in self._changing}, self.storage, self.head)
        top, here = (self.weight_bytes_per_token(g) for g in (self.ladder.top, gear))
        return whole_model_speedup((top - unmanaged) / top, (top - unmanaged) / (here - unmanaged))

    def layer_paths(self) -> list[LayerPath]:
        """What every layer runs on and why: those that change gear, the other linear layers, and a tied output head."""
        found = []
        for layer in self.layers:
            bits = tuple(self.bits_of(layer, gear) for gear in self.ladder)
            format = None if {*bits} == {DENSE} else self.format
            runs_on, why = kernels_of(layer.module, self.kernels, format)
            if isinstance(self.source, StreamedFiles) and self.source.disk_bytes(layer, bits[-1]):
                runs_on = f"{runs_on}, from the disk in gear '{self.ladder.top.name}'"
            found.append(LayerPath(layer.path, bits, runs_on, why))
        modules = layers_of(self.model)
        for path, reason in self.unmanaged.items():
            holder = path if path in modules else path.rpartition(".")[0]  # of a matrix that is no module of its own
            kernels = kernels_of(modules[holder], self.kernels, None)
            found.append(LayerPath(path, (DENSE,) * len(self.ladder), *kernels, fixed=reason))
        parts = {path: f"; this rank has {part}" for path, part in self._parts.items()}
        return [dataclasses.replace(row, why=row.why + parts.get(row.path, "")) for row in found]

    def describe(self) -> str:
        """`layer_paths` as text, one line for each: "lm_head: 4, 8, 16; native (16 vectors at a time)".

        Of a model that ranks have divided, a last line says how much of it every rank reads.
        """
        lines, top = [*map(str, self.layer_paths())], self.ladder.top
        if self._parts:
            whole, total = self.undivided_bytes_per_token(top), self.weight_bytes_per_token(top)
            lines.append(f"every rank reads the others, norms and a tied head whole: {whole} of {total} bytes a token")
        return "\n".join(lines)

    def costed_in(self, ladder: Ladder) -> "GearCosts":
        """The same costs for another ladder; the result cannot shift.

        A gear that stands alone has fewer planes to read than one of the same bits among others.
        """
        other = copy.copy(self)
        other.ladder, other._token_bytes = ladder, {}
        if isinstance(self.source, Original):  # else what it stores does not depend on the ladder
            other.source = dataclasses.replace(self.source, ladder=ladder)
        return other
