"""Directories of one process: those of killed processes are removed, and nothing else."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gearbx_mlx.kernels import library_cache
from gearbx_mlx.kernels.library_cache import process_directory, remove_abandoned

PREFIX = "gearbx-mlx-kernels-"
NO_BODY = 65534  # a user that owns nothing here
USE_ONE = """
import sys
from pathlib import Path
from gearbx_mlx.kernels.library_cache import process_directory

with process_directory(Path(sys.argv[1]), sys.argv[2]) as directory:
    (directory / "kernels.o").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that uses a directory until its stdin is closed: the process, and the directory."""
    processes = []

    def run(parent: Path = tmp_path, prefix: str = PREFIX) -> tuple[subprocess.Popen, Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", USE_ONE, str(parent), prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process, Path(process.stdout.readline().strip())

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def killed(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_process_that_ends_removes_its_own(start):
    process, directory = start()
    assert [path.name for path in directory.iterdir()] == ["kernels.o"]
    process.communicate("")
    assert not directory.exists()


def test_those_of_killed_processes_are_removed_and_those_of_living_ones_stay(start, tmp_path):
    (dead, abandoned), (_, in_use) = start(), start()
    remove_abandoned(tmp_path, PREFIX)
    assert abandoned.is_dir()
    killed(dead)
    assert abandoned.is_dir()
    remove_abandoned(tmp_path, PREFIX)
    assert set(tmp_path.iterdir()) == {in_use}
    assert (in_use / "kernels.o").exists()


def test_what_only_looks_like_one_stays(tmp_path):
    names = [f"{PREFIX}{end}" for end in ("linked00", "file0000", "mode0000", "short", "of-mine0", "muchlonger")]
    for name in names[2:]:
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / names[0]).symlink_to(tmp_path / "target", target_is_directory=True)
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / names[1]).touch(mode=0o700)
    (tmp_path / names[2]).chmod(0o755)
    remove_abandoned(tmp_path, PREFIX)
    assert {path.name for path in tmp_path.iterdir()} == {*names, "target"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_those_of_other_users_stay(tmp_path):
    (directory := tmp_path / f"{PREFIX}abcdefgh").mkdir(mode=0o700)
    os.chown(directory, NO_BODY, -1)
    remove_abandoned(tmp_path, PREFIX)
    assert directory.is_dir()
    os.chown(directory, os.geteuid(), -1)
    remove_abandoned(tmp_path, PREFIX)
    assert not directory.exists()


def test_one_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    made = []
    make = tempfile.mkdtemp

    def removed_at_first(**keywords: object) -> str:
        made.append(make(**keywords))
        if len(made) == 1:
            remove_abandoned(tmp_path, PREFIX)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_first)
    with process_directory(tmp_path, PREFIX) as directory:
        assert [str(directory)] == made[1:]
        assert set(tmp_path.iterdir()) == {directory}


def test_opening_the_cache_removes_both_kinds(start, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = library_cache.open_cache()
    for process, _ in (start(cache, library_cache.BUILDING), start(tmp_path, library_cache.PRIVATE)):
        killed(process)
    assert library_cache.open_cache() == cache
    library_cache.remove_abandoned_private()
    assert list(tmp_path.iterdir()) == [cache]
    assert list(cache.iterdir()) == []
