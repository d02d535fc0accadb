"""Sensors of the machine, their readings together, and what happens to sensors that fail."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from gearbx_mlx import GearbxError
from gearbx_mlx.machine import sensors
from gearbx_mlx.machine.controller import PATIENCE, SteadyBudget, budget
from gearbx_mlx.machine.sensors import LinuxThermal, MachineState, Scripted, Watch, merged


class Told:
    """A sensor that returns the value it is given, or calls it."""

    def __init__(self, name: str, act):
        self.name = name
        self.read = act if callable(act) else lambda: act


def until(condition, seconds: float = 10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_of_two_states_the_worse_values_count():
    one = MachineState("fair", 0.5, True, 0.3)
    other = MachineState("serious", 0.4, None, 0.2)
    assert merged([one, other]) == MachineState("serious", 0.4, True, 0.3)


class TestBudget:
    @pytest.mark.parametrize(
        ("state", "share"),
        [
            (MachineState(), 1.0),
            (MachineState("nominal", 0.51, False), 1.0),
            (MachineState("nominal", 0.2, True), 1.0),  # on a charger
            (MachineState("nominal", 0.3), 0.5),  # not known to be on one
            (MachineState("nominal", 0.05, False), 0.0),
            (MachineState("fair"), 2 / 3),
            (MachineState("serious", 0.9, True), 1 / 3),
            (MachineState("critical"), 0.0),
            (MachineState(memory=0.8), 1.0),
            (MachineState(memory=0.9), 0.5),
            (MachineState("fair", memory=0.99), 0.0),
        ],
    )
    def test_is_minimum_of_readings(self, state, share):
        assert budget(state) == pytest.approx(share)

    def test_falls_at_once_and_rises_after_a_while(self):
        steady = SteadyBudget()
        hot, cool = MachineState("serious"), MachineState("nominal")
        shares = [steady.update(state) for state in (cool, hot, cool, hot, *[cool] * PATIENCE)]
        assert shares == pytest.approx([1, *[1 / 3] * (2 + PATIENCE), 1])

    def test_fluctuating_readings_change_no_budget(self):
        steady = SteadyBudget()
        shares = {steady.update(MachineState(memory=0.900 + 0.001 * (i % 2))) for i in range(100)}
        assert len(shares) <= 2


def zone(root, number: int, temperature: object, **trips: int) -> None:
    """A thermal zone as Linux shows it; degrees."""
    directory = root / f"thermal_zone{number}"
    directory.mkdir(parents=True)
    (directory / "temp").write_text(f"{temperature}\n")
    for place, (kind, at) in enumerate(trips.items()):
        (directory / f"trip_point_{place}_type").write_text(f"{kind}\n")
        (directory / f"trip_point_{place}_temp").write_text(f"{at}\n")


class TestReaders:
    @pytest.mark.parametrize(
        ("temperature", "state"),
        [(50_000, "nominal"), (76_000, "fair"), (85_000, "serious"), (94_000, "serious"), (101_000, "critical")],
    )
    def test_linux_zones_set_thermal_state(self, tmp_path, temperature, state):
        zone(tmp_path, 0, temperature, passive=85_000, critical=105_000)
        zone(tmp_path, 1, 30_000, critical=100_000, passive=-274_000)
        assert LinuxThermal(tmp_path).read() == MachineState(thermal=state)

    def test_zone_with_only_critical_trip(self, tmp_path):
        zone(tmp_path, 0, 91_000, critical=100_000)
        assert LinuxThermal(tmp_path).read().thermal == "serious"

    def test_missing_trip_points_are_refused(self, tmp_path):
        zone(tmp_path, 0, 40_000)
        with pytest.raises(GearbxError, match="no thermal zone with trip points"):
            LinuxThermal(tmp_path)

    def test_macos_reports_thermal_state(self, monkeypatch):
        monkeypatch.setattr(sensors.platform, "system", lambda: "Darwin")
        info = SimpleNamespace(thermalState=lambda: 2)
        process = SimpleNamespace(processInfo=lambda: info)
        monkeypatch.setitem(sys.modules, "Foundation", SimpleNamespace(NSProcessInfo=process))
        assert sensors.MacThermal().read() == MachineState(thermal="serious")
        monkeypatch.setitem(sys.modules, "Foundation", None)
        with pytest.raises(GearbxError, match="pip install pyobjc"):
            sensors.MacThermal()

    def test_battery_and_memory(self, monkeypatch):
        battery = SimpleNamespace(percent=42.0, power_plugged=None)
        memory = SimpleNamespace(percent=63.0)
        stand_in = SimpleNamespace(sensors_battery=lambda: battery, virtual_memory=lambda: memory)
        monkeypatch.setitem(sys.modules, "psutil", stand_in)
        assert sensors.Battery().read() == MachineState(battery=0.42)
        battery.power_plugged = True
        assert sensors.Battery().read() == MachineState(battery=0.42, charging=True)
        assert sensors.Memory().read() == MachineState(memory=0.63)

    def test_missing_readings_are_reported(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "psutil", None)
        monkeypatch.setattr(sensors.platform, "system", lambda: "Linux")
        monkeypatch.setattr(LinuxThermal.__init__, "__defaults__", (tmp_path,))
        found, absent = sensors.this_machine()
        assert not found
        assert absent["heat"].startswith("no thermal zone")
        missing = "psutil: is not installed; use pip install psutil"
        assert absent["battery"] == absent["memory"] == missing


class TestScript:
    LINES = '{"seconds": 0, "thermal": "nominal", "battery": 0.8}\n\n{"seconds": 30, "thermal": "serious"}\n'

    def read(self, tmp_path, text: str) -> Scripted:
        file = tmp_path / "machine.jsonl"
        file.write_text(text)
        return Scripted.from_file(file)

    @pytest.mark.parametrize("array", [False, True])
    def test_plays_a_file(self, tmp_path, array):
        lines = [json.loads(line) for line in self.LINES.splitlines() if line]
        text = json.dumps(lines, indent=1) if array else self.LINES
        watch = Watch([self.read(tmp_path, text)])
        assert watch.state(29.9) == MachineState("nominal", 0.8)
        assert watch.state(30.0) == MachineState("serious", 0.8)

    def test_counts_tokens_too(self, tmp_path):
        watch = Watch([self.read(tmp_path, '{"tokens": 100, "memory": 0.9}')])
        assert watch.state(1e9, 99) == MachineState()
        assert watch.state(0.0, 100) == MachineState(memory=0.9)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "must have a state, got none"),
            ('{"seconds": 0}\n{"seconds": 1', "line 2: not JSON"),
            ("[1]", "entry 1: it is 1, not an object"),
            ('{"seconds": 0, "heat": 1}', "line 1: heat is not known; choose from seconds, tokens, thermal"),
            ('{"thermal": "fair"}', "line 1: needs one time; set either seconds or tokens"),
            ('{"seconds": 0}\n{"tokens": 1}', "line 2: unit must be seconds as in the lines above, got tokens"),
            ('{"seconds": 5}\n{"seconds": 1}', "line 2: seconds must ascend, got 1 after 5"),
            ('{"seconds": -1}', "line 1: seconds is -1"),
            ('{"seconds": 0, "battery": 1.5}', "line 1: battery is 1.5"),
            ('{"seconds": 0, "charging": 1}', "line 1: charging is 1, not true or false"),
            ('\n{"seconds": 0, "thermal": "hot"}', 'line 2: thermal is "hot", not one of critical, fair'),
        ],
    )
    def test_errors_name_their_line(self, tmp_path, text, told):
        with pytest.raises(GearbxError, match=told) as raised:
            self.read(tmp_path, text)
        assert "machine.jsonl" in str(raised.value)


class TestWatch:
    def test_readings_of_sensors_are_combined(self):
        with Watch([Told("heat", MachineState("fair")), Told("memory", MachineState(memory=0.5))]) as watch:
            until(lambda: watch.state() == MachineState("fair", memory=0.5))
            assert watch.problems() == []

    def test_failing_sensor_is_skipped_and_reported_once(self):
        def fails():
            raise OSError("the sensor is gone")

        with Watch([Told("heat", fails), Told("memory", MachineState(memory=0.5))], interval=0.001) as watch:
            until(lambda: watch.state() == MachineState(memory=0.5) and watch.polls[0].failure)
            watch.state()
            assert watch.problems() == [
                "generation ignores a sensor: heat cannot be read (OSError: the sensor is gone)"
            ]
            time.sleep(0.02)
            watch.state()
            assert watch.problems() == []

    def test_blocked_sensor_does_not_delay_others(self):
        released = threading.Event()

        def blocks():
            released.wait(30)
            return MachineState("critical")

        with Watch([Told("heat", blocks), Told("memory", MachineState(memory=0.5))], timeout=0.05) as watch:
            until(lambda: watch.state() == MachineState(memory=0.5))
            until(lambda: watch.state() == MachineState(memory=0.5) and watch._problems)
            assert watch.problems() == ["generation ignores a sensor: heat cannot be read (no answer for 0.05 s)"]
            released.set()  # when it answers, it is heard again
            until(lambda: watch.state().thermal == "critical")
            assert watch.problems() == []
