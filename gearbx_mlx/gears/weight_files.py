"""Weights of a model directory: its safetensors, or one GGUF file's tensors, unpacked at each start.

The directory of a GGUF is an entry of the user's cache with configuration and tokenizer. Its weights stay in the file.
Where native CPU kernels run, F16 and BF16 are mapped, and quantized tensors are unread until their first use. Elsewhere
numpy unpacks them on all cores.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from ..compat.arrays import dtype_name, dtype_named, loading_with
from ..errors import GearbxError, one_line
from ..files.gguf import CODED, GGUF_GROUP, GgufFile, affine_codes
from ..files.gguf_model import GgufWeights, ModelTensor, gguf_weights, model_directory, not_fitting
from ..files.model_directory import REFETCH
from ..files.reading import shown
from ..files.unpacked import is_in_state, state_of
from ..files.writing import align_arrays, work_directory
from .mapped import load_arrays, map_array, mapping_kernels, note_mapped, set_origin

STORED = {"F16": mx.float16, "BF16": mx.bfloat16}
NATIVE = (*CODED, "Q6_K")  # types that native kernels unpack
PARTS = ("weight", "scales", "biases")


def gguf_directory(file: Path, name: str | None = None, dtype: str | None = None) -> Path:
    """Return the cache directory with configuration and tokenizer of a GGUF file.

    Args:
        name: of the directory; None: the file's.
        dtype: name of the type of all weights; None: quantized weights stay packed.

    Raises:
        GearbxError: a file that cannot be read, or a cache that cannot be written.
    """
    return model_directory(file, name or file.stem, dtype, check_weights)


def check_weights(directory: Path, weights: GgufWeights) -> None:
    """Validate the weights of a GGUF once, when its directory is written.

    Raises:
        GearbxError: metadata that do not fit the weights, weights that are not finite, or a file that changes.
    """
    blank = {name: mx.zeros(shape, dtype) for name, (dtype, shape) in kinds_of(weights).items()}
    try:
        with loading_with(lambda _: blank, [str(weights.file)]):
            load_model(directory, lazy=True)
    except Exception as error:  # an unsuitable configuration fails in a hundred ways
        raise not_fitting(weights.file, one_line(error).partition(",")[0]) from error
    try:
        for each in weights.tensors:
            for name, array in unpacked_arrays(weights, [each], mapping=False).items():
                if array.dtype != mx.uint32 and not mx.all(mx.isfinite(array)).item():
                    problem = (
                        f"{shown(each.tensor.name)} ({name}) has values that {dtype_name(array.dtype)} cannot hold"
                    )
                    raise GearbxError(f"{weights.file}: {problem}; {REFETCH}")
    finally:
        check_state(weights)


def array_kinds(weights: GgufWeights, each: ModelTensor) -> dict[str, tuple[mx.Dtype, tuple[int, ...]]]:
    """Return type and shape of each array that a tensor becomes, by name."""
    kind, shape = each.tensor.kind.name, each.tensor.shape
    if weights.dtype is not None:
        return {each.name: (dtype_named(weights.dtype), shape)}
    if kind not in CODED:  # norms and biases in F32 become the type of the others
        return {each.name: (STORED.get(kind) or dtype_named(weights.usual_type), shape)}
    words, groups = (*shape[:-1], shape[-1] * CODED[kind] // 32), (*shape[:-1], shape[-1] // GGUF_GROUP)
    stem = each.name.rpartition(".")[0]
    kinds = ((mx.uint32, words), (mx.float16, groups), (mx.float16, groups))
    return {f"{stem}.{part}": own for part, own in zip(PARTS, kinds)}


def kinds_of(weights: GgufWeights) -> dict[str, tuple[mx.Dtype, tuple[int, ...]]]:
    """Return type and shape of all arrays of a model, by name."""
    return {name: kind for each in weights.tensors for name, kind in array_kinds(weights, each).items()}


def weights_size(directory: Path) -> int:
    """Return the bytes of a model's weights in memory."""
    weights = gguf_weights(directory)
    if weights is None:
        return sum(file.stat().st_size for file in weight_files(directory))
    return sum(dtype.size * math.prod(shape) for dtype, shape in kinds_of(weights).values())


def read_weights(weights: GgufWeights) -> dict[str, mx.array]:
    """Return all arrays of a model in a GGUF file, by their names in mlx-lm; native kernels leave them unread.

    Raises:
        GearbxError: a file that cannot be read, or is not any more in the state in which it was hashed.
    """
    return unpacked_arrays(weights, weights.tensors)


def check_state(weights: GgufWeights) -> None:
    """Validate that a GGUF file is the one that was hashed.

    Raises:
        GearbxError: a file that was written to, replaced or removed.
    """
    if not is_in_state(weights.file, weights.state):
        raise GearbxError(f"{weights.file}: was replaced while it was unpacked; start again when the file is complete")


def unpacked_arrays(weights: GgufWeights, tensors: Sequence[ModelTensor], mapping: bool = True) -> dict[str, mx.array]:
    """Return the arrays of some tensors by their names in mlx-lm.

    Args:
        mapping: whether F16 and BF16 may be mapped; a process that reads them ends if the file is cut off.
    """
    check_state(weights)  # before the file is opened: a pipe in its place would be waited for
    kernels, file = mapping_kernels(), GgufFile(weights.file)
    found = {} if kernels is None else by_kernels(kernels, file, tensors, weights.dtype, mapping)
    found |= by_numpy(weights, [each for each in tensors if each.name not in found])
    arrays: dict[str, mx.array] = {}
    for each in tensors:
        own = found[each.name]
        stored = [heads_in_halves(array, each.heads) for array in own] if each.heads else own
        arrays |= zip(array_kinds(weights, each), stored)
    return arrays


def by_kernels(
    kernels: ModuleType, file: GgufFile, tensors: Iterable[ModelTensor], dtype: str | None, mapping: bool
) -> dict[str, list[mx.array]]:
    """Return the arrays of tensors of most types, by the tensors' names: mapped, or unread until their first use."""
    unpacked = [each for each in tensors if each.tensor.kind.name in NATIVE]
    places = [(each.tensor.kind.name, each.tensor.place, each.tensor.shape) for each in unpacked]
    arrays = kernels.unpack_gguf(file.fileno(), places, dtype is None, dtype_named(dtype or "float16"))
    found: dict[str, list[mx.array]] = dict(zip((each.name for each in unpacked), arrays))
    for each in tensors:
        kind, place, shape = each.tensor.kind.name, each.tensor.place, each.tensor.shape
        if mapping and dtype is None and kind in STORED and not each.minus:
            with contextlib.suppress(ValueError):  # it is not on the bounds of its type
                found[each.name] = [map_array(kernels, file.fileno(), place, shape, STORED[kind])]
    return found


def by_numpy(weights: GgufWeights, tensors: Sequence[ModelTensor]) -> Iterator[tuple[str, list[mx.array]]]:
    """Yield the names of tensors with their arrays, unpacked by numpy on all cores."""

    def numbers(each: ModelTensor) -> tuple[np.ndarray, ...]:
        file = GgufFile(weights.file)  # this thread's own file
        codes = affine_codes(file, each.tensor) if weights.dtype is None else None
        return codes or (file.weights(each.tensor) - np.float32(each.minus),)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for each, own in zip(tensors, pool.map(numbers, tensors)):
            kinds = array_kinds(weights, each).values()
            arrays = [mx.array(array).astype(dtype) for array, (dtype, _) in zip(own, kinds)]
            mx.eval(arrays)  # else the arrays that these were made of stay in memory
            yield each.name, arrays


def heads_in_halves(weight: mx.array, heads: int) -> mx.array:
    """Return rows of q or k in halves of a head, as mlx-lm rotates them; llama.cpp stores a Llama's in pairs."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def weight_files(directory: Path) -> list[Path]:
    """Return the files that have the weights of a model."""
    weights = gguf_weights(directory)
    return sorted(directory.glob("model*.safetensors")) if weights is None else [weights.file]


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Let mlx-lm read the weights of a model in the context: mapped safetensors if possible, or its GGUF file.

    Raises:
        GearbxError: a GGUF file that was written to meanwhile.
    """
    weights = gguf_weights(directory)
    if weights is None:
        with loading_with(load_arrays):
            yield
        return
    try:
        with loading_with(lambda _: read_weights(weights), [str(weights.file)]):
            yield
    finally:
        check_state(weights)


def load_mapped(directory: Path, load: Any) -> tuple:
    """Return the result of a function of mlx-lm for a directory with mapped weights; its model has an `Origin`."""
    weights = gguf_weights(directory)
    if weights is None:
        states = {path: state_of(path) for path in weight_files(directory)}
    else:
        states = {weights.file: weights.state}
    note_mapped(states)
    with reading(directory):
        model, *others = load()
    set_origin(model, states)
    return model, *others


def arrays_in(directory: Path) -> dict[str, mx.array]:
    """Return the weights of a directory by their names in its files; safetensors are unread.

    Raises:
        GearbxError: as `read_weights`.
        RuntimeError: MLX's, for damaged safetensors.
    """
    weights, arrays = gguf_weights(directory), dict[str, mx.array]()
    if weights is not None:
        return read_weights(weights)
    for file in weight_files(directory):
        arrays |= cast(dict[str, mx.array], mx.load(str(file)))
    return arrays


@contextlib.contextmanager
def in_safetensors(directory: Path, beside: Path) -> Iterator[Path]:
    """Yield a directory with the same model in safetensors: its own; or for a GGUF file one that lasts for the block.

    Args:
        beside: where that one is made.

    Raises:
        GearbxError: as `read_weights`.
        OSError: a directory that cannot be written.
    """
    if gguf_weights(directory) is None:
        yield directory
        return
    with work_directory(beside / directory.name) as made:
        write_safetensors(directory, made)
        yield made


def write_safetensors(directory: Path, out: Path) -> None:
    """Write the model of a GGUF file into an empty directory, as stock mlx-lm loads it. directory: the model's.

    Raises:
        GearbxError: as `read_weights`.
        OSError: a directory that cannot be written.
    """
    weights = gguf_weights(directory)
    assert weights is not None
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((directory / name).read_bytes())
    try:
        mx.save_safetensors(str(out / "model.safetensors"), read_weights(weights), metadata={"format": "mlx"})
        align_arrays(out / "model.safetensors")
    except RuntimeError as error:  # from MLX, for instance on a full disk
        raise OSError(one_line(error)) from error
