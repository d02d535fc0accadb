"""Flags of quality floors."""

import argparse
from dataclasses import dataclass

from ..bit_selection.floors import LAZY, STRICT, Floors
from ..errors import GearbxError
from .settings import Settings

CODEBOOKS = ("codebook", "codebook-library")


@dataclass(frozen=True)
class FloorSettings(Settings):
    """Floors as given; a floor implies `auto_bits`."""

    auto_bits: bool = False
    min_cos_strict: float | None = None
    min_cos_lazy: float | None = None

    @property
    def wanted(self) -> bool:
        return self.auto_bits or self.min_cos_strict is not None or self.min_cos_lazy is not None

    def floors(self, format: str | None) -> Floors | None:
        """The floors for a format; None where none are asked for.

        Raises:
            GearbxError: a floor outside (0, 1), or a format that has no codebooks.
        """
        if not self.wanted:
            return None
        floors = Floors.chosen(self.min_cos_strict, self.min_cos_lazy)
        if format not in CODEBOOKS:
            raise GearbxError(f"quality floors choose codebooks, and the format is {format}; give --format codebook")
        return floors


def add_floor_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quality floors (format codebook or codebook-library)")
    group.add_argument(
        "--auto-bits",
        action="store_true",
        help="Give every layer the fewest bits that reach its floor; a gear of fewer bits has it at those.",
    )
    group.add_argument(
        "--min-cos-strict",
        type=float,
        metavar="COSINE",
        help="Floor of attention, shared experts, dense MLPs and the head; implies --auto-bits. "
        f"Default: XFP_MIN_COS_STRICT or {STRICT}",
    )
    group.add_argument(
        "--min-cos-lazy",
        type=float,
        metavar="COSINE",
        help=f"Floor of routed experts; implies --auto-bits. Default: XFP_MIN_COS_LAZY or {LAZY}",
    )
