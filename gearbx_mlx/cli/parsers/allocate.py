"""Flags of `allocate`, and the settings that they become."""

import argparse
import math
from dataclasses import dataclass

from ...bit_selection.allocation import EXCHANGES
from ...errors import GearbxError
from ...gears.ladder import Ladder
from ...gears.names import DEFAULT_LADDER
from ..calibration_text import CalibrationTextSettings, add_text_flags
from ..model import ModelSettings, add_model_flags
from ..settings import Settings, command_settings, flag_of, name, new_parser, number
from ..sizes import parse_bytes

UNITS = {"bpw": "bits per weight", "bytes": "bytes", "kl": "nats", "tps": "tokens/s"}  # kind of target to its unit
DESCRIPTION = (
    "Find bits for every layer: give a byte more to the layer where it saves the most KL. Measure the tables that come "
    "of it, and store them in the manifest as the tables of gears."
)


@dataclass(frozen=True)
class Target:
    """What a table is to meet. kind: bpw (bits per weight), bytes, kl (nats per token) or tps (tokens/s)."""

    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.value:g} {UNITS[self.kind]}"


@dataclass(frozen=True)
class AllocationSettings(Settings):
    """Which tables to find, and where they are stored; out: None means the manifest itself."""

    manifest: str = name("manifest.json")
    out: str | None = name()
    gears: str = DEFAULT_LADDER
    target_bpw: str | None = None
    target_bytes: str | None = None
    target_kl: str | None = None
    target_tps: str | None = None
    any_bits: bool = False
    exchanges: int = number(EXCHANGES, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bits:
            raise GearbxError(f"--gears {self.gears}: 16 is full precision in every layer; give a gear of fewer bits")
        self.targets()

    @property
    def bits(self) -> tuple[int, ...]:
        """Of the gears that get a table: all but 16."""
        return Ladder.parse(self.gears).quantized_bits

    def targets(self) -> list[Target | None]:
        """A target for each table; None: the bits per weight of the uniform gear.

        Raises:
            GearbxError: what is no positive number, too few or too many targets, or targets of two kinds.
        """
        wanted = {kind: text for kind in UNITS if (text := getattr(self, f"target_{kind}")) is not None}
        if not wanted:
            return [None] * len(self.bits)
        if len(wanted) > 1:
            raise GearbxError(f"{' and '.join(flag_of(f'target_{kind}') for kind in wanted)}: give one of them")
        ((kind, text),) = wanted.items()
        values = parse_targets(kind, text)
        if len(values) != len(self.bits):
            raise GearbxError(
                f"--target-{kind} '{text}': give {len(self.bits)}, one for each of --gears {self.gears} but 16"
            )
        return [Target(kind, value) for value in values]


def parse_targets(kind: str, text: str) -> list[float]:
    """Numbers with commas between. Raises GearbxError for what is no positive number."""
    try:
        values = [float(parse_bytes(part) if kind == "bytes" else part) for part in text.split(",")]
    except GearbxError:
        raise
    except ValueError as error:
        raise GearbxError(f"--target-{kind} '{text}' are not numbers with commas between") from error
    if not all(0 < value < math.inf for value in values):
        raise GearbxError(f"--target-{kind} '{text}': give numbers above 0")
    return values


@dataclass(frozen=True)
class AllocateSettings:
    """Everything that `allocate` runs with."""

    model: ModelSettings
    text: CalibrationTextSettings
    allocation: AllocationSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = new_parser("allocate", DESCRIPTION)
    add_model_flags(parser)
    add_text_flags(parser)
    group = parser.add_argument_group("allocation")
    group.add_argument("--manifest", help="From gearbx_mlx.sensitivity. Default: manifest.json")
    group.add_argument("--out", help="Default: the manifest itself")
    group.add_argument("--gears", help=f"A table for each but 16. Default: {DEFAULT_LADDER}")
    target = group.add_mutually_exclusive_group()
    target.add_argument(
        "--target-bpw",
        metavar="BITS",
        help="Bits per weight, scales included; one for each table, with commas. Default: those of the uniform gear",
    )
    target.add_argument("--target-bytes", metavar="SIZE", help="Of the layers that change gear, such as 3GB; likewise.")
    target.add_argument("--target-kl", metavar="NATS", help="Most KL from full precision, nats per token; likewise.")
    target.add_argument("--target-tps", metavar="TOKENS", help="Tokens/s of decoding on this machine; likewise.")
    group.add_argument("--any-bits", action="store_true", help="Ignore the ranges of the manifest.")
    group.add_argument(
        "--exchanges",
        type=int,
        help=f"Tables to measure in search of a better one, by exchanges of bits. Default: {EXCHANGES}",
    )
    return parser


def parse() -> AllocateSettings:
    return command_settings(AllocateSettings, vars(setup_arg_parser().parse_args()))
