"""Readers of the machine's state: heat, battery, memory. A reader that cannot work says why when it is made."""

import importlib
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Protocol

from ..errors import GearbxError
from .state import THERMAL, MachineState

ZONES = Path("/sys/class/thermal")
CLOSE = 10_000  # millidegrees Celsius below the trip point


class Reader(Protocol):
    """Reads a part of the machine's state. It may fail or take long; `Watch` handles both."""

    name: str

    def read(self) -> MachineState:
        """Raises GearbxError, OSError, or any error of a library."""
        ...


def optional(module: str, package: str) -> ModuleType:
    """The module of a library. Raises GearbxError if the package that has it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GearbxError(f"{package} is not installed; install it with: pip install {package}") from error


class MacThermal:
    """`NSProcessInfo.thermalState` of macOS 10.10.3 and later, through pyobjc.

    Raises:
        GearbxError: another system, or no pyobjc.
    """

    name = "heat"

    def __init__(self) -> None:
        if platform.system() != "Darwin":
            raise GearbxError("NSProcessInfo exists on macOS only")
        self._process = optional("Foundation", "pyobjc-framework-Cocoa").NSProcessInfo.processInfo()

    def read(self) -> MachineState:
        return MachineState(thermal=THERMAL[int(self._process.thermalState())])


class LinuxThermal:
    """Thermal zones of Linux (Documentation/driver-api/thermal/sysfs-api.rst): the worst zone.

    A zone has a temperature and trip points. At a passive or hot point the kernel slows the processor down, at a
    critical point it turns the machine off. "Serious" begins at the lowest passive or hot point (without one, 10
    degrees below critical), "fair" 10 degrees below that, "critical" 5 degrees below the critical point.

    Args:
        zones: the directory of the zones.

    Raises:
        GearbxError: no zone has a temperature and a trip point.
    """

    name = "heat"

    def __init__(self, zones: Path = ZONES):
        self.zones = zones
        if not any(True for _ in self._states()):
            raise GearbxError(f"no thermal zone with trip points in {zones}")

    def read(self) -> MachineState:
        states = list(self._states())
        if not states:
            raise GearbxError(f"no thermal zone in {self.zones} can be read")
        return MachineState(thermal=max(states, key=THERMAL.index))

    def _states(self) -> Iterator[str]:
        for zone in sorted(self.zones.glob("thermal_zone*")):
            try:
                temperature = number(zone / "temp")
                trips = trip_points(zone)
            except (OSError, ValueError):  # a sensor that sleeps, or is gone
                continue
            if trips:
                yield thermal_state(temperature, trips)


def number(file: Path) -> int:
    """The integer that a file of sysfs contains."""
    return int(file.read_text().strip())


def trip_points(zone: Path) -> dict[str, int]:
    """Type of trip point to its lowest temperature, in millidegrees Celsius; points at 0 or below are switched off."""
    found: dict[str, int] = {}
    for file in sorted(zone.glob("trip_point_*_type")):
        kind = file.read_text().strip()
        at = number(file.with_name(file.name.replace("_type", "_temp")))
        if kind in ("passive", "hot", "critical") and at > 0:
            found[kind] = min(at, found.get(kind, at))
    return found


def thermal_state(temperature: int, trips: dict[str, int]) -> str:
    """One of THERMAL, from millidegrees Celsius."""
    off = trips.get("critical")
    slower = min((trips[kind] for kind in ("passive", "hot") if kind in trips), default=None)
    if slower is None:
        assert off is not None
        slower = off - CLOSE
    if off is not None and temperature >= off - CLOSE // 2:
        return "critical"
    return "serious" if temperature >= slower else "fair" if temperature >= slower - CLOSE else "nominal"


def share(percent: float) -> float:
    """Percent as a number from 0 to 1."""
    return round(min(100.0, max(0.0, percent)) / 100, 4)


class Battery:
    """Reads charge and charger, with psutil.

    Raises:
        GearbxError: no psutil, or no battery.
    """

    name = "battery"

    def __init__(self) -> None:
        self._psutil = optional("psutil", "psutil")
        if not hasattr(self._psutil, "sensors_battery") or self._psutil.sensors_battery() is None:
            raise GearbxError("there is none")

    def read(self) -> MachineState:
        battery = self._psutil.sensors_battery()
        if battery is None:
            raise GearbxError("the battery is gone")
        plugged = battery.power_plugged  # None where psutil does not know
        return MachineState(battery=share(battery.percent), charging=None if plugged is None else bool(plugged))


class Memory:
    """Reads the share of memory that is not available to new programs, with psutil.

    Raises:
        GearbxError: no psutil.
    """

    name = "memory"

    def __init__(self) -> None:
        self._psutil = optional("psutil", "psutil")

    def read(self) -> MachineState:
        return MachineState(memory=share(self._psutil.virtual_memory().percent))


class OwnMemory:
    """Reads this process's memory as a share of a limit, with psutil: what is resident, or what MLX has on a GPU.

    Args:
        limit: bytes.
        held: bytes that MLX has, where these are not resident.

    Raises:
        GearbxError: no psutil.
    """

    name = "the memory of this process"

    def __init__(self, limit: int, held: Callable[[], int] = lambda: 0):
        self.limit, self._held = limit, held
        self._process = optional("psutil", "psutil").Process()

    def bytes(self) -> int:
        """In use now."""
        return max(int(self._process.memory_info().rss), self._held())

    def read(self) -> MachineState:
        return MachineState(memory=share(100 * self.bytes() / self.limit))


def this_machine(timeout: float = 2.0) -> tuple[list[Reader], dict[str, str]]:
    """The readers that work on this machine, and for the others, name to reason.

    Args:
        timeout: seconds that making one reader may take.
    """
    thermal = MacThermal if platform.system() == "Darwin" else LinuxThermal
    found: list[Reader] = []
    absent = {}
    for kind in (thermal, Battery, Memory):
        made = within(timeout, kind)
        if isinstance(made, Exception):
            absent[kind.name] = str(made)
        else:
            found.append(made)
    return found, absent


def within(seconds: float, make: Callable[[], Reader]) -> Reader | Exception:
    """The reader that `make` returns, or an exception: what a library raised, or that it took too long."""
    outcome: list[Reader | Exception] = []

    def attempt() -> None:
        try:
            outcome.append(make())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else GearbxError(f"no answer for {seconds:g} s")
