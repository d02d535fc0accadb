"""convert and convert --restore: files on the disk, odd file names, and flags that they ignore."""

import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import save_model, tiny_model, weights_of
from refusals import assert_refused
from test_restoring import contents, exact, publish

import gearbx_mlx
from gearbx_mlx.cli.terminal import escaped


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of a tiny model; its original in two shards beside it."""
    folder = tmp_path_factory.mktemp("whole")
    model = tiny_model(dtype=mx.bfloat16)
    save_model(model, folder / "original")
    publish(folder / "original", weights_of(model), shards=2)
    return exact(folder / "original")


@pytest.mark.parametrize("restores", [False, True])
def test_every_file_is_on_the_disk_before_the_directory_has_its_name(checkpoint, tmp_path, monkeypatch, restores):
    """Otherwise a power failure leaves empty files in a directory that looks whole."""
    synced, fsync, replace = set(), os.fsync, os.replace
    before = []
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.add(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (before.append({*synced}), replace(*paths)))
    made = {"restore": checkpoint} if restores else {"hf_path": checkpoint.with_name("original"), "gears": "4,16"}
    out = gearbx_mlx.convert(**made, mlx_path=tmp_path / "out")
    assert [file.name for file in (out, *out.iterdir()) if file.stat().st_ino not in before[-1]] == []


class TestOddNames:
    @pytest.mark.parametrize("shard", ["model (1).safetensors", "model é+&%.safetensors"])
    def test_a_shard_and_a_note(self, checkpoint, tmp_path, command, shard):
        """A file whose name cannot be in gears.json does not come back; the others do."""
        original = Path(shutil.copytree(checkpoint.with_name("original"), tmp_path / "original"))
        (original / "model-00002-of-00002.safetensors").rename(original / shard)
        (original / "my notes (2).txt").write_text("mine")
        wanted = contents(original)
        (original / "odd\x07.txt").write_text("odd")
        (original / "back\\slash.md").write_text("odd")
        flags = "--model", original, "--format", "exact", "--gears", "4,16", "--q-group-size", 32
        done = command("convert", *flags, "--mlx-path", tmp_path / "geared")
        assert done.status == 0
        assert r"--restore will not bring back back\slash.md, odd\x07.txt" in done.err.replace("\n", " ")
        assert str(original) not in done.err
        done = command("convert", "--restore", tmp_path / "geared", "--mlx-path", tmp_path / "restored")
        assert (done.status, contents(tmp_path / "restored")) == (0, wanted)

    def test_nothing_is_said_of_the_model_that_ships(self, tmp_path, command):
        done = command("convert", "--format", "exact", "--mlx-path", tmp_path / "out")
        assert done.status == 0
        assert "--restore" not in done.err

    @pytest.mark.parametrize("shard", ["model\x07.safetensors", "model\\1.safetensors"])
    def test_a_shard_that_could_not_come_back(self, checkpoint, tmp_path, command, shard):
        original = Path(shutil.copytree(checkpoint.with_name("original"), tmp_path / "original"))
        (original / "model-00002-of-00002.safetensors").rename(original / shard)
        done = command(
            "convert", "--model", original, "--format", "exact", "--gears", "4,16", "--mlx-path", tmp_path / "out"
        )
        assert_refused(done, original, escaped(shard), "rename it")
        assert [file.name for file in tmp_path.iterdir()] == ["original"]


class TestFlags:
    @pytest.mark.parametrize("command_flag", ["--restore", "--verify"])
    def test_the_revision_is_that_of_the_checkpoint(self, checkpoint, tmp_path, command, monkeypatch, command_flag):
        asked = []

        def download(name: str, revision: str | None, allow_patterns: list[str]) -> Path:
            asked.append((name, revision))
            return checkpoint

        monkeypatch.setattr("gearbx_mlx.loading.snapshot_download", download)
        flags = command_flag, "somebody/geared", "--revision", "v2", "--mlx-path", tmp_path / "out"
        assert command("convert", *flags).status == 0
        assert asked == [("somebody/geared", "v2")]

    @pytest.mark.parametrize("command_flag", ["--restore", "--verify"])
    def test_code_that_is_not_run_is_not_trusted(self, checkpoint, tmp_path, command, command_flag):
        flags = command_flag, checkpoint, "--trust-remote-code", "--mlx-path", tmp_path / "out"
        assert_refused(command("convert", *flags), command_flag, "leave out")
        assert not (tmp_path / "out").exists()
