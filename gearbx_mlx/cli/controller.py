"""Flags of the controller, which caps the gears by speed and by the machine's state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import GearbxError, about
from ..gears.ladder import SUPPORTED, WHOLE, WIDTHS, Ladder
from ..machine.readers import Scripted
from .settings import Settings, flag
from .sizes import parse_bytes

NESTED = "planes"  # the format in which further bits take hardly more memory
CAP_BITS = (4, 5, 6, 8)
SLOWEST = 0.001  # tokens per second


@dataclass(frozen=True)
class ControllerSettings(Settings):
    """What the controller aims at and watches; it runs if any of the first four is set.

    target_tps: tokens per second. machine: a file that plays the machine's state. cap_bits: bits with commas between.
    """

    title: ClassVar[str] = "controller"

    target_tps: float | None = flag(
        None,
        "Hold N tokens per second: a controller caps the bits of layers, the least sensitive first. It looks at this "
        "machine's heat, battery and memory too.",
        metavar="N",
    )
    watch_machine: bool = flag(False, "Cap by heat, battery and memory, at any speed.", rare=True)
    machine: str | None = flag(
        None,
        "Play the machine's state from a file (docs/machine.md) instead of reading it.",
        metavar="FILE",
        named=True,
        rare=True,
    )
    max_memory: str | None = flag(
        None,
        "Keep this process below so much memory, such as 3GB: layers are capped when it is near, the least sensitive "
        "first, which frees memory with --residency disk.",
        metavar="SIZE",
    )
    cap_bits: str | None = flag(
        None,
        "Bits, such as 5,6, that layers may be capped to in addition to those of the gears. Default: "
        f"{', '.join(map(str, CAP_BITS))} in {NESTED} below the top gear, none in other formats",
        metavar="BITS",
        rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.wanted and self.cap_bits:
            raise GearbxError("--cap-bits goes with --target-tps or --watch-machine; give one")
        self.limit()
        if self.target_tps is not None and not SLOWEST <= self.target_tps < math.inf:
            raise GearbxError(f"--target-tps is {self.target_tps}; give tokens per second, {SLOWEST} or more")
        if self.machine is not None:
            Scripted.from_file(self.machine)
        self.given_bits()

    @property
    def wanted(self) -> bool:
        watching = self.watch_machine or self.machine is not None or self.max_memory is not None
        return self.target_tps is not None or watching

    def limit(self) -> int | None:
        """--max-memory in bytes. Raises GearbxError for what is no size."""
        if self.max_memory is None:
            return None
        with about("--max-memory"):
            return parse_bytes(self.max_memory)

    def given_bits(self) -> tuple[int, ...] | None:
        """--cap-bits as numbers. Raises GearbxError for bits that no layer can be stored at."""
        if self.cap_bits is None:
            return None
        try:
            widths = tuple(int(part) for part in self.cap_bits.split(","))
        except ValueError as error:
            raise GearbxError(f"--cap-bits is '{self.cap_bits}'; give whole numbers with commas between") from error
        unknown = [bits for bits in widths if bits not in WIDTHS]
        if unknown:
            raise GearbxError(f"--cap-bits has {unknown[0]}; choose from {SUPPORTED}")
        return widths

    def widths(self, model: str | None, ladder: Ladder, format: str, stored: Sequence[int] | None) -> tuple[int, ...]:
        """Further bits to which layers can be capped: they are stored at them, or already are in a geared checkpoint.

        Args:
            model: its name, for the error.
            stored: bits of the gears that the checkpoint holds, to which nothing can be added; None: no gears.

        Raises:
            GearbxError: --cap-bits that a geared checkpoint does not have.
        """
        given = self.given_bits()
        missing = [bits for bits in given or () if stored is not None and bits not in stored]
        if missing:
            bits = ", ".join(map(str, stored or ()))
            raise GearbxError(
                f"--cap-bits has {missing[0]}, and the gears of {model} have {bits} bits; choose from these, "
                "or convert the original with more --gears"
            )
        if given is not None:
            return given
        if not self.wanted or format == WHOLE:  # whose layers have the widths of its ladder alone
            return ()
        if stored is not None:
            return tuple(bits for bits in stored if bits < ladder.top.bits)
        if format != NESTED:
            return ()
        return tuple(bits for bits in CAP_BITS if bits < ladder.top.bits)
