"""How many draft steps are queued ahead: measured once on a GPU, never where it would cost more than it gains."""

import json
import time
from pathlib import Path

import pytest
from conftest import on_disk, tiny_model

from gearbx_mlx import Gearbox
from gearbx_mlx.decoding import draft_trials
from gearbx_mlx.decoding.draft_trials import DEPTHS, default_depth, depth_here, round_times, shallowest
from gearbx_mlx.decoding.drafting import Drafter
from gearbx_mlx.routing.acceptance import FixedLength, default_rule


@pytest.fixture
def on_gpu(monkeypatch, own_cache) -> Path:
    """The device claims to be a GPU; returns the tuner's file."""
    monkeypatch.setenv("GEARBX_TUNE", "1")
    monkeypatch.setattr(draft_trials, "on_cpu", lambda: False)
    return own_cache / "tuning.json"


def depth(gearbox: Gearbox) -> int:
    return depth_here(gearbox, gearbox.ladder[0], default_rule())


@pytest.mark.parametrize(
    ("seconds", "depth"),
    [
        ({0: 1.0, 1: 0.8, 2: 0.79, 4: 0.9}, 1),
        ({0: 1.0, 1: 1.1, 2: 1.2, 4: 1.5}, 0),
        ({0: 1.0, 1: 0.9, 2: 0.7, 4: 0.6}, 4),
        ({0: 1.01, 1: 1.0}, 0),
    ],
)
def test_is_the_smallest_that_is_nearly_the_fastest(seconds, depth):
    assert shallowest(seconds) == depth


def test_every_depth_is_timed():
    gearbox = Gearbox(tiny_model(), "4,16")
    found = round_times(gearbox, gearbox.ladder[0], 16, trials=2)
    assert tuple(found) == DEPTHS
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())
    assert gearbox.gear == gearbox.ladder.top


def test_a_cpu_waits():
    assert default_depth() == depth(Gearbox(tiny_model(), "4,16")) == 0


def test_is_measured_once_on_a_gpu(on_gpu):
    chosen = []
    for _ in range(2):
        gearbox = Gearbox(tiny_model(), "4,16")
        gear = gearbox.gear
        chosen.append(depth(gearbox))
        (times,) = gearbox.kernel_choices.tuner.cache.times.values()
        assert {*map(int, times)} == {*DEPTHS}
        assert chosen[-1] == shallowest({int(key): seconds for key, seconds in times.items()})
        assert (gearbox.gear, gearbox.shifts, gearbox.shift_seconds) == (gear, 0, 0.0)
    assert chosen[0] == chosen[1]
    assert gearbox.kernel_choices.tuner.measured == {}


def test_of_another_format_is_measured_too(on_gpu):
    names = set()
    for format in ("planes", "affine"):
        gearbox = Gearbox(tiny_model(), "4,16", format=format)
        depth(gearbox)
        names |= gearbox.kernel_choices.tuner.cache.times.keys()
    assert len(names) == 2


@pytest.mark.some(2)
@pytest.mark.parametrize("damaged", [{}, {"x": 1.0}, {"0": 1.0, "two": 2.0}, {"99": 1.0}, {"-3": 1.0}])
def test_a_damaged_entry_is_measured_again(on_gpu, damaged):
    depth(Gearbox(tiny_model(), "4,16"))
    stored = json.loads(on_gpu.read_text())
    for times in stored["machines"].values():
        times.update(dict.fromkeys(times, damaged))
    on_gpu.write_text(json.dumps(stored))
    assert depth(Gearbox(tiny_model(), "4,16")) in DEPTHS


class TestIsNotMeasured:
    def test_for_drafts_of_a_fixed_length(self, on_gpu):
        gearbox = Gearbox(tiny_model(), "4,16")
        assert depth_here(gearbox, gearbox.ladder[0], FixedLength(2)) == 0
        assert not on_gpu.exists()

    def test_where_gears_leave_memory(self, on_gpu, tmp_path):
        assert depth(Gearbox(tiny_model(), "4,16", **on_disk(tiny_model(), tmp_path))) == 1
        assert not on_gpu.exists()

    def test_if_told_so(self, on_gpu, monkeypatch):
        monkeypatch.setenv("GEARBX_TUNE", "0")
        assert depth(Gearbox(tiny_model(), "4,16")) == 1
        assert not on_gpu.exists()

    def test_where_drafting_fails(self, on_gpu, monkeypatch):
        def draft(*_):
            raise RuntimeError("[malloc] out of memory")

        monkeypatch.setattr(Drafter, "draft", draft)
        assert depth(Gearbox(tiny_model(), "4,16")) == 1


def test_the_seconds_of_rounds_are_those_that_pass(tiny):
    gearbox = Gearbox(tiny, "4,16")
    begun = time.perf_counter()
    found = round_times(gearbox, gearbox.ladder[0], 4, trials=2, drafted=2)
    passed = time.perf_counter() - begun
    assert found.keys() == {*DEPTHS}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())
    assert sum(map(sum, found.values())) < passed
