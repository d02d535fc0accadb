"""The command `sensitivity`: measures the cost of every layer's precision, and writes a precision manifest."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from rich.table import Table

from ..bit_selection.precision import EXACT_KL, FIRST_ORDER, PrecisionManifest, least_bits
from ..bit_selection.sensitivity import (
    MeasuredLayer,
    calibration_windows,
    estimate_kls,
    exact_of,
    layer_precision,
    layer_precisions,
    measure_layers,
    measuring_cost,
    single_layer_gearbox,
)
from ..cli.build import load_original
from ..cli.flags import output_path
from ..cli.tables import table_with_head
from ..cli.terminal import messages, note, progress_bar, show_compiling
from ..compat.versions import program_versions
from ..errors import GearbxError
from ..files.journal import JOURNAL, Journal, hash_of_tokens, place_beside
from ..files.writing import write_text
from ..formats import get_format
from ..gears.discovery import Layer, discover
from ..gears.gearbox import model_fingerprint
from ..loading import model_name
from . import SensitivitySettings

Windows = Sequence[Sequence[int]]


def run(settings: SensitivitySettings) -> int:
    wanted, text = settings.measurement, settings.text
    check_format(settings.layout.filled(None, "")["format"])
    out = output_path(wanted.out)
    journal = place_beside(out, JOURNAL)
    model, tokenizer, config = load_original(settings.model)
    windows = calibration_windows(model, tokenizer, config, text.data, text.num_samples, text.sequence_length)
    manifest = (
        estimated(settings, model, windows) if wanted.fast else measured_layers(settings, model, windows, journal)
    )
    write_text(out, manifest.as_json())
    if journal is not None:
        journal.unlink(missing_ok=True)
    messages.print(classes_table(manifest))
    lowest = manifest.bits[0]
    least = (
        least_bits(layer.kl, layer.perplexity_change, manifest.accuracy_threshold) for layer in manifest.layers.values()
    )
    bound = sum(bits > lowest for bits in least)
    note(f"{bound} of {len(manifest.layers)} layers may not go down to {lowest} bits")
    print(out)
    return 0


def check_format(name: str) -> None:
    """Validate that layers of a format can have different bits, before the model is loaded. Raises GearbxError."""
    if get_format(name).ladders:
        raise GearbxError(
            f"--format {name}: all layers have the same gears, so their bits cannot be chosen separately; "
            "use --format planes or affine"
        )


def inputs_of_journal(settings: SensitivitySettings, model: nn.Module, windows: Windows) -> dict[str, Any]:
    """Return everything that the results depend on, as in the manifest."""
    return {
        "model": model_name(settings.model.model),
        "fingerprint": model_fingerprint(model),
        "calibration": hash_of_tokens(windows),
        "tokens": sum(len(window) - 1 for window in windows),
        **settings.layout.filled(None, ""),
        "bits": settings.measurement.bits,
    }


def measured_layers(
    settings: SensitivitySettings, model: nn.Module, windows: Windows, file: Path | None
) -> PrecisionManifest:
    """Return the manifest of a model whose layers are reduced one at a time. file: of the journal, or None."""
    inputs, bits = inputs_of_journal(settings, model, windows), settings.measurement.bits
    dtype, threshold = settings.model.dtype, settings.measurement.accuracy_threshold
    show_compiling()
    gearbox = single_layer_gearbox(
        model, bits, **settings.layout.filled(None, ""), dtype=dtype, kernels=settings.text.kernels
    )
    check_floors(gearbox.layers, bits)
    depends_on = {**inputs, "native": gearbox.kernels.native, "dtype": dtype, **program_versions()}
    journal = Journal(file, depends_on, MeasuredLayer)
    with progress_bar() as progress:
        exact = exact_of(gearbox, windows, progress)
        task = progress.add_task("layers", total=len(gearbox.layers))
        measure_layers(exact, bits, journal, lambda: progress.advance(task))
    layers, cost = layer_precisions(gearbox.layers, journal.parts, threshold), measuring_cost(journal.parts).shares()
    note(
        f"computed {cost['blocks']:.3f} of the blocks, {cost['layer_calls']:.3f} of the layers' calls and "
        f"{cost['multiplications']:.3f} of the multiplications of {len(layers)} x {len(bits)} full passes"
    )
    inputs["accuracy_threshold"] = threshold
    return PrecisionManifest(method=EXACT_KL, perplexity=exact.perplexity, layers=layers, cost=cost, **inputs)


def estimated(settings: SensitivitySettings, model: nn.Module, windows: Windows) -> PrecisionManifest:
    """Return the first-order manifest."""
    inputs, bits = inputs_of_journal(settings, model, windows), settings.measurement.bits
    layout = settings.layout.filled(None, "")
    layers, _ = discover(model, layout["manage"], layout["group_size"], get_format(layout["format"]))
    check_floors(layers, bits)
    kls = estimate_kls(layers, model, windows, bits, layout["group_size"])
    precisions = {layer.path: layer_precision(layer, kls[layer.path], {}) for layer in layers}
    return PrecisionManifest(method=FIRST_ORDER, perplexity=None, layers=precisions, **inputs)


def check_floors(layers: Sequence[Layer], bits: Sequence[int]) -> None:
    """Validate that each layer can have some of these bits, before the work. Raises GearbxError."""
    for layer in layers:
        if layer.lowest_bits > max(bits):
            raise GearbxError(
                f"--bits {','.join(map(str, bits))}: {layer.path} has {layer.lowest_bits} bits or more; "
                f"use {layer.lowest_bits} as well"
            )


def classes_table(manifest: PrecisionManifest) -> Table:
    """Return a table of layer classes: the fewest allowed bits, and the summed KL at each width."""
    rows = []
    for kind in dict.fromkeys(layer.kind for layer in manifest.layers.values()):
        layers = [layer for layer in manifest.layers.values() if layer.kind == kind]
        least = sorted({layer.min_bits for layer in layers})
        kls = (sum(layer.kl.get(bits, 0.0) for layer in layers) for bits in manifest.bits)
        rows.append([kind, str(len(layers)), ", ".join(map(str, least)), *(f"{kl:.2g}" for kl in kls)])
    return table_with_head(["class", "layers", "least bits", *(f"KL at {bits}" for bits in manifest.bits)], rows)
