"""Flags of the controller, and the governor that is built from them."""

import argparse
import contextlib
import math
from collections.abc import Iterator
from typing import Any

from ..decoding.governor import Governor
from ..decoding.stream import KICKDOWN, ROUTE
from ..errors import GearbxError
from ..gears.gearbox import Gearbox
from ..gears.ladder import SUPPORTED, WIDTHS, Ladder
from ..loading import gears_of
from ..machine.readers import this_machine
from ..machine.scripted import Scripted
from ..machine.watch import Watch
from .terminal import note

NESTED = "planes"  # the format in which further bits take no further memory to speak of
CAP_BITS = (4, 5, 6, 8)


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("controller")
    group.add_argument(
        "--target-tps",
        type=float,
        metavar="N",
        help="Hold N tokens per second: a controller caps the bits of layers, the least sensitive first. It looks "
        "at this machine's heat, battery and memory too.",
    )
    group.add_argument(
        "--watch-machine", action="store_true", help="Cap by heat, battery and memory, whatever the speed."
    )
    group.add_argument(
        "--machine",
        metavar="FILE",
        help="Play the machine's state from a file (docs/machine.md) in place of reading it.",
    )
    group.add_argument(
        "--cap-bits",
        metavar="BITS",
        help="Bits, such as 5,6, that layers may be capped to besides those of the gears. Default: "
        f"{', '.join(map(str, CAP_BITS))} in {NESTED} below the top gear, none in other formats",
    )
    group.add_argument(
        "--time-layers",
        action="store_true",
        help="Lower a block at once whose time jumps over its moving average. On a CPU; it costs some speed.",
    )


def wanted(args: argparse.Namespace) -> bool:
    """Whether anything is to be capped."""
    return args.target_tps is not None or args.watch_machine or args.machine is not None


def settle_machine(args: argparse.Namespace) -> None:
    """Check what can be checked without a model, and fill in `args.widths` for the gearbox.

    Raises:
        GearbxError: numbers or flags that cannot be, a file that is not a script.
    """
    args.widths = ()
    if not wanted(args):
        for flag in ("cap_bits", "time_layers"):
            if getattr(args, flag):
                raise GearbxError(f"--{flag.replace('_', '-')} goes with --target-tps or --watch-machine; give one")
        return
    if args.target_tps is not None and not 0 < args.target_tps < math.inf:
        raise GearbxError(f"--target-tps is {args.target_tps}; give tokens per second, more than 0")
    if args.mode not in (None, ROUTE, KICKDOWN):
        why = "keeps the top gear's text" if args.mode == "lossless" else "changes no gear"
        raise GearbxError(f"--mode {args.mode} {why}, so that nothing may be capped; use --mode {ROUTE} or {KICKDOWN}")
    if args.draft_model is not None:
        raise GearbxError("with --draft-model tokens come several at a time and cannot be timed; leave it out")
    if args.machine is not None:
        Scripted.from_file(args.machine)
    args.widths = cap_bits(args)


def cap_bits(args: argparse.Namespace) -> tuple[int, ...]:
    """Bits that layers are stored at besides those of the gears."""
    if args.cap_bits is None:
        if args.format != NESTED or gears_of(args.model) is not None:
            return ()
        return tuple(bits for bits in CAP_BITS if bits < Ladder.parse(args.gears).top.bits)
    try:
        widths = tuple(int(part) for part in args.cap_bits.split(","))
    except ValueError as error:
        raise GearbxError(f"--cap-bits is '{args.cap_bits}'; give whole numbers with commas between") from error
    unknown = [bits for bits in widths if bits not in WIDTHS]
    if unknown:
        raise GearbxError(f"--cap-bits has {unknown[0]}; choose from {SUPPORTED}")
    if gears_of(args.model) is not None:
        raise GearbxError(f"the gears of {args.model} have their bits; leave out --cap-bits")
    return widths


@contextlib.contextmanager
def governor(args: argparse.Namespace, gearbox: Any, **further: Any) -> Iterator[Governor | None]:
    """What caps the gears while the context lasts; None where nothing is to be capped.

    Args:
        further: what a manifest says: `sensitivity`, `bounds`.

    Raises:
        GearbxError: a model that changes no gear, or whose layers cannot be capped or timed.
    """
    if not wanted(args):
        yield None
        return
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(
            "the model changes no gear, so nothing can be capped; leave out --target-tps and --watch-machine"
        )
    with make_watch(args) as watch:
        yield Governor(gearbox, args.target_tps, watch=watch, time_layers=args.time_layers, **further)


def make_watch(args: argparse.Namespace) -> Watch:
    """Of a script, or of this machine: what it has, and what not, is told."""
    if args.machine is not None:
        return Watch([Scripted.from_file(args.machine)])
    readers, absent = this_machine()
    reasons: dict[str, list[str]] = {}
    for name, reason in absent.items():
        reasons.setdefault(reason, []).append(name)
    told = [f"no {' and '.join(names)} ({reason})" for reason, names in reasons.items()]
    if args.verbose:
        names = [reader.name for reader in readers] or ["nothing"]
        note(f"watching {' and '.join(names)} of this machine" + (f"; {'; '.join(told)}" if told else ""))
    return Watch(readers)
