"""The body of `sensitivity`: measures what every layer's precision costs, and writes a precision manifest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from rich import box
from rich.progress import Progress
from rich.table import Table

from ..bit_selection.defaults import LOW
from ..bit_selection.first_order import as_kl, first_order, read_sensitivities, sensitivities_of
from ..bit_selection.precision import EXACT, FIRST_ORDER, LayerPrecision, PrecisionManifest, least_bits
from ..bit_selection.sensitivity import (
    MeasuredLayer,
    calibration_windows,
    estimated_precisions,
    exact_of,
    flagged,
    layer_precisions,
    measure_clamped,
    measure_layers,
    measuring_cost,
    rank_agreement,
    single_layer_gearbox,
)
from ..cli.flags import output_path
from ..cli.loaded import load_original
from ..cli.terminal import messages, note, progress_bar, show_compiling
from ..errors import GearbxError
from ..evaluation.session import JOURNAL, Journal, beside, hash_of_tokens, versions
from ..files.writing import write_text
from ..formats import get_format
from ..gears.discovery import Layer, discover
from ..gears.gearbox import model_fingerprint
from ..loading import model_name
from . import SensitivitySettings

Windows = Sequence[Sequence[int]]
Kls = dict[str, dict[int, float]]  # path to bits to nats


def run(settings: SensitivitySettings) -> int:
    wanted, text = settings.measurement, settings.text
    check_format(settings.layout.filled(None, "")["format"])
    out = output_path(wanted.out)
    journal = beside(out, JOURNAL)
    other = None if wanted.write_sensitivities is None else output_path(wanted.write_sensitivities)
    known = None if wanted.sensitivities is None else read_sensitivities(Path(wanted.sensitivities))
    model, tokenizer, config = load_original(settings.model)
    windows = calibration_windows(tokenizer, config, text.data, text.num_samples, text.sequence_length)
    if wanted.fast or known is not None:
        manifest = estimated(settings, model, windows, known)
    else:
        manifest = measured(settings, model, windows, journal)
    if other is not None:
        write_text(other, json.dumps(sensitivities_of(manifest.layers)))
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
    for path in filter(None, (out, other)):
        print(path)
    return 0


def check_format(name: str) -> None:
    """Raises GearbxError for a format whose layers cannot have bits of their own; before the model is loaded."""
    if get_format(name).ladders:
        raise GearbxError(
            f"--format {name}: all layers have the same gears, so there are no bits to choose for one of them; "
            "give --format planes or affine"
        )


def inputs_of(settings: SensitivitySettings, model: nn.Module, windows: Windows) -> dict[str, Any]:
    """Everything that the results depend on; the manifest says it beside its layers."""
    return {
        "model": model_name(settings.model.model),
        "fingerprint": model_fingerprint(model),
        "calibration": hash_of_tokens(windows),
        "tokens": sum(len(window) - 1 for window in windows),
        **settings.layout.filled(None, ""),
        "bits": settings.measurement.widths,
    }


def measured(settings: SensitivitySettings, model: nn.Module, windows: Windows, file: Path | None) -> PrecisionManifest:
    """The manifest of a model whose layers are reduced one at a time.

    Args:
        file: the journal, which an interrupted run is continued from, if there is one.
    """
    inputs, bits = inputs_of(settings, model, windows), settings.measurement.widths
    layout = settings.layout.filled(None, "")
    estimates = None
    if settings.measurement.compare:
        managed, _ = discover(model, layout["manage"], layout["group_size"], get_format(layout["format"]))
        estimates = estimate_kls(managed, model, windows, bits, layout["group_size"])
    show_compiling()
    run_with = {**layout, "dtype": settings.model.dtype, "kernels": settings.text.kernels}
    with progress_bar() as progress:
        threshold = settings.measurement.accuracy_threshold
        perplexity, layers, cost = measure(model, windows, bits, threshold, run_with, inputs, file, progress)
    report_cost(cost, len(layers), len(bits))
    report_clamps(layers)
    if estimates is not None:
        cost["spearman"] = report_agreement(layers, estimates)
    inputs["accuracy_threshold"] = threshold
    return PrecisionManifest(method=EXACT, perplexity=perplexity, layers=layers, cost=cost, **inputs)


def measure(
    model: nn.Module,
    windows: Windows,
    bits: Sequence[int],
    threshold: float,
    run_with: dict[str, Any],
    inputs: Mapping[str, Any],
    file: Path | None,
    progress: Progress,
) -> tuple[float, dict[str, LayerPrecision], dict[str, Any]]:
    """The perplexity at full precision, every layer's precision, and what measuring cost over all runs.

    Args:
        threshold: percent that a layer at its fewest bits may add to the perplexity.
        run_with: further keywords of `single_layer_gearbox`.
        inputs: what the journal's parts depend on.
        file: the journal.
    """
    gearbox = single_layer_gearbox(model, bits, clamps={}, **run_with)
    check_floors(gearbox.layers, bits)
    clamps = flagged(gearbox.layers)
    depends_on = {**inputs, "native": gearbox.kernels.native, "dtype": run_with["dtype"], **versions()}
    journal = Journal(file, depends_on, MeasuredLayer)
    exact = exact_of(gearbox, windows, progress)
    task = progress.add_task("layers", total=len(gearbox.layers))
    measure_layers(exact, bits, journal, lambda: progress.advance(task))
    if clamps:
        clamped = exact_of(single_layer_gearbox(model, bits, clamps=clamps, **run_with), windows, progress)
        clamped_task = progress.add_task("clamped layers", total=len(clamps))
        measure_clamped(clamped, journal, lambda: progress.advance(clamped_task))
    precisions = layer_precisions(gearbox.layers, journal.parts, clamps, threshold)
    return exact.perplexity, precisions, measuring_cost(journal.parts).shares()


def check_floors(layers: Sequence[Layer], bits: Sequence[int]) -> None:
    """Raises GearbxError for a layer that can have none of these bits; before the work, not after it."""
    for layer in layers:
        if layer.lowest_bits > max(bits):
            raise GearbxError(
                f"--bits {','.join(map(str, bits))}: {layer.path} has {layer.lowest_bits} bits or more; "
                f"measure {layer.lowest_bits} as well"
            )


def report_cost(cost: Mapping[str, float], layers: int, widths: int) -> None:
    note(
        f"computed {cost['blocks']:.3f} of the blocks, {cost['layer_calls']:.3f} of the layers' calls and "
        f"{cost['multiplications']:.3f} of the multiplications of {layers} x {widths} full passes"
    )


def report_clamps(layers: Mapping[str, LayerPrecision]) -> None:
    tried = sum(bool(layer.kl_clamped) for layer in layers.values())
    lowered = sum(layer.clamp is not None for layer in layers.values())
    note(f"{tried} layers have heavier tails than a Gaussian; a clamp of 3 sigma pays in {lowered} of them")


def report_agreement(layers: Mapping[str, LayerPrecision], estimates: Kls) -> dict[str, float]:
    """Print and return how well the estimates rank the layers: bits to Spearman's correlation."""
    agreement = rank_agreement(layers, estimates)
    shown = ", ".join(f"{value:.2f} at {width} bits" for width, value in agreement.items())
    note(f"the fast way ranks the layers with a Spearman correlation of {shown}")
    return {str(width): round(value, 4) for width, value in agreement.items()}


def estimated(
    settings: SensitivitySettings, model: nn.Module, windows: Windows, known: dict[str, float] | None
) -> PrecisionManifest:
    """The manifest to first order: estimated here, or from a file of mlx_lm.dynamic_quant (path to sensitivity)."""
    inputs, bits = inputs_of(settings, model, windows), settings.measurement.widths
    layout = settings.layout.filled(None, "")
    layers, _ = discover(model, layout["manage"], layout["group_size"], get_format(layout["format"]))
    check_floors(layers, bits)
    if known is None:
        kls = estimate_kls(layers, model, windows, bits, layout["group_size"])
    else:
        inputs |= {"calibration": "", "tokens": 0}
        kls = known_kls(layers, known, bits, settings.measurement.sensitivities)
    return PrecisionManifest(method=FIRST_ORDER, perplexity=None, layers=estimated_precisions(layers, kls), **inputs)


def estimate_kls(
    layers: Sequence[Layer], model: nn.Module, windows: Windows, bits: Sequence[int], group_size: int
) -> Kls:
    """A proxy for the KL of every layer at every width, from one backward pass."""
    low = LOW if LOW in bits else bits[0]
    high = next((width for width in bits if width > low), 8)
    found = first_order(model, windows, low, high, group_size)
    missing = [layer.path for layer in layers if layer.path not in found]
    if missing:
        raise GearbxError(f"mlx-lm estimates no sensitivity of {missing[0]}; measure it without --fast and --compare")
    return {layer.path: as_kl(found[layer.path], layer.module.weight.size, bits, low) for layer in layers}


def known_kls(layers: Sequence[Layer], known: Mapping[str, float], bits: Sequence[int], file: str | None) -> Kls:
    """A proxy for the KL of every layer at every width, from sensitivities of mlx_lm.dynamic_quant.

    Raises:
        GearbxError: a layer that the file does not have.
    """
    missing = [layer.path for layer in layers if layer.path not in known]
    if missing:
        raise GearbxError(f"{file}: has no {missing[0]}; make it with mlx_lm.dynamic_quant of this model")
    return {layer.path: as_kl(known[layer.path], layer.module.weight.size, bits) for layer in layers}


def classes_table(manifest: PrecisionManifest) -> Table:
    """A line for each class of layers: the fewest bits that they may have, and what all of them cost at each width."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("class")
    for name in ("layers", "least bits", *(f"KL at {bits}" for bits in manifest.bits)):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in dict.fromkeys(layer.kind for layer in manifest.layers.values()):
        layers = [layer for layer in manifest.layers.values() if layer.kind == kind]
        least = sorted({layer.min_bits for layer in layers})
        kls = (sum(layer.kl.get(bits, 0.0) for layer in layers) for bits in manifest.bits)
        table.add_row(kind, str(len(layers)), ", ".join(map(str, least)), *(f"{kl:.2g}" for kl in kls))
    return table
