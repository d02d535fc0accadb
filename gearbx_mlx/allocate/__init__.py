"""Flags of `allocate`, and the settings that they become."""

import argparse
import math
from dataclasses import dataclass
from typing import ClassVar

from ..bit_selection.defaults import EXCHANGES
from ..cli.flags import CalibrationTextSettings, ModelSettings
from ..cli.settings import Settings, flag, flag_of, parse_bytes, parser_of
from ..cli.start import command
from ..errors import GearbxError
from ..gears.ladder import DEFAULT_LADDER, Ladder

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

    title: ClassVar[str] = "allocation"

    manifest: str = flag("manifest.json", "From gearbx_mlx.sensitivity.", named=True)
    out: str | None = flag(None, "File to write. Default: the manifest itself", named=True)
    gears: str = flag(DEFAULT_LADDER, "A table for each but 16.")
    target_bpw: str | None = flag(
        None,
        "Bits per weight, scales included; one for each table, with commas. Default: those of the uniform gear",
        metavar="BITS",
        exclusive="target",
    )
    target_bytes: str | None = flag(
        None, "Bytes of the layers that change gear, such as 3GB; likewise.", metavar="SIZE", exclusive="target"
    )
    target_kl: str | None = flag(
        None, "Most KL from full precision, nats per token; likewise.", metavar="NATS", exclusive="target"
    )
    target_tps: str | None = flag(
        None, "Tokens/s of decoding on this machine; likewise.", metavar="TOKENS", exclusive="target"
    )
    within_ranges: bool = flag(False, "Keep every layer within min_bits and max_bits of the manifest.")
    exchanges: int = flag(EXCHANGES, "Tables to measure in search of a better one, by exchanges of bits.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bits:
            raise GearbxError(f"--gears {self.gears}: 16 is full precision in every layer; give a gear of fewer bits")
        self.targets()

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of the gears that get a table: all but 16."""
        return Ladder.parse(self.gears).quantized_bits

    def targets(self) -> list[Target | None]:
        """A target for each table; None: the bits per weight of the uniform gear.

        Raises:
            GearbxError: what is not a positive number, too few or too many targets, or targets of two kinds.
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
    """Numbers with commas between. Raises GearbxError for what is not a positive number."""
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
    return parser_of(AllocateSettings, "allocate", DESCRIPTION)


main = command("allocate")
