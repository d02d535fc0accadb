"""How much memory gears will need, from a model's files, before anything is loaded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..formats.base import Format, stored_bits
from .discovery import at_least
from .ladder import DENSE
from .manifest import GEARS_FILE, Manifest, read_manifest
from .tensor_entries import SIZES, Entry, read_entries

DENSE_TYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


@dataclass(frozen=True)
class ModelFiles:
    """What the headers of a model's files say. manifest: of a geared checkpoint, else None."""

    arrays: Mapping[str, Entry]
    manifest: Manifest | None

    @property
    def is_quantized(self) -> bool:
        """Whether it is a quantized model without gears."""
        return self.manifest is None and any(name.endswith(".scales") for name in self.arrays)

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return sum(map(size_of, self.arrays.values()))

    @property
    def matrices(self) -> dict[str, Entry]:
        """About those that change gear: matrices of numbers, but no embeddings that are not the output head too."""
        untied = "lm_head.weight" in self.arrays
        return {
            name: entry
            for name, entry in self.arrays.items()
            if len(entry.shape) in (2, 3) and entry.dtype in DENSE_TYPES and not (untied and "embed" in name)
        }


def read_files(directory: Path) -> ModelFiles:
    """Raises GearbxError for files that are damaged, OSError for those that cannot be read."""
    files = sorted({*directory.glob("model*.safetensors"), *directory.glob(GEARS_FILE)})
    arrays = {name: entry for file in files for name, entry in read_entries(file)[0].items()}
    return ModelFiles(arrays, read_manifest(directory))


def needed_memory(files: ModelFiles, gears: Sequence[int], format: Format, group_size: int, resident: bool) -> int:
    """About how many bytes a model in gears needs, without its KV cache.

    Args:
        gears: bits, ascending.
        resident: whether idle gears stay in memory; else it is what the largest gear alone needs.
    """
    if not resident:
        return max(needed_memory(files, [bits], format, group_size, True) for bits in gears)
    if files.is_quantized:
        return files.total
    if files.manifest is not None:
        return saved_bytes(files, files.manifest, gears)
    matrices = files.matrices
    packed = sum(matrix_bytes(entry, gears, format, group_size) for entry in matrices.values())
    return files.total - sum(map(size_of, matrices.values())) + packed


def saved_bytes(files: ModelFiles, manifest: Manifest, gears: Iterable[int]) -> int:
    """Bytes of the arrays that some gears of a geared checkpoint read, and of those that every gear does."""
    of_gears: set[str] = set()
    wanted: set[str] = set()
    for layer in manifest.changing.values():
        of_gears.update(name for arrays in layer.gears.values() for name in arrays.values())
        stored = sorted(layer.gears)
        wanted.update(name for bits in gears for name in layer.gears.get(at_least(stored, bits), {}).values())
    return sum(size_of(entry) for name, entry in files.arrays.items() if name in wanted or name not in of_gears)


def matrix_bytes(entry: Entry, gears: Sequence[int], format: Format, group_size: int) -> int:
    """Bytes of the gears of a matrix that is not packed yet; gears share arrays in some formats."""
    stored = stored_bits(format, gears)
    dense = size_of(entry) if DENSE in gears and DENSE not in stored else 0
    if not stored or entry.shape[-1] % group_size:
        return max(dense, size_of(entry))
    dtype = DENSE_TYPES[entry.dtype]
    gears_arrays = [format.stored_arrays(entry.shape, bits, stored, group_size, dtype).values() for bits in stored]
    arrays = {(array.bits, array.name): array for made in gears_arrays for array in made}.values()
    lengths = [[length for length in array.shape if length is not None] for array in arrays]
    if all(len(known) == len(array.shape) for known, array in zip(lengths, arrays)):
        return dense + sum(math.prod(known) * array.dtype.size for known, array in zip(lengths, arrays))
    # The data decide how long some arrays are; what a product reads of them is known on average.
    counted = stored[-1:] if stored in format.ladders else stored
    return dense + sum(format.bytes_read(entry.shape, bits, stored, group_size, dtype.size) for bits in counted)


def size_of(entry: Entry) -> int:
    """Bytes of an array."""
    return SIZES.get(entry.dtype, 0) * math.prod(entry.shape)
