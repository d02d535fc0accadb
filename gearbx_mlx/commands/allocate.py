"""python -m gearbx_mlx.allocate: bits for every layer of a gear, from a precision manifest, into the manifest."""

import argparse
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ..cli import terminal
from ..files.writing import write_text

if TYPE_CHECKING:
    from ..bit_selection.allocating import Allocator, Found
    from ..bit_selection.sensitivity import Exact
    from ..gears.gearbox import Gearbox

TRIALS, TOKENS = 3, 48  # timings of a gear, and tokens of each
TARGETS = {"bpw": "bits per weight", "bytes": "bytes", "kl": "nats", "tps": "tokens/s"}


def setup_arg_parser() -> argparse.ArgumentParser:
    from ..bit_selection import calibration_text as measuring
    from ..bit_selection.allocating import TRIALS as EXCHANGES
    from ..cli import options
    from ..gears.gearbox import DEFAULT_LADDER

    parser = argparse.ArgumentParser(
        prog="python -m gearbx_mlx.allocate",
        description="Find bits for every layer where a byte more saves the most KL, measure what they come to, and "
        "keep them in the manifest as the tables of gears.",
    )
    options.add_model_flags(parser)
    measuring.add_text_flags(parser)
    group = parser.add_argument_group("allocation")
    group.add_argument(
        "--manifest", default="manifest.json", help="From gearbx_mlx.sensitivity. Default: manifest.json"
    )
    group.add_argument("--out", help="Default: the manifest itself")
    group.add_argument("--gears", default=DEFAULT_LADDER, help=f"A table for each but 16. Default: {DEFAULT_LADDER}")
    wish = group.add_mutually_exclusive_group()
    wish.add_argument(
        "--target-bpw",
        metavar="BITS",
        help="Bits per weight, scales included; one for each table, with commas. Default: those of the uniform gear",
    )
    wish.add_argument("--target-bytes", metavar="SIZE", help="Of the layers that change gear, such as 3GB; likewise.")
    wish.add_argument("--target-kl", metavar="NATS", help="Most KL from full precision, nats per token; likewise.")
    wish.add_argument("--target-tps", metavar="TOKENS", help="Tokens/s of decoding on this machine; likewise.")
    group.add_argument("--any-bits", action="store_true", help="Leave the ranges of the manifest aside.")
    group.add_argument(
        "--exchanges", type=int, default=EXCHANGES, help=f"Tables that are measured to mend one. Default: {EXCHANGES}"
    )
    return parser


def wishes_of(args: argparse.Namespace, gears: int) -> tuple[str, list[float]] | None:
    """Kind of target and a number for each table; None for the uniform gears' bits.

    Raises:
        GearbxError: no positive numbers, or too few or many of them.
    """
    from ..bit_selection.budget import parse_bytes
    from ..errors import GearbxError

    for kind in TARGETS:
        text = getattr(args, f"target_{kind}")
        if text is None:
            continue
        try:
            found = [float(parse_bytes(part) if kind == "bytes" else part) for part in text.split(",")]
        except GearbxError:
            raise
        except ValueError as error:
            raise GearbxError(f"--target-{kind} '{text}' are not numbers with commas between") from error
        if not all(0 < value < math.inf for value in found):
            raise GearbxError(f"--target-{kind} '{text}': give numbers above 0")
        if len(found) != gears:
            raise GearbxError(f"--target-{kind} '{text}': give {gears}, one for each of --gears {args.gears} but 16")
        return kind, found
    return None


def run(args: argparse.Namespace) -> int:
    from ..bit_selection import calibration_text as measuring
    from ..bit_selection.allocating import Allocator, table_of
    from ..bit_selection.precision import fit, read_precision
    from ..cli import options
    from ..errors import GearbxError, about
    from ..gears.ladder import Ladder

    ladder = Ladder.parse(args.gears)
    bits = [gear.bits for gear in ladder if not gear.dense]
    if not bits:
        raise GearbxError(f"--gears {ladder}: 16 is full precision in every layer; give a gear of fewer bits")
    if args.exchanges < 0:
        raise GearbxError(f"--exchanges is {args.exchanges}; give 0 or more")
    wish = wishes_of(args, len(bits))
    file = Path(args.manifest)
    manifest = read_precision(file)
    out = options.output_path(args.out or file)
    model, tokenizer, config = measuring.load_original(args)
    texts = measuring.windows(args, tokenizer, config)
    with about(file):
        manifest, _, missing = fit(manifest, model)
        terminal.show_compiling()
        settings = manifest.format, manifest.group_size, manifest.manage, manifest.clamps
        gearbox = measuring.geared(args, model, {*manifest.bits, *bits}, *settings)
    for path in missing:
        terminal.note(f"{file}: has no {path}, which stays at full precision")
    gears = dict(manifest.gears)
    with measuring.progress_bar() as bar:
        exact = measuring.exact_of(gearbox, texts, bar)
        task = bar.add_task("tables measured", total=None)
        allocator = Allocator(exact, manifest, not args.any_bits, args.exchanges, lambda: bar.advance(task))
        for place, gear in enumerate(bits):
            found, told = met(allocator, gearbox, gear, wish and (wish[0], wish[1][place]))
            gears[gear] = table_of(found, told, allocator.weights)
            tell(exact, allocator, gear, gears[gear])
    manifest = structs.replace(manifest, gears=dict(sorted(gears.items())))
    write_text(out, manifest.as_json())
    print(out)
    return 0


def met(allocator: "Allocator", gearbox: "Gearbox", gear: int, wish: tuple[str, float] | None) -> tuple["Found", str]:
    """A table for a wish, and the wish in words; where none meets it the nearest, and a note."""
    if wish is None:
        uniform = sum(gearbox.layer_bytes(layer, gearbox.ladder.find(gear)) for layer in gearbox.layers)
        wish = "bpw", 8 * uniform / allocator.weights
    kind, value = wish
    told = f"{value:g} {TARGETS[kind]}"
    if kind == "kl":
        found = allocator.for_kl(value)
        if found.distance.kl > value:
            terminal.note(f"no table has a KL of {value:g} nats; the nearest has {found.distance.kl:.2g}")
        return found, told
    budget = value if kind == "bytes" else bytes_for(gearbox, value) if kind == "tps" else allocator.budget(value)
    found = allocator.for_bytes(budget)
    if found.bytes > budget:
        nearest = f"{8 * found.bytes / allocator.weights:.3f} bits per weight, {terminal.human_bytes(found.bytes)}"
        terminal.note(f"no table meets {told}; the nearest has {nearest}")
    if kind == "tps":
        gearbox.cap(found.bits)
        terminal.note(f"measured: {1 / seconds_of(gearbox):.1f} tokens/s in this table")
        gearbox.cap({})
    return found, told


def seconds_of(gearbox: "Gearbox") -> float:
    """Per token of decoding, median."""
    from .benchmark.decode import decode_seconds

    return statistics.median(decode_seconds(gearbox.model, TOKENS) for _ in range(TRIALS))


def bytes_for(gearbox: "Gearbox", tokens_per_second: float) -> float:
    """The bytes of managed layers at which decoding has this speed: time is bytes over bandwidth, and a rest.

    Raises:
        GearbxError: fewer bytes are not faster here.
    """
    from ..errors import GearbxError

    points = []
    for gear in (gearbox.ladder[0], gearbox.ladder[-2]):
        gearbox.cap({layer.path: gear.bits for layer in gearbox.layers})
        points.append((sum(gearbox.layer_bytes(layer, gear) for layer in gearbox.layers), seconds_of(gearbox)))
    gearbox.cap({})
    (few, fast), (many, slow) = points
    if slow <= fast:
        raise GearbxError(
            f"{gearbox.ladder[0].bits} bits are not faster than {gearbox.ladder[-2].bits} here "
            f"({1 / fast:.1f} and {1 / slow:.1f} tokens/s), so that no table is; give --target-bpw"
        )
    return few + (1 / tokens_per_second - fast) * (many - few) / (slow - fast)


def tell(exact: "Exact", allocator: "Allocator", gear: int, table: Any) -> None:
    """What a table came to, beside the uniform gear."""
    gearbox = exact.gearbox
    there = gearbox.ladder.find(gear)
    uniform = exact.measure_caps({layer.path: gear for layer in gearbox.layers})
    plain = 8 * sum(gearbox.layer_bytes(layer, there) for layer in gearbox.layers) / allocator.weights
    terminal.note(
        f"gear {gear}: {table.bits_per_weight:.3f} bits per weight, KL {table.kl:.2g} nats measured "
        f"({table.sum_of_parts:.2g} as a sum), perplexity {table.perplexity_change:+.2f} %; "
        f"uniform {gear} bits: {plain:.3f}, {uniform.kl:.2g}, {uniform.perplexity_change:+.2f} %"
    )


def main() -> None:
    terminal.run(lambda: run(setup_arg_parser().parse_args()))
