"""Machine state (heat, battery, memory) and its sensors.

A sensor that cannot work raises the reason when it is made. `Watch` reads sensors in threads, so they cannot stop or
delay generation. `Scripted` replays states from a file, for tests and experiments.
"""

import importlib
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from ..errors import GearbxError, error_context
from ..files.reading import json_lines, parse_json, read_text, typed

THERMAL = ("nominal", "fair", "serious", "critical")  # NSProcessInfo.thermalState, in its order


@dataclass(frozen=True)
class MachineState:
    """State of the machine; None: unknown.

    thermal: one of THERMAL. battery: its charge, 0 to 1. charging: True on a charger. memory: share of memory in use, 0
    to 1.
    """

    thermal: str | None = None
    battery: float | None = None
    charging: bool | None = None
    memory: float | None = None

    @property
    def known(self) -> dict[str, Any]:
        """Known values by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        parts = [] if self.thermal is None else [f"thermal {self.thermal}"]
        if self.battery is not None:
            parts.append(f"battery {self.battery:.0%}" + (", charging" if self.charging else ""))
        if self.memory is not None:
            parts.append(f"memory {self.memory:.0%} in use")
        return ", ".join(parts) or "nothing known"


READINGS = tuple(field.name for field in fields(MachineState))


def merged(states: Iterable[MachineState]) -> MachineState:
    """Return the states of several sensors as one, with the worse value if two sensors have the same one."""
    found: dict[str, Any] = {}
    for state in states:
        for name, value in state.known.items():
            found[name] = worse(name, found[name], value) if name in found else value
    return MachineState(**found)


def worse(name: str, one: Any, other: Any) -> Any:
    if name == "thermal":
        return max(one, other, key=THERMAL.index)
    return max(one, other) if name == "memory" else min(one, other)


ZONES = Path("/sys/class/thermal")
CLOSE = 10_000  # millidegrees Celsius below the trip point


class Sensor(Protocol):
    """A source of a part of the machine's state. It may fail or take long; `Watch` handles both."""

    name: str

    def read(self) -> MachineState:
        """Return the state. Raises GearbxError, OSError, or any error of a library."""
        ...


def optional(module: str, package: str) -> ModuleType:
    """Return the module of a library. Raises GearbxError if its package is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GearbxError(f"{package}: is not installed; use pip install {package}") from error


class MacThermal:
    """`NSProcessInfo.thermalState` of macOS 10.10.3 and later, through pyobjc.

    Raises:
        GearbxError: a system other than macOS, or no pyobjc.
    """

    name = "heat"

    def __init__(self) -> None:
        if platform.system() != "Darwin":
            raise GearbxError("NSProcessInfo exists on macOS only")
        self._process = optional("Foundation", "pyobjc-framework-Cocoa").NSProcessInfo.processInfo()

    def read(self) -> MachineState:
        return MachineState(thermal=THERMAL[int(self._process.thermalState())])


class LinuxThermal:
    """The worst thermal zone of Linux (Documentation/driver-api/thermal/sysfs-api.rst).

    A zone has a temperature and trip points. At a passive or hot point the kernel slows the processor, at a critical
    point it turns the machine off. The state "serious" starts at the lowest passive or hot point, or without one 10
    degrees below the critical point. The state "fair" starts 10 degrees lower, "critical" 5 degrees below the critical
    point.

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
                temperature = number_in(zone / "temp")
                trips = trip_points(zone)
            except (OSError, ValueError):  # the zone is asleep, or has disappeared
                continue
            if trips:
                yield thermal_state(temperature, trips)


def number_in(file: Path) -> int:
    """Return the integer that a file of sysfs contains."""
    return int(file.read_text().strip())


def trip_points(zone: Path) -> dict[str, int]:
    """Return the lowest temperature of each type of trip point, in millidegrees Celsius; 0 or below is disabled."""
    found: dict[str, int] = {}
    for file in sorted(zone.glob("trip_point_*_type")):
        kind = file.read_text().strip()
        at = number_in(file.with_name(file.name.replace("_type", "_temp")))
        if kind in ("passive", "hot", "critical") and at > 0:
            found[kind] = min(at, found.get(kind, at))
    return found


def thermal_state(temperature: int, trips: dict[str, int]) -> str:
    """Return one of THERMAL for a temperature in millidegrees Celsius."""
    off = trips.get("critical")
    slower = min((trips[kind] for kind in ("passive", "hot") if kind in trips), default=None)
    if slower is None:
        assert off is not None
        slower = off - CLOSE
    if off is not None and temperature >= off - CLOSE // 2:
        return "critical"
    return "serious" if temperature >= slower else "fair" if temperature >= slower - CLOSE else "nominal"


def charge_of(percent: float) -> float:
    """Return a percentage as a number from 0 to 1."""
    return round(min(100.0, max(0.0, percent)) / 100, 4)


class Battery:
    """Charge and charger, from psutil.

    Raises:
        GearbxError: no psutil, or no battery.
    """

    name = "battery"

    def __init__(self) -> None:
        self._psutil = optional("psutil", "psutil")
        if not hasattr(self._psutil, "sensors_battery") or self._psutil.sensors_battery() is None:
            raise GearbxError("this machine has none")

    def read(self) -> MachineState:
        battery = self._psutil.sensors_battery()
        if battery is None:
            raise GearbxError("the battery has disappeared")
        plugged = battery.power_plugged  # None if psutil does not know
        return MachineState(battery=charge_of(battery.percent), charging=None if plugged is None else bool(plugged))


class Memory:
    """Share of memory that is not available to new programs, from psutil.

    Raises:
        GearbxError: no psutil.
    """

    name = "memory"

    def __init__(self) -> None:
        self._psutil = optional("psutil", "psutil")

    def read(self) -> MachineState:
        return MachineState(memory=charge_of(self._psutil.virtual_memory().percent))


class OwnMemory:
    """This process's memory as a share of a limit: resident memory (psutil), or MLX's memory on a GPU.

    Args:
        limit: bytes.
        held: returns MLX's bytes, if they are not resident.

    Raises:
        GearbxError: no psutil.
    """

    name = "the memory of this process"

    def __init__(self, limit: int, held: Callable[[], int] = lambda: 0):
        self.limit, self._held = limit, held
        self._process = optional("psutil", "psutil").Process()

    def bytes(self) -> int:
        """Return the bytes in use now."""
        return max(int(self._process.memory_info().rss), self._held())

    def read(self) -> MachineState:
        return MachineState(memory=charge_of(100 * self.bytes() / self.limit))


def this_machine() -> tuple[list[Sensor], dict[str, str]]:
    """Return the working sensors of this machine, and name to reason for the others."""
    thermal = MacThermal if platform.system() == "Darwin" else LinuxThermal
    found: list[Sensor] = []
    absent = {}
    for kind in (thermal, Battery, Memory):
        made = in_time(2.0, kind)  # seconds
        if isinstance(made, Exception):
            absent[kind.name] = str(made)
        else:
            found.append(made)
    return found, absent


def in_time(seconds: float, make: Callable[[], Sensor]) -> Sensor | Exception:
    """Return the sensor that `make` returns, or an exception: its own, or a GearbxError after a timeout."""
    outcome: list[Sensor | Exception] = []

    def attempt() -> None:
        try:
            outcome.append(make())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else GearbxError(f"no answer for {seconds:g} s")


class Poll(threading.Thread):
    """A thread that reads one sensor repeatedly.

    latest: its last state. failure: reason why it could not be read. started: time of the current reading; None between
    two. stopped: ends the thread when set.
    """

    def __init__(self, sensor: Sensor, interval: float):
        super().__init__(name=f"gearbx {sensor.name}", daemon=True)
        self.sensor = sensor
        self.interval = interval
        self.latest: MachineState | None = None
        self.failure: str | None = None
        self.started: float | None = time.monotonic()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            self.started = time.monotonic()
            try:
                self.latest, self.failure = self.sensor.read(), None
            except Exception as error:  # a sensor or its library may raise any error
                self.latest, self.failure = None, " ".join(f"{type(error).__name__}: {error}".split())
            self.started = None
            self.stopped.wait(self.interval)


class Watch:
    """Latest state of the machine, from sensors that run in their own threads.

    A sensor that fails, or exceeds the timeout, is ignored until it answers again; `problems` names it once. A
    `Scripted` sensor needs no thread: it is read in `state`.

    Args:
        sensors: of the machine.
        interval: seconds between two readings.
        timeout: seconds of a reading.
    """

    def __init__(self, sensors: Sequence[Sensor], interval: float = 1.0, timeout: float = 5.0):
        self.timeout = timeout
        self.scripts = [sensor for sensor in sensors if isinstance(sensor, Scripted)]
        self.polls = [Poll(sensor, interval) for sensor in sensors if not isinstance(sensor, Scripted)]
        self._reported: set[str] = set()
        self._problems: list[str] = []
        for poll in self.polls:
            poll.start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads. They are daemons, so a blocked one ends with the program."""
        for poll in self.polls:
            poll.stopped.set()

    def state(self, seconds: float = 0.0, tokens: int = 0) -> MachineState:
        """Return the state now, without waiting.

        Args:
            seconds, tokens: since the start of generation, for scripts.
        """
        states = []
        for script in self.scripts:
            script.moment = tokens if script.unit == "tokens" else seconds
            states.append(script.read())
        for poll in self.polls:
            started, failure, state = poll.started, poll.failure, poll.latest
            if started is not None and time.monotonic() - started > self.timeout:
                self._report(poll, f"no answer for {self.timeout:g} s")
            elif failure is not None:
                self._report(poll, failure)
            elif state is not None:
                states.append(state)
        return merged(states)

    def problems(self) -> list[str]:
        """Return the problems since the last call, of each sensor only the first one."""
        found, self._problems = self._problems, []
        return found

    def _report(self, poll: Poll, problem: str) -> None:
        if poll.sensor.name not in self._reported:
            self._reported.add(poll.sensor.name)
            self._problems.append(f"generation ignores a sensor: {poll.sensor.name} cannot be read ({problem})")


GIVE_LINES = 'use lines such as {"seconds": 30, "thermal": "serious"}'

if TYPE_CHECKING:  # type checkers see str, msgspec the allowed values
    Thermal = str
else:
    Thermal = Literal[THERMAL]
Moment = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class ScriptEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a script: a time since the start of generation, and the values that change then."""

    seconds: Moment | None = None
    tokens: Moment | None = None
    thermal: Thermal | None = None
    battery: Fraction | None = None
    charging: bool | None = None
    memory: Fraction | None = None


@dataclass(frozen=True)
class Point:
    """State from a time on; at: seconds or tokens since the start of generation."""

    at: float
    state: MachineState


class Scripted:
    """A sensor that replays states from a script.

    Args:
        points: in the order of their times; values that a point omits stay the same.
        unit: of the times, "seconds" or "tokens".
    """

    name = "script"

    def __init__(self, points: Sequence[Point], unit: str = "seconds"):
        self.points = tuple(points)
        self.unit = unit
        self.moment = 0.0

    @classmethod
    def from_file(cls, path: str | Path) -> "Scripted":
        """Read a script: JSON Lines, or a JSON array, of objects such as {"seconds": 30, "thermal": "serious"}.

        Each has `seconds` or `tokens` since the start of generation, and any of the fields of MachineState.

        Raises:
            GearbxError: a value out of range, no time or two, mixed units, or times that descend, with file and line
                (of an array, entry).
        """
        points: list[Point] = []
        unit = None
        for place, entry in read_entries(Path(path)):
            with error_context(f"{path}, {place}"):
                times = [name for name in ("seconds", "tokens") if getattr(entry, name) is not None]
                if len(times) != 1:
                    raise GearbxError("needs one time; set either seconds or tokens")
                if unit not in (None, times[0]):
                    raise GearbxError(f"unit must be {unit} as in the lines above, got {times[0]}; use one of them")
                unit, at = times[0], getattr(entry, times[0])
                if points and at < points[-1].at:
                    raise GearbxError(f"{unit} must ascend, got {at:g} after {points[-1].at:g}; use ascending times")
                points.append(Point(at, MachineState(**{name: getattr(entry, name) for name in READINGS})))
        if unit is None:
            raise GearbxError(f"{path}: must have a state, got none; {GIVE_LINES}")
        return cls(points, unit)

    def read(self) -> MachineState:
        """Return the state at `moment`; empty before the first point."""
        known: dict[str, Any] = {}
        for point in self.points:
            if point.at <= self.moment:
                known |= point.state.known
        return MachineState(**known)


def read_entries(path: Path) -> Iterator[tuple[str, ScriptEntry]]:
    """Yield each entry of a script with its place: "line 3", or of an array "entry 3". Raises GearbxError for an
    invalid one."""
    text = read_text(path, "a script of machine states", GIVE_LINES)
    if not text.lstrip().startswith("["):
        for number, entry in json_lines(path, text, ScriptEntry, GIVE_LINES):
            yield f"line {number}", entry
        return
    with error_context(path):
        entries = typed(parse_json(text), list[Any])
    for number, entry in enumerate(entries, 1):
        with error_context(f"{path}, entry {number}"):
            yield f"entry {number}", typed(entry, ScriptEntry)
