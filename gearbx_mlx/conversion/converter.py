"""From a model to a geared checkpoint, one layer at a time; a conversion that is stopped can be continued."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten
from msgspec import Meta, Struct
from msgspec.structs import asdict

from ..errors import GearbxError
from ..files.problems import shown
from ..files.reading import Count, json_lines, read_text
from ..formats import get_format
from ..formats.base import check_ladder
from ..gears.activations import dtype_name, stored_dtype
from ..gears.discovery import Layer, Predicate, discover, none_managed, with_bits
from ..gears.fingerprint import SAMPLED, fingerprint_of, sample
from ..gears.ladder import DENSE, Ladder
from ..gears.looked_up import tables_to_pack
from ..gears.manifest import GEARS_FILE, MANIFEST, Hash, Manifest, SavedLayer
from ..gears.names import EMBEDDINGS
from ..gears.offload import EMPTY, put
from ..gears.saved_check import KINDS
from ..gears.tensor_entries import Entry, hash_of
from ..gears.values import DtypeName, GroupSize, Width
from .packing import Packed, pack_layer, pack_table
from .tensor_file import TensorFile

BASE_FILE = "model.safetensors"
JOURNAL = "conversion.jsonl"  # the plan, and a line for each parameter that is done
REMOVE = "remove the directory, and the same command begins anew"
ROOM = 512  # bytes of a header for the entry of one array, name included
ARRAYS_PER_GEAR = 8  # at most


class Plan(Struct, frozen=True):
    """What to make, as `Gearbox` takes it. source: the hashes of the model's files, by name."""

    format: str
    gears: tuple[Width, ...]
    manage: str
    group_size: GroupSize
    dtype: DtypeName | None
    source: Mapping[str, str]
    wish: Mapping[str, Any] | None = None  # floors or a budget, which the bits of every layer follow from
    bits: Mapping[str, Width] | None = None  # path to the fewest bits that a layer may have
    embeddings: str = EMBEDDINGS[1]  # what conversions did before there was a choice

    @property
    def managed(self) -> str | Predicate:
        """The argument `manage` of `Gearbox`."""
        return self.manage if self.bits is None else with_bits(self.bits)


class Unit(Struct, frozen=True):
    """A line of the journal after the first, which has the plan: a parameter that is done.

    unit, shape, dtype: its name, shape and type. sample: bits of the float32 values that the fingerprint takes.
    base, gears: the arrays that were written, by name. hashes: of their bytes. names: of a managed layer, as in
    `SavedLayer.gears`. stock_bits: those of the layer in the base, where mlx-lm runs it quantized. rows: as in
    `SavedLayer`. larger: why the layer stays dense, if it would become larger.
    """

    unit: str
    shape: tuple[Count, ...]
    dtype: str
    sample: Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(max_length=SAMPLED)]
    base: Mapping[str, Entry]
    gears: Mapping[str, Entry]
    hashes: Mapping[str, Hash]
    names: Mapping[Width, Mapping[str, str]] = {}
    stock_bits: Width | None = None
    rows: Width = DENSE
    larger: str | None = None


def is_finite(array: mx.array) -> bool:
    return not mx.issubdtype(array.dtype, mx.floating) or bool(mx.isfinite(array).all().item())


def read_journal(work: Path) -> tuple[Plan | None, dict[str, Unit], int]:
    """The plan of a conversion that was begun in a directory, the parameters that are done, and bytes of whole lines.

    Raises:
        GearbxError: a line that is damaged.
    """
    file = work / JOURNAL
    text = read_text(file, "the journal of a conversion", REMOVE) if os.path.lexists(file) else ""
    complete = text[: text.rfind("\n") + 1]
    head, _, rest = complete.partition("\n")
    plan = next((plan for _, plan in json_lines(file, head, Plan, REMOVE)), None)
    units = (unit for _, unit in json_lines(file, rest, Unit, REMOVE, first=2))
    return plan, {unit.unit: unit for unit in units}, len(complete.encode())


def is_begun(work: Path) -> bool:
    """Whether a conversion in a directory has done something that another run need not do again."""
    plan, done, _ = read_journal(work)
    return bool(done) or (plan is not None and plan.bits is not None)


class Converter:
    """Writes a geared checkpoint of a model into a directory of its own.

    Every step ends with a line in the journal. A continued conversion starts after the last line.

    Args:
        model: not quantized. Weights that are not read yet are read when they are needed; all are dropped once written.
        work: the directory; it is made, or has the beginning of the same conversion.

    Raises:
        GearbxError: a model that is quantized or has no layer to manage, bits that the format does not support, or the
            beginning of another conversion in the directory.
    """

    def __init__(self, model: nn.Module, plan: Plan, work: Path):
        self.done: dict[str, Unit] = {}
        self.model, self.plan, self.work = model, plan, work
        self.ladder, self.format = Ladder(plan.gears), get_format(plan.format)
        check_ladder(self.format, plan.gears)
        self.layers, self.unmanaged = discover(model, plan.managed, plan.group_size, self.format)
        if not self.layers:
            raise none_managed(self.unmanaged)
        tables = plan.manage, plan.gears, self.format, plan.group_size
        self.tables = tables_to_pack(model, *tables) if self.packs_rows else []
        parameters = tree_flatten(model.parameters())
        self.dtype = dtype_name(stored_dtype(model))
        self.size = sum(array.nbytes for _, array in parameters)
        # Everything that changes with the gear, by the name of its weight.
        self.changing = {f"{layer.path}.weight": layer for layer in (*self.layers, *self.tables)}
        self.rest = [name for name, _ in parameters if name not in self.changing]
        room = ROOM * (len(parameters) + ARRAYS_PER_GEAR * len(self.ladder) * len(self.changing))
        self._resume({name: array.shape for name, array in parameters})
        base: dict[str, Entry] = {}
        gears: dict[str, Entry] = {}
        for unit in self.done.values():
            base |= unit.base
            gears |= unit.gears
        try:
            self.files = {
                "base": TensorFile(work / BASE_FILE, room, base),
                "gears": TensorFile(work / GEARS_FILE, room, gears),
            }
        except GearbxError as error:
            raise GearbxError(f"{work}: its files are not what {JOURNAL} says ({error}); {REMOVE}") from error

    def __iter__(self) -> Iterator[int]:
        """Convert. Yields the bytes of each parameter that is done; those of earlier runs come first."""
        now = dict(tree_flatten(self.model.parameters()))
        for name, layer in self.changing.items():
            size = now.pop(name).nbytes
            if name not in self.done:
                self._write(name, layer.module.weight, self._pack(layer))
            layer.module.weight = EMPTY
            mx.clear_cache()
            yield size
        for name in self.rest:
            array = now.pop(name)
            if name not in self.done:
                if not self.format.ladders and not is_finite(array):
                    raise GearbxError(f"{name}: has values that are not finite; check the checkpoint")
                mx.eval(array)
                self._write(name, array, Packed({name: array}))
            yield array.nbytes
            put(self.model, {name: EMPTY})

    def finish(self) -> Manifest:
        """Close the files and write gears.json."""
        for file in self.files.values():
            file.finish()
        reasons = {layer.path: self.done[name].larger for name, layer in self.changing.items()}
        larger = {path: reason for path, reason in reasons.items() if reason}
        layers = [layer for layer in self.layers if layer.path not in larger]
        manifest = Manifest(
            format=self.plan.format,
            gears=self.plan.gears,
            group_size=self.plan.group_size,
            manage=self.plan.manage,
            dtype=self.dtype,
            fingerprint=fingerprint_of(
                {
                    name: (unit.shape, np.array(unit.sample, np.uint32).view(np.float32))
                    for name, unit in self.done.items()
                }
            ),
            stock=all(f"{layer.path}.weight" in self.files["base"].entries for layer in layers),
            base={BASE_FILE: hash_of(self.work / BASE_FILE)},
            gears_hash=hash_of(self.work / GEARS_FILE),
            layers={layer.path: self._saved(layer) for layer in layers},
            tables={table.path: self._saved(table) for table in self.tables if table.path not in larger},
            unmanaged=self.unmanaged | larger,
            hashes={name: hash for unit in self.done.values() for name, hash in unit.hashes.items()},
        )
        (self.work / MANIFEST).write_text(manifest.as_json(), encoding="utf-8")
        return manifest

    def quantization(self) -> dict[str, Any] | None:
        """The quantization of the base by layer, as mlx-lm reads it in config.json; None if the base is dense."""
        known: dict[str, Any] = {}
        for name, layer in self.changing.items():
            found = self.done[name].stock_bits
            if found:
                known[layer.path] = {"group_size": self.plan.group_size, "bits": found, "mode": "affine"}
        if not known:
            return None
        default = {"group_size": self.plan.group_size, "bits": self.ladder.quantized_bits[0], "mode": "affine"}
        able = [path for path, module in self.model.named_modules() if hasattr(module, "to_quantized")]
        return default | {path: known.get(path, False) for path in able}

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    @property
    def packs_rows(self) -> bool:
        """Whether embeddings are quantized where mlx-lm would quantize them."""
        return self.plan.embeddings == EMBEDDINGS[0]

    def _pack(self, layer: Layer) -> Packed:
        if self._is_table(layer):
            return pack_table(layer, self.plan.gears, self.format, self.plan.group_size)
        return pack_layer(layer, self.plan.gears, self.format, self.plan.group_size, self.packs_rows)

    def _is_table(self, layer: Layer) -> bool:
        return layer.is_table

    def _write(self, unit: str, original: mx.array, packed: Packed) -> None:
        written = self.files["base"].append(packed.base.items())
        beside = self.files["gears"].append(packed.gears.items())
        done = Unit(
            unit=unit,
            shape=original.shape,
            dtype=dtype_name(original.dtype),
            sample=np.array(sample(original)).view(np.uint32).tolist(),
            base=written[0],
            gears=beside[0],
            hashes=written[1] | beside[1],
            names=packed.names,
            stock_bits=packed.stock_bits,
            rows=packed.rows,
            larger=packed.larger,
        )
        for file in self.files.values():
            file.flush()
        self._note(done)
        self.done[unit] = done

    def _saved(self, layer: Layer) -> SavedLayer:
        unit = self.done[f"{layer.path}.weight"]
        kind = next(name for name, (dense, *_) in KINDS.items() if isinstance(layer.module, dense))
        kind = "table" if self._is_table(layer) else kind
        lowest = DENSE if {*unit.names} == {DENSE} else layer.lowest_bits  # a layer that stays dense
        return SavedLayer(kind, unit.shape, unit.dtype, lowest, unit.names, unit.rows)

    def _note(self, line: Plan | Unit) -> None:
        with open(self.work / JOURNAL, "ab") as journal:
            journal.write(msgspec.json.encode(line) + b"\n")

    def _resume(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Take what is done from the journal; the journal of a conversion that begins gets its plan.

        Args:
            shapes: of the model's parameters, by name.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        before, self.done, length = read_journal(self.work)
        journal = self.work / JOURNAL
        if before is None:
            journal.unlink(missing_ok=True)
            self._note(self.plan)
            return
        then, now = asdict(before), asdict(self.plan)
        for name, value in now.items():
            if then[name] != value:
                differing = f"{name} {shown(then[name])} and not {shown(value)}"
                differing = "another model" if name == "source" else differing
                raise GearbxError(f"{self.work}: holds the beginning of a conversion of {differing}; remove it")
        for name, unit in self.done.items():
            named = {array for names in unit.names.values() for array in names.values()}
            if unit.shape != tuple(shapes.get(name, ())) or bool(named or unit.larger) != (name in self.changing):
                raise GearbxError(f"{journal}: {shown(name)} is not such a parameter of the model; {REMOVE}")
            if not named <= {*unit.base, *unit.gears} or unit.hashes.keys() != {*unit.base, *unit.gears}:
                raise GearbxError(f"{journal}: {shown(name)} names arrays that are not its own; {REMOVE}")
        os.truncate(journal, length)
