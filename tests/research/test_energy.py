"""Energy per token, if the machine reports it; the tests' own files and programs give counters and samples."""

import plistlib
import sys

import pytest

from gearbx_mlx.errors import GearbxError
from research import energy


def zone(powercap, place, name, microjoules, largest=10_000_000):
    directory = powercap / place
    directory.mkdir(parents=True, exist_ok=True)
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", largest)):
        (directory / file).write_text(f"{value}\n")
    return directory / "energy_uj"


def test_packages_count_with_memory_without_cores(tmp_path):
    package = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    cores = zone(tmp_path, "intel-rapl:0:0", "core", 500_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 100_000)
    meter = energy.Rapl(tmp_path)
    assert (meter.name, meter.joules()) == ("package-0 + dram", 0.0)
    for file, now in ((package, 3_000_000), (cores, 1_500_000), (memory, 350_000)):
        file.write_text(str(now))
    assert meter.joules() == pytest.approx(2.25)


def test_counter_may_wrap_repeatedly(tmp_path):
    file = zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000)
    meter = energy.Rapl(tmp_path)
    found = []
    for now in (1_000_000, 8_000_000, 2_000_000):
        file.write_text(str(now))
        found.append(meter.joules())
    assert found == pytest.approx([2.0, 9.0, 13.0])


def test_machine_without_counters_is_reported(tmp_path):
    with pytest.raises(GearbxError, match="has no RAPL zone"):
        energy.Rapl(tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", "none")
    with pytest.raises(GearbxError, match="cannot be read"):
        energy.Rapl(tmp_path)


def test_samples_of_powermetrics_add_up(tmp_path):
    texts = [
        plistlib.dumps({"elapsed_ns": 200_000_000, "processor": {"combined_power": power}})
        for power in (5000.0, 10000.0)
    ]
    recorded = tmp_path / "samples"
    recorded.write_bytes(b"\0".join([*texts, texts[0][:40]]))  # the last one is cut off by the end
    copy = "import shutil, sys; shutil.copyfileobj(open(sys.argv[1], 'rb'), sys.stdout.buffer)"
    meter = energy.PowerMetrics([sys.executable, "-c", copy, str(recorded)])
    meter._thread.join(30)
    assert meter.joules() == pytest.approx(1.0 + 2.0)
    meter.close()


class Told:
    """A meter that says of each reading 6 joules more than of the one before."""

    name, now = "package-0", 100.0

    def joules(self):
        self.now += 6.0
        return self.now

    def close(self):
        pass


def test_study_reports_joules_per_token_by_gear(monkeypatch):
    monkeypatch.setattr(energy, "this_meter", Told)
    found = energy.energy(gears="4,16", tokens=12, trials=2)
    assert found.data == {4: [0.5, 0.5], 16: [0.5, 0.5]}
    assert "joules of a token (package-0)" in found.tables["energy"]
