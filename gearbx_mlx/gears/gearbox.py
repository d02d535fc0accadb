"""The gearbox: for every gear, the module of every managed layer; a shift puts them into the model (GEARBX 6)."""

import copy
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import GearbxError
from ..formats import DEFAULT_FORMAT, get_format
from ..formats.base import Format
from ..formats.native import Native, NativeEmbedding, with_kernels
from ..formats.tied import linear_of
from .activations import compute_in, stored_dtype
from .attachment import ATTACHED, attached, model_fingerprint
from .cost import token_bytes, whole_model_speedup
from .description import LayerPath, fixed_layers, kernels_of
from .discovery import Layer, Predicate, at_least, at_most, discover, is_quantized
from .double_quantization import warn_if_quantized
from .external_low_gear import differing, external_low_gear
from .ladder import DENSE, Gear, Ladder
from .names import DEFAULT_ACTIVATIONS, DEFAULT_GROUP_SIZE, DEFAULT_KERNELS, DEFAULT_LADDER, GROUP_SIZES
from .offload import EMPTY, Residency, Resident, make_residency
from .saved import SavedDisk, saved_gears
from .settings import check_settings, check_tables, choose_kernels
from .sources import FromFiles, Original, Source


class Gearbox:
    """Puts one of several precisions into a model, and back.

    The model is in the ladder's top gear after construction. Gears are made when they are first engaged, kept, and
    swapped as a whole: a shift that fails leaves the model in the gear it had. A top gear of 16 bits is the original
    arrays. A half-precision model is put into float32 on a CPU when the ladder has quantized gears (`dtype`).

    A model that `load` got from a geared checkpoint has its gears in the files: they are read when first engaged, the
    model is in the lowest after construction, and ladder, format, manage and group size are the checkpoint's.

    Args:
        model: an mlx-lm model that is not quantized, or one of a geared checkpoint.
        ladder: a Ladder, or text such as "4,8,16", which is the default; of a geared checkpoint some of its gears.
        format: how quantized gears are stored: "planes" (the default), "affine", "rowwise", "groupwise", "codebook",
            "codebook-library", or a Format.
        manage: "all" linear layers, "attention", "mlp", or a predicate (path, module) -> bool or {"bits": lowest}.
        group_size: inputs that share a scale: 32, 64 or 128; rowwise and groupwise have their own.
        residency: of gears that are not engaged: "resident", "host" or "disk".
        checkpoint: the model's directory, for "disk".
        dtype: what to compute in: "auto", "float32", "bfloat16" or "float16".
        kernels: "mlx": MLX's own, with which the top gear is mlx-lm bit for bit. "native": compiled on this machine,
            for a CPU, where the top gear then differs from mlx-lm in the last bits, or Metal kernels. "auto": native on
            a CPU that has them, where the ladder has quantized gears.
        activations: what native kernels of the CPU multiply packed weights by. "float": activations as they are;
            "int16", "int8": rounded to so many bits, with a step per token and group of inputs. 16 bits are nearer than
            bfloat16 activations would be; 8 (W4A8, W8A8) are faster still and further off: docs/performance.md.
        tables: name of a gear to path to bits, for layers that have not the gear's own bits in it.
        widths: further bits that every layer is stored at, so that `cap` can put it there.
        low_model: a quantized model whose layers, and whatever else a quantizer changed, are the lowest gear.

    Raises:
        GearbxError: an argument that does not exist, bits that the format has not, a quantized model, no layer to
            manage, a table of another gear or layer.
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
    ):
        self.saved = saved_gears(model)
        if self.saved is not None:
            self.ladder = self.saved.manifest.chosen(ladder)
            check_settings(self.saved.manifest, format=format, manage=manage, group_size=group_size)
            format, group_size = self.saved.format, self.saved.manifest.group_size
        elif ladder is None or isinstance(ladder, str):
            self.ladder = Ladder.parse(ladder or DEFAULT_LADDER)
        else:
            self.ladder = ladder
        self.format = get_format(DEFAULT_FORMAT if format is None else format)
        group_size = DEFAULT_GROUP_SIZE if group_size is None else group_size
        if group_size not in GROUP_SIZES:
            raise GearbxError(f"group size {group_size} is not supported; choose from 32, 64, 128")
        if is_quantized(model) and self.saved is None:
            told = "the model is quantized already, by its checkpoint or by another gearbox"
            raise GearbxError(f"{told}: run it with telemetry only, or load the original")
        self.model = model
        self.fingerprint = model_fingerprint(model)
        if self.saved is not None:
            self.unmanaged = dict(self.saved.manifest.unmanaged)
            self.layers = self.saved.layers(model)
            model.update_modules(tree_unflatten([(layer.path, layer.module) for layer in self.layers]))
        else:
            self.layers, self.unmanaged = discover(model, manage or "all", group_size, self.format)
        self._tables = check_tables(tables or {}, self.ladder, self.layers)
        in_tables = {bits for table in self._tables.values() for bits in table.values()}
        quantized = sorted({*self.ladder.quantized_bits, *in_tables, *widths} - {DENSE})
        for bits in quantized:
            self.format.check(bits)
        if quantized and not self.layers:
            reasons = "; ".join(sorted(set(self.unmanaged.values()))) or "it has no linear layer"
            raise GearbxError(f"no layer can change gear: {reasons}")

        self.kernels = choose_kernels(kernels, bool(quantized), activations)
        native = self._use_kernels()
        unread = [] if self.saved is None else [e.module for e in self.layers if not isinstance(e.module, nn.Embedding)]
        self.compute_dtype = compute_in(model, dtype, bool(quantized), [*native, *unread])
        for module in native:
            if isinstance(module, NativeEmbedding):
                module.activations = self.compute_dtype
        # What the checkpoint holds decides what a gear is, whatever it is computed in.
        self.storage = {
            path: stored_dtype(model, path and f"{path}.weight") for path in ("", *(e.path for e in self.layers))
        }
        held_in = dict.fromkeys(self.storage, self.compute_dtype)
        held_in |= {e.path: self.storage[e.path] for e in self.layers if isinstance(e.module, Native)}
        for layer in self.layers:
            if self.saved is not None and "bias" in layer.module:
                layer.module.bias = layer.module.bias.astype(held_in[layer.path])
        self.group_size = group_size
        self._shapes = {layer.path: layer.module.weight.shape for layer in self.layers}
        self._besides: dict[bool, dict[str, nn.Module]] = {}  # in the lowest gear or not: what changes with it
        self.source: Source
        if self.saved is None:
            settings = self.format, self.ladder, group_size, self.storage, self.compute_dtype
            self.source = Original(*settings, self._shapes, self._tables, widths)
        else:
            self.source = FromFiles(self.saved, held_in, self.compute_dtype)
        if low_model is not None:
            self.source = external_low_gear(low_model, self.layers, self.source, residency)
            others = differing(model, low_model, self._shapes, self.compute_dtype)
            self._besides = dict(zip((False, True), others))
        self.residency: Residency
        if self.saved is not None and residency == "disk":
            self.residency = SavedDisk(self.saved, held_in)
        else:
            self.residency = make_residency(residency, model, checkpoint, held_in)
        if quantized and self.saved is None:
            warn_if_quantized([layer.module.weight for layer in self.layers])

        self._keeps_all = isinstance(self.residency, Resident)
        self._biases = {layer.path: layer.module.bias.size if "bias" in layer.module else 0 for layer in self.layers}
        self._made: dict[str, dict[int, nn.Module]] = {
            layer.path: {DENSE: layer.module} if self.saved is None else {} for layer in self.layers
        }
        self._unread: dict[str, list[nn.Module]] = {}  # what was made and is still to be evaluated
        # Layers whose original is no gear's, and the bits that are made of it.
        widths_by_path = {} if self.saved else {layer.path: {*self.source.widths(layer)} for layer in self.layers}
        self._passing = {path: held for path, held in widths_by_path.items() if DENSE not in held}
        self._prepared: set[Gear] = set()
        self._caps: dict[str, int] = {}
        self._token_bytes: dict[tuple[Gear, int], int] = {}
        self._original = Gear(len(self.ladder), "original", DENSE)
        first = self.ladder.top if self.saved is None else self.ladder[0]
        as_loaded = first.dense and self.saved is None and not self._tables.get(DENSE)
        self.gear = first if as_loaded else self._original
        now = {layer.path: layer.module for layer in self.layers} | self._besides.get(False, {})
        self._trees = {self.gear: tree_unflatten(list(now.items()))}
        self._caches: dict[Gear, list[nn.Module]] = {}  # what has reconstructions to forget when its gear is left
        self.shifts, self.shift_seconds = 0, 0.0
        self.active_memory: dict[str, int] = {self.gear.name: mx.get_active_memory()}
        setattr(model, ATTACHED, self)
        if self.gear != first:
            self.shift(first)
            self.shifts, self.shift_seconds = 0, 0.0
            del self.active_memory[self._original.name]

    def widths_of(self, layer: Layer) -> tuple[int, ...]:
        """Bits that a layer can be put to, ascending."""
        return self.source.widths(layer)

    def bits_of(self, layer: Layer, gear: Gear) -> int:
        """The bits of a layer in a gear: its table's or its own, or the next that the layer is stored at; capped."""
        widths = self.source.widths(layer)
        bits = at_least(widths, self._tables.get(gear.bits, {}).get(layer.path, gear.bits))
        return min(bits, at_most(widths, self._caps.get(layer.path, bits)))

    def cap(self, bits: Mapping[str, int]) -> None:
        """Bound layers from now on: path to the most bits that it has in any gear. Layers not named have no bound.

        Nothing is copied: modules of the layers whose bits change are swapped. A layer that is stored at no width so
        low has its lowest.

        Raises:
            GearbxError: no such layer; weights that cannot be quantized or read back. The caps stay what they were.
        """
        unknown = bits.keys() - self._shapes.keys()
        if unknown:
            raise GearbxError(f"no layer {min(unknown)} changes gear, and so none can be capped")
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

    def prepare(self, gear: Gear) -> None:
        """Make a gear that will soon be engaged; where idle gears stay in memory, without waiting for it."""
        if gear in self._trees or gear in self._prepared:
            return
        if self._keeps_all:
            self._prepared.add(gear)
            mx.async_eval([m.parameters() for m in self._make(gear).values()])
        else:
            self._complete(gear)
            self._give_up_idle()

    def shift(self, gear: Gear | str | int) -> float:
        """Engage a gear, given itself or by its name or bits, and return the seconds that this took.

        Raises:
            GearbxError: no such gear; weights that cannot be quantized or read back; another gearbox that was put on
                this model since. The gear stays what it was.
        """
        gear = self.ladder.find(gear)
        if gear == self.gear:
            return 0.0
        start = time.perf_counter()
        before = self.gear
        self._engage(gear)
        for module in self._caches.get(before, ()):
            module.forget()
        seconds = time.perf_counter() - start
        self.shifts += 1
        self.shift_seconds += seconds
        self.active_memory[gear.name] = mx.get_active_memory()
        return seconds

    def layer_bytes(self, layer: Layer, at: Gear | int) -> int:
        """Bytes that one use of a layer reads in a gear or at a width, scales and bias included; of experts, of all."""
        bits = at if isinstance(at, int) else self.bits_of(layer, at)
        read = self.source.bytes_read(layer, bits, self._made[layer.path].get(bits))
        return read + self._biases[layer.path] * self.storage[layer.path].size

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
        managed = {layer.path: self.layer_bytes(layer, gear) for layer in self.layers}
        read = token_bytes(self.model, managed, self.storage, positions)
        if gear in self._trees:  # made, so that its layers have been counted
            self._token_bytes[key] = read
        return read

    def predicted_speedup(self, gear: Gear) -> float:
        """Decoding speed in a gear against the ladder's top gear, if time is bytes of weights (GEARBX 15)."""
        if not self.layers:
            return 1.0
        unmanaged = token_bytes(self.model, dict.fromkeys(self._shapes, 0), self.storage)
        top, here = (self.weight_bytes_per_token(g) for g in (self.ladder.top, gear))
        return whole_model_speedup((top - unmanaged) / top, (top - unmanaged) / (here - unmanaged))

    def layer_paths(self) -> list[LayerPath]:
        """What every layer runs on and why: those that change gear, the other linear layers, and a tied output head."""
        found = []
        for layer in self.layers:
            bits = tuple(self.bits_of(layer, gear) for gear in self.ladder)
            format = None if {*bits} == {DENSE} else self.format
            found.append(LayerPath(layer.path, bits, *kernels_of(layer.module, self.kernels, format)))
        modules = dict(self.model.named_modules())
        for path, reason in fixed_layers(modules, [layer.path for layer in self.layers], self.unmanaged).items():
            kernels = kernels_of(modules[path], self.kernels, None)
            found.append(LayerPath(path, (DENSE,) * len(self.ladder), *kernels, fixed=reason))
        return found

    def describe(self) -> str:
        """`layer_paths` as text, one line for each: "lm_head: 4, 8, 16; native (16 vectors at a time)"."""
        return "\n".join(map(str, self.layer_paths()))

    def _use_kernels(self) -> list[nn.Module]:
        """Have the whole model run on the chosen kernels, and return the layers that are native."""
        for path, module in list(self.model.named_modules()):
            made = with_kernels(module, self.kernels.native)
            if made is not module:  # one by one, since some are in others
                self.model.update_modules(tree_unflatten([(path, made)]))
        now = dict(self.model.named_modules())
        self.layers = [dataclasses.replace(layer, module=now[layer.path]) for layer in self.layers]
        return [module for module in now.values() if isinstance(module, Native)]

    def costed_in(self, ladder: Ladder) -> "Gearbox":
        """As this one with another ladder, to be asked what its gears read, and not to be shifted.

        A gear that stands alone has fewer planes to read than one of the same bits among others.
        """
        other = copy.copy(self)
        other.ladder, other._token_bytes = ladder, {}
        if isinstance(self.source, Original):  # else what it stores does not depend on the ladder
            other.source = dataclasses.replace(self.source, ladder=ladder)
        return other

    def _make(self, gear: Gear) -> dict[str, nn.Module]:
        """Path to module of a gear; what is missing is made, unevaluated."""
        bits = {layer.path: self.bits_of(layer, gear) for layer in self.layers}
        missing = [layer for layer in self.layers if bits[layer.path] not in self._made[layer.path]]
        if self.saved is None:
            self.residency.enter({(layer.path, DENSE): layer.module for layer in missing})
        for layer in missing:
            made = self.source.modules(layer, bits[layer.path])
            self._unread.setdefault(layer.path, []).extend(made.values())
            self._made[layer.path] = made | self._made[layer.path]
        chosen = {path: made[bits[path]] for path, made in self._made.items()}
        for module in map(linear_of, chosen.values()):
            if isinstance(module, Native):
                module.x_bits = self.kernels.x_bits
        return chosen

    def _complete(self, gear: Gear) -> None:
        """See to it that all modules of a gear are made, evaluated and in memory."""
        if gear not in self._trees:
            modules = self._make(gear)
            unread = {path: made for path, made in self._unread.items() if any(m is modules[path] for m in made)}
            self.source.read(unread)
            for path in unread:
                del self._unread[path]
            besides = self._besides.get(gear == self.ladder[0], {})
            self._trees[gear] = tree_unflatten(list((modules | besides).items()))
            self._caches[gear] = [linear for linear in map(linear_of, modules.values()) if hasattr(linear, "forget")]
        if not self._keeps_all:
            bits = {layer.path: self.bits_of(layer, gear) for layer in self.layers}
            self.residency.enter({(path, bits[path]): made[bits[path]] for path, made in self._made.items()})

    def _engage(self, gear: Gear) -> None:
        """Put a gear into the model, or leave the one that is in it."""
        if attached(self.model) is not self:
            raise GearbxError("another gearbox was put on this model since; use that one")
        before = self.gear
        self._complete(gear)
        try:
            self.model.update_modules(self._trees[gear])
            self.gear = gear
            self._give_up_idle()
        except BaseException:  # an interrupt as well: never half of one gear and half of another
            self.gear = before
            self._complete(before)
            self.model.update_modules(self._trees[before])
            raise

    def _bound(self, caps: dict[str, int]) -> None:
        """Take caps, and forget what followed from others."""
        self._caps = caps
        for followed in (self._trees, self._caches, self._token_bytes):
            followed.clear()

    def _give_up_idle(self) -> None:
        self._give_up_originals()
        if self._keeps_all:
            return
        engaged = {layer.path: self.bits_of(layer, self.gear) for layer in self.layers}
        idle = {
            (path, bits): module
            for path, made in self._made.items()
            for bits, module in made.items()
            if bits != engaged[path]
        }
        self.residency.leave(idle, self.model)

    def _give_up_originals(self) -> None:
        """Originals that are no gear's are of no use once all gears of their layers are made."""
        for path, widths in list(self._passing.items()):
            if widths <= self._made[path].keys():
                self._made[path][DENSE].weight = EMPTY
                del self._passing[path]
