"""The part of `convert` that writes one table of a precision manifest as a checkpoint of stock mlx-lm."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..bit_selection.precision import PrecisionManifest, fit, read_precision
from ..cli.gears import LayoutSettings
from ..cli.loaded import trust
from ..cli.terminal import messages, note
from ..conversion.model_card import AFFINE, CARD, Provenance, table_card, write_table
from ..errors import GearbxError, about
from ..formats import get_format
from ..gears.discovery import Layer, is_quantized
from ..gears.tensor_files import header_of
from ..loading import load


def write_manifest_table(
    file: str | Path, layout: LayoutSettings, trust_remote_code: bool, source: Path, work: Path, origin: Provenance
) -> None:
    """Fill the directory `work`; what is in it before is removed.

    Raises:
        GearbxError: as `choose_table`; a quantized model, another model, or a layer that it does not have.
        OSError: the directory cannot be written.
    """
    manifest, gear = choose_table(Path(file), layout)
    model, tokenizer, config = load(source, return_config=True, lazy=True, **trust(trust_remote_code))
    if is_quantized(model):
        raise GearbxError(f"{source}: is quantized already; convert the original")
    with about(file):
        manifest, layers, missing = fit(manifest, model, get_format(AFFINE))
    for path in missing:
        note(f"{file}: has no {path}, which stays as it is")
    bits = manifest.gears[gear].bits
    weights = sum(layer.module.weight.size for layer in layers)
    with messages.status("quantizing"):
        write_table(model, tokenizer, config, source, work, bits, manifest.group_size)
    write_card(layers, bits, weights, work, origin)


def choose_table(file: Path, layout: LayoutSettings) -> tuple[PrecisionManifest, int]:
    """The manifest, and the gear whose table is written.

    Raises:
        GearbxError: a manifest that cannot be read or lacks the table, or flags that contradict it.
    """
    manifest = read_precision(file)
    if layout.format not in (None, AFFINE):
        raise GearbxError(f"--format {layout.format}: a checkpoint with the bits of a manifest is mlx-lm's own, affine")
    if layout.q_group_size not in (None, manifest.group_size):
        raise GearbxError(
            f"--q-group-size is {layout.q_group_size}, and {file} was measured with {manifest.group_size}"
        )
    tables = ", ".join(map(str, manifest.gears))
    if not tables:
        raise GearbxError(f"{file}: has no tables; make some with python -m gearbx_mlx.allocate --manifest {file}")
    wanted = [*manifest.gears] if layout.gears is None else [gear.bits for gear in layout.gears]
    if layout.gears is None and len(wanted) > 1:
        raise GearbxError(f"{file}: has tables for gears {tables}; choose one with --gears")
    if len(wanted) > 1 or wanted[0] not in manifest.gears:
        raise GearbxError(f"{file}: has no table for gears {layout.gears}; choose one of {tables}")
    if manifest.format != AFFINE:
        note(f"{file}: was measured with {manifest.format}; mlx-lm's affine layers differ a little from it")
    return manifest, wanted[0]


def write_card(layers: Sequence[Layer], bits: Mapping[str, int], weights: int, work: Path, origin: Provenance) -> None:
    """Write the model card, with sizes from the files that were written."""
    files = sorted(work.glob("model*.safetensors"))
    sizes: dict[str, int] = {}
    for file in files:
        spans = {name: entry.data_offsets for name, entry in header_of(file).entries.items()}
        sizes |= {name: end - begin for name, (begin, end) in spans.items()}
    parts = ("weight", "scales", "biases")
    size = sum(sizes.get(f"{layer.path}.{part}", 0) for layer in layers for part in parts)
    counts = {file.name: file.stat().st_size for file in files}
    card = table_card({layer.path: bits[layer.path] for layer in layers}, size, weights, counts, origin)
    (work / CARD).write_text(card, encoding="utf-8")
