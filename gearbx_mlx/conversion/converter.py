"""From a model to a geared checkpoint, one layer at a time, so that it may be stopped anywhere and gone on with."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import GearbxError
from ..formats import get_format
from ..formats.tied import linear_of
from ..gears.activations import dtype_name, stored_dtype
from ..gears.discovery import Layer, Predicate, discover, widths_of, with_bits
from ..gears.fingerprint import fingerprint_of, sample
from ..gears.ladder import DENSE, Ladder
from ..gears.manifest import GEARS_FILE, MANIFEST, Manifest, SavedLayer
from ..gears.offload import EMPTY, put
from ..gears.tensor_file import TensorFile, hash_of

BASE_FILE = "model.safetensors"
JOURNAL = "conversion.jsonl"  # what is done; the first line is what is to be done
STOCK = (nn.QuantizedLinear, QuantizedSwitchLinear)
ROOM = 512  # bytes of a header for the entry of one array, name included
ARRAYS_PER_GEAR = 8  # at most

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Plan:
    """What is to be made, as `Gearbox` takes it, and of which model: hashes of its files."""

    format: str
    gears: tuple[int, ...]
    manage: str
    group_size: int
    dtype: str | None
    source: Mapping[str, str]
    wish: Mapping[str, Any] | None = None  # floors or a budget, from which the bits of every layer were found
    bits: Mapping[str, int] | None = None  # path to the fewest that a layer may have

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "gears": list(self.gears), "source": dict(self.source)}

    @property
    def managed(self) -> str | Predicate:
        """What `Gearbox` takes as `manage`."""
        return self.manage if self.bits is None else with_bits(self.bits)


def planned(work: Path) -> dict[str, Any] | None:
    """What a conversion that was begun in a directory is to make; None where none was."""
    try:
        with open(work / JOURNAL, encoding="utf-8") as journal:
            line = journal.readline()
    except FileNotFoundError:
        return None
    return json.loads(line) if line.endswith("\n") else None


class Converter:
    """Writes a geared checkpoint of a model into a directory of its own.

    Every step ends with a line in the journal, and whatever is behind the last line is written again.

    Args:
        model: not quantized; unread weights are read as they are needed, and given up.
        work: the directory, which is made, or holds the beginning of the same conversion.

    Raises:
        GearbxError: a model that is quantized or has no layer to manage, bits that the format has not, or another
            conversion in the directory.
    """

    def __init__(self, model: nn.Module, plan: Plan, work: Path):
        self.model, self.plan, self.work = model, plan, work
        self.ladder, self.format = Ladder(plan.gears), get_format(plan.format)
        for bits in self.ladder.quantized_bits:
            self.format.check(bits)
        self.layers, self.unmanaged = discover(model, plan.managed, plan.group_size, self.format)
        if not self.layers:
            reasons = "; ".join(sorted(set(self.unmanaged.values()))) or "it has no linear layer"
            raise GearbxError(f"no layer can change gear: {reasons}")
        parameters = tree_flatten(model.parameters())
        self.dtype = dtype_name(stored_dtype(model))
        self.size = sum(array.nbytes for _, array in parameters)
        weights = {f"{layer.path}.weight" for layer in self.layers}
        self.rest = [name for name, _ in parameters if name not in weights]
        room = ROOM * (len(parameters) + ARRAYS_PER_GEAR * len(self.ladder) * len(self.layers))
        self.done = self._resume()
        entries = {
            which: {name: entry for line in self.done.values() for name, entry in line[which].items()}
            for which in ("base", "gears")
        }
        self.files = {
            "base": TensorFile(work / BASE_FILE, room, entries["base"]),
            "gears": TensorFile(work / GEARS_FILE, room, entries["gears"]),
        }

    def __iter__(self) -> Iterator[int]:
        """Convert; after each step the bytes of the original that are done with, those of earlier runs first."""
        now = dict(tree_flatten(self.model.parameters()))
        for layer in self.layers:
            name = f"{layer.path}.weight"
            size = now.pop(name).nbytes
            if name not in self.done:
                base, gears, names = self._convert(layer)
                self._write(name, layer.module.weight, base, gears, names)
            layer.module.weight = EMPTY
            mx.clear_cache()
            yield size
        for name in self.rest:
            array = now.pop(name)
            if name not in self.done:
                mx.eval(array)
                self._write(name, array, {name: array}, {}, {})
            yield array.nbytes
            put(self.model, {name: EMPTY})

    def finish(self) -> Manifest:
        """Close the files and write gears.json."""
        for file in self.files.values():
            file.finish()
        manifest = Manifest(
            format=self.plan.format,
            gears=self.plan.gears,
            group_size=self.plan.group_size,
            manage=self.plan.manage,
            dtype=self.dtype,
            fingerprint=fingerprint_of(
                {
                    name: (line["shape"], np.array(line["sample"], np.uint32).view(np.float32))
                    for name, line in self.done.items()
                }
            ),
            stock=all(f"{layer.path}.weight" in self.files["base"].entries for layer in self.layers),
            base={BASE_FILE: hash_of(self.work / BASE_FILE)},
            layers={layer.path: self._saved(layer) for layer in self.layers},
            unmanaged=self.unmanaged,
        )
        (self.work / MANIFEST).write_text(manifest.as_json(), encoding="utf-8")
        return manifest

    def quantization(self) -> dict[str, Any] | None:
        """What config.json says to mlx-lm of the base: every layer by name. None if all of the base is dense."""
        known: dict[str, Any] = {}
        for layer in self.layers:
            found = self.done[f"{layer.path}.weight"]["stock_bits"]
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

    def _convert(self, layer: Layer) -> tuple[Arrays, Arrays, dict[str, Any]]:
        """Arrays for the base and for the other file, and what the journal is to know of the layer."""
        path, original = layer.path, layer.module.weight
        dense = linear_of(layer.module)
        wanted = widths_of(layer, self.plan.gears, self.format.layer_bits)
        stored = tuple(bits for bits in wanted if bits != DENSE)
        made: dict[int, nn.Module] = {}
        for bits in wanted:
            if bits != DENSE and bits not in made:
                made |= self.format.modules(dense, bits, stored, self.plan.group_size, original.dtype)
        tied = isinstance(layer.module, nn.Embedding)
        lowest = made.get(wanted[0])
        stock = lowest if type(lowest) in STOCK else None
        base: Arrays = {}
        gears: Arrays = {}
        held: dict[int, str] = {}  # id of an array to its name
        names: dict[int, dict[str, str]] = {}
        for bits in wanted:
            if bits == DENSE:
                continue
            names[bits] = {}
            for name, array in tree_flatten(made[bits].parameters()):
                if name == "bias":
                    continue
                if id(array) not in held:
                    into, key = (base, f"{path}.{name}") if made[bits] is stock else (gears, f"{path}@{bits}.{name}")
                    into[key], held[id(array)] = array, key
                names[bits][name] = held[id(array)]
        if DENSE in wanted or tied:
            into, key = (gears, f"{path}@{DENSE}.weight") if stock else (base, f"{path}.weight")
            into[key] = original
            names[DENSE] = {"weight": key}
        mx.eval(base, gears)
        for array in (*base.values(), *gears.values()):
            if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all().item():
                raise GearbxError(f"{path}: weights are not finite and cannot be quantized; check the checkpoint")
        return base, gears, {"names": names, "stock_bits": wanted[0] if stock else None}

    def _write(self, unit: str, original: mx.array, base: Arrays, gears: Arrays, more: Mapping[str, Any]) -> None:
        line = {
            "unit": unit,
            "shape": list(original.shape),
            "dtype": dtype_name(original.dtype),
            "sample": np.array(sample(original)).view(np.uint32).tolist(),
            "base": self.files["base"].append(base.items()),
            "gears": self.files["gears"].append(gears.items()),
            **more,
        }
        for file in self.files.values():
            file.flush()
        self._note(line)
        self.done[unit] = json.loads(json.dumps(line))

    def _saved(self, layer: Layer) -> SavedLayer:
        line = self.done[f"{layer.path}.weight"]
        kind = "embedding" if isinstance(layer.module, nn.Embedding) else "linear"
        kind = "switch" if isinstance(layer.module, SwitchLinear) else kind
        gears = {int(bits): names for bits, names in line["names"].items()}
        return SavedLayer(kind, tuple(line["shape"]), line["dtype"], layer.lowest_bits, gears)

    def _note(self, line: Mapping[str, Any]) -> None:
        with open(self.work / JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(line) + "\n")

    def _resume(self) -> dict[str, Any]:
        """Units that are done, by name; the journal of a conversion that begins has its plan."""
        self.work.mkdir(parents=True, exist_ok=True)
        journal = self.work / JOURNAL
        lines = journal.read_text(encoding="utf-8").splitlines(keepends=True) if journal.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        plan = self.plan.as_json()
        if not whole:
            journal.unlink(missing_ok=True)
            self._note(plan)
            return {}
        for name, value in plan.items():
            if whole[0].get(name) != value:
                told = "another model" if name == "source" else f"{name} {whole[0].get(name)} and not {value}"
                raise GearbxError(f"{self.work}: holds the beginning of a conversion of {told}; remove it")
        os.truncate(journal, sum(len(line.encode()) for line in lines if line.endswith("\n")))
        return {line["unit"]: line for line in whole[1:]}
