"""Geared checkpoints that are damaged or do not fit, and conversions that fail."""

import errno
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest
from conftest import save_model, tiny_model

import gearbx_mlx
from gearbx_mlx import GearbxError
from gearbx_mlx.conversion import converter
from gearbx_mlx.gears.manifest import VERSION


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A geared checkpoint of the demo model."""
    out = tmp_path_factory.mktemp("whole") / "geared"
    subprocess.run(
        [sys.executable, "-m", "gearbx_mlx.convert", "--device", "cpu", "--mlx-path", out],
        check=True,
        capture_output=True,
    )
    return out


@pytest.fixture
def geared(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "geared")


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


def change_manifest(directory, **change):
    file = directory / "gears.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


class TestLoading:
    def refused(self, directory, words):
        with pytest.raises(GearbxError, match=words) as error:
            gearbx_mlx.load(directory)
        assert str(error.value).count("\n") == 0
        assert str(directory) in str(error.value)

    @pytest.mark.slow
    def test_a_base_that_changed(self, geared):
        model = mx.load(str(geared / "model.safetensors"))
        name = "model.layers.3.mlp.up_proj.scales"
        mx.save_safetensors(str(geared / "model.safetensors"), model | {name: model[name] * 1.01})
        self.refused(geared, "model.safetensors: changed since the gears beside it were made")

    @pytest.mark.slow
    def test_a_base_that_is_gone(self, geared):
        (geared / "model.safetensors").rename(geared / "model-00001-of-00001.safetensors")
        self.refused(geared, "model.safetensors: missing")

    @pytest.mark.parametrize("part", [0.5, 0.001, 0])
    def test_truncated_gears(self, geared, part):
        file = geared / "gears.safetensors"
        os.truncate(file, int(file.stat().st_size * part))
        self.refused(geared, "gears.safetensors: damaged or truncated")

    def test_gears_that_are_gone(self, geared):
        (geared / "gears.safetensors").unlink()
        self.refused(geared, "gears.safetensors: missing beside gears.json; download it again, or make it again")

    def test_gears_without_their_manifest(self, geared):
        (geared / "gears.json").unlink()
        self.refused(geared, "gears.json: missing beside gears.safetensors")

    def test_a_newer_version(self, geared):
        change_manifest(geared, version=VERSION + 1)
        words = f"gears.json: of version {VERSION + 1}, and this gearbx-mlx reads up to {VERSION}; upgrade gearbx-mlx"
        self.refused(geared, words)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": "1"}', "\x00"])
    def test_a_damaged_manifest(self, geared, text):
        (geared / "gears.json").write_text(text)
        self.refused(geared, "gears.json: cannot be read as a manifest of gears")

    def test_a_manifest_of_other_gears(self, geared):
        content = json.loads((geared / "gears.json").read_text())
        next(iter(content["layers"].values()))["gears"]["8"]["scales"] = "elsewhere"
        change_manifest(geared, **content)
        self.refused(geared, "has no elsewhere, which gears.json names")

    def test_gears_that_vanish_later(self, geared):
        model, _ = gearbx_mlx.load(geared)
        gearbox = gearbx_mlx.Gearbox(model, residency="disk")
        gearbox.shift("mid")
        gearbox.shift("low")
        (geared / "gears.safetensors").unlink()
        with pytest.raises(GearbxError, match="cannot be read"):
            gearbox.shift("mid")
        assert gearbox.gear.name == "low"
        assert model(mx.array([[1, 2]])).shape == (1, 2, 4096)


class TestConverting:
    @pytest.mark.some(1)
    @pytest.mark.parametrize("after", [0, 1, 30])
    def test_a_disk_that_fills_up(self, whole, tmp_path, command, monkeypatch, after):
        appends, append = iter(range(after)), converter.TensorFile.append

        def full(self, arrays):
            if next(appends, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return append(self, arrays)

        out = tmp_path / "geared"
        with monkeypatch.context() as patch:
            patch.setattr(converter.TensorFile, "append", full)
            done = command("convert", "--mlx-path", out)
        self.stopped(done, out, "No space left on device")
        assert command("convert", "--mlx-path", out).status == 0
        assert contents(out) == contents(whole)

    @pytest.mark.processes
    @pytest.mark.parametrize("limit", [1_000, 500_000, 5_000_000])
    def test_files_that_may_not_grow(self, whole, tmp_path, command, limit):
        out = tmp_path / "geared"
        shell = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        shell += "from gearbx_mlx.convert import main; main()"
        arguments = [sys.executable, "-c", shell, "--device", "cpu", "--mlx-path", out]
        done = subprocess.run(arguments, capture_output=True, text=True)
        self.stopped(SimpleNamespace(status=done.returncode, err=done.stderr), out, "File too large")
        assert command("convert", "--mlx-path", out).status == 0
        assert contents(out) == contents(whole)

    def stopped(self, done, out, reason):
        assert done.status == 2
        assert [line for line in done.err.splitlines() if not line.startswith("converting: ")][1:] == []
        assert f"{out}: cannot be written ({reason}); make room or choose another place" in done.err
        assert [*out.parent.iterdir()] == []

    def test_half_a_conversion_of_an_earlier_version_is_named_and_left(self, tmp_path, command):
        half = tmp_path / "geared.incomplete"
        half.mkdir()
        (half / "conversion.jsonl").write_text("{}\n")
        done = command("convert", "--mlx-path", tmp_path / "geared")
        assert done.status == 0
        assert f"{half}: half a conversion by an earlier version, which nothing goes on with; remove it" in done.err
        assert (half / "conversion.jsonl").exists()

    def test_what_makes_no_sense(self, whole, tmp_path, command):
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "a.txt").touch()
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        quantized = tmp_path / "quantized"
        shutil.copytree(whole, quantized)
        for name in ("gears.json", "gears.safetensors"):
            (quantized / name).unlink()
        for flags, words in (
            (["--mlx-path", tmp_path / "there"], "is there already; remove it or give another path"),
            (["--mlx-path", tmp_path / "link"], "is there already; remove it or give another path"),
            (["--mlx-path", tmp_path / "no" / "where"], "there is no directory"),
            (["--mlx-path", tmp_path / "a", "--gears", "16"], "nothing to convert; give a gear of fewer bits"),
            (["--mlx-path", tmp_path / "a", "--gears", "8,4"], "gears must ascend"),
            (["--mlx-path", tmp_path / "a", "--format", "rowwise", "--gears", "3,16"], "no gear of 3 bits"),
            (["--mlx-path", tmp_path / "a", "--model", whole], "holds gears already; convert the original"),
            (
                ["--mlx-path", tmp_path / "a", "--model", quantized],
                "there is no lower gear to write; without conversion 4 bits",
            ),
            (["--mlx-path", tmp_path / "a", "--model", tmp_path / "b"], "no such model directory"),
            (["--mlx-path", tmp_path / "a", "--model", ""], "--model is empty"),
            (["--mlx-path", tmp_path / "a", "--model", "b" * 300], "no such model directory"),
            (["--mlx-path", tmp_path / "a", "--model", "b/" + "c" * 300], "b/ccc"),
            (["--mlx-path", tmp_path / "a", "--manifest", "b" * 300], "cannot be read as a precision manifest"),
            (["--mlx-path", tmp_path / "a", "--upload-repo", "b" * 300], "--upload-repo bbb"),
            (["--mlx-path", ""], "--mlx-path is empty"),
            (["--mlx-path", "."], "is there already"),
            (["--mlx-path", "~no-such-user/a"], "no directory can have this name"),
            (["--mlx-path", tmp_path / ("a" * 300)], "no directory can have this name (File name too long)"),
        ):
            done = command("convert", *flags)
            assert done.status == 2
            assert words in done.err
            assert done.err.strip().count("\n") == 0
            assert {path.name for path in tmp_path.iterdir()} == {"there", "link", "quantized"}

    def test_weights_that_are_not_finite(self, tmp_path, command):
        model = tiny_model()
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
        save_model(model, tmp_path / "original")
        done = command("convert", "--model", tmp_path / "original", "--mlx-path", tmp_path / "geared")
        assert done.status == 2
        assert "model.layers.1.mlp.up_proj: weights are not finite" in done.err


def size_of(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
