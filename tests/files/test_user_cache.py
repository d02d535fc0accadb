"""The user's cache where it cannot be used: one line that says why, and what to do."""

import errno
import pwd
import re

import platformdirs
import pytest

from gearbx_mlx.chat.run import history_file
from gearbx_mlx.files.user_cache import CacheUnusable, cache_entry, open_cache, why


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space"), "^No space; make room, or set XDG_CACHE_HOME"),
        (OSError(errno.EACCES, "Denied", "/far"), "^/far: Denied; set XDG_CACHE_HOME"),
        (OSError("broken"), "^broken; set XDG_CACHE_HOME"),
        (CacheUnusable("it is so"), "^it is so$"),
    ],
)
def test_system_refusal_is_single_line(error, said):
    assert re.search(said, why(error))


def test_a_file_in_its_place_is_named(own_cache, monkeypatch):
    (own_cache / "file").write_text("")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: own_cache / "file" / "gearbx-mlx")
    with pytest.raises(CacheUnusable, match=r"/file.*; set XDG_CACHE_HOME to another directory$"):
        open_cache()


def test_missing_home_error_names_variable(monkeypatch):
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as a container's user that /etc/passwd does not have
    with pytest.raises(CacheUnusable, match=r"home directory.*; set XDG_CACHE_HOME to a directory$"):
        open_cache()
    assert history_file() is None


def test_entry_is_private_to_user(own_cache):
    assert cache_entry("new") == own_cache / "new"
    (own_cache / "new").mkdir(mode=0o700)
    assert cache_entry("new") == own_cache / "new"
    (own_cache / "new").chmod(0o720)
    with pytest.raises(CacheUnusable, match=f"others may write to {own_cache / 'new'}; run chmod go-w on it"):
        cache_entry("new")


def test_killed_compilations_are_removed_and_running_ones_kept(own_cache, holding):
    compiling = "with work_directory(path) as place:\n    (place / 'kernels.o').touch()"
    dead = holding(compiling, own_cache / "kernels.so")
    (abandoned,) = own_cache.iterdir()
    alive = holding(compiling, own_cache / "kernels.so")
    assert len([*open_cache().iterdir()]) == 2
    dead.kill()
    dead.wait()
    assert abandoned.is_dir()
    (in_use,) = open_cache().iterdir()
    assert in_use != abandoned
    assert [path.name for path in in_use.iterdir()] == ["kernels.o"]
    alive.communicate()
    assert not in_use.exists()
