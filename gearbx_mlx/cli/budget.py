"""Flags of a budget in memory or bits, in the place of quality floors."""

import re
from dataclasses import dataclass
from typing import ClassVar

from ..errors import GearbxError
from ..formats import has_codebooks
from .floors import FloorSettings
from .settings import Settings, flag
from .sizes import parse_bytes


@dataclass(frozen=True)
class Budget:
    """The most bytes of the model while it is encoded, or the most bits per weight; and prompts to compare it on.

    reserve: bytes of the budget that are for generation; None: as measured.
    """

    memory_budget: int | None
    target_bpw: float | None
    prompts: str | None
    reserve: int | None = None


@dataclass(frozen=True)
class BudgetSettings(Settings):
    """A budget as given."""

    title: ClassVar[str] = "budget (format codebook or codebook-library; instead of floors)"

    memory_budget: str | None = flag(
        None,
        "Such as 3GB: find the floors whose model fits, while it is encoded too, and makes sense.",
        metavar="SIZE",
    )
    target_bpw: float | None = flag(
        None, "The same for bits per weight of the layers that change gear.", metavar="BITS"
    )
    reserve: str | None = flag(
        None,
        "Of the memory budget, for keys and values and activations while the model generates: such as 2GB or 20%%. "
        "Default: measured, for the model's context, at most 8192 tokens of it.",
        metavar="SIZE",
    )
    prompts: str | None = flag(
        None,
        "One prompt per line, or JSON Lines, on which the original is compared. Default: some that ship.",
        named=True,
    )

    @property
    def wanted(self) -> bool:
        return self.memory_budget is not None or self.target_bpw is not None

    def budget(self, format: str | None, floors: FloorSettings) -> Budget | None:
        """The budget for a format; None where none is asked for.

        Raises:
            GearbxError: no such size or bits, a format that has no codebooks, floors beside the budget.
        """
        if not self.wanted:
            self.reserved(None)
            return None
        size = None if self.memory_budget is None else parse_bytes(self.memory_budget)
        if self.target_bpw is not None and not 0 < self.target_bpw < 16:
            raise GearbxError(f"--target-bpw is {self.target_bpw:g}; give bits between 0 and 16")
        if not has_codebooks(format):
            raise GearbxError(f"a budget is met by codebooks, and the format is {format}; give --format codebook")
        if floors.wanted:
            raise GearbxError("a budget finds the floors; leave out --auto-bits and --min-cos-strict, --min-cos-lazy")
        return Budget(size, self.target_bpw, self.prompts, self.reserved(size))

    def reserved(self, size: int | None) -> int | None:
        """Bytes of a budget of `size` bytes that are for generation; None: as measured.

        Raises:
            GearbxError: no such size or share, or no budget that it is a part of.
        """
        if self.reserve is None:
            return None
        if size is None:
            raise GearbxError(f"--reserve is {self.reserve}, a part of --memory-budget; give that too, or leave it out")
        reserved = size_or_share(self.reserve, size)
        if not 0 <= reserved < size:
            raise GearbxError(f"--reserve is {self.reserve}; give less than --memory-budget: 2GB, 20% or 0")
        return round(reserved)


def size_or_share(text: str, whole: int) -> float:
    """Bytes of "2GB", of "20%" of `whole`, or of "0". Raises GearbxError for anything else."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    if found and found[2]:
        return float(found[1]) / 100 * whole
    return 0.0 if found and float(found[1]) == 0 else parse_bytes(text)
