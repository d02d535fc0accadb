"""Sources of gears' modules: the loaded weights, a geared checkpoint, quantized weights or a separate model.

Formats whose top gear contains the original make all gears of a layer at once, and drop the original
(`make_all`). Every module is made when it is first needed, and dropped if memory is short (`GearModules`). A warning
is given for weights that were quantized before and widened again (GEARBX 6.4, 13.3).
"""

import collections
import copy
import dataclasses
import itertools
import math
import statistics
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_map

from ..compat.arrays import dtype_name
from ..errors import GearbxError, GearbxWarning
from ..formats.base import Format, check_quantized, dense_weight, is_finite, stored_bits
from ..formats.exact import too_large
from ..formats.fused import FUSED
from ..formats.native import Native, affine_planes, for_kernels, split_for_kernels, takes_panels, with_kernels
from ..formats.planes import PlanesModule, plane_widths, planes_module
from ..formats.tied import ExactTied, QuantizedTied, in_place_of, linear_of, quantized_table
from ..kernels.bit_planes import Planes
from ..kernels.products import panel_rows
from .activations import layer_bytes, stored_dtype
from .adapters import layers_of
from .discovery import Layer, is_quantized, none_managed, stored_widths
from .in_place import OwnCodes, widths_in
from .kept import KeptGears
from .kernel_choices import KernelChoices
from .ladder import DENSE, Ladder
from .layout import Bits, Layout
from .mapped import forget
from .offload import EMPTY, LARGE_BYTES, Residency, return_memory
from .saved import SavedGears
from .sharding import QUANTIZED_AS, dense_shape
from .tensor_files import Samples, samples_of

Gears = dict[int, nn.Module]  # bits to module


class Source(ABC):
    """A source of the modules of any layer at any of its bits."""

    @abstractmethod
    def widths(self, layer: Layer) -> tuple[int, ...]:
        """Return the bits that a layer can have, ascending."""

    @abstractmethod
    def bytes_read(self, layer: Layer, bits: int, made: nn.Module | None) -> int:
        """Return bytes that one use of a layer reads, without its bias, of all experts. made: its module, or None."""

    @abstractmethod
    def rows_at(self, layer: Layer, bits: int) -> int:
        """Return the bits of the input rows of a tied embedding whose head has `bits`."""

    @abstractmethod
    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        """Return bits to the modules of a layer, including `bits`; not evaluated."""

    @abstractmethod
    def read(self, made: Mapping[str, Iterable[nn.Module]], originals: Mapping[str, mx.array]) -> None:
        """Evaluate modules that were made together, from an original if any. Raises GearbxError for bad weights."""

    def find(self, bits: Mapping[str, int], layers: Sequence[Layer]) -> dict[str, Gears]:
        """Return complete modules that an earlier start made for layers at these bits; without missing ones."""
        return {}

    def keep(self, bits: Mapping[str, int], layers: Sequence[Layer], made: Mapping[str, Gears]) -> None:  # noqa: B027
        """Keep modules that were made together, and are complete, for later starts, if possible."""

    def disk_bytes(self, layer: Layer, bits: int) -> int:
        """Return the part of `bytes_read` that every use reads from disk."""
        return 0

    def for_ladder(self, ladder: Ladder) -> "Source":
        """Return the source for a different ladder."""
        return self


@dataclass(frozen=True)
class FromWeights(Source):
    """A source that makes gears from the original weights.

    storage: path to the type of a layer in the checkpoint; scales are rounded to it. shapes: of the weights, by
    path. tables: bits of a gear to path to bits, for layers whose bits differ from the gear's. extra_widths: more bits
    at which every layer is stored. base: path to a calibrated plane of the lowest gear; other layers are rounded. kept:
    gears of earlier starts from these weights; None: none are kept.
    """

    format: Format
    ladder: Ladder
    group_size: int
    storage: Mapping[str, mx.Dtype]
    compute_dtype: mx.Dtype
    shapes: Mapping[str, tuple[int, ...]]
    tables: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    extra_widths: Sequence[int] = ()
    base: Mapping[str, Planes] = field(default_factory=dict)
    kept: KeptGears | None = None

    def widths(self, layer: Layer) -> tuple[int, ...]:
        in_gears = {self.tables.get(gear.bits, {}).get(layer.path, gear.bits) for gear in self.ladder}
        return stored_widths(layer, self.format, {*in_gears, *self.extra_widths})

    def for_ladder(self, ladder: Ladder) -> "FromWeights":
        return dataclasses.replace(self, ladder=ladder)

    def stored(self, layer: Layer) -> tuple[int, ...]:
        """Return the bits at which the format stores a layer."""
        return stored_bits(self.format, self.widths(layer))

    def bytes_read(self, layer: Layer, bits: int, made: nn.Module | None) -> int:
        shape, size = self.shapes[layer.path], self.storage[layer.path].size
        return bytes_of(self.format, shape, bits, self.stored(layer), self.group_size, size, made)

    def rows_at(self, layer: Layer, bits: int) -> int:
        stored = self.stored(layer)
        return bits if DENSE in stored and bits == stored[0] else DENSE

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        if bits == DENSE and DENSE not in self.stored(layer):
            return {DENSE: layer.module}
        stored, base = self.stored(layer), self.base.get(layer.path)
        dense, dtype = self._dense(layer)
        made = made_over(self.format, dense, bits, stored, self.group_size, dtype, base)
        self._forget(layer.module.weight)
        return self._in_place(layer, made)

    def _forget(self, original: mx.array) -> None:
        """Release the pages of an original that belongs to no gear once gears are made from it: its file has them."""
        if self.format.ladders or not self.ladder.top.dense:
            forget(original)

    def _dense(self, layer: Layer) -> tuple[nn.Module, mx.Dtype]:
        """Return the linear layer from which gears are made, and the type of their scales."""
        dense = copy.copy(linear_of(layer.module))
        dense.weight = dense.weight.astype(self.storage[layer.path])
        # Native kernels widen scales as they read; MLX's are fast only with scales of the compute type.
        return dense, self.storage[layer.path] if isinstance(dense, Native) else self.compute_dtype

    def _in_place(self, layer: Layer, made: Gears) -> Gears:
        """Return the layer's modules with these linear layers inside."""
        if DENSE in made and isinstance(layer.module, nn.Embedding):
            return whole_embedding(made, layer.is_table, self.compute_dtype)
        return {b: in_place_of(layer.module, linear, self.compute_dtype) for b, linear in made.items()}

    def find(self, bits: Mapping[str, int], layers: Sequence[Layer]) -> dict[str, Gears]:
        found = self.kept.find(self._wanted(bits, layers)) if self.kept is not None and layers else None
        return {layer.path: self._kept(layer, found[layer.path]) for layer in layers if found and layer.path in found}

    def _kept(self, layer: Layer, arrays: Mapping[int, Mapping[str, mx.array]]) -> Gears:
        """Return the modules of a layer over kept arrays."""
        dense, _ = self._dense(layer)
        stored, size = self.stored(layer), self.group_size
        return self._in_place(layer, {b: self.format.module(dense, b, own, stored, size) for b, own in arrays.items()})

    def keep(self, bits: Mapping[str, int], layers: Sequence[Layer], made: Mapping[str, Gears]) -> None:
        if self.kept is None:
            return
        own = [layer for layer in layers if layer.path in made]
        gears = {layer.path: {b: packed_arrays(one) for b, one in made[layer.path].items()} for layer in own}
        if all(is_same(self._kept(layer, gears[layer.path]), gears[layer.path]) for layer in own):
            self.kept.keep(self._wanted(bits, layers), gears)

    def _wanted(self, bits: Mapping[str, int], layers: Sequence[Layer]) -> Any:
        """Return the settings, as JSON, on which modules at these bits depend in addition to the weights."""
        own = []
        for layer in layers:
            dense, dtype = self._dense(layer)
            stored = self.stored(layer)
            rows = panel_rows() if takes_panels(dense, self.format.widths(bits[layer.path], stored)) else 1
            types = dtype_name(self.storage[layer.path]), dtype_name(dtype), dtype_name(self.compute_dtype)
            kind = type(dense).__name__, layer.is_table, rows
            own.append([layer.path, bits[layer.path], stored, self.shapes[layer.path], *types, *kind])
        return msgspec.to_builtins([self.format.name, self.group_size, own])

    def read(self, made: Mapping[str, Iterable[nn.Module]], originals: Mapping[str, mx.array]) -> None:
        shown = dict[str, list[mx.array]]()  # by path, arrays that show whether the weight is finite
        for path, modules in made.items():  # one by one, so that temporary memory is freed before the next
            # All modules at once: an array that is not yet computed keeps the original weight in memory.
            mx.eval([module.parameters() for module in modules])
            names = ("scales", "codebook", "library", "outliers")  # arrays that show weights that are too large
            fitted = [linear_of(module).get(name) for module in modules for name in names]
            fitted = [array for array in fitted if array is not None]
            if fitted and path not in self.base and all(map(self.format.shows_damage, map(linear_of, modules))):
                shown[path] = fitted
            else:
                check_quantized(path, originals[path], fitted)
            self._forget(originals[path])
        if not is_finite(*itertools.chain.from_iterable(shown.values())):
            for path, fitted in shown.items():
                check_quantized(path, originals[path], fitted)


def packed_arrays(module: nn.Module) -> dict[str, mx.array]:
    """Return the arrays of a managed module by their flat names: of its linear layer, without the bias."""
    linear = module if isinstance(module, nn.QuantizedEmbedding) else linear_of(module)
    return {name: array for name, array in tree_flatten(linear.parameters()) if name != "bias"}


def is_same(made: Gears, arrays: Mapping[int, Mapping[str, mx.array]]) -> bool:
    """Return True if modules have these arrays, by their names."""
    found = {bits: packed_arrays(module) for bits, module in made.items()}
    return all(
        found[bits].keys() == own.keys() and all(found[bits][name] is array for name, array in own.items())
        for bits, own in arrays.items()
    )


def made_over(
    format: Format,
    dense: nn.Module,
    bits: int,
    stored: Sequence[int],
    group_size: int,
    dtype: mx.Dtype,
    base: Planes | None,
) -> dict[int, nn.Module]:
    """Return `Format.modules`, with the codes of a calibrated base if the lowest gear is among them."""
    makes_lowest = bits == stored[0] or bool(format.ladders)
    if base is None or not makes_lowest or not format.takes_base:
        return format.modules(dense, bits, stored, group_size, dtype)
    return format.over_base(dense, base, stored, dtype)


def bytes_of(
    format: Format,
    shape: tuple[int, ...],
    bits: int,
    stored: Sequence[int],
    group_size: int,
    size: int,
    made: nn.Module | None,
) -> int:
    """Return the bytes that one use of a weight reads. A format estimates outliers; a module knows their number."""
    if bits == DENSE and DENSE not in stored:
        return math.prod(shape) * size
    counted = 0 if made is None else getattr(linear_of(made), "bytes_read", 0)
    return counted or format.bytes_read(shape, bits, stored, group_size, size)


def whole_embedding(made: Mapping[int, nn.Module], is_table: bool, dtype: mx.Dtype) -> dict[int, nn.Module]:
    """Return bits to embedding, with rows of `dtype`, from two linear layers of which the 16-bit one is exact.

    is_table: True for an embedding that is not the output head.
    """
    low = min(made)
    exact = made[DENSE]
    packed = quantized_table(affine_planes(made[low]), dtype) if is_table else QuantizedTied(made[low], dtype)
    return {low: packed, DENSE: ExactTied(exact, exact, dtype)}


@dataclass(frozen=True)
class FromFiles(Source):
    """A source that reads gears from a geared checkpoint.

    dtypes: path to the type of a layer's scales, and of its 16-bit weight. panels: True if codes may be in panels.
    """

    saved: SavedGears
    dtypes: Mapping[str, mx.Dtype]
    compute_dtype: mx.Dtype
    panels: ClassVar[bool] = True

    def widths(self, layer: Layer) -> tuple[int, ...]:
        return self.saved.widths(layer)

    def bytes_read(self, layer: Layer, bits: int, made: nn.Module | None) -> int:
        manifest, size = self.saved.manifest, self.saved.storage(layer.path).size
        saved, format = manifest.changing[layer.path], manifest.format_of(layer.path)
        return bytes_of(format, saved.shape, bits, manifest.stored(layer.path), manifest.group_size, size, made)

    def rows_at(self, layer: Layer, bits: int) -> int:
        return self.saved.manifest.changing[layer.path].rows_at(bits)

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        return {bits: self.saved.module(layer, bits, self.dtypes[layer.path], self.compute_dtype, self.panels)}

    def read(self, made: Mapping[str, Iterable[nn.Module]], originals: Mapping[str, mx.array]) -> None:
        self.saved.read([module.parameters() for modules in made.values() for module in modules])


@dataclass(frozen=True)
class FromCodes(Source):
    """A source that splits the codes of a checkpoint that is already quantized (in_place.py).

    codes: the arrays of its modules are removed when they are split.
    samples: of the arrays that were split, for the model's fingerprint; reading all for it would take twice the memory.
    """

    codes: OwnCodes
    ladder: Ladder
    compute_dtype: mx.Dtype
    samples: Samples = field(default_factory=dict)

    def widths(self, layer: Layer) -> tuple[int, ...]:
        return widths_in(layer, self.codes.modules[layer.path].bits, [gear.bits for gear in self.ladder])

    def for_ladder(self, ladder: Ladder) -> "FromCodes":
        return dataclasses.replace(self, ladder=ladder)

    def bytes_read(self, layer: Layer, bits: int, made: nn.Module | None) -> int:
        weight = layer.module.weight  # only the first plane has biases
        group_size = self.codes.modules[layer.path].group_size
        return math.prod(weight.shape) * bits // 8 + 2 * weight.size // group_size * weight.dtype.size

    def rows_at(self, layer: Layer, bits: int) -> int:
        return bits

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        raise AssertionError(f"{layer.path} has all of its gears from the start")

    def read(self, made: Mapping[str, Iterable[nn.Module]], originals: Mapping[str, mx.array]) -> None:
        for path, modules in made.items():
            arrays = tree_flatten([module.parameters() for module in modules])
            mx.eval(arrays)
            scales = {id(array): array for name, array in arrays if "scales" in name}  # gears share them
            if not all(map(is_finite, scales.values())):
                raise GearbxError(f"{path}: scales are not finite; check the checkpoint")

    def make_all(self, layers: Iterable[Layer]) -> dict[str, Gears]:
        """Return all gears of all layers; a layer's array of the checkpoint is dropped once its planes are made.

        The largest layer comes first, since weights that are not read yet take no memory.
        """
        layers, made = list(layers), dict[str, Gears]()
        for layer in sorted(layers, key=lambda layer: -layer.module.weight.size):
            stored = self.codes.modules[layer.path]
            arrays = tree_flatten(stored.parameters())
            self.samples.update(samples_of({f"{layer.path}.{name}": array for name, array in arrays}))
            del arrays
            made[layer.path] = self._gears(layer, stored)
            self.read({layer.path: made[layer.path].values()}, {})
        return {layer.path: made[layer.path] for layer in layers}

    def _gears(self, layer: Layer, stored: nn.Module) -> Gears:
        widths, dense, native = self.widths(layer), linear_of(layer.module), isinstance(layer.module, Native)
        if len(widths) == 1 and not native:
            return {widths[0]: stored}
        affine = affine_planes(stored)
        if layer.is_table:
            return {widths[0]: quantized_table(affine, self.compute_dtype)}
        split = split_for_kernels(dense, affine, plane_widths(widths))
        mx.eval(split.arrays)
        del affine
        stored.clear()
        *low, top = widths
        lower = [split.prefix(bits) if native else split.prefix(bits).with_biases() for bits in low]
        linears = {bits: planes_module(dense, planes) for bits, planes in zip(low, lower)}
        linears[top] = planes_module(dense, split, joined=not native)
        if not isinstance(layer.module, nn.Embedding):
            return linears
        if not low:
            return {top: tied_to(linears[top], self.compute_dtype)}
        return {bits: ExactTied(linear, linears[top], self.compute_dtype) for bits, linear in linears.items()}


@dataclass(frozen=True)
class ExternalLowGear(Source):
    """A source whose lowest gear has the modules of a second model.

    others: source of the other gears. bits: of the lowest gear. layers: path to its module. bytes: path to the bytes
    that one use of this module reads, without its bias.
    """

    others: FromWeights
    bits: int
    layers: Mapping[str, nn.Module]
    bytes: Mapping[str, int]

    def widths(self, layer: Layer) -> tuple[int, ...]:
        return tuple(sorted({self.bits, *self.others.widths(layer)}))

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        return {bits: self.layers[layer.path]} if bits == self.bits else self.others.modules(layer, bits)

    def bytes_read(self, layer: Layer, bits: int, made: nn.Module | None) -> int:
        return self.bytes[layer.path] if bits == self.bits else self.others.bytes_read(layer, bits, made)

    def rows_at(self, layer: Layer, bits: int) -> int:
        return bits if bits == self.bits else self.others.rows_at(layer, bits)

    def read(self, made: Mapping[str, Iterable[nn.Module]], originals: Mapping[str, mx.array]) -> None:
        self.others.read(made, originals)


def external_low_gear(model: nn.Module, layers: Iterable[Layer], others: Source, residency: str) -> ExternalLowGear:
    """Return the source of a gearbox whose lowest gear is a quantized model.

    The model has the same architecture, as from mlx-lm's DWQ, AWQ, GPTQ and dynamic quantization. A layer has
    native kernels if it has them in the other gears. Dense layers of the quantized model stay dense.

    Raises GearbxError for a model that is not quantized, or has other layers; a residency other than resident.
    """
    if not isinstance(others, FromWeights):
        raise GearbxError("a geared checkpoint has its own low gear; use the original with --base")
    if residency != "resident":
        raise GearbxError(
            f"residency {residency} drops idle gears, but cannot read back a second model's; use resident"
        )
    if len(others.ladder) < 2:
        raise GearbxError(f"gears {others.ladder} have none above the low gear; use at least two gears")
    if not is_quantized(model):
        raise GearbxError("the model for the low gear is not quantized; use a quantized model")
    found, low_layers, storage = dict(model.named_modules()), {}, stored_dtype(model)
    for layer in layers:
        module = found.get(layer.path)
        own = dense_shape(layer.module)
        if module is None or dense_shape(module) != own:
            problem = "no such layer" if module is None else f"{dense_shape(module)} instead of {own}"
            raise GearbxError(f"the model for the low gear does not fit: {problem} at {layer.path}; use a matching one")
        low_layers[layer.path] = in_gear(module, layer, others.compute_dtype)
    low, rest = others.ladder[0], Ladder([gear.bits for gear in others.ladder][1:])
    read = {path: layer_bytes(found[path], storage) for path in low_layers}
    read = {path: size - storage.size * found[path].get("bias", mx.zeros(0)).size for path, size in read.items()}
    return ExternalLowGear(others.for_ladder(rest), low.bits, low_layers, read)


def in_gear(module: nn.Module, layer: Layer, dtype: mx.Dtype) -> nn.Module:
    """Return a layer of the quantized model for this gearbox: with native kernels, or converted to `dtype`."""
    affine = getattr(module, "mode", None) == "affine"
    if affine and any(isinstance(module, kind) for kind in QUANTIZED_AS.values()):
        made = planes_module(layer.module, for_kernels(layer.module, affine_planes(module)))
        if "bias" in module:
            made.bias = module.bias
    elif affine and isinstance(module, nn.QuantizedEmbedding) and isinstance(layer.module, Native):
        head = linear_of(layer.module)
        linear = planes_module(head, for_kernels(head, affine_planes(module)))
        return tied_to(linear, dtype)
    else:
        made = with_kernels(module, isinstance(layer.module, Native))
    if not isinstance(made, Native):
        cast(made, dtype)
    return made


def tied_to(linear: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """Return a tied embedding over affine codes in one plane or several. dtype: of the rows of input tokens."""
    return ExactTied(linear, linear, dtype) if isinstance(linear, PlanesModule) else QuantizedTied(linear, dtype)


def cast(module: nn.Module, dtype: mx.Dtype) -> None:
    """Convert the floating parameters of a module to `dtype`, in place."""
    module.update(
        tree_map(lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a, module.parameters())
    )


def differing(
    model: nn.Module, other: nn.Module, managed: Collection[str], dtype: mx.Dtype
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the other modules that the quantizer changed: norms, into which AWQ puts scales, and embeddings.

    Both are by path: of `model`, and of `other`, whose parameters are converted to `dtype`.
    """
    before, after = layers_of(model), dict(other.named_modules())
    parents = {path.rpartition(".")[0] for path in before}
    changed = []
    for path, module in before.items():
        if path in parents or path in managed or path not in after or not module.parameters():
            continue
        own, its = (dict(tree_flatten(m.parameters())) for m in (module, after[path]))
        if own.keys() != its.keys() or not all(mx.array_equal(own[n], its[n].astype(own[n].dtype)) for n in own):
            cast(after[path], dtype)
            after[path] = with_kernels(after[path], type(module) in FUSED.values())
            changed.append(path)
    return {path: before[path] for path in changed}, {path: after[path] for path in changed}


def size_of(layer: Layer) -> int:
    """Return the bytes of a layer's weight. The largest is made first, while little else is in memory."""
    return layer.module.weight.nbytes


class NewModules(NamedTuple):
    """Modules that were made together, as arguments of `Source.keep`."""

    bits: Mapping[str, int]
    layers: Sequence[Layer]
    made: Mapping[str, Gears]


class GearModules:
    """The modules of the managed layers, made and dropped as needed.

    made: path to the existing gears of a layer; None: a layer has only its original.
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
        self.made: dict[str, dict[int, nn.Module]] = {
            layer.path: {DENSE: layer.module} if made is None else made[layer.path] for layer in layers
        }
        self._unread: dict[str, list[nn.Module]] = {}  # made, but not evaluated
        self._new: list[NewModules] = []  # made, but not kept for later starts
        # Layers whose original belongs to no gear, and the bits that are made from it.
        widths = {layer.path: {*source.widths(layer)} for layer in layers} if self.has_originals else {}
        self._passing = {path: stored for path, stored in widths.items() if DENSE not in stored}

    def make(self, bits: Bits) -> dict[str, nn.Module]:
        """Return path to module at these bits; missing modules are made, unevaluated."""
        missing = [layer for layer in self.layers if bits[layer.path] not in self.made[layer.path]]
        if self.has_originals:
            self.residency.enter({(layer.path, DENSE): layer.module for layer in missing})
        found, fresh = self.source.find(bits, missing), dict[str, Gears]()
        for layer in sorted(missing, key=size_of, reverse=True):
            made = found.get(layer.path) or self.source.modules(layer, bits[layer.path])
            if layer.path not in found:
                self._unread.setdefault(layer.path, []).extend(made.values())
                fresh[layer.path] = made
            self.made[layer.path] = made | self.made[layer.path]
        if missing and not found:
            self._new.append(NewModules(dict(bits), missing, fresh))
        chosen = {path: made[bits[path]] for path, made in self.made.items()}
        self.kernels.take(chosen.values())
        return chosen

    def complete(self, bits: Bits) -> dict[str, nn.Module]:
        """Return `make`'s modules, evaluated."""
        modules = self.make(bits)
        unread = {path: made for path, made in self._unread.items() if any(m is modules[path] for m in made)}
        try:
            self.source.read(unread, {path: self.made[path][DENSE].weight for path in unread if self.has_originals})
        except BaseException:  # so that other gears do not wait for modules that could not be read
            for path, made in unread.items():
                dropped = {*map(id, made)}
                self.made[path] = {bits: m for bits, m in self.made[path].items() if id(m) not in dropped}
                del self._unread[path]
            self._new.clear()
            raise
        for path in unread:
            del self._unread[path]
        waiting = [one for one in self._new if not self._unread.keys().isdisjoint(one.made)]
        done, self._new = [one for one in self._new if all(one is not other for other in waiting)], waiting
        for one in done:
            self.source.keep(*one)
        self.kernels.measure(modules.values())
        return modules

    def enter(self, bits: Bits) -> None:
        """Read dropped modules back into memory."""
        self.residency.enter({(path, bits[path]): made[bits[path]] for path, made in self.made.items()})

    def drop_originals(self) -> None:
        """Drop the originals that belong to no gear, once all gears are made from them."""
        done = [path for path, widths in self._passing.items() if widths <= self.made[path].keys()]
        for path in done:
            self.made[path][DENSE].weight = EMPTY
            del self._passing[path]
        if done:
            return_memory()

    def drop_idle(self, engaged: Bits, model: nn.Module) -> None:
        """Drop modules that are not engaged, depending on the residency."""
        idle = {
            (path, bits): module
            for path, made in self.made.items()
            for bits, module in made.items()
            if bits != engaged[path]
        }
        self.residency.leave(idle, model)


Advance = Callable[[int], object]


def no_advance(done: int) -> None:
    pass


def no_progress(total: int) -> AbstractContextManager[Advance]:
    return nullcontext(no_advance)


# Context of encoding `total` bytes, for seconds; called with the bytes of each finished layer. A command puts
# its progress bar here.
while_encoding: Callable[[int], AbstractContextManager[Advance]] = no_progress


def refuse_other_codes(
    layout: Layout, layers: Sequence[Layer], tables: Mapping, low_model: nn.Module | None, residency: str
) -> None:
    """Validate settings against formats with their own codes, or without originals. Raises GearbxError."""
    name = layout.format.name
    if layout.codes is not None:
        others = {"tables": tables, "low_model": low_model, f"residency '{residency}'": residency != "resident"}
        for given in (what for what, value in others.items() if value):
            raise GearbxError(
                f"the model is quantized already, and its gears are the first bits of its codes; omit {given}, "
                "or use the original"
            )
        return
    if tables:
        raise GearbxError(f"format {name} has the same bits in every layer; omit tables")
    if low_model is not None:
        raise GearbxError(f"format {name}: all gears share one copy of the weights, got a separate low model; omit it")
    if residency == "disk" and layout.saved is None:
        raise GearbxError(
            f"format {name} has no originals to read back from disk; use gearbx_mlx convert to write its gears, "
            "or omit residency 'disk'"
        )
    shared = collections.Counter(id(layer.module) for layer in layers)
    for layer in layers:
        if shared[id(layer.module)] > 1:
            raise GearbxError(f"{layer.path} is a module in two places, which format {name} cannot drop; use planes")


def make_all(layers: Sequence[Layer], source: FromWeights) -> tuple[dict[str, Gears], dict[str, str]]:
    """Make all gears of all layers, and drop each original once its gears exist; if this fails, restore all.

    Returns path to the gears of a layer, and path to reason of unchanged layers: they would become larger, or have
    floors. Raises GearbxError if all do.
    """
    made: dict[str, Gears] = {}
    larger: dict[str, str] = {}
    size = sum(layer.module.weight.nbytes for layer in layers)
    lowest = {layer.path: source.widths(layer)[0] for layer in layers}
    found = source.find(lowest, layers)
    with restoring_weights(layers, made):
        with nullcontext(no_advance) if found else while_encoding(size) as advance:
            for layer in sorted(layers, key=size_of, reverse=True):
                gears, reason = (found[layer.path], None) if layer.path in found else all_gears(layer, source)
                if reason:
                    larger[layer.path] = reason
                else:
                    made[layer.path] = gears
                if len(gears) > 1:
                    layer.module.weight = mx.zeros_like(layer.module.weight)  # never evaluated
                    if size_of(layer) >= LARGE_BYTES:
                        return_memory()  # few arrays of the other layers are as large as those that it freed
                advance(layer.module.weight.nbytes)
        if not any(layer.path in made for layer in layers if not layer.is_table):
            raise none_managed(larger)
    if not found:
        source.keep(lowest, layers, made)
    return made, larger


@contextmanager
def restoring_weights(layers: Sequence[Layer], made: Mapping[str, Gears] | None) -> Iterator[None]:
    """Restore the weights of layers that were dropped for their gears, if the block fails."""
    try:
        yield
    except BaseException:
        for layer in layers:
            if made and len(made.get(layer.path, {})) > 1:
                layer.module.weight = dense_weight(linear_of(made[layer.path][DENSE]))
        raise


def all_gears(layer: Layer, source: FromWeights) -> tuple[Gears, str | None]:
    """Return all gears of a layer, evaluated; or none, and the reason for leaving it unchanged."""
    lowest, *others = source.widths(layer)
    if not others:
        return {}, f"has a floor of {layer.lowest_bits} bits, which format {source.format.name} does not have"
    gears = source.modules(layer, lowest)
    source.read({layer.path: gears.values()}, {layer.path: layer.module.weight})
    reason = too_large(linear_of(gears[DENSE]))
    return ({}, reason) if reason else (gears, None)


def looks_quantized(weights: Sequence[mx.array]) -> bool:
    """Return True if dense matrices (..., O, I) have so few different values that they must have been quantized.

    In a few of their rows, the median group of 32 (the smallest in use) has at most 16 values, as with 4-bit codes; or
    the median row of 1024 or more at most 256, as with one 8-bit scale.
    """
    in_group: list[int] = []
    in_row: list[int] = []
    for weight in weights[:: max(1, len(weights) // 8)]:
        rows = weight.reshape(-1, weight.shape[-1])
        sample = np.array(rows[:: max(1, rows.shape[0] // 8)][:8].astype(mx.float32))
        for row in sample:
            in_group += [len(np.unique(group)) for group in row[: len(row) // 32 * 32].reshape(-1, 32)]
            if len(row) >= 1024:
                in_row.append(len(np.unique(row)))
    few_in_groups = bool(in_group) and statistics.median(in_group) <= 16
    return few_in_groups or (bool(in_row) and statistics.median(in_row) <= 256)


def warn_if_quantized(weights: Sequence[mx.array]) -> None:
    """Warn if weights look quantized: quantizing them again increases the error."""
    if looks_quantized(weights):
        warnings.warn(
            "the weights have few different values, as if they had been quantized before: quantizing them again "
            "increases their error, most of all in the lowest gear; use the original",
            GearbxWarning,
            stacklevel=3,
        )
