"""The energy that the machine reports, in joules: RAPL on Linux, powermetrics on macOS. Most let only root read it.

The machine is shared: what other programs use is in it.
"""

import os
import platform
import plistlib
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import GearbxError

POWERCAP = Path("/sys/class/powercap")
PLATFORM = "psys"  # the zone of everything, where there is one
INSIDE = "dram"  # a zone within a package's that the package's energy leaves out
POWERMETRICS = ("powermetrics", "--samplers", "cpu_power", "-i", "200", "-f", "plist")


class Zone:
    """A RAPL zone (Documentation/power/powercap): a counter in microjoules, which begins again behind its range.

    Raises OSError or ValueError where it cannot be read.
    """

    def __init__(self, directory: Path):
        self.directory, self.total = directory, 0
        self.name = (directory / "name").read_text().strip()
        self.range, self.last = self._read("max_energy_range_uj"), self._read("energy_uj")

    def _read(self, file: str) -> int:
        return int((self.directory / file).read_text())

    def microjoules(self) -> int:
        now = self._read("energy_uj")
        self.total += now - self.last if now >= self.last else now - self.last + self.range
        self.last = now
        return self.total


class Rapl:
    """The processor's own counters: of the whole platform, or of all packages with their memory. name: of which zones.

    Args:
        powercap: the directory of the zones.

    Raises:
        GearbxError: there are none, or this user may not read them.
    """

    def __init__(self, powercap: Path = POWERCAP):
        try:
            zones = [Zone(path) for path in sorted(powercap.glob("intel-rapl:*"))]
        except PermissionError as error:
            raise GearbxError(f"{error.filename}: only root may read it") from error
        except (OSError, ValueError) as error:
            raise GearbxError(f"{powercap}: cannot be read ({error})") from error
        outer = [zone for zone in zones if zone.directory.name.count(":") == 1]
        whole = [zone for zone in outer if zone.name == PLATFORM]
        self._zones = whole or [*outer, *(zone for zone in zones if zone.name == INSIDE)]
        if not self._zones:
            raise GearbxError(f"{powercap}: has no RAPL zone")
        self.name = " + ".join(zone.name for zone in self._zones)

    def joules(self) -> float:
        """Since some moment before the first call. Raises OSError where the machine says it no longer."""
        return sum(zone.microjoules() for zone in self._zones) / 1e6

    def close(self) -> None:
        pass


class PowerMetrics:
    """macOS's powermetrics, which samples the power of processor, GPU and neural engine; it needs root.

    Args:
        command: what writes its property lists, with a zero byte between them.

    Raises:
        GearbxError: another user than root, or there is no such program.
    """

    name = "processor, GPU and neural engine"

    def __init__(self, command: Sequence[str] = POWERMETRICS):
        if command is POWERMETRICS and os.geteuid() != 0:
            raise GearbxError("powermetrics: only root may run it")
        if shutil.which(command[0]) is None:
            raise GearbxError(f"{command[0]}: is not installed")
        self._joules = 0.0
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self._thread = threading.Thread(target=self._run, args=(self._process.stdout,), daemon=True)
        self._thread.start()

    def joules(self) -> float:
        return self._joules

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def _run(self, stream: IO[bytes]) -> None:
        for sample in samples(stream):
            self._joules += sample


def samples(stream: IO[bytes]) -> Iterator[float]:
    """The joules of each of powermetrics' samples: milliwatts times nanoseconds."""
    waiting = b""
    while part := stream.read1(65536) if hasattr(stream, "read1") else stream.read(65536):
        *whole, waiting = (waiting + part).split(b"\0")
        for text in whole:
            found = plistlib.loads(text.strip())
            yield found["processor"]["combined_power"] * found["elapsed_ns"] * 1e-12


def this_meter() -> PowerMetrics | Rapl:
    """The meter of this machine. Raises GearbxError where there is none that this user may read."""
    return PowerMetrics() if platform.system() == "Darwin" else Rapl()


@dataclass
class Energy:
    """What was counted while a context lasted. joules: None where the machine does not say. name: of what."""

    joules: float | None = None
    name: str = ""


@contextmanager
def counted() -> Iterator[Energy]:
    """Count the machine's energy while the context lasts."""
    found = Energy()
    try:
        meter = this_meter()
    except GearbxError:
        yield found
        return
    start = meter.joules()
    try:
        yield found
    finally:
        try:
            found.joules, found.name = meter.joules() - start, meter.name
        except OSError:  # the counters have gone
            found.joules = None
        meter.close()
