"""Kernels that a wheel brings are loaded without a compiler; for another MLX they are compiled, and that is said."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from gearbx_mlx import GearbxWarning
from gearbx_mlx.kernels import compiler, cpu, wheel
from gearbx_mlx.kernels.compiler import AVX2, AVX512, INSTRUCTION_SETS, NATIVE_CPU, NEON, PORTABLE, CompileTarget

X86 = [*(INSTRUCTION_SETS[AVX2].needs)]
NOW = version("mlx")


@pytest.fixture
def folder(native, afresh, tmp_path) -> Path:
    """The folder of a wheel whose kernels are this machine's own, in an environment without a compiler."""
    made = tmp_path / "brought"
    made.mkdir()
    for name in (*INSTRUCTION_SETS, PORTABLE):
        shutil.copyfile(native.__file__, made / f"{name}.so")
    wheel.keep(made)
    afresh.setattr(wheel, "FOLDER", made)
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    afresh.setenv("PATH", str(tmp_path))
    for name in ("CXX", "GEARBX_CPU"):
        afresh.delenv(name, raising=False)
    wheel.why_foreign.cache_clear()
    yield made
    wheel.why_foreign.cache_clear()


def linked_with(folder: Path, **changes: str) -> None:
    record = folder / wheel.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))
    wheel.why_foreign.cache_clear()


def test_kernels_are_loaded_without_compilation(folder, tmp_path):
    assert cpu.is_compiled()
    assert cpu.why_not() is None
    assert Path(cpu.native().__file__).parent == folder
    assert not (tmp_path / "cache").exists()


def test_kernels_follow_gearbx_cpu(folder, afresh):
    afresh.setenv("GEARBX_CPU", PORTABLE)
    assert cpu.why_not() is None
    assert Path(cpu.native().__file__) == folder / f"{PORTABLE}.so"
    afresh.setenv("GEARBX_CPU", NATIVE_CPU)
    cpu._kernels_or_reason.cache_clear()
    assert not cpu.is_compiled()
    assert cpu.why_not().startswith("no C++ compiler was found; ")


@pytest.mark.parametrize(
    ("machine", "flags", "best"),
    [
        ("x86_64", [], PORTABLE),
        ("x86_64", X86, AVX2),
        ("x86_64", [*X86, "avx512f", "avx512bw"], AVX2),
        ("x86_64", [*INSTRUCTION_SETS[AVX512].needs], AVX512),
        ("aarch64", ["asimddp"], NEON),
        ("aarch64", [], PORTABLE),
    ],
)
def test_best_supported_kernels_are_chosen(folder, afresh, tmp_path, machine, flags, best):
    lines = tmp_path / "cpuinfo"
    lines.write_text(f"flags : {' '.join(flags)}\nFeatures : {' '.join(flags)}\n")
    afresh.setattr(compiler, "CPUINFO", lines)
    afresh.setattr("platform.machine", lambda: machine)
    assert compiler.instructions() == best


class TestDifferentMlx:
    FOREIGN = f"the CPU kernels of this wheel are for MLX 0.1.2, and MLX {NOW} is installed"

    def test_of_the_same_interface_is_used(self, folder):
        linked_with(folder, mlx=f"{NOW}.post1")
        assert cpu.why_not() is None

    @pytest.mark.parametrize("change", [{"mlx": "0.1.2"}, {"mlx": f"{NOW}.post1", "headers": "others"}])
    def test_missing_compiler_is_named(self, folder, change):
        linked_with(folder, **change)
        told = self.FOREIGN.replace("0.1.2", change["mlx"])
        assert not cpu.is_compiled()
        assert cpu.why_not() == f"{told}; no C++ compiler was found; {compiler.REMEDY}"

    def test_is_compiled_for_and_reported(self, folder, native, afresh, tmp_path):
        """The compiler copies what was compiled before."""
        linked_with(folder, mlx="0.1.2")
        script = tmp_path / "copying"
        copy = f'rm -f "$last"; cp {native.__file__} "$last"'
        script.write_text(f'#!/bin/sh\nfor last; do :; done\ncase "$*" in *-shared*) {copy};; *) : > "$last";; esac\n')
        script.chmod(0o755)
        afresh.setenv("PATH", "/bin:/usr/bin")
        afresh.setenv("CXX", str(script))
        assert not cpu.is_compiled()
        with pytest.warns(GearbxWarning) as said:
            assert cpu.why_not() is None
        assert [str(line.message) for line in said] == [f"{self.FOREIGN}: they are compiled here"]
        assert compiler.instructions() == NATIVE_CPU
        cpu._kernels_or_reason.cache_clear()
        assert cpu.is_compiled()
        assert cpu.why_not() is None  # from the cache; a warning would be an error
        assert Path(cpu.native().__file__).parent == tmp_path / "cache" / "gearbx-mlx"

    @pytest.mark.parametrize("content", ["", "{}", "\xff"])
    def test_unreadable_record_counts_as_damage(self, folder, content):
        (folder / wheel.RECORD).write_text(content, encoding="latin-1")
        told = "the CPU kernels of this wheel are damaged; install gearbx-mlx again"
        assert cpu.why_not() == f"{told}; no C++ compiler was found; {compiler.REMEDY}"


def test_unloadable_library_is_reported(folder):
    for library in folder.glob("*.so"):
        library.write_bytes(b"not a library")
    assert cpu.why_not().startswith("the compiled CPU kernels cannot be loaded: ")


@pytest.mark.parametrize(
    ("system", "machine", "sets"),
    [
        ("linux", "x86_64", {PORTABLE, AVX2, AVX512}),
        ("linux", "aarch64", {NEON}),
        ("darwin", "arm64", {NATIVE_CPU}),
    ],
)
def test_a_wheel_has_kernels_for(system, machine, sets):
    assert {*compiler.sets_of_wheel(CompileTarget(system, machine, Path()))} == sets


def test_clones_compile_their_kernels(native):
    assert not wheel.FOLDER.exists()
    assert wheel.library_for(NATIVE_CPU) is None
