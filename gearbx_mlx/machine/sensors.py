"""The state of the machine at a moment (heat, battery, memory), and who reads it.

A sensor that cannot work says why when it is made. `Watch` reads in a thread of its own, so that no sensor can stop or
delay generation. `Scripted` plays states from a file, for tests and for trying things out.
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
    """The state of the machine; None is unknown.

    thermal: one of THERMAL. battery: its charge, 0 to 1. charging: whether the machine is on a charger. memory: the
    share of memory in use, 0 to 1.
    """

    thermal: str | None = None
    battery: float | None = None
    charging: bool | None = None
    memory: float | None = None

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


READINGS = tuple(field.name for field in fields(MachineState))


def merged(states: Iterable[MachineState]) -> MachineState:
    """Return the states of several sensors as one; the worse value where two sensors know the same thing."""
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
    """Reads a part of the machine's state. It may fail or take long; `Watch` handles both."""

    name: str

    def read(self) -> MachineState:
        """Raises GearbxError, OSError, or any error of a library."""
        ...


def optional(module: str, package: str) -> ModuleType:
    """Return the module of a library. Raises GearbxError if the package that has it is missing."""
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
                temperature = number_in(zone / "temp")
                trips = trip_points(zone)
            except (OSError, ValueError):  # a sensor that sleeps, or is gone
                continue
            if trips:
                yield thermal_state(temperature, trips)


def number_in(file: Path) -> int:
    """Return the integer that a file of sysfs contains."""
    return int(file.read_text().strip())


def trip_points(zone: Path) -> dict[str, int]:
    """Type of trip point to its lowest temperature, in millidegrees Celsius; points at 0 or below are switched off."""
    found: dict[str, int] = {}
    for file in sorted(zone.glob("trip_point_*_type")):
        kind = file.read_text().strip()
        at = number_in(file.with_name(file.name.replace("_type", "_temp")))
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


def charge_of(percent: float) -> float:
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
        return MachineState(battery=charge_of(battery.percent), charging=None if plugged is None else bool(plugged))


class Memory:
    """Reads the share of memory that is not available to new programs, with psutil.

    Raises:
        GearbxError: no psutil.
    """

    name = "memory"

    def __init__(self) -> None:
        self._psutil = optional("psutil", "psutil")

    def read(self) -> MachineState:
        return MachineState(memory=charge_of(self._psutil.virtual_memory().percent))


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
        return MachineState(memory=charge_of(100 * self.bytes() / self.limit))


def this_machine() -> tuple[list[Sensor], dict[str, str]]:
    """Return the sensors that work on this machine, and for the others, name to reason."""
    thermal = MacThermal if platform.system() == "Darwin" else LinuxThermal
    found: list[Sensor] = []
    absent = {}
    for kind in (thermal, Battery, Memory):
        made = in_time(2.0, kind)  # seconds that making one sensor may take
        if isinstance(made, Exception):
            absent[kind.name] = str(made)
        else:
            found.append(made)
    return found, absent


def in_time(seconds: float, make: Callable[[], Sensor]) -> Sensor | Exception:
    """Return the sensor that `make` returns, or an exception: what a library raised, or that it took too long."""
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
    """A thread that reads one sensor again and again.

    latest: its last state. failure: why it could not be read. began: when the present reading began; None between two.
    stopped: to be set, so that it ends.
    """

    def __init__(self, sensor: Sensor, interval: float):
        super().__init__(name=f"gearbx {sensor.name}", daemon=True)
        self.sensor = sensor
        self.interval = interval
        self.latest: MachineState | None = None
        self.failure: str | None = None
        self.began: float | None = time.monotonic()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            self.began = time.monotonic()
            try:
                self.latest, self.failure = self.sensor.read(), None
            except Exception as error:  # sensors and their libraries raise anything
                self.latest, self.failure = None, " ".join(f"{type(error).__name__}: {error}".split())
            self.began = None
            self.stopped.wait(self.interval)


class Watch:
    """The latest state of the machine, from sensors that run in threads of their own.

    A sensor that fails, or takes longer than the timeout, is left out until it answers again; `problems` names it once.
    A `Scripted` sensor needs no thread: it is read when the state is asked for.

    Args:
        sensors: of the machine.
        interval: seconds between two readings.
        timeout: seconds that a reading may take.
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
        """Let the threads end. They are daemons, so a blocked one ends with the program."""
        for poll in self.polls:
            poll.stopped.set()

    def state(self, seconds: float = 0.0, tokens: int = 0) -> MachineState:
        """Return the state now, without waiting.

        Args:
            seconds, tokens: since generation began, for scripts.
        """
        states = []
        for script in self.scripts:
            script.moment = tokens if script.unit == "tokens" else seconds
            states.append(script.read())
        for poll in self.polls:
            began, failure, state = poll.began, poll.failure, poll.latest
            if began is not None and time.monotonic() - began > self.timeout:
                self._report(poll, f"no answer for {self.timeout:g} s")
            elif failure is not None:
                self._report(poll, failure)
            elif state is not None:
                states.append(state)
        return merged(states)

    def problems(self) -> list[str]:
        """Return what went wrong since the last call; only the first problem of each sensor."""
        found, self._problems = self._problems, []
        return found

    def _report(self, poll: Poll, problem: str) -> None:
        if poll.sensor.name not in self._reported:
            self._reported.add(poll.sensor.name)
            self._problems.append(f"{poll.sensor.name} cannot be read ({problem}); going on without it")


GIVE_LINES = 'give lines such as {"seconds": 30, "thermal": "serious"}'

if TYPE_CHECKING:  # where type checkers see str, msgspec sees the values that are allowed
    Thermal = str
else:
    Thermal = Literal[THERMAL]
Moment = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class ScriptEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a script: a time since generation began, and what changes then."""

    seconds: Moment | None = None
    tokens: Moment | None = None
    thermal: Thermal | None = None
    battery: Fraction | None = None
    charging: bool | None = None
    memory: Fraction | None = None


@dataclass(frozen=True)
class Point:
    """The state from a moment on: seconds or tokens since generation began."""

    at: float
    state: MachineState


class Scripted:
    """A sensor that takes the state of each moment from a script.

    Args:
        points: in the order of their times; a value that a point leaves out stays as it was.
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

        Each has `seconds` or `tokens` since generation began, and any of `thermal`, `battery`, `charging`, `memory`.

        Raises:
            GearbxError: naming file and line (of an array, entry): a value that cannot be, no time or two, another unit
                than the points before it, or a time before theirs.
        """
        points: list[Point] = []
        unit = None
        for place, entry in read_entries(Path(path)):
            with error_context(f"{path}, {place}"):
                times = [name for name in ("seconds", "tokens") if getattr(entry, name) is not None]
                if len(times) != 1:
                    raise GearbxError("give either seconds or tokens")
                if unit not in (None, times[0]):
                    raise GearbxError(f"{times[0]}, where the lines before have {unit}; use one of them")
                unit, at = times[0], getattr(entry, times[0])
                if points and at < points[-1].at:
                    raise GearbxError(f"{unit} is {at:g}, before the line above; put them in order")
                points.append(Point(at, MachineState(**{name: getattr(entry, name) for name in READINGS})))
        if unit is None:
            raise GearbxError(f"{path}: no states in it; {GIVE_LINES}")
        return cls(points, unit)

    def read(self) -> MachineState:
        """Return the state at `moment`; empty before the first point."""
        known: dict[str, Any] = {}
        for point in self.points:
            if point.at <= self.moment:
                known |= point.state.known
        return MachineState(**known)


def read_entries(path: Path) -> Iterator[tuple[str, ScriptEntry]]:
    """Yield each entry of a script, and where it is: "line 3", or of an array "entry 3". Raises GearbxError for a bad
    one."""
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
