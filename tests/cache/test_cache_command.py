"""The command that shows and empties the user's cache."""

import os
import time

import pytest
from refusals import assert_refused

from gearbx_mlx.kernels.cpu import UNUSED, CachedLibrary

LIBRARY = "_gearbx_cpu-aa-bb.so"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache with something of each kind: 1000 bytes a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = tmp_path / "gearbx-mlx"
    for name in (
        LIBRARY,
        f"{LIBRARY}.sha256",
        "bases/a.safetensors",
        "gears/a-b.safetensors",
        "m-1/config.json",
        "m-1/w",
        "tuning.json",
        "x/y",
    ):
        (directory / name).parent.mkdir(exist_ok=True, parents=True, mode=0o700)
        (directory / name).write_bytes(bytes(1000))
    (directory / ".lock").touch(0o600)
    return directory


def shown(result) -> dict[str, list[str]]:
    """By their kinds: number and size."""
    assert result.status == 0, result.err
    lines = [line for line in result.out.splitlines() if ": " in line and not line.startswith("/")]
    return {line.split(":")[0]: line.split()[-4:-1] for line in lines}


def test_each_kind_has_its_number_and_size(command, kept):
    result = command("cache")
    one = ["1", "1", "kB"]
    several = {"kernels": ["2", "2", "kB"], "models": ["1", "2", "kB"]}
    assert shown(result) == {"bases": one, "gears": one, "times": one, "other": one} | several
    assert result.out.splitlines()[-1].endswith("gearbx-mlx: 8 kB")


def test_one_kind_is_removed_or_all(command, kept):
    assert set(shown(command("cache", "--empty", "models"))) == {"kernels", "bases", "gears", "times", "other"}
    assert (kept / LIBRARY).exists()
    assert shown(command("cache", "--empty", "all")) == {}
    assert {path.name for path in kept.iterdir()} == {".lock", "bases", "gears"}


def test_remove_all_names_entries_and_chat_history(command, kept, tmp_path):
    history = tmp_path / "state" / "gearbx-mlx" / "chat_history"
    history.parent.mkdir(parents=True)
    history.write_bytes(bytes(1000))
    assert "removed" not in command("cache").err
    assert command("cache", "--empty", "models").err.splitlines() == ["removed models: 1, 2 kB"]
    assert "removed history: 1, 1 kB" in command("cache", "--empty", "all").err
    assert not history.exists()


def test_cache_writable_by_others_is_refused(command, kept):
    kept.chmod(0o777)
    assert_refused(command("cache", "--empty", "all"), kept)
    assert (kept / LIBRARY).exists()


def test_unused_libraries_are_removed(kept):
    old, used = (kept / f"_gearbx_cpu-{name}-bb.so" for name in ("old", "used"))
    files = [old, CachedLibrary(old).hash_file, used, CachedLibrary(used).hash_file]
    for file in files:
        file.touch()
        os.utime(file, (0, time.time() - UNUSED - 10))
    CachedLibrary(used).note_use()
    CachedLibrary(kept / LIBRARY).remove_unused()
    assert [file.exists() for file in files] == [False, False, True, True]
    assert (kept / LIBRARY).exists()
