"""Energy per token in each gear, as reported by the machine: RAPL on Linux, powermetrics on macOS.

On most machines, only root may read it: use sudo, or chmod a+r of the files energy_uj. It includes the energy of other
programs. The readers were tested only with files and recorded samples.
"""

import os
import platform
import plistlib
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO

from rich.progress import track

from gearbx_mlx import Gearbox, GearbxError, load, stream_generate
from gearbx_mlx.decoding.route import Static
from gearbx_mlx.loading import DEMO_MODEL

from .studies import Found, spread, study, table_here

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
    """Yield the joules of each of powermetrics' samples: milliwatts times nanoseconds."""
    waiting = b""
    while part := stream.read1(65536) if hasattr(stream, "read1") else stream.read(65536):
        *whole, waiting = (waiting + part).split(b"\0")
        for text in whole:
            found = plistlib.loads(text.strip())
            yield found["processor"]["combined_power"] * found["elapsed_ns"] * 1e-12


def this_meter() -> PowerMetrics | Rapl:
    """Return the meter of this machine. Raises GearbxError where there is none that this user may read."""
    return PowerMetrics() if platform.system() == "Darwin" else Rapl()


@study(minutes=1)
def energy(
    model: str | None = None,
    gears: str = "4,8,16",
    prompt: str = "Tom has 5 apples and buys 7 more.",
    tokens: int = 64,
    trials: int = 5,
) -> Found:
    """Measure the joules per token in each gear, alternating, if the machine reports its energy.

    Args:
        model: Model; the bundled one if omitted.
    """
    loaded, tokenizer = load(model or DEMO_MODEL)
    gearbox = Gearbox(loaded, gears)
    found: dict[int, list[float]] = {gear.bits: [] for gear in gearbox.ladder}
    with closing(this_meter()) as meter:
        for trial in track(range(trials + 1), "trials"):
            for gear in gearbox.ladder:
                start = meter.joules()
                text = stream_generate(loaded, tokenizer, prompt, tokens, mode=Static(gear.name), gearbox=gearbox)
                written = sum(1 for _ in text)
                if trial:  # the first makes the gears
                    found[gear.bits].append((meter.joules() - start) / written)
        rows = [[bits, spread(joules, 3)] for bits, joules in found.items()]
        return Found({"energy": table_here(["gear, bits", f"joules of a token ({meter.name})"], rows)}, found)
