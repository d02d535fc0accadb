"""Flags of a budget in memory or bits, in the place of quality floors."""

import argparse
from dataclasses import dataclass

from ..errors import GearbxError
from .floors import CODEBOOKS, FloorSettings
from .settings import Settings, name
from .sizes import parse_bytes


@dataclass(frozen=True)
class Budget:
    """The most bytes of the model while it is encoded, or the most bits per weight; and prompts to compare it on."""

    memory_budget: int | None
    target_bpw: float | None
    prompts: str | None


@dataclass(frozen=True)
class BudgetSettings(Settings):
    """A budget as given."""

    memory_budget: str | None = None
    target_bpw: float | None = None
    prompts: str | None = name()

    @property
    def wanted(self) -> bool:
        return self.memory_budget is not None or self.target_bpw is not None

    def budget(self, format: str | None, floors: FloorSettings) -> Budget | None:
        """The budget for a format; None where none is asked for.

        Raises:
            GearbxError: no such size or bits, a format that has no codebooks, floors beside the budget.
        """
        if not self.wanted:
            return None
        size = None if self.memory_budget is None else parse_bytes(self.memory_budget)
        if self.target_bpw is not None and not 0 < self.target_bpw < 16:
            raise GearbxError(f"--target-bpw is {self.target_bpw:g}; give bits between 0 and 16")
        if format not in CODEBOOKS:
            raise GearbxError(f"a budget is met by codebooks, and the format is {format}; give --format codebook")
        if floors.wanted:
            raise GearbxError("a budget finds the floors; leave out --auto-bits and --min-cos-strict, --min-cos-lazy")
        return Budget(size, self.target_bpw, self.prompts)


def add_budget_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("budget (format codebook or codebook-library; in the place of floors)")
    group.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="Such as 3GB: find the floors whose model fits, while it is encoded too, and makes sense.",
    )
    group.add_argument(
        "--target-bpw", type=float, metavar="BITS", help="The same for bits per weight of the layers that change gear."
    )
    group.add_argument(
        "--prompts",
        help="One prompt per line, or JSON Lines, on which the original is compared. Default: some that ship.",
    )
