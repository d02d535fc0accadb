"""python -m gearbx_mlx.sensitivity: what every layer's precision costs, written to a precision manifest."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli import terminal
from ..files.writing import write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..bit_selection.precision import PrecisionManifest

DEFAULT_BITS = "3,4,5,6,8"
JOURNAL = ".journal"  # behind the name of a manifest that is not whole yet


def setup_arg_parser() -> argparse.ArgumentParser:
    from ..bit_selection import calibration_text as measuring
    from ..cli import gears as options_gears
    from ..cli import options

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.sensitivity",
        description="Measure, for every layer and width, the KL from full precision and the change of perplexity with "
        "this layer alone reduced. An interrupted run goes on when the command is given again.",
    )
    options.add_model_flags(parser)
    measuring.add_text_flags(parser)
    group = parser.add_argument_group("sensitivity")
    group.add_argument("--bits", default=DEFAULT_BITS, help=f"Widths, ascending. Default: {DEFAULT_BITS}")
    options_gears.add_format_flags(group)
    group.add_argument("--out", default="manifest.json", help="Default: manifest.json")
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--fast", action="store_true", help="To first order, from one backward pass, as in mlx_lm.dynamic_quant."
    )
    how.add_argument("--compare", action="store_true", help="Measure, and tell how well the fast way ranks the layers.")
    how.add_argument(
        "--sensitivities", metavar="FILE", help="Take a file of mlx_lm.dynamic_quant instead of measuring."
    )
    group.add_argument("--write-sensitivities", metavar="FILE", help="Write such a file, for mlx_lm.dynamic_quant.")
    return parser


def parse_bits(text: str) -> tuple[int, ...]:
    """Raises GearbxError for what makes no ladder, or has 16 in it."""
    from ..errors import GearbxError
    from ..gears.ladder import Ladder

    bits = tuple(gear.bits for gear in Ladder.parse(text))
    if 16 in bits:
        raise GearbxError(f"--bits {text}: 16 is full precision, which the others are compared with; leave it out")
    return bits


def run(args: argparse.Namespace) -> int:
    from ..bit_selection import calibration_text as measuring
    from ..bit_selection.mlx_sensitivities import HIGH, LOW, read_sensitivities, sensitivities_of
    from ..bit_selection.precision import least_bits
    from ..cli import gears as options_gears
    from ..cli import options
    from ..errors import GearbxError

    bits = parse_bits(args.bits)
    if args.write_sensitivities and not {LOW, HIGH} <= {*bits}:
        raise GearbxError(
            f"--bits {args.bits}: mlx_lm.dynamic_quant needs {LOW} and {HIGH} bits; measure these as well"
        )
    out = options.output_path(args.out)
    given = read_sensitivities(Path(args.sensitivities)) if args.sensitivities else None
    other = options.output_path(args.write_sensitivities) if args.write_sensitivities else None
    args.gears = None
    options_gears.settle_gears(args, None)
    model, tokenizer, config = measuring.load_original(args)
    texts = measuring.windows(args, tokenizer, config)
    if args.fast or given is not None:
        manifest = estimated(args, model, texts, bits, given)
    else:
        manifest = measured(args, model, texts, bits, Path(f"{out}{JOURNAL}"))
    if other:
        write_text(other, json.dumps(sensitivities_of(manifest.layers)))
    write_text(out, manifest.as_json())
    Path(f"{out}{JOURNAL}").unlink(missing_ok=True)
    terminal.messages.print(classes_table(manifest))
    bound = sum(least_bits(layer.kl, layer.perplexity_change) > bits[0] for layer in manifest.layers.values())
    terminal.note(f"{bound} of {len(manifest.layers)} layers may not go down to {bits[0]} bits")
    for path in (out, *([other] if other else [])):
        print(path)
    return 0


def described(
    args: argparse.Namespace, fingerprint: str, texts: "Sequence[Sequence[int]]", bits: "Sequence[int]"
) -> dict[str, Any]:
    """What a manifest says beside its layers; results depend on it."""
    from ..bit_selection.layer_precision import hash_of_windows
    from ..loading import model_name

    return {
        "model": model_name(args.model),
        "fingerprint": fingerprint,
        "calibration": hash_of_windows(texts),
        "tokens": sum(len(text) - 1 for text in texts),
        "format": args.format,
        "group_size": args.q_group_size,
        "manage": args.manage,
        "bits": tuple(bits),
    }


def measured(
    args: argparse.Namespace, model: Any, texts: "Sequence[Sequence[int]]", bits: "Sequence[int]", file: Path
) -> "PrecisionManifest":
    """Exactly, one layer at a time."""
    from ..bit_selection import calibration_text as measuring
    from ..bit_selection.layer_precision import (
        flagged,
        layer_precisions,
        measure_clamped,
        measure_layers,
        rank_agreement,
    )
    from ..bit_selection.precision import EXACT, PrecisionManifest
    from ..evaluation.journal import Journal
    from ..gears.attachment import model_fingerprint

    told = described(args, model_fingerprint(model), texts, bits)
    proxies = proxies_of(args, model, texts, bits, None) if args.compare else None
    terminal.show_compiling()
    settings = args.format, args.q_group_size, args.manage
    gearbox = measuring.geared(args, model, bits, *settings, {})
    layers = gearbox.layers
    clamps = flagged(layers)
    journal = Journal(file, told | {"native": gearbox.kernels.native, "dtype": args.dtype}, PARTS)
    with measuring.progress_bar() as bar:
        exact = measuring.exact_of(gearbox, texts, bar)
        task = bar.add_task("layers", total=len(layers))
        measure_layers(exact, bits, journal, lambda: bar.advance(task))
        precisions = layer_precisions(layers, journal.parts, clamps)
        if clamps:
            clamped = measuring.exact_of(measuring.geared(args, model, bits, *settings, clamps), texts, bar)
            task = bar.add_task("clamped layers", total=len(clamps))
            measure_clamped(clamped, journal, lambda: bar.advance(task))
            precisions = layer_precisions(layers, journal.parts, clamps)
    cost: dict[str, Any] = exact.cost.shares()
    terminal.note(
        f"computed {cost['blocks']:.3f} of the blocks, {cost['layer_calls']:.3f} of the layers' calls and "
        f"{cost['multiplications']:.3f} of the multiplications of {len(layers)} x {len(bits)} full passes"
    )
    lowered = sum(layer.clamp is not None for layer in precisions.values())
    terminal.note(
        f"{len(clamps)} layers have heavier tails than a Gaussian; a clamp of 3 sigma pays in {lowered} of them"
    )
    if proxies is not None:
        agreement = rank_agreement(precisions, proxies)
        cost["spearman"] = {str(width): round(value, 4) for width, value in agreement.items()}
        shown = ", ".join(f"{value:.2f} at {width} bits" for width, value in agreement.items())
        terminal.note(f"the fast way ranks the layers with a Spearman correlation of {shown}")
    return PrecisionManifest(method=EXACT, perplexity=exact.perplexity, layers=precisions, cost=cost, **told)


def proxies_of(
    args: argparse.Namespace,
    model: Any,
    texts: "Sequence[Sequence[int]]",
    bits: "Sequence[int]",
    given: "dict[str, float] | None",
) -> "dict[str, dict[int, float]]":
    """Path to bits to a proxy for the KL, from mlx-lm's sensitivities: estimated here, or as given.

    Raises:
        GearbxError: a layer that a given file does not have.
    """
    from ..bit_selection.mlx_sensitivities import LOW, as_kl
    from ..bit_selection.sensitivity_fast import first_order
    from ..errors import GearbxError
    from ..formats import get_format
    from ..gears.discovery import discover

    layers, _ = discover(model, args.manage, args.q_group_size, get_format(args.format))
    low = LOW
    if given is None:
        low = LOW if LOW in bits else bits[0]
        high = next((width for width in bits if width > low), 8)
        given = first_order(model, texts, low, high, args.q_group_size)
    missing = [layer.path for layer in layers if layer.path not in given]
    if missing:
        raise GearbxError(f"{args.sensitivities}: has no {missing[0]}; make it with mlx_lm.dynamic_quant of this model")
    return {layer.path: as_kl(given[layer.path], layer.module.weight.size, bits, low) for layer in layers}


def estimated(
    args: argparse.Namespace,
    model: Any,
    texts: "Sequence[Sequence[int]]",
    bits: "Sequence[int]",
    given: "dict[str, float] | None",
) -> "PrecisionManifest":
    """To first order, or from a file."""
    from ..bit_selection.layer_precision import estimated_precisions
    from ..bit_selection.precision import FIRST_ORDER, PrecisionManifest
    from ..formats import get_format
    from ..gears.attachment import model_fingerprint
    from ..gears.discovery import discover

    told = described(args, model_fingerprint(model), texts, bits)
    if given is not None:
        told |= {"calibration": "", "tokens": 0}
    proxies = proxies_of(args, model, texts, bits, given)
    layers, _ = discover(model, args.manage, args.q_group_size, get_format(args.format))
    return PrecisionManifest(method=FIRST_ORDER, perplexity=None, layers=estimated_precisions(layers, proxies), **told)


def classes_table(manifest: "PrecisionManifest") -> Any:
    """A line for each class of layers: how far down they may go, and what all of them cost at each width."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("class")
    for name in ("layers", "least bits", *(f"KL at {bits}" for bits in manifest.bits)):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in dict.fromkeys(layer.kind for layer in manifest.layers.values()):
        held = [layer for layer in manifest.layers.values() if layer.kind == kind]
        least = sorted({layer.min_bits for layer in held})
        kls = (sum(layer.kl.get(bits, 0.0) for layer in held) for bits in manifest.bits)
        table.add_row(kind, str(len(held)), ", ".join(map(str, least)), *(f"{kl:.2g}" for kl in kls))
    return table


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))
