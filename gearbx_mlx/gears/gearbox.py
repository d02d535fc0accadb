"""The gearbox: the module of every managed layer in every gear; a shift puts one gear's into the model (GEARBX 6).

A model has one gearbox, and a fingerprint that is the same in any gear. `Observer` is a gearbox that only observes, for
quantized checkpoints, or if no layer may change.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..compat.classes import CompiledSteps
from ..compat.versions import warn_if_untested
from ..errors import GearbxError
from ..formats.base import Format
from ..formats.tied import linear_of
from ..kernels.bit_planes import Planes
from ..kernels.device import check_device, device_in_use
from ..kernels.dispatch import KernelChoice, on_cpu
from .activations import CurrentType, compute_in, layer_bytes, model_dtype, stored_dtype
from .adapters import base_arrays, layers_of, places_of, put_layers, tree_of
from .cost import (
    LayerPath,
    experts_of,
    kernels_of,
    token_bytes,
    warn_of_unknown_routing,
    whole_model_speedup,
)
from .discovery import DENSE_LAYERS, QUANTIZED, Layer, Predicate, at_least, at_most, none_managed, tied_head
from .in_place import own_codes
from .kept import KeptGears, kept_gears
from .kernel_choices import KernelChoices, choose_kernels
from .ladder import DEFAULT_ACTIVATIONS, DEFAULT_KERNELS, DEFAULT_LADDER, DENSE, Gear, Ladder
from .layout import (
    Layout,
    check_tables,
    compute_model_in,
    has_quantized,
    layout_of,
    managed_layers,
    use_kernels,
)
from .mapped import active_memory, forget
from .offload import Disk, Residency, large_pages
from .ownership import ATTACHED, own, why_unsaveable
from .saved import saved_gears
from .sharding import dense_shape, divided_parts, sharding_of
from .sources import (
    FromCodes,
    FromFiles,
    FromWeights,
    GearModules,
    Source,
    differing,
    external_low_gear,
    make_all,
    refuse_other_codes,
    restoring_weights,
    warn_if_quantized,
)
from .streaming import Stream, StreamedFiles, residency_of
from .tensor_files import Samples, fingerprint_of, samples_of, with_adapters


@dataclass(frozen=True)
class Parts:
    """The parts of a Gearbox: layers, on their kernels and in their types, and the source of their modules.

    unmanaged: path to reason of the linear layers that do not change gear. tables: bits of a gear to bits of layers.
    extra_modules: True for the lowest gear, to the other modules that change with it. made: path to the initial gears,
    if originals are dropped; None: the originals.
    """

    layers: list[Layer]
    embeddings: list[Layer]
    unmanaged: dict[str, str]
    head: str | None
    tables: dict[int, Mapping[str, int]]
    places: dict[str, str]
    kernels: KernelChoice
    compute_dtype: mx.Dtype
    storage: dict[str, mx.Dtype]
    residency: Residency
    source: Source
    extra_modules: dict[bool, dict[str, nn.Module]]
    made: dict[str, dict[int, nn.Module]] | None
    fingerprint: str


def parts_of(
    model: nn.Module,
    layout: Layout,
    *,
    manage: str | Predicate | None,
    residency: str,
    checkpoint: str | Path | None,
    dtype: str,
    kernels: str,
    activations: str,
    tables: Mapping[str, Mapping[str, int]],
    widths: Sequence[int],
    low_model: nn.Module | None,
    base: Mapping[str, Planes],
    kept: KeptGears | None,
) -> Parts:
    """Put a model on its kernels and in its type, and return the parts of its gearbox; arguments as of `Gearbox`."""
    coded = set() if layout.codes is None else {*layout.codes.modules}
    fingerprint = "" if coded else model_fingerprint(model)
    layers, embeddings, unmanaged = managed_layers(model, layout, manage)
    samples = samples_beside(model, coded) if coded else {}
    head, of_gears = tied_head(model), check_tables(tables, layout.ladder, layers)
    if layout.format.ladders or layout.of_codes:
        refuse_other_codes(layout, layers, of_gears, low_model, residency)
    quantized = has_quantized(layout, of_gears, widths)
    if quantized and not layers and layout.codes is None:
        raise none_managed(unmanaged)
    chosen = choose_kernels(kernels, quantized, activations, bool(layout.format.ladders), layout.format.rounds)
    places = places_of(model)
    layers, embeddings = use_kernels(model, chosen, layers, embeddings)
    changing = [*layers, *embeddings]
    # With MLX's kernels, results equal mlx-lm's with a quantized checkpoint, in its type.
    in_float32 = chosen.native or (quantized and not layout.of_codes)
    types = compute_dtype, storage, scales = compute_model_in(model, changing, layout, dtype, in_float32)
    place = residency_of(residency, layout.saved, model, checkpoint, scales)
    source, extra = source_of(layout, changing, types, place, of_gears, widths, base, kept), {}
    if low_model is not None:
        source = external_low_gear(low_model, layers, source, residency)
        others = differing(model, low_model, {layer.path for layer in layers}, compute_dtype)
        extra = dict(zip((False, True), others))
    if quantized and layout.saved is None and layout.codes is None:
        warn_if_quantized([layer.module.weight for layer in layers])
    warn_of_unknown_routing(model)
    made, larger = made_at_once(source, changing, layout)
    if isinstance(source, FromCodes) and coded:
        fingerprint = with_adapters(fingerprint_of(samples | source.samples), model)
    layers, embeddings = ([each for each in found if each.path not in larger] for found in (layers, embeddings))
    known = unmanaged | larger, head, of_gears, places, chosen, compute_dtype, storage, place, source, extra, made
    return Parts(layers, embeddings, *known, fingerprint)


def source_of(
    layout: Layout,
    changing: Sequence[Layer],
    types: tuple[mx.Dtype, dict[str, mx.Dtype], dict[str, mx.Dtype]],
    residency: Residency,
    tables: Mapping[int, Mapping[str, int]],
    widths: Sequence[int],
    base: Mapping[str, Planes],
    kept: KeptGears | None,
) -> Source:
    """Return the source of modules: files or quantized weights of a checkpoint, or the model's weights. types: its."""
    compute_dtype, storage, scales = types
    if layout.saved is not None and isinstance(residency, Stream):
        return StreamedFiles(layout.saved, scales, compute_dtype, residency.reader)
    if layout.saved is not None:
        return FromFiles(layout.saved, scales, compute_dtype)
    if layout.codes is not None:
        return FromCodes(layout.codes, layout.ladder, compute_dtype)
    shapes = {layer.path: layer.module.weight.shape for layer in changing}
    settings = layout.format, layout.ladder, layout.group_size, storage, compute_dtype, shapes
    return FromWeights(*settings, tables, widths, base, kept)


def made_at_once(
    source: Source, changing: list[Layer], layout: Layout
) -> tuple[dict[str, dict[int, nn.Module]] | None, dict[str, str]]:
    """Return path to the initial gears (all of them if originals are dropped); None: the originals.

    The second result is path to reason of the layers that do not change.
    """
    if isinstance(source, FromCodes):
        return source.make_all(changing), {}
    if layout.saved is not None:
        return {layer.path: {} for layer in changing}, {}
    if not layout.format.ladders:
        return None, {}
    assert isinstance(source, FromWeights)
    return make_all(changing, source)


class GearThread:
    """A thread that makes a gear."""

    def __init__(self, gear: Gear, make: Callable[[], Any]):
        self.gear = gear
        pool = ThreadPoolExecutor(1, thread_name_prefix="gearbx make")
        self._done = pool.submit(self._timed, make)
        pool.shutdown(wait=False)  # it ends with its work

    def __deepcopy__(self, memo: dict) -> None:
        """Return None: a copy of the model makes its own gears."""

    def has_made(self, gear: Gear) -> bool:
        """Return True if the gear is this one, and made."""
        return gear == self.gear and self._done.done()

    def wait(self) -> float:
        """Return the seconds that making the gear took, once it is made. Raises any error of the thread."""
        return self._done.result()

    @staticmethod
    def _timed(make: Callable[[], Any]) -> float:
        start = time.perf_counter()
        make()
        return time.perf_counter() - start


class Gearbox:
    """A model's modules at several precisions, one of them engaged.

    A gear is made when it is first engaged, and kept. A shift swaps all layers, or none: if it fails, the model stays
    in its current gear. After construction the model is in the top gear. A 16-bit top gear has the original
    arrays. On a CPU, a half-precision model is put into float32 if the ladder has quantized gears (`dtype`).

    A geared checkpoint has its gears in files, and reads them when they are first engaged. After construction such a
    model is in the lowest gear; ladder, format, manage and group size come from the checkpoint.

    Args:
        model: an mlx-lm model with original or affine weights, or a geared checkpoint's model.
        ladder: a Ladder, or text such as "4,8,16", the default ("4,16" for format "exact"). For a geared
            checkpoint, some of its gears.
        format: storage of quantized gears: "planes" (the default), "affine", "rowwise" (per-channel),
            "groupwise", "codebook", "codebook-library", or a Format. "exact" replaces bfloat16 weights by one copy
            that contains all gears, the top one bit for bit.
        manage: "all" linear layers, "attention", "mlp", or a predicate (path, module) -> bool or {"bits": lowest}.
            "everything" also includes towers for images and sound.
        group_size: inputs that share a scale: 32, 64 or 128; rowwise and groupwise have their own.
        residency: location of idle gears: "resident" (memory), or "disk" (read again). "stream" reads the top
            gear's layers from a geared checkpoint of format exact at every use.
        checkpoint: the model's directory, for "disk".
        dtype: the type to compute in: "auto", "float32", "bfloat16" or "float16".
        kernels: "mlx": MLX's kernels; the top gear is then bit-identical to mlx-lm. "native": the package's kernels,
            compiled for this CPU or for Metal; results differ from MLX's in the last bits. "auto": on a CPU the fastest
            measured ones, if the ladder has quantized gears; on a GPU MLX's, and on a Mac proven native ones.
            "measure": the fastest, after new measurements.
        activations: precision of activations in native CPU kernels. "float": not quantized. "int16", "int8":
            quantized to 16 or 8 bits, with one scale for each token and group of inputs. int16 is more exact than
            bfloat16, int8 is faster (docs/performance.md). With bfloat16 weights, both may round to bfloat16.
        tables: name of a gear to path to bits, for layers whose bits differ from the gear's.
        widths: additional bits at which every layer is stored, so that `cap` can use them.
        low_model: a quantized model that becomes the lowest gear: its layers, and all else that its quantizer changed.
        base: path to the plane of a layer in the lowest gear, from `calibrate_base`; other layers are rounded.
        keep: use gears that an earlier start kept in the user's cache, and keep new ones. The model must be unchanged
            since `load`.

    Raises:
        GearbxError: an unknown argument, unsupported bits, a quantized model, no layer to manage, or a table of an
            unknown gear or layer.

    A gearbox is for MLX's device at its construction (`device`), and refuses to shift on a different one.
    """

    def __init__(
        self,
        model: nn.Module,
        ladder: Ladder | str | None = None,
        *,
        format: str | Format | None = None,
        manage: str | Predicate | None = None,
        group_size: int | None = None,
        residency: str = "resident",
        checkpoint: str | Path | None = None,
        dtype: str = "auto",
        kernels: str = DEFAULT_KERNELS,
        activations: str = DEFAULT_ACTIVATIONS,
        tables: Mapping[str, Mapping[str, int]] | None = None,
        widths: Sequence[int] = (),
        low_model: nn.Module | None = None,
        base: Mapping[str, Planes] | None = None,
        keep: bool = False,
    ):
        warn_if_untested()
        kept = kept_gears(model) if keep and residency == "resident" and not base else None
        layout = layout_of(model, ladder, format, manage, group_size)
        how: dict[str, Any] = {"manage": manage, "residency": residency, "checkpoint": checkpoint, "dtype": dtype}
        how |= {"kernels": kernels, "activations": activations, "tables": tables or {}, "widths": widths}
        stored = layout.saved or layout.codes  # whose layers are blank until their gears are made
        before = {path: module for path, module in layers_of(model).items() if stored and "weight" in module}
        try:
            parts = parts_of(model, layout, **how, low_model=low_model, base=base or {}, kept=kept)
        except BaseException:
            put_layers(model, before)
            raise
        self.model, self.saved, self.device = model, layout.saved, device_in_use()
        self.ladder, self.format, self.group_size = layout.ladder, layout.format, layout.group_size
        self.in_place, self.of_codes = layout.codes is not None, layout.of_codes
        self.layers, self._embeddings, self.unmanaged = parts.layers, parts.embeddings, parts.unmanaged
        self.source, self._extra_modules, self.base = parts.source, parts.extra_modules, base or {}
        self.fingerprint, self.head, self._tables = parts.fingerprint, parts.head, parts.tables
        self.kernels, self.compute_dtype, self.storage = parts.kernels, parts.compute_dtype, parts.storage
        self.residency = parts.residency
        self.keeps_all = not isinstance(self.residency, Disk)  # idle gears stay in memory
        self._places, self._widths = parts.places, tuple(widths)
        self._shapes = {layer.path: layer.module.weight.shape for layer in self.layers}
        self._biases = {layer.path: layer.module.bias.size if "bias" in layer.module else 0 for layer in self.layers}
        with restoring_weights(self._changing, None if self.in_place else parts.made):
            self._attach(parts.made)

    def _attach(self, made: dict[str, dict[int, nn.Module]] | None) -> None:
        """Put the gearbox on its model. made: the gears that exist."""
        self.kernel_choices = KernelChoices(self.model, self.kernels, self.compute_dtype)
        self._modules = GearModules(self._changing, self.source, self.residency, made, self.kernel_choices)
        self.compiled = CompiledSteps(self.model)
        self._current_type = CurrentType(self.model, [layer.module for layer in self._changing], self.compute_dtype)
        setattr(self.model, ATTACHED, self)
        own(self.model, self._shapes, partial(why_unsaveable, self), partial(trees_of, self))
        self._begin()

    def _begin(self) -> None:
        """Engage the first gear: the top one, or the lowest of a geared checkpoint for a fast start."""
        self._prepared: set[Gear] = set()
        self._making: GearThread | None = None
        self._caps: dict[str, int] = {}
        self._token_bytes: dict[tuple[Gear, int], int] = {}
        self._caches: dict[Gear, list[nn.Module]] = {}  # modules that drop reconstructions when their gear is left
        self.shifts, self.shift_seconds, self.making_seconds = 0, 0.0, 0.0
        first = self.ladder.top if self.saved is None else self.ladder[0]
        as_loaded = first.dense and self._modules.has_originals and not self._tables.get(DENSE)
        self.gear = first if as_loaded else Gear(len(self.ladder), "original", DENSE)
        now = {layer.path: layer.module for layer in self._changing} | self._extra_modules.get(False, {})
        self._trees, self.active_memory = {self.gear: tree_of(now, self._places)}, dict[str, int]()
        if self.gear != first:
            self.shift(first)
            self.shifts, self.shift_seconds = 0, 0.0  # the first read from files counts as making
            if self.saved is not None:  # parameters that no gear changes: no other thread could read them
                self.saved.read(self.model.parameters())
            elif self.in_place:
                mx.eval(self.model.parameters())
        else:
            self.active_memory[first.name] = active_memory()

    def widths_of(self, layer: Layer) -> tuple[int, ...]:
        """Return all bits of a layer, ascending; for a geared checkpoint all stored ones, unless `widths` chose."""
        widths = self.source.widths(layer)
        if self.saved is None or not self._widths:
            return widths
        wanted = {at_least(widths, bits) for bits in (*(gear.bits for gear in self.ladder), *self._widths)}
        return tuple(bits for bits in widths if bits in wanted)

    def bits_of(self, layer: Layer, gear: Gear) -> int:
        """Return the bits of a layer in a gear, by its table and cap, rounded up to a stored width."""
        bits = self._stored_bits(layer, gear)
        return min(bits, at_most(self.source.widths(layer), self._caps.get(layer.path, bits)))

    def _stored_bits(self, layer: Layer, gear: Gear) -> int:
        """Return the bits of a layer in a gear without a cap."""
        widths = self.source.widths(layer)
        bits = at_least(widths, self._tables.get(gear.bits, {}).get(layer.path, gear.bits))
        return min(bits, widths[-1])  # a layer of a quantized checkpoint may have fewer bits than the top gear

    def cap(self, bits: Mapping[str, int]) -> None:
        """Limit the bits of layers from now on: path to the most bits in any gear. Layers not named have no limit.

        No weight is copied: only modules of the layers whose bits change are swapped. A layer without a width that low
        gets its lowest.

        Raises:
            GearbxError: no such layer; weights that cannot be quantized or read back. The caps stay unchanged.
        """
        unknown = bits.keys() - self._shapes.keys()
        if unknown:
            raise GearbxError(f"no layer {min(unknown)} changes gear, so it has no cap; use managed layers")
        if bits == self._caps:
            return
        before, gear = self._caps, self.gear
        self._bound(dict(bits))
        try:
            self._engage(gear)
        except BaseException:
            self._bound(before)
            self._engage(gear)
            raise

    @property
    def caps(self) -> Mapping[str, int]:
        """Path to the most bits of a layer; a new object after each change."""
        return self._caps

    def prepare(self, gear: Gear) -> None:
        """Make a gear that will soon be engaged; without waiting for it if idle gears stay in memory."""
        if gear in self._trees or gear in self._prepared:
            return
        self._end_making()
        if self.keeps_all:
            self._prepared.add(gear)
            mx.async_eval([m.parameters() for m in self._modules.make(self._bits_in(gear)).values()])
        else:
            self.make(gear)

    def module_in(self, path: str, gear: Gear) -> nn.Module | None:
        """Return the module of a layer in a gear, if it is made; None for a layer that does not change."""
        layer = next((layer for layer in self._changing if layer.path == path), None)
        return None if layer is None else self._modules.made[path].get(self.bits_of(layer, gear))

    def begin(self, gear: Gear) -> None:
        """Start making a gear in a thread while the model works in a different one; otherwise make it now.

        A thread makes planes only with native CPU kernels, since MLX binds its operations to threads.

        Raises:
            GearbxError: as `make`, if it is made now.
        """
        if gear in self._trees or (self._making is not None and self._making.gear == gear):
            return
        self._end_making()
        if self.keeps_all and self._modules.has_originals and self.makes_beside:
            self._making = GearThread(gear, partial(self._modules.make, self._bits_in(gear)))
        else:
            self.make(gear)

    @property
    def makes_beside(self) -> bool:
        """Flag for gears that `begin` makes in a thread."""
        layers = self._changing
        return isinstance(self.source, FromWeights) and all(self.format.shows_damage(layer.module) for layer in layers)

    def ready(self, gear: Gear) -> bool:
        """Return True if a gear is made, so that a shift to it is fast."""
        return gear in self._trees or (self._making is not None and self._making.has_made(gear))

    def make(self, gear: Gear) -> bool:
        """Make a gear's modules without engaging it. Returns True if there were none.

        Raises:
            GearbxError: weights that cannot be quantized or read back.
        """
        if gear in self._trees:
            return False
        self._complete(gear)
        self._drop_idle()
        return True

    def shift(self, gear: Gear | str | int) -> float:
        """Engage a gear, given as itself, a name or bits, and return the seconds that the shift took.

        Raises:
            GearbxError: no such gear; weights that cannot be quantized or read back; a newer gearbox on this model.
                The gear stays unchanged.
        """
        gear = self.ladder.find(gear)
        check_attached(self)
        if gear == self.gear:
            return 0.0
        start, made = time.perf_counter(), self.making_seconds
        before = self.gear
        self._engage(gear)
        for module in self._caches.get(before, ()):
            module.forget()
        seconds = time.perf_counter() - start
        self.shifts += 1
        self.shift_seconds += seconds - (self.making_seconds - made)
        self.active_memory[gear.name] = active_memory()
        return seconds

    def _bits_in(self, gear: Gear) -> dict[str, int]:
        """Return path of everything that changes to its bits in a gear."""
        return {layer.path: self.bits_of(layer, gear) for layer in self._changing}

    def _end_making(self) -> None:
        """Wait for the gear that `begin` started. Raises GearbxError for weights that cannot be quantized."""
        making, self._making = self._making, None
        if making is not None:
            self.making_seconds += making.wait()
            self._complete(making.gear)

    def _complete(self, gear: Gear) -> None:
        """Make, evaluate and load all modules of a gear."""
        if gear not in self._trees:
            self._end_making()
        if gear not in self._trees:
            start = time.perf_counter()
            size = sum(map(math.prod, self._shapes.values())) * gear.bits // 8 if self.keeps_all else 0
            with large_pages(size):
                modules = self._modules.complete(self._bits_in(gear))
            extra_modules = self._extra_modules.get(gear == self.ladder[0], {})
            self._trees[gear] = tree_of(modules | extra_modules, self._places)
            self._caches[gear] = [linear for linear in map(linear_of, modules.values()) if hasattr(linear, "forget")]
            self.making_seconds += time.perf_counter() - start
        if not self.keeps_all:
            self._modules.enter(self._bits_in(gear))

    def _drop_idle(self) -> None:
        self._modules.drop_originals()
        if not self.keeps_all:
            self._modules.drop_idle(self._bits_in(self.gear), self.model)

    def _engage(self, gear: Gear) -> None:
        """Put a gear into the model; if that fails, restore the previous one."""
        check_attached(self)
        before = self.gear
        self._complete(gear)
        try:
            self._current_type.follow(self._trees[gear])
            self.model.update_modules(self._trees[gear])
            self.compiled.change(before, gear)
            self.gear = gear
            self._drop_idle()
        except BaseException:  # includes interrupts: the model never has half of a gear
            self.gear = before
            self._complete(before)
            self.model.update_modules(self._trees[before])
            self.compiled.forget()
            raise

    def _bound(self, caps: dict[str, int]) -> None:
        """Set caps, and forget everything that depends on them."""
        self._caps = caps
        self.compiled.forget()
        for dependent in (self._trees, self._caches, self._token_bytes):
            dependent.clear()

    # Costs of gears: queries without side effects.

    @property
    def _changing(self) -> list[Layer]:
        """Everything that changes with the gear."""
        return [*self.layers, *self._embeddings]

    def layer_bytes(self, layer: Layer, at: Gear | int) -> int:
        """Return bytes that one use of a layer (all experts) reads in a gear or at a width, with scales and bias."""
        bits = at if isinstance(at, int) else self.bits_of(layer, at)
        if getattr(self.format, "cache", False) and not self.kernels.native:
            read = math.prod(self._shapes[layer.path]) * self._size(layer)  # bytes of the unpacked weight
        else:
            read = self.source.bytes_read(layer, bits, self._modules.made[layer.path].get(bits))
        return read + self._biases[layer.path] * self._size(layer)

    def bits_per_weight(self, gear: Gear) -> float:
        """Return the bits read per managed weight in a gear, including scales."""
        weights = sum(map(math.prod, self._shapes.values()))
        if not weights:
            return 8.0 * self.storage[""].size
        return 8 * sum(self.layer_bytes(layer, gear) for layer in self.layers) / weights

    def ladder_report(self) -> list[dict]:
        """Return name, bits and bytes per weight of each gear, and the bits of its layers if they differ."""
        return [self._gear_report(gear) for gear in self.ladder]

    def _gear_report(self, gear: Gear) -> dict[str, Any]:
        bits = {self._stored_bits(layer, gear) for layer in self.layers}
        others = {"layer_bits": [min(bits), max(bits)]} if bits - {gear.bits} else {}
        return {"name": gear.name, "bits": gear.bits, "bytes_per_weight": self.bits_per_weight(gear) / 8, **others}

    def weight_bytes_per_token(self, gear: Gear, positions: int = 1) -> int:
        """Return bytes of weights that a forward pass over some positions reads in a gear."""
        key = gear, positions
        if key in self._token_bytes:
            return self._token_bytes[key]
        if positions > 2 and not self._has_experts:
            one, two = (self.weight_bytes_per_token(gear, few) for few in (1, 2))
            return one + (positions - 1) * (two - one)  # each token reads one row of an embedding
        read = token_bytes(self.model, self._managed_bytes(gear, positions), self.storage, self.head, positions)
        if gear in self._trees:  # made, so that its layers have been counted
            self._token_bytes[key] = read
        return read

    @cached_property
    def _has_experts(self) -> bool:
        """Flag for models in which the bytes that a token reads depend on the other tokens."""
        modules = layers_of(self.model)
        return any(experts_of(path, modules) for path in modules)

    def _managed_bytes(self, gear: Gear, positions: int) -> dict[str, float]:
        """Return path to bytes read in one forward pass, for everything that changes with the gear."""
        managed: dict[str, float] = {layer.path: self.layer_bytes(layer, gear) for layer in self.layers}
        for layer in self.layers:
            if layer.path != self.head:
                continue
            bits = self.bits_of(layer, gear)
            if self.source.rows_at(layer, bits) != bits:  # rows of the embedding that the head does not read
                managed[layer.path] += positions * self._shapes[layer.path][-1] * self._size(layer)
        for table in self._embeddings:
            bits = self.bits_of(table, gear)
            rows = self.source.bytes_read(table, bits, self._modules.made[table.path].get(bits))
            managed[table.path] = rows * min(1.0, positions / len(table.module.weight))
        return managed

    def original_bytes_per_token(self) -> int:
        """Return bytes of weights that one token would read if every layer had its original weight.

        For a checkpoint that is already quantized, its quantized weights count.
        """
        if self.of_codes:
            return self.weight_bytes_per_token(self.ladder.top)
        managed = {
            layer.path: float((math.prod(self._shapes[layer.path]) + self._biases[layer.path]) * self._size(layer))
            for layer in self.layers
        }
        managed |= {table.path: float(table.module.weight.shape[-1] * self._size(table)) for table in self._embeddings}
        return token_bytes(self.model, managed, self.storage, self.head)

    def _size(self, layer: Layer) -> int:
        """Return bytes per number of a layer, as stored in the checkpoint."""
        return self.storage[layer.path].size

    def layer_paths(self) -> list[LayerPath]:
        """Return the kernels of every layer with reasons: managed layers, other linear layers, a tied head."""
        found = []
        for layer in self.layers:
            bits = tuple(self.bits_of(layer, gear) for gear in self.ladder)
            format = None if {*bits} == {DENSE} else self.format
            runs_on, why = kernels_of(layer.module, self.kernels, format)
            if self.source.disk_bytes(layer, bits[-1]):
                runs_on = f"{runs_on}, from the disk in gear '{self.ladder.top.name}'"
            found.append(LayerPath(layer.path, bits, runs_on, why))
        modules = layers_of(self.model)
        for path, reason in self.unmanaged.items():
            holder = path if path in modules else path.rpartition(".")[0]  # the module that has the matrix
            kernels = kernels_of(modules[holder], self.kernels, None)
            own = getattr(modules[holder], "bits", DENSE)
            found.append(LayerPath(path, (own,) * len(self.ladder), *kernels, fixed=reason))
        parts = {path: f"; this rank has {part}" for path, part in divided_parts(self.model).items()}
        return [dataclasses.replace(row, why=row.why + parts.get(row.path, "")) for row in found]

    def describe(self) -> str:
        """Return `layer_paths` as text, one line each: "lm_head: 4, 8, 16; native (16 vectors at a time)".

        For a model divided among ranks, a last line has the bytes that every rank reads.
        """
        lines, top = [*map(str, self.layer_paths())], self.ladder.top
        if divided_parts(self.model):
            whole, total = undivided_bytes_per_token(self, top), self.weight_bytes_per_token(top)
            lines.append(f"every rank reads the others, norms and a tied head whole: {whole} of {total} bytes a token")
        return "\n".join(lines)


def undivided_bytes_per_token(gearbox: Gearbox, gear: Gear) -> int:
    """Return the bytes per token that every rank reads: layers that the ranks have not divided."""
    managed = gearbox._managed_bytes(gear, 1) | dict.fromkeys(divided_parts(gearbox.model), 0.0)
    return token_bytes(gearbox.model, managed, gearbox.storage, gearbox.head)


def predicted_speedup(gearbox: Gearbox, gear: Gear) -> float:
    """Return the decoding speedup of a gear over the top gear, if time is proportional to bytes read (GEARBX 15)."""
    if not gearbox.layers:
        return 1.0
    fixed = dict.fromkeys((layer.path for layer in gearbox._changing), 0.0)
    unmanaged = token_bytes(gearbox.model, fixed, gearbox.storage, gearbox.head)
    top, here = (gearbox.weight_bytes_per_token(g) for g in (gearbox.ladder.top, gear))
    return whole_model_speedup((top - unmanaged) / top, (top - unmanaged) / (here - unmanaged))


def costed_in(gearbox: Gearbox, ladder: Ladder) -> Gearbox:
    """Return the same costs for a different ladder; the result cannot shift."""
    other = copy.copy(gearbox)
    other.ladder, other._token_bytes, other.source = ladder, {}, gearbox.source.for_ladder(ladder)
    return other


def trees_of(gearbox: Gearbox) -> Collection[Any]:
    """Return the trees that a shift puts into the model: the modules of each gear that is made."""
    return gearbox._trees.values()


def attached(model: nn.Module) -> Any:
    """Return the Gearbox that was last put on a model, or None."""
    return getattr(model, ATTACHED, None)


def check_attached(gearbox: Any) -> None:
    """Validate that a Gearbox is its model's current one, on MLX's current device. Raises GearbxError."""
    if attached(gearbox.model) is not gearbox:
        raise GearbxError("this gearbox was replaced by a newer one on the same model; use the newer one")
    check_device(gearbox.device)


def samples_beside(model: nn.Module, coded: set[str]) -> Samples:
    """Return samples of all arrays except of the layers with these paths, whose quantized weights are read later."""
    arrays = base_arrays(model)
    return samples_of({name: array for name, array in arrays.items() if name.rpartition(".")[0] not in coded})


def model_fingerprint(model: nn.Module) -> str:
    """Return the fingerprint of the model as loaded, in any gear; for a rank's part, the whole model's."""
    gearbox, saved, sharding = attached(model), saved_gears(model), sharding_of(model)
    if gearbox is not None:
        return gearbox.fingerprint
    if sharding is not None:
        return sharding.fingerprint
    samples = Samples()
    for name, array in base_arrays(model).items() if saved is None else ():
        samples |= samples_of({name: array})
        forget(array)  # a few values bring half a megabyte of a mapped file into memory
    return with_adapters(fingerprint_of(samples) if saved is None else saved.manifest.fingerprint, model)


def in_one_gear(
    model: nn.Module, dtype: str = "auto", kernels: str = DEFAULT_KERNELS, activations: str = DEFAULT_ACTIVATIONS
) -> Gearbox | None:
    """Put a model whose precision does not change on the fastest kernels; arguments as of `Gearbox`.

    With "auto" these are native kernels on a CPU (output equal to mlx-lm's except for rounding), and MLX's on a GPU.
    Returns the model's gearbox, new or existing; None for a model that mlx-lm computes.
    """
    if attached(model) is not None:
        return attached(model)
    if kernels == "mlx" or (kernels == "auto" and not on_cpu()) or sharding_of(model) is not None:
        compute_in(model, dtype, quantized=False)
        return None
    saved, codes = saved_gears(model), own_codes(model)
    bits = saved.manifest.ladder[0].bits if saved is not None else DENSE if codes is None else codes.bits
    chosen = "native" if kernels == "auto" else kernels
    return Gearbox(model, Ladder([bits]), dtype=dtype, kernels=chosen, activations=activations)


class Observer:
    """A gearbox that records the gear it would engage, and changes neither precision nor layers.

    Bytes and bits describe the unchanged model, and its output is mlx-lm's. With kernels "native" its layers are
    replaced, and the output is mlx-lm's except for rounding. A model that has a gearbox keeps it.

    Args:
        dtype, activations: as of `Gearbox`. kernels: "auto" means "mlx".
    """

    def __init__(
        self,
        model: nn.Module,
        ladder: Ladder | str = DEFAULT_LADDER,
        *,
        dtype: str = "auto",
        kernels: str = DEFAULT_KERNELS,
        activations: str = DEFAULT_ACTIVATIONS,
    ):
        self.ladder = ladder if isinstance(ladder, Ladder) else Ladder.parse(ladder)
        self.model, self.device = model, device_in_use()
        head = tied_head(model)
        kinds = (*DENSE_LAYERS, *(kind for kind in QUANTIZED if kind is not nn.QuantizedEmbedding))
        found = {path: m for path, m in layers_of(model).items() if isinstance(m, kinds) or path == head}
        linear = {path: linear_of(module) for path, module in found.items()}
        storage = stored_dtype(model)
        self.storage = {"": storage}
        self.layers: list[str] = []
        self.unmanaged = dict.fromkeys(linear, "telemetry only")
        self._own_bits = {path: getattr(module, "bits", DENSE) for path, module in linear.items()}
        read = sum(layer_bytes(module, storage) for module in linear.values())
        shapes = (getattr(module, "weight_shape", None) or dense_shape(module) for module in linear.values())
        weights = sum(map(math.prod, shapes))
        self._bits = 8 * read / weights if weights else 8.0 * storage.size
        self._token_bytes = token_bytes(model, {}, self.storage, head)
        own = in_one_gear(model, dtype, "mlx" if kernels == DEFAULT_KERNELS else kernels, activations)
        self.kernels = KernelChoice(False, "an observer replaces no layers") if own is None else own.kernels
        self.compute_dtype = model_dtype(model) if own is None else own.compute_dtype
        self.gear = self.ladder.top
        self.shifts = 0
        self.shift_seconds = self.making_seconds = 0.0
        self.active_memory = {"as loaded": active_memory()}

    def prepare(self, gear: Gear) -> None:
        pass

    def shift(self, gear: Gear | str | int) -> float:
        self.gear = self.ladder.find(gear)
        return 0.0

    def bits_per_weight(self, gear: Gear) -> float:
        return self._bits

    def ladder_report(self) -> list[dict]:
        """Return name, bits and nominal bytes per weight (GEARBX Table 7) of each gear. No gear was made."""
        return [{"name": gear.name, "bits": gear.bits, "bytes_per_weight": gear.bits / 8} for gear in self.ladder]

    def layer_paths(self) -> list[LayerPath]:
        """Return every linear layer with its bits, the same in each gear."""
        modules, found = layers_of(self.model), []
        for path, reason in self.unmanaged.items():
            kernels, _ = kernels_of(linear_of(modules[path]), self.kernels, None)
            found.append(LayerPath(path, (self._own_bits[path],) * len(self.ladder), kernels, reason))
        return found

    def weight_bytes_per_token(self, gear: Gear, positions: int = 1) -> int:
        return self._token_bytes

    def original_bytes_per_token(self) -> int:
        return self._token_bytes
