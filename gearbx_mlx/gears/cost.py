"""The cost of a gear (GEARBX 9 and 15): bytes read per decoded token, and the time of reading them.

Bytes are counted from the arrays of the modules that run. The formulas for time are the paper's.

A mixture of experts counts with the experts that a token uses; mlx-lm's architectures store their number in different
places. `needed_memory` estimates the memory of gears from file headers, before anything is loaded.

Floating arrays are counted in the checkpoint's type. On a CPU a half-precision checkpoint computes in float32 (see
activations.py); counting four bytes per weight there would overstate the speedup of lower gears.
"""

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError, GearbxWarning
from ..files.gguf_model import gguf_weights
from ..files.model_directory import REFETCH
from ..files.reading import unreadable
from ..formats.base import Format, stored_bits
from ..formats.native import Native, NativeSwitchLinear
from ..kernels.dispatch import METAL, KernelChoice, device
from .activations import layer_bytes, stored_bytes
from .adapters import holders_of, layers_of, own_arrays
from .discovery import at_least, in_tower, is_table
from .ladder import DENSE
from .manifest import GEARS_FILE, RESTORE, Manifest, read_manifest
from .tensor_files import TYPE_NAMES, TYPE_SIZES, TensorEntry, header_of
from .weight_files import kinds_of


@dataclass(frozen=True)
class LayerPath:
    """The kernels of one layer.

    bits: in each gear of the ladder. why: the reason for the kernels. fixed: the reason that the layer does not change
    gear; None if it does.
    """

    path: str
    bits: tuple[int, ...]
    kernels: str
    why: str
    fixed: str | None = None

    def __str__(self) -> str:
        bits = ", ".join(map(str, self.bits)) if self.fixed is None else f"dense ({self.fixed})"
        return f"{self.path}: {bits}; {self.kernels} ({self.why})"


def kernels_of(module: nn.Module, choice: KernelChoice, format: Format | None) -> tuple[str, str]:
    """Return the kernels of a layer's module in the top gear, and why. format: of its quantized gears, if any."""
    if not choice.native:
        return "mlx", choice.reason
    if not isinstance(module, Native):
        return "mlx", f"no native kernel for {type(module).__name__}"
    experts = isinstance(module, NativeSwitchLinear)
    without_metal = experts and device() != METAL
    if format is not None and not (format.native_experts if without_metal else format.native):
        what = f"experts in {format.name}" if experts else format.name
        return "mlx, native in 16-bit gears", f"no native kernel for {what}"
    return "native", choice.why(format is None or format.rounds)


def alike_paths(layers: Iterable[LayerPath]) -> Iterator[tuple[str, LayerPath, int]]:
    """Group layers whose paths differ only in numbers, like "layers.0-23.mlp.up_proj": path, first layer, count."""
    groups: dict[tuple, list[LayerPath]] = {}
    for layer in layers:
        words = tuple("#" if part.isdigit() else part for part in layer.path.split("."))
        groups.setdefault((words, layer.bits, layer.kernels, layer.why, layer.fixed), []).append(layer)
    for (words, *_), members in groups.items():
        columns = zip(*(layer.path.split(".") for layer in members))
        path = ".".join(as_runs(map(int, set(c))) if word == "#" else word for word, c in zip(words, columns))
        yield path, members[0], len(members)


def as_runs(values: Iterable[int]) -> str:
    """Return numbers as text: 0, 1, 2, 5 -> "0-2,5"."""
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(values)), key=lambda item: item[1] - item[0]):
        members = [value for _, value in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(runs)


DENSE_TYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


@dataclass(frozen=True)
class ModelFiles:
    """A model's arrays, as listed in the headers of its files. manifest: of a geared checkpoint, else None."""

    arrays: Mapping[str, TensorEntry]
    manifest: Manifest | None

    @property
    def is_quantized(self) -> bool:
        """Flag for quantized models without gears."""
        return self.manifest is None and any(name.endswith(".scales") for name in self.arrays)

    @property
    def dtype(self) -> str:
        """The most common floating type, as headers name it; BF16 if there is none."""
        counts: Counter[str] = Counter()
        for entry in self.arrays.values():
            if entry.dtype in DENSE_TYPES:
                counts[entry.dtype] += math.prod(entry.shape)
        return max(counts, key=lambda dtype: counts[dtype], default="BF16")

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return sum(map(entry_bytes, self.arrays.values()))

    @property
    def matrices(self) -> dict[str, TensorEntry]:
        """Matrices that probably change gear: floating ones, without embeddings unless they are the output head."""
        untied = "lm_head.weight" in self.arrays
        return {
            name: entry
            for name, entry in self.arrays.items()
            if len(entry.shape) in (2, 3) and entry.dtype in DENSE_TYPES and not (untied and "embed" in name)
        }


def read_files(directory: Path) -> ModelFiles:
    """Return the headers of the files in a directory. Raises GearbxError for damaged or unreadable files."""
    weights = gguf_weights(directory)
    if weights is not None:
        kinds = kinds_of(weights).items()
        return ModelFiles({name: TensorEntry(TYPE_NAMES[dtype], shape, (0, 0)) for name, (dtype, shape) in kinds}, None)
    manifest, arrays = read_manifest(directory), dict[str, TensorEntry]()
    for file in sorted({*directory.glob("model*.safetensors"), *directory.glob(GEARS_FILE)}):
        try:
            arrays |= header_of(file).entries
        except OSError as error:
            raise unreadable(file, error) from error
        except GearbxError as error:
            raise GearbxError(f"{error}; {RESTORE if file.name == GEARS_FILE else REFETCH}") from error
    return ModelFiles(arrays, manifest)


def needed_memory(files: ModelFiles, gears: Sequence[int], format: Format, group_size: int, resident: bool) -> int:
    """Estimate the bytes of a model in gears, without KV cache; only of the largest gear unless `resident`."""
    in_one_copy = any(DENSE in ladder for ladder in format.ladders)  # of both gears
    if not resident and not in_one_copy:
        return max(needed_memory(files, [bits], format, group_size, True) for bits in gears)
    if files.is_quantized:
        return files.total
    if files.manifest is not None:
        return saved_bytes(files, files.manifest, gears)
    matrices = files.matrices
    packed = sum(matrix_bytes(entry, gears, format, group_size) for entry in matrices.values())
    return files.total - sum(map(entry_bytes, matrices.values())) + packed


def saved_bytes(files: ModelFiles, manifest: Manifest, gears: Iterable[int]) -> int:
    """Return bytes of the arrays of a geared checkpoint that these gears read, with those that all gears share."""
    of_gears: set[str] = set()
    wanted: set[str] = set()
    for layer in manifest.changing.values():
        of_gears.update(name for arrays in layer.gears.values() for name in arrays.values())
        stored = sorted(layer.gears)
        wanted.update(name for bits in gears for name in layer.gears.get(at_least(stored, bits), {}).values())
    return sum(entry_bytes(entry) for name, entry in files.arrays.items() if name in wanted or name not in of_gears)


def matrix_bytes(entry: TensorEntry, gears: Sequence[int], format: Format, group_size: int) -> int:
    """Return bytes of the gears of a matrix that is not packed yet; gears share arrays in some formats."""
    stored = stored_bits(format, gears)
    dense = entry_bytes(entry) if DENSE in gears and DENSE not in stored else 0
    if not stored or entry.shape[-1] % group_size:
        return max(dense, entry_bytes(entry))
    dtype = DENSE_TYPES[entry.dtype]
    gears_arrays = [format.stored_arrays(entry.shape, bits, stored, group_size, dtype).values() for bits in stored]
    arrays = {(array.bits, array.name): array for made in gears_arrays for array in made}.values()
    lengths = [[length for length in array.shape if length is not None] for array in arrays]
    if all(len(known) == len(array.shape) for known, array in zip(lengths, arrays)):
        return dense + sum(math.prod(known) * array.dtype.size for known, array in zip(lengths, arrays))
    # The lengths of some arrays depend on the data; the bytes that a matmul reads of them are known on average.
    counted = stored[-1:] if stored in format.ladders else stored
    return dense + sum(format.bytes_read(entry.shape, bits, stored, group_size, dtype.size) for bits in counted)


def entry_bytes(entry: TensorEntry) -> int:
    """Return bytes of an array."""
    return TYPE_SIZES.get(entry.dtype, 0) * math.prod(entry.shape)


def token_bytes(
    model: nn.Module,
    managed: Mapping[str, float],
    storage: Mapping[str, mx.Dtype],
    head: str | None,
    positions: int = 1,
) -> int:
    """Return the bytes of weights that decoding one token reads.

    managed: path to bytes of the layers that change gear. storage: path to the type in which a layer's floating values
    are stored; "" for the rest of the model. head: the path of a tied output head. positions: tokens per forward pass.

    Every parameter counts once, except in towers for images or sound. A mixture counts with the experts that a token
    uses (at several positions, as if no two used the same). An embedding that is not the output head counts with one
    row. Adapters count in their own type.
    """
    modules = layers_of(model)
    containers = {path[:dot] for path in modules for dot, char in enumerate(path) if char == "."} | {""}
    total = 0.0
    for path, module in modules.items():
        dtype = storage.get(path, storage[""])
        if path.rpartition(".")[0] in managed or in_tower(path):  # managed: a part of a tied embedding
            continue
        if path in managed:
            total += managed[path] * used_share(path, modules, positions)
        elif is_table(module) and path != head:
            total += layer_bytes(module, dtype) * min(1.0, positions / len(module.weight))
        elif path in containers:
            own = (array for name, array in module.items() if isinstance(array, mx.array) and name[0] != "_")
            total += sum(stored_bytes(array, dtype) for array in own)
        else:
            total += layer_bytes(module, dtype) * used_share(path, modules, positions)
    for path, holder in holders_of(model).items():
        looked_up = is_table(modules[path]) and path != head
        read = adapter_bytes(holder, storage[""], positions if looked_up else None)
        total += read * used_share(path, modules, positions)
    return round(total)


def adapter_bytes(adapter: nn.Module, storage: mx.Dtype, rows: int | None) -> float:
    """Return bytes of an adapter that a token reads, without its layer. rows: of an embedding; None: all."""
    total = float(stored_bytes(adapter["bias"], storage)) if "bias" in adapter else 0.0
    for name, array in own_arrays(adapter).items():
        total += array.nbytes * (1 if rows is None or name == "lora_b" else rows / len(array))
    return total


def whole_model_speedup(managed_share: float, reduction: float) -> float:
    """Return the decoding speedup over the top gear, if bytes decide the time (GEARBX 15): 1 / ((1 - f) + f / k).

    Args:
        managed_share: f, the share of the top gear's bytes per token that managed layers read, 0 to 1.
        reduction: k, the bytes of those layers in the top gear over those in this gear.
    """
    return 1 / ((1 - managed_share) + managed_share / reduction)


def break_even_tokens(shift_seconds: float, seconds_before: float, seconds_after: float) -> float | None:
    """Return tokens until a faster gear makes up for the time of its shift (GEARBX 9); None: it is not faster."""
    saved = seconds_before - seconds_after
    return shift_seconds / saved if saved > 0 else None


CHOSEN_FIELDS = (  # names for the number of experts that a router chooses
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)


def used_share(path: str, modules: Mapping[str, nn.Module], positions: int = 1) -> float:
    """Return the share of a layer's weights that tokens use: all, the chosen experts of a mixture, none of a tower.

    positions: tokens computed in one forward pass, as if no two of them used the same expert.
    """
    if in_tower(path):
        return 0.0
    experts = experts_of(path, modules)
    chosen = chosen_experts(path, modules) if experts else None
    return min(1.0, positions * chosen / experts) if chosen else 1.0


def experts_of(path: str, modules: Mapping[str, nn.Module]) -> int:
    """Return the number of experts in a layer's stack, or in its list of experts; 0 for other layers."""
    block, _, _ = path.rpartition(".experts.")
    listed = modules[block].get("experts") if block else None
    return getattr(modules[path], "num_experts", 0) or (len(listed) if isinstance(listed, list) else 0)


def chosen_experts(path: str, modules: Mapping[str, nn.Module]) -> int | None:
    """Return how many experts of a layer a token uses; None if unknown."""
    parts = path.split(".")
    for end in range(len(parts) - 1, -1, -1):  # the block that routes is an ancestor of the experts
        block = modules.get(".".join(parts[:end]))
        for place in places(block) if block is not None else ():
            for name in CHOSEN_FIELDS:
                chosen = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
                if isinstance(chosen, int) and chosen > 0:
                    return chosen
    return None


def places(block: nn.Module) -> Iterator[Any]:
    """Yield the places that may have the number: the block's attributes, its router's, and its settings."""
    yield vars(block)
    yield from (vars(child) for child in block.children().values() if isinstance(child, nn.Module))
    yield from (getattr(block, name) for name in ("args", "config") if hasattr(block, name))


def warn_of_unknown_routing(model: nn.Module) -> None:
    """Warn of mixtures with an unknown number of experts per token: they are counted as if it used all of them."""
    modules = dict(model.named_modules())
    mixtures = [path for path, module in modules.items() if "weight" in module and experts_of(path, modules)]
    unknown = [path for path in mixtures if chosen_experts(path, modules) is None]
    if unknown:
        warnings.warn(
            f"{unknown[0]}: the number of experts per token is unknown; its bytes are counted with all of them, more "
            "than a token reads",
            GearbxWarning,
            stacklevel=3,
        )
