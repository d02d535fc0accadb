"""Flags of quality floors."""

from dataclasses import dataclass
from typing import ClassVar

from ..bit_selection.defaults import LAZY, STRICT, Floors
from ..errors import GearbxError
from ..formats import has_codebooks
from .settings import Settings, flag


@dataclass(frozen=True)
class FloorSettings(Settings):
    """Floors as given; a floor implies `auto_bits`."""

    title: ClassVar[str] = "quality floors (format codebook or codebook-library)"

    auto_bits: bool = flag(
        False, "Give every layer the fewest bits that reach its floor; a gear of fewer bits has it at those.", rare=True
    )
    min_cos_strict: float | None = flag(
        None,
        "Floor of attention, shared experts, dense MLPs and the head; implies --auto-bits. "
        f"Default: XFP_MIN_COS_STRICT or {STRICT}",
        metavar="COSINE",
        rare=True,
    )
    min_cos_lazy: float | None = flag(
        None,
        f"Floor of routed experts; implies --auto-bits. Default: XFP_MIN_COS_LAZY or {LAZY}",
        metavar="COSINE",
        rare=True,
    )

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
        if not has_codebooks(format):
            raise GearbxError(f"quality floors choose codebooks, and the format is {format}; give --format codebook")
        return floors
