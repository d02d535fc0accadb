"""What gears.json says, compared with the arrays in the files and with the model, before any module is made."""

from collections.abc import Mapping

import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import GearbxError
from ..files.reading import shown
from ..formats.base import StoredArray
from .activations import DTYPES
from .adapters import layers_of
from .ladder import DENSE
from .manifest import GEARS_FILE, MANIFEST, Manifest
from .tensor_entries import NAMES, Entry

KINDS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {  # dense, and as mlx-lm quantizes it
    "linear": (nn.Linear, nn.QuantizedLinear),
    "switch": (SwitchLinear, QuantizedSwitchLinear),
    "multi": (MultiLinear, QuantizedMultiLinear),
    "embedding": (nn.Embedding, nn.QuantizedEmbedding),
    "table": (nn.Embedding, nn.QuantizedEmbedding),
}


def check_arrays(manifest: Manifest, gears: Mapping[str, Entry], base: Mapping[str, Entry]) -> None:
    """Compare a manifest with the arrays that the files contain.

    Args:
        gears, base: entries of gears.safetensors and of the files of the base, by name.

    Raises:
        GearbxError: an array that is missing, of another layer, parameter, dtype or shape, or that no gear uses.
    """
    entries = {**base, **gears}
    used = set()
    for path, layer in manifest.changing.items():
        for bits, names in layer.gears.items():
            place = f"{manifest.place_of(path)}.gears[{shown(str(bits))}]"
            expected = stored_arrays(manifest, path, bits)
            if names.keys() != expected.keys():
                raise GearbxError(f"{MANIFEST}: {place} has {', '.join(map(shown, names))}, not {', '.join(expected)}")
            check_gear(place, path, names, expected, entries)
            used |= {*names.values()}
    managed = {f"{path}.{name}" for path in manifest.changing for name in ("weight", "scales", "biases")}
    unused = (gears.keys() | (managed & base.keys())) - used
    if unused:
        raise GearbxError(f"{MANIFEST}: does not name {shown(min(unused))}, which is in the files")
    if manifest.version > 1 and manifest.gears_hash is None:
        raise GearbxError(f"{MANIFEST}: has no field 'gears_hash'")
    if manifest.version > 1 and manifest.hashes.keys() != entries.keys():
        differing = min(manifest.hashes.keys() ^ entries.keys())
        raise GearbxError(f"{MANIFEST}: hashes and the files do not have the same arrays: {shown(differing)}")
    if manifest.stock != all(f"{path}.weight" in base for path in manifest.layers):
        raise GearbxError(f"{MANIFEST}: stock is {shown(manifest.stock)}, which the files of the base contradict")


def stored_arrays(manifest: Manifest, path: str, bits: int) -> dict[str, StoredArray]:
    """The arrays that a gear of a layer or a table has."""
    layer = manifest.changing[path]
    dtype = DTYPES[layer.dtype]
    stored = manifest.stored(path)
    if bits == DENSE and DENSE not in stored:
        return {"weight": StoredArray(dtype, layer.shape, DENSE, "weight")}
    return manifest.format_of(path).stored_arrays(layer.shape, bits, stored, manifest.group_size, dtype)


def check_gear(
    place: str,
    path: str,
    names: Mapping[str, str],
    expected: Mapping[str, StoredArray],
    entries: Mapping[str, Entry],
) -> None:
    """Raises GearbxError unless the arrays of one gear are what its format makes for the layer."""
    free = set()  # lengths that the data decide, of which a gear has one
    for parameter, array in expected.items():
        name = names[parameter]
        if name not in entries:
            raise GearbxError(f"{GEARS_FILE}: has no {shown(name)[1:-1]}, which {MANIFEST} names")
        own = f"{path}.{array.name}", f"{path}@{array.bits}.{array.name}"  # in the base, or beside it
        if name not in own:
            raise GearbxError(f"{MANIFEST}: {place}.{parameter} is {shown(name)}, not {shown(own[1])}")
        entry = entries[name]
        lengths = tuple(length for length, known in zip(entry.shape, array.shape) if known is None)
        fits = len(entry.shape) == len(array.shape) and all(
            length == known or (known is None and length > 0) for length, known in zip(entry.shape, array.shape)
        )
        free |= {*lengths}
        if entry.dtype != NAMES[array.dtype] or not fits or len(free) > 1:
            wanted = ["any" if length is None else length for length in array.shape]
            raise GearbxError(
                f"{GEARS_FILE}: {shown(name)} is {entry.dtype} of {list(entry.shape)}, and {MANIFEST} needs "
                f"{NAMES[array.dtype]} of {wanted}"
            )


def check_model(manifest: Manifest, model: nn.Module) -> None:
    """Raises GearbxError unless every layer is a module of the model, of its kind and shape."""
    modules = layers_of(model)
    for path, layer in manifest.changing.items():
        module = modules.get(path)
        if not isinstance(module, KINDS[layer.kind]):
            found = "no module" if module is None else f"a {type(module).__name__}"
            field = "tables" if path in manifest.tables else "layers"
            raise GearbxError(f"{MANIFEST}: {field} has the key {shown(path)}, and the model has {found} there")
        shape = module.weight.shape
        if not isinstance(module, KINDS[layer.kind][0]):
            shape = (*shape[:-1], shape[-1] * 32 // module.bits)
        if tuple(shape) != layer.shape:
            raise GearbxError(
                f"{MANIFEST}: {manifest.place_of(path)}.shape is {list(layer.shape)}, and the model's is {list(shape)}"
            )
