"""Flags that say how gears become tokens, and what is built from them."""

import argparse
from typing import Any

from ..decoding.drafting import read_draft_file, shipped
from ..decoding.stream import KICKDOWN, LOSSLESS, MODES, ROUTE, TELEMETRY_ONLY
from ..errors import GearbxError
from ..gears.ladder import DENSE
from ..routing.acceptance import MOST_DRAFTED, FixedLength
from ..routing.draft_file import DraftFile
from ..routing.thresholds import ThresholdFile
from .options import read_thresholds


def add_mode_flags(parser: argparse.ArgumentParser) -> None:
    """`--gears` has no default afterwards: a drafting file brings its own ladder."""
    parser.set_defaults(gears=None)
    group = parser.add_argument_group("mode")
    group.add_argument(
        "--mode",
        choices=MODES,
        help="route: the entropy of past tokens shifts. kickdown: a token in doubt is computed again in a higher gear. "
        "lossless: the low gear drafts, the top gear checks. pair: --model and --small-model take turns. Default: "
        "pair where there is a --small-model, telemetry-only for quantized checkpoints, else route",
    )
    group.add_argument("--telemetry-only", action="store_true", help="Shift nothing, name the gear that would be used.")
    group.add_argument(
        "--curve",
        metavar="FILE",
        help="For --mode lossless, when to stop drafting: a file from gearbx_mlx.calibrate --mode lossless, whose "
        "gears are then the default. Default: what ships for the demo model, or a rule for any model.",
    )
    group.add_argument(
        "--draft-length",
        type=int,
        metavar="N",
        help=f"For --mode lossless, draft so many tokens, 1 to {MOST_DRAFTED}, whatever they are.",
    )


def follow_file(args: argparse.Namespace) -> None:
    """A file that --thresholds names says which mode and gears it is for, where no flag does.

    Raises:
        GearbxError: a drafting file, and another mode than lossless.
    """
    try:
        read_draft_file(args.thresholds)
    except GearbxError:
        made = read_thresholds(args.thresholds)
        if isinstance(made, ThresholdFile) and made.mode != ROUTE:
            args.gears = args.gears or ",".join(map(str, made.gears))
            if made.mode == KICKDOWN and not args.telemetry_only:  # a static gear needs no mode
                args.mode = args.mode or KICKDOWN
        return
    if args.telemetry_only or args.mode not in (None, LOSSLESS):
        raise GearbxError(f"{args.thresholds}: is for --mode lossless; leave out the other mode")
    args.mode, args.curve, args.thresholds = LOSSLESS, args.curve or args.thresholds, None


def apply_mode(args: argparse.Namespace) -> None:
    """Settle mode and gears from the flags and files that name them.

    Raises:
        GearbxError: flags that exclude each other, a file that is no drafting file.
    """
    if args.thresholds is not None:
        follow_file(args)
    if args.telemetry_only:
        if args.mode not in (None, TELEMETRY_ONLY):
            raise GearbxError(f"--telemetry-only and --mode {args.mode} exclude each other; give one")
        args.mode = TELEMETRY_ONLY
    args.telemetry_only = args.mode == TELEMETRY_ONLY
    for flag, value in (("--curve", args.curve), ("--draft-length", args.draft_length)):
        if value is not None and args.mode != LOSSLESS:
            raise GearbxError(f"{flag} is for --mode lossless")
    if args.curve is not None and args.draft_length is not None:
        raise GearbxError("--curve and --draft-length exclude each other; give one")
    if args.draft_length is not None:
        FixedLength(args.draft_length)
    if args.gears is None:
        file = read_draft_file(args.curve) if args.curve is not None else None
        if args.mode == LOSSLESS and args.model is None:
            file = file or max(shipped(), key=saving, default=None)
        if file is not None:
            args.gears = ",".join(map(str, file.gears))


def saving(file: DraftFile) -> float:
    """How many times fewer bytes of weights than the top gear reads; of the originals before other top gears."""
    return (file.gears[-1] == DENSE) * file.weight_bytes_per_token_top / file.weight_bytes_per_token


def mode_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """What `stream_generate` is told about the mode beyond its name."""
    return {"drafting": args.curve if args.curve is not None else args.draft_length} if args.mode == LOSSLESS else {}
