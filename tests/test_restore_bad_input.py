"""convert and convert --restore beside what a stopped run left, of files with odd names, and with flags they ignore."""

from pathlib import Path

import mlx.core as mx
import pytest
from conftest import save_model, tiny_model, weights_of
from test_bad_input import assert_refused
from test_restore import contents, exact, publish

from gearbx_mlx.conversion.restoring import Restorer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of a tiny model; its original in two shards beside it."""
    folder = tmp_path_factory.mktemp("whole")
    model = tiny_model(dtype=mx.bfloat16)
    save_model(model, folder / "original")
    publish(folder / "original", weights_of(model), shards=2)
    return exact(folder / "original")


class TestWhatAStoppedRunLeft:
    def test_a_restoration_does_not_get_into_a_conversion(self, checkpoint, tmp_path, command, monkeypatch):
        out, work = tmp_path / "out", tmp_path / "out.incomplete"
        with monkeypatch.context() as patch:
            patch.setattr(Restorer, "tensors", lambda self, *group: (_ for _ in ()).throw(KeyboardInterrupt))
            assert command("convert", "--restore", checkpoint, "--mlx-path", out).status == 130
        left = contents(work)
        assert left
        done = command("convert", "--mlx-path", out)
        shard = "model-00001-of-00002.safetensors"
        assert_refused(done, work, f'has "{shard}", which is not of this conversion; remove the directory')
        assert contents(work) == left
        assert not out.exists()

    def test_files_that_a_conversion_writes_itself_are_written_anew(self, checkpoint, tmp_path, command):
        """As after a kill between the last step and the renaming, of a conversion to another format."""
        work = tmp_path / "out.incomplete"
        work.mkdir()
        for name in ("model.safetensors", "original.safetensors", "selection.json", "tokenizer.json.part"):
            (work / name).write_text("before")
        flags = "--model", checkpoint.with_name("original"), "--gears", "4,16", "--q-group-size", 32
        assert command("convert", *flags, "--mlx-path", tmp_path / "out").status == 0
        assert command("convert", *flags, "--mlx-path", tmp_path / "other").status == 0
        assert contents(tmp_path / "out").keys() == contents(tmp_path / "other").keys()
