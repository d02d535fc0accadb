"""The cache of compiled kernels: what is compiled once, what is compiled again, what is never loaded."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gearbx_mlx import GearbxWarning
from gearbx_mlx.kernels import compiler, cpu
from gearbx_mlx.kernels.cpu import BUILDING_LOCK

NO_BODY = 65534  # a user that owns nothing here


@pytest.fixture
def cache(native, afresh, tmp_path):
    """An empty cache, and a compiler that copies what was compiled before: these tests are about where it goes."""
    log, script = tmp_path / "log", tmp_path / "copying"
    log.touch()
    script.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\n"
        f'case "$*" in *-shared*) echo >> {log}; rm -f "$last"; cp {native.__file__} "$last";; *) : > "$last";; esac\n',
        encoding="utf-8",
    )
    script.chmod(0o755)
    directory = tmp_path / "far" / "above" / "home" / "gearbx-mlx"
    environment = {"CXX": str(script), "XDG_CACHE_HOME": str(directory.parent), "GEARBX_CPU": "native"}
    for name, value in environment.items():
        afresh.setenv(name, value)

    def load() -> Path:
        """The file from which kernels are loaded now."""
        assert why_not() is None
        return Path(cpu.native().__file__)

    def why_not() -> str | None:
        """Look the kernels up again."""
        cpu._kernels_or_reason.cache_clear()
        return cpu.why_not()

    def count() -> int:
        return len(log.read_text().splitlines())

    def kept() -> list[Path]:
        return [file for file in directory.iterdir() if file.name != BUILDING_LOCK]

    cpu._kernels_or_reason.cache_clear()
    return SimpleNamespace(directory=directory, load=load, why_not=why_not, compilations=count, kept=kept)


# In a process of its own, which a damaged library may crash.
LOADING = sys.executable, "-c", "from gearbx_mlx.kernels import cpu; print(cpu.why_not())"


class TestCompiledOnce:
    def test_and_kept_with_a_hash(self, cache):
        file = cache.load()
        assert cache.load() == file
        assert cache.compilations() == 1
        assert set(cache.kept()) == {file, file.with_name(f"{file.name}.sha256")}

    def test_and_loaded_again_with_any_umask(self, cache):
        before = os.umask(0)
        try:
            assert cache.load() == cache.load()
        finally:
            os.umask(before)
        assert cache.compilations() == 1
        for path in (cache.directory, *cache.directory.iterdir()):
            assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    @pytest.mark.parametrize("named", [None, "no-such-compiler"])
    def test_and_used_when_the_compiler_has_gone(self, cache, afresh, tmp_path, named):
        file = cache.load()
        afresh.setenv("PATH", str(tmp_path))
        afresh.setenv("CXX", named) if named else afresh.delenv("CXX")
        assert cache.load() == file
        assert cache.compilations() == 1

    def test_and_ignored_without_compiler_if_changed_or_damaged(self, cache, afresh, tmp_path):
        file = cache.load()
        afresh.setenv("CXX", "no-such-compiler")
        reason = "CXX: no such compiler, got 'no-such-compiler'; set it to a compiler such as g++"
        with afresh.context() as changed:
            changed.setattr(compiler, "processor_features", lambda: "another")
            assert cache.why_not() == reason
        file.chmod(0o620)
        assert (
            cache.why_not() == f"{reason}; the cache cannot be used: others may write to {file}; run chmod go-w on it"
        )
        file.unlink()
        assert cache.why_not() == reason

    def test_by_two_processes(self, cache):
        both = [subprocess.Popen([*LOADING], stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [process.communicate(timeout=300)[0] for process in both] == ["None\n", "None\n"]
        assert len(cache.kept()) == 2
        cache.load()
        assert cache.compilations() == 1

    def test_kernels_that_fail(self, cache, afresh):
        def refuse(module: object) -> None:
            raise compiler.Unavailable("incompatible function arguments")

        with afresh.context() as changed:
            changed.setattr(cpu, "check_kernels", refuse)
            assert [cache.why_not() for _ in range(2)] == ["incompatible function arguments"] * 2
        assert cache.load() in cache.kept()  # the reason has gone
        assert cache.compilations() == 1

    def test_unless_a_dependency_changes(self, afresh):
        afresh.setenv("GEARBX_CPU", "native")

        def keys() -> set[str]:
            return {cpu.library_name(compiler.make_recipe(c)) for c in (["c++"], ["c++", "-g"], ["clang++"])}

        found = keys()
        afresh.setattr(compiler, "processor_features", lambda: "another")
        found |= keys()
        afresh.setattr(compiler, "version", lambda name: "1")
        found |= keys()
        assert len(found) == 9


class TestRecompiled:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("size", [0, 100, 0.6, 0.99])
    def test_after_a_library_was_cut_off(self, cache, size):
        file = cache.load()
        whole = file.read_bytes()
        file.unlink()  # this process has the old file in its memory
        file.write_bytes(whole[: int(size * len(whole)) if size < 1 else size])
        done = subprocess.run(LOADING, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
        assert file.read_bytes() == whole
        assert cache.compilations() == 2

    @pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"0" * 64, None], ids=str)
    def test_when_hash_differs(self, cache, content):
        file = cache.load()
        hashed = file.with_name(f"{file.name}.sha256")
        expected = hashed.read_bytes()
        hashed.unlink() if content is None else hashed.write_bytes(content)
        assert cache.load() == file
        assert cache.compilations() == 2
        assert hashed.read_bytes() == expected


class TestNeverLoaded:
    """A cache that another user could have written to: one line says so, and the kernels are compiled again."""

    def assert_private(self, cache, reason: str) -> None:
        with pytest.warns(GearbxWarning, match=reason) as warned:
            file = cache.load()
        assert len(warned) == 1
        assert "\n" not in str(warned[0].message)
        assert not file.is_relative_to(cache.directory)
        assert file.parent.stat().st_mode & 0o777 == 0o700

    def places(self, cache, file: Path) -> dict[str, Path]:
        hash_file = file.with_name(f"{file.name}.sha256")
        home, _, far = cache.directory.parents[:3]
        return {"library": file, "hash": hash_file, "cache": cache.directory, "home": home, "far above": far}

    @pytest.mark.some(6)
    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o757], ids=oct)
    @pytest.mark.parametrize("place", ["library", "hash", "cache", "home", "far above"])
    def test_if_writable_by_others(self, cache, place, mode):
        file = cache.load()
        path = self.places(cache, file)[place]
        path.chmod(mode)
        self.assert_private(cache, f"others may write to {path}; run chmod go-w on it")
        path.chmod(0o700)
        assert cache.load() == file

    @pytest.mark.parametrize("place", ["library", "cache", "home", "far above"])
    def test_if_owned_by_other_user(self, cache, afresh, place):
        file = cache.load()
        path = self.places(cache, file)[place]
        if os.geteuid() == 0:
            os.chown(path, NO_BODY, -1)
        else:
            path = cache.directory.parent  # the first one looked at
            afresh.setattr(os, "geteuid", lambda: NO_BODY)
        self.assert_private(cache, f"{path} belongs to another user; set XDG_CACHE_HOME to a directory of yours")

    @pytest.mark.parametrize("kind", ["link", "pipe"])
    def test_if_link_or_pipe_is_in_place(self, cache, kind):
        file = cache.load()
        file.rename(elsewhere := cache.directory / "elsewhere")
        file.symlink_to(elsewhere) if kind == "link" else os.mkfifo(file)
        self.assert_private(cache, f"{file} is neither a file nor a directory; remove it")

    def test_if_folder_is_unwritable(self, cache):
        far = cache.directory.parents[2]
        far.write_text("in the way", encoding="utf-8")
        self.assert_private(cache, f"{far}.*; set XDG_CACHE_HOME to another directory")

    def test_without_any_writable_folder(self, cache, afresh, tmp_path):
        def refuse() -> None:
            raise PermissionError

        cache.directory.parents[2].write_text("in the way", encoding="utf-8")
        afresh.setattr(cpu, "private_directory", refuse)
        with pytest.warns(GearbxWarning, match="for this process only"):
            assert cpu.native() is None
        assert cpu.why_not() == "no directory for the compiled CPU kernels; set XDG_CACHE_HOME to one"

    def test_from_working_directory(self, cache, afresh, tmp_path):
        afresh.setenv("XDG_CACHE_HOME", "relative")
        afresh.setenv("HOME", str(tmp_path / "own"))
        afresh.chdir(tmp_path)
        assert cache.load().is_relative_to(tmp_path / "own")
        assert not (tmp_path / "relative").exists()

    @pytest.mark.parametrize("suffix", ["", ".sha256"])
    def test_if_file_has_second_name(self, cache, suffix):
        file = cache.load()
        named = file.with_name(file.name + suffix)
        os.link(named, cache.directory / "elsewhere")
        self.assert_private(cache, f"{named} has a second name elsewhere, a hard link; remove it")
