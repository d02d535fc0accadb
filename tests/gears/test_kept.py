"""Gears of a model in the user's cache: the same as made, of these weights alone, and never worse than none."""

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import same_arrays
from mutations import flip

from gearbx_mlx import GearbxWarning
from gearbx_mlx.gears import kept, sources
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.loading import DEMO_MODEL, load

PROMPT = mx.array([[1, 5, 9, 2, 7]])
CASES = [
    ("planes", "4,16"),
    ("planes", "4,8,16"),
    ("planes", "6,16"),
    ("affine", "4,16"),
    ("affine", "5,6,16"),  # codes of 5 and 6 bits, which some processors read as two planes
    ("rowwise", "8,16"),
    ("exact", "4,16"),
]


def written() -> None:
    """Wait until all entries are written."""
    for thread in threading.enumerate():
        if thread.name == kept.THREAD:
            thread.join()


def started(model: Path, format: str = "planes", ladder: str = "4,16", **how: object) -> Gearbox:
    """A gearbox as a start has it, in its lowest gear."""
    gearbox = Gearbox(load(model)[0], ladder, format=format, keep=True, **how)
    gearbox.shift(gearbox.ladder[0])
    written()
    return gearbox


def logits(gearbox: Gearbox) -> list[mx.array]:
    """What the model computes in each gear."""
    found = []
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        found.append(gearbox.model(PROMPT))
    return found


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "gears").glob("*.safetensors"))


@pytest.fixture
def model(tmp_path) -> Path:
    """The demo model, in a directory that a test may change."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


@pytest.fixture
def cache(own_cache, monkeypatch) -> Path:
    """An empty cache, in which gears of small models are kept too."""
    monkeypatch.setattr(kept, "MIN_KEPT_BYTES", 0)
    return own_cache


@pytest.fixture
def made(monkeypatch) -> SimpleNamespace:
    """Counts layers whose gears are made."""
    count, modules = SimpleNamespace(layers=0), sources.FromWeights.modules

    def counting(source, layer, bits):
        count.layers += 1
        return modules(source, layer, bits)

    monkeypatch.setattr(sources.FromWeights, "modules", counting)
    return count


@pytest.mark.parametrize(("format", "ladder"), CASES)
def test_second_start_reuses_gears_with_equal_results(model, cache, made, format, ladder):
    first = logits(started(model, format, ladder))
    made.layers = 0
    second = logits(started(model, format, ladder))
    assert made.layers == 0
    assert same_arrays(first, second)


def test_kept_only_on_request_and_for_large_models(model, own_cache):
    started(model)
    Gearbox(load(model)[0], "4,16").shift(4)
    written()
    assert not (own_cache / "gears").exists()


def test_changed_weights_have_separate_gears(model, cache, made):
    first, file = logits(started(model)), model / "model.safetensors"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-3000:-2000] = bytes(1000)  # in no place that a sample of the file shows
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    made.layers = 0
    with pytest.warns(GearbxWarning, match="was made of other weights; the gears are made again"):
        second = started(model)
    assert made.layers > 0
    assert not same_arrays(first, logits(second))


def test_the_same_weights_elsewhere_have_the_same_gears(model, cache, made, tmp_path):
    started(model)
    made.layers = 0
    started(Path(shutil.copytree(model, tmp_path / "other")))
    assert made.layers == 0


@pytest.mark.parametrize("in_place", [True, False])
def test_array_changed_after_loading_is_not_reused(model, cache, in_place):
    def changed() -> nn.Module:
        found = load(model)[0]
        layer = found.layers[0].mlp.up_proj
        if in_place:
            layer.weight[0] = 0.0
        else:
            layer.weight = layer.weight * 2
        return found

    started(model)
    gearbox = Gearbox(changed(), "4,16", keep=True)
    gearbox.shift(4)
    written()
    assert same_arrays(logits(gearbox), logits(Gearbox(changed(), "4,16")))
    assert len(entries(cache)) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(flip(file.read_bytes(), -1000)),
        lambda file: file.write_bytes(flip(file.read_bytes(), 20)),
        lambda file: os.truncate(file, file.stat().st_size // 2),
        lambda file: file.write_bytes(b"foreign"),
    ],
    ids=["a bit", "the header", "the end", "another file"],
)
def test_a_damaged_entry_is_made_again(model, cache, made, damage):
    first = logits(started(model))
    (entry,) = entries(cache)
    damage(entry)
    with pytest.warns(GearbxWarning, match="the gears are made again"):
        assert same_arrays(first, logits(started(model)))
    made.layers = 0
    started(model)
    assert made.layers == 0


def test_entry_writable_by_others_is_ignored(model, cache, made):
    first = logits(started(model))
    (entry,) = entries(cache)
    entry.chmod(0o666)
    made.layers = 0
    with pytest.warns(GearbxWarning, match="others may write to"):
        assert same_arrays(first, logits(started(model)))
    assert made.layers > 0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_unwritable_cache_costs_a_warning(model, cache, monkeypatch, error):
    def refused(*_):
        raise error

    monkeypatch.setattr(kept.TensorFile, "append_data", refused)
    monkeypatch.setattr(kept, "in_background", lambda write: write())  # its warning belongs to this test
    with pytest.warns(GearbxWarning, match=error.strerror):
        found = logits(started(model))
    assert entries(cache) == []
    assert same_arrays(found, logits(Gearbox(load(model)[0], "4,16")))


def test_weights_changed_before_writing_keep_no_gears(model, cache, monkeypatch):
    loaded = load(model)[0]
    monkeypatch.setattr(kept, "in_background", lambda write: write())
    gearbox = Gearbox(loaded, "4,16", keep=True)
    beside = model / "beside"
    beside.write_bytes((model / "model.safetensors").read_bytes())
    beside.replace(model / "model.safetensors")
    with pytest.warns(GearbxWarning, match="changed while it was in use"):
        gearbox.shift(4)
    assert entries(cache) == []


def test_weights_damaged_after_loading_keep_no_gears(model, cache):
    loaded = load(model)[0]
    file = model / "model.safetensors"
    (model / "new").write_bytes(file.read_bytes()[:100])
    (model / "new").replace(file)
    gearbox = Gearbox(loaded, "4,16", keep=True)
    with pytest.warns(GearbxWarning, match="model.safetensors: .*the gears are made again"):
        gearbox.shift("low")
    written()
    assert gearbox.gear.name == "low"


def test_two_starts_at_once_leave_one_whole_entry(model, cache, made):
    gearboxes = [Gearbox(load(model)[0], "4,16", keep=True) for _ in range(2)]
    for gearbox in gearboxes:
        gearbox.shift(4)
    written()
    assert len(entries(cache)) == 1
    made.layers = 0
    assert same_arrays(logits(started(model)), logits(gearboxes[0]))
    assert made.layers == 0


def test_files_of_killed_process_are_removed(model, cache):
    (cache / "gears").mkdir(mode=0o700)
    left = cache / "gears" / ".x-y.safetensors.abcdefgh.part"
    left.write_bytes(b"half")
    started(model)
    assert not left.exists()


def test_least_recently_used_is_evicted(model, cache, monkeypatch):
    started(model, ladder="4,16")
    (first,) = entries(cache)
    os.utime(first, (0, 0))
    started(model, ladder="8,16")
    second = next(entry for entry in entries(cache) if entry != first)
    started(model, ladder="4,16")  # used last now
    os.utime(second, (1, 1))
    size = sum(entry.stat().st_size for entry in entries(cache))
    room = SimpleNamespace(free=kept.SHARE_OF_ROOM * (size + 2**20) - size)
    monkeypatch.setattr(kept.shutil, "disk_usage", lambda _: room)
    started(model, format="affine", ladder="4,16")
    assert first in entries(cache)
    assert second not in entries(cache)


def test_gears_beyond_room_are_not_kept(model, cache, monkeypatch):
    monkeypatch.setattr(kept.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    started(model)
    assert entries(cache) == []
