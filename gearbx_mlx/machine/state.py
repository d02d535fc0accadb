"""The state of the machine at a moment, as far as it is known."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import GearbxError

THERMAL = ("nominal", "fair", "serious", "critical")  # NSProcessInfo.thermalState, in its order


@dataclass(frozen=True)
class MachineState:
    """The state of the machine; None is unknown.

    thermal: one of THERMAL. battery: its charge, 0 to 1. charging: whether the machine is on a charger. memory: the
    share of memory in use, 0 to 1.

    Raises:
        GearbxError: a value outside of these.
    """

    thermal: str | None = None
    battery: float | None = None
    charging: bool | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        if self.thermal is not None and self.thermal not in THERMAL:
            raise GearbxError(f"thermal is '{self.thermal}'; choose from {', '.join(THERMAL)}")
        if self.charging is not None and not isinstance(self.charging, bool):
            raise GearbxError(f"charging is {self.charging!r}; give true or false")
        for name in ("battery", "memory"):
            value = getattr(self, name)
            if value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not 0 <= value <= 1:
                raise GearbxError(f"{name} is {value!r}; give a fraction, 0 to 1")

    @property
    def known(self) -> dict[str, Any]:
        """Name to value of what is known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        parts = [] if self.thermal is None else [f"thermal {self.thermal}"]
        if self.battery is not None:
            parts.append(f"battery {self.battery:.0%}" + (", charging" if self.charging else ""))
        if self.memory is not None:
            parts.append(f"memory {self.memory:.0%} in use")
        return ", ".join(parts) or "nothing known"


NAMES = tuple(field.name for field in fields(MachineState))


def merged(states: Iterable[MachineState]) -> MachineState:
    """The states of several readers as one; the worse value where two readers know the same thing."""
    found: dict[str, Any] = {}
    for state in states:
        for name, value in state.known.items():
            found[name] = worse(name, found[name], value) if name in found else value
    return MachineState(**found)


def worse(name: str, one: Any, other: Any) -> Any:
    if name == "thermal":
        return max(one, other, key=THERMAL.index)
    return max(one, other) if name == "memory" else min(one, other)
