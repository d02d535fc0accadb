"""Output files are whole or absent, and leftovers of dead processes are removed."""

import errno
import os
import signal
from pathlib import Path

import pytest
from conftest import save_model, tiny_model

import gearbx_mlx
from gearbx_mlx import GearbxError
from gearbx_mlx.files.writing import new_directory, replacing, replacing_arrays, work_directory, write_text


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


class TestReplacing:
    def test_files_of_killed_process_are_removed(self, tmp_path, holding):
        file = tmp_path / "a[1]*.json"
        process = holding("with replacing(path):", file)
        assert len(names(tmp_path)) == 1
        write_text(file, "ours")  # while the other process lives
        assert len(names(tmp_path)) == 2
        process.kill()
        process.communicate()
        write_text(tmp_path / "a", "of another name")
        assert len(names(tmp_path)) == 3
        write_text(file, "again")
        assert names(tmp_path) == {"a", file.name}
        assert file.read_text() == "again"

    def test_two_processes_write_one_file(self, tmp_path, holding):
        file = tmp_path / "a"
        process = holding("with replacing(path):", file)
        write_text(file, "ours")
        process.communicate(b"go on")
        assert process.returncode == 0
        assert names(tmp_path) == {"a"}
        assert file.read_text() == ""  # the last one's

    @pytest.mark.parametrize(
        ("number", "remedy"), [(errno.ENOSPC, "make room"), (errno.EFBIG, "make room"), (errno.EACCES, "another place")]
    )
    def test_a_failed_write_is_blamed_on_the_file(self, tmp_path, number, remedy):
        file = tmp_path / "a"
        with pytest.raises(GearbxError, match=f"{file}: cannot be written .*{remedy}"), replacing(file):
            raise OSError(number, os.strerror(number))
        assert not names(tmp_path)

    def test_missing_directory_is_blamed_on_the_file(self, tmp_path):
        with pytest.raises(GearbxError, match=f"{tmp_path / 'gone' / 'a'}: cannot be written"):
            write_text(tmp_path / "gone" / "a", "text")

    def test_long_name_of_wide_characters(self, tmp_path):
        write_text(tmp_path / ("語" * 83), "text")
        assert names(tmp_path) == {"語" * 83}

    def test_arrays_of_killed_process_are_removed(self, tmp_path):
        with replacing(tmp_path / "a.safetensors") as part:
            left = tmp_path / f"{part.name}.safetensors"
        for file in (left, left.with_suffix("")):
            file.touch()
        with replacing_arrays(tmp_path / "a.safetensors") as place:
            Path(place).touch()
        assert names(tmp_path) == {"a.safetensors"}

    def test_work_directory_of_killed_process_is_removed(self, tmp_path):
        with work_directory(tmp_path / "a") as directory:
            left = directory.name
        (tmp_path / left / "within").mkdir(parents=True)
        with work_directory(tmp_path / "a") as directory:
            assert names(tmp_path) == {directory.name}

    def test_files_of_other_programs_stay(self, tmp_path):
        (tmp_path / ".a.tar.gz.part").touch()
        write_text(tmp_path / "a", "ours")
        assert names(tmp_path) == {"a", ".a.tar.gz.part"}


class TestNewDirectory:
    def test_is_one_process_at_a_time(self, tmp_path, holding, command):
        """What a killed process left is removed."""
        out = tmp_path / "geared"
        process = holding("with new_directory(path):", out)
        left = names(tmp_path)
        done = command("convert", "--mlx-path", out)
        assert done.status == 2
        assert done.err == f"error: {out}: another process writes it; wait for it, or end it\n"
        assert names(tmp_path) == left
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with new_directory(out) as work:
            (work / "a.txt").touch()
        assert names(tmp_path) == {"geared"}
        assert names(out) == {"a.txt"}

    def test_concurrently_created_directory_is_not_replaced(self, tmp_path):
        out = tmp_path / "geared"
        with pytest.raises(GearbxError, match=r"geared: cannot be written \(File exists"), new_directory(out):
            out.mkdir()
        assert names(tmp_path) == {"geared"}


class TestFailedConversion:
    def test_user_error_leaves_no_files(self, tmp_path, command):
        model = tiny_model()
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
        save_model(model, tmp_path / "original")
        assert command("convert", "--model", tmp_path / "original", "--mlx-path", tmp_path / "geared").status == 2
        assert names(tmp_path) == {"original"}

    @pytest.mark.parametrize("error", [SystemExit, MemoryError, GearbxError, KeyboardInterrupt])
    def test_other_exception_leaves_no_files(self, tmp_path, monkeypatch, error):
        def fail(self, *_):
            raise error("in the end")

        monkeypatch.setattr("gearbx_mlx.conversion.converter.Converter.finish", fail)
        with pytest.raises(error):
            gearbx_mlx.convert(mlx_path=tmp_path / "geared")
        assert not names(tmp_path)

    def test_error_names_unreadable_file(self, tmp_path, command):
        save_model(tiny_model(), tmp_path / "original")
        (tmp_path / "original" / "tokenizer.model").mkdir()
        done = command("convert", "--model", tmp_path / "original", "--mlx-path", tmp_path / "geared")
        assert done.status == 2
        assert f"{tmp_path}/original/tokenizer.model: cannot be read (Is a directory); check the path" in done.err
