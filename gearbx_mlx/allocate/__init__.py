"""Flags of `allocate`, and their settings."""

import argparse
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..bit_selection import EXCHANGES
from ..cli.flags import CalibrationTextSettings, ModelSettings
from ..cli.parser import parser_of
from ..cli.start import command
from ..errors import GearbxError, numbers
from ..gears.ladder import DEFAULT_LADDER, Ladder
from ..settings import Settings, as_text, flag, flag_of, parse_bytes

TARGET_UNITS = {"bpw": "bits per weight", "bytes": "bytes", "kl": "nats", "tps": "tokens/s"}
DESCRIPTION = (
    "Find bits for every layer: each additional byte goes to the layer that saves the most KL. Measure the "
    "resulting tables, and store them in the manifest as the tables of gears."
)


@dataclass(frozen=True)
class Target:
    """A target of a table. kind: bpw (bits per weight), bytes, kl (nats per token) or tps (tokens/s)."""

    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.value:g} {TARGET_UNITS[self.kind]}"


def parse_targets(kind: str, text: str) -> tuple[float, ...]:
    """Return comma-separated numbers. Raises GearbxError for a number that is not positive."""
    name = f"--target-{kind}"
    if kind == "bytes":
        return tuple(parse_bytes(part, name) for part in text.split(","))
    values = numbers(name, text, float, "4.5,8")
    if not all(0 < value < math.inf for value in values):
        raise GearbxError(f"{name}: must be above 0, got '{text}'; use for example 4.5,8")
    return values


def target_flag(kind: str, metavar: str, help: str, **rules: Any) -> Any:
    """Return the flag of one kind of target; only one kind may be set. rules: as for `flag`."""
    return flag(None, help, metavar=metavar, exclusive="target", parse=partial(parse_targets, kind), **rules)


@dataclass(frozen=True)
class AllocationSettings(Settings):
    """The tables to find, and the output file; out: None means the manifest itself."""

    title: ClassVar[str] = "allocation"

    manifest: str = flag("manifest.json", "Manifest from gearbx_mlx sensitivity", named=True)
    out: str | None = flag(None, "File to write", default_text="the manifest itself", named=True)
    gears: Ladder = flag(Ladder.parse(DEFAULT_LADDER), "Gears that get a table, except 16", parse=Ladder.parse)
    target_bpw: tuple[float, ...] | None = target_flag(
        "bpw",
        "BITS",
        "Bits per weight with scales, one for each table, comma-separated",
        default_text="those of the uniform gear",
    )
    target_bytes: tuple[float, ...] | None = target_flag(
        "bytes", "SIZE", "Bytes of the managed layers, such as 3GB, one for each table"
    )
    target_kl: tuple[float, ...] | None = target_flag(
        "kl", "NATS", "Maximum KL from full precision in nats per token, one for each table"
    )
    target_tps: tuple[float, ...] | None = target_flag(
        "tps", "TOKENS", "Decoding speed on this machine in tokens/s, one for each table"
    )
    within_ranges: bool = flag(False, "Keep every layer within min_bits and max_bits of the manifest")
    exchanges: int = flag(EXCHANGES, "Tables to measure while exchanging bits between layers", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bits:
            raise GearbxError(f"--gears {self.gears}: 16 is full precision in every layer; use a gear of fewer bits")
        self.targets()

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of the gears that get a table: all but 16."""
        return self.gears.quantized_bits

    def targets(self) -> list[Target | None]:
        """Return a target for each table; None: the bits per weight of the uniform gear.

        Raises:
            GearbxError: too few or too many targets, or targets of two kinds.
        """
        wanted = {kind: values for kind in TARGET_UNITS if (values := getattr(self, f"target_{kind}")) is not None}
        if not wanted:
            return [None] * len(self.bits)
        if len(wanted) > 1:
            raise GearbxError(f"{' and '.join(flag_of(f'target_{kind}') for kind in wanted)}: use only one")
        ((kind, values),) = wanted.items()
        if len(values) != len(self.bits):
            every = f"one for each of --gears {self.gears} but 16"
            raise GearbxError(f"--target-{kind}: wrong count, got '{as_text(values)}'; use {len(self.bits)}, {every}")
        return [Target(kind, value) for value in values]


@dataclass(frozen=True)
class AllocateSettings:
    """All settings of `allocate`."""

    model: ModelSettings
    text: CalibrationTextSettings
    allocation: AllocationSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(AllocateSettings, "allocate", DESCRIPTION)


main = command("allocate")
