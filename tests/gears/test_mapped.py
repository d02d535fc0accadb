"""Arrays where their file is mapped: the same as MLX reads, and a file that changes ends nothing without a word."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import normal, same_weights

from gearbx_mlx import Gearbox, GearbxWarning
from gearbx_mlx.files.writing import align_arrays
from gearbx_mlx.gears.mapped import forget, load_arrays, warn_of_changes
from gearbx_mlx.loading import DEMO_MODEL, load

ARRAYS = {
    "a": normal(64, 64).astype(mx.bfloat16),
    "b": normal(3, 5, 7).astype(mx.float16),
    "c": normal(1000),
    "d": mx.arange(12, dtype=mx.uint32).reshape(3, 4),
    "e": mx.array(3.0),
}


@pytest.fixture
def file(tmp_path):
    mx.save_safetensors(str(tmp_path / "model.safetensors"), ARRAYS)
    return tmp_path / "model.safetensors"


def resident(file: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    mappings = re.split(r"\n(?=[\da-f]+-[\da-f]+ )", Path("/proc/self/smaps").read_text())
    own = [one for one in mappings if one.partition("\n")[0].endswith(str(file))]
    return sum(int(match[1]) * 1024 for one in own if (match := re.search(r"\nRss: +(\d+)", one)))


@pytest.mark.usefixtures("compiled")
class TestMapped:
    @pytest.mark.parametrize("aligned", [True, False])
    def test_arrays_equal_mlx_arrays(self, file, aligned):
        if aligned:
            align_arrays(file)
        found = load_arrays(file)
        assert same_weights(found, ARRAYS)
        assert {name: (a.shape, a.dtype) for name, a in found.items()} == {
            n: (a.shape, a.dtype) for n, a in ARRAYS.items()
        }

    def test_array_writes_stay_out_of_file(self, file):
        align_arrays(file)
        before = file.read_bytes()
        found = load_arrays(file)
        found["c"][:] = 1.0
        mx.eval(found)
        assert mx.array_equal(found["c"], mx.ones(1000)).item()
        assert file.read_bytes() == before
        assert same_weights(load_arrays(file), ARRAYS)

    def test_array_survives_replaced_or_removed_file(self, file):
        align_arrays(file)
        found = load_arrays(file)
        other = file.with_name("other")
        other.write_bytes(bytes(file.stat().st_size))
        other.replace(file)
        assert same_weights(found, ARRAYS)

    def test_dropped_pages_are_read_again(self, file):
        align_arrays(file)
        found = load_arrays(file)
        mine = mx.ones((2048, 64))
        mx.eval(mine)
        for array in (*found.values(), mine):
            forget(array)
        assert same_weights(found, ARRAYS)
        assert mx.array_equal(mine, mx.ones((2048, 64))).item()

    @pytest.mark.parametrize("again", [False, True])
    def test_edited_arrays_keep_their_pages(self, file, again):
        align_arrays(file)
        found = load_arrays(file)["c"]
        for place in (3, 900)[: 1 + again]:
            found[place] = 7.0
            mx.eval(found)
        expected = np.array(found)
        forget(found)
        assert (np.array(found) == expected).all()

    def test_edit_before_gears_is_in_them(self, tmp_path):
        def high(**how: bool) -> mx.array:
            model, _ = load(shutil.copytree(DEMO_MODEL, tmp_path / str(how)), **how)
            model.layers[0].mlp.up_proj.weight[0] = 0.0
            gearbox = Gearbox(model, "4,16")
            gearbox.shift("high")
            return model(mx.array([[1, 2, 3]]))

        assert mx.array_equal(high(lazy=True), high()).item()

    @pytest.mark.skipif(sys.platform != "linux", reason="the system does not show the pages of a mapping")
    @pytest.mark.parametrize(("format", "ladder"), [("planes", "4"), ("exact", "4,16")])
    def test_originals_leave_memory_with_their_gears(self, tmp_path, format, ladder):
        model, _ = load(shutil.copytree(DEMO_MODEL, tmp_path / "model"), keep_mapped=True)
        Gearbox(model, ladder, format=format)
        assert resident(tmp_path / "model" / "model.safetensors") < 2**19

    def test_modified_file_is_reported_and_replaced_is_not(self, tmp_path):
        for name in ("written", "replaced"):
            load(shutil.copytree(DEMO_MODEL, tmp_path / name))
        with open(tmp_path / "written" / "model.safetensors", "r+b") as opened:
            opened.write(b"1")
        os.utime(tmp_path / "written" / "model.safetensors", (0, 0))
        shutil.copyfile(DEMO_MODEL / "model.safetensors", tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / "replaced" / "model.safetensors")
        with pytest.warns(GearbxWarning, match="was modified while it was in use") as said:
            warn_of_changes()
        assert [str(tmp_path / "written") in str(each.message) for each in said].count(True) == 1
        assert not any(str(tmp_path / "replaced") in str(each.message) for each in said)

    @pytest.mark.slow
    def test_truncated_file_ends_process_with_message(self, tmp_path):
        place = tmp_path / "large.safetensors"
        mx.save_safetensors(str(place), {"a": mx.zeros((1024, 1024))})
        align_arrays(place)
        program = (
            "import os, sys, mlx.core as mx\n"
            "from gearbx_mlx.gears.mapped import load_arrays\n"
            "array = load_arrays(sys.argv[1])['a']\n"
            "os.truncate(sys.argv[1], 4096)\n"
            "print(array.sum().item())\n"
        )
        ended = subprocess.run([sys.executable, "-c", program, place], capture_output=True, text=True)
        if ended.returncode == 0:
            pytest.skip("the kernels are not kept in this cache, so that nothing is mapped")
        assert ended.returncode == 1
        assert ended.stderr.splitlines() == ["error: a file of the model was truncated during use; start again"]


def test_without_kernels_mlx_reads_the_file(file, monkeypatch):
    monkeypatch.setattr("gearbx_mlx.gears.mapped.mapping_kernels", lambda: None)
    assert same_weights(load_arrays(file), ARRAYS)


def test_a_damaged_file_has_the_error_of_mlx(file):
    os.truncate(file, 100)
    with pytest.raises(RuntimeError):
        load_arrays(file)


def test_a_model_computes_the_same_from_mapped_weights(monkeypatch):
    prompt = mx.array([[1, 5, 9, 2, 7]])
    mapped = load()[0](prompt)
    monkeypatch.setattr("gearbx_mlx.loading.mapping_kernels", lambda: None)
    assert mx.array_equal(load()[0](prompt), mapped).item()
