"""Programs in C over the CPU kernels, without Python and MLX: built with sanitizers, or for another processor."""

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import object_store
import pytest
import zig

from gearbx_mlx.kernels.compiler import AVX2, SOURCES, find_compiler, lacking, processor_features

OWN = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
SANITIZED = [
    pytest.param(["-fsanitize=address,undefined", OWN], id="address, undefined"),
    pytest.param(
        ["-fsanitize=address,undefined", "-march=x86-64-v3"],
        id="address, undefined, AVX2",
        marks=pytest.mark.skipif(bool(lacking(AVX2)), reason="this processor has no AVX2"),
    ),
    pytest.param(["-fsanitize=address,undefined", "-DGEARBX_PORTABLE"], id="address, undefined, portable"),
    pytest.param(["-fsanitize=address,undefined", OWN, "-DGEARBX_TILE_TWIN"], id="address, undefined, matrix tiles"),
    pytest.param(["-fsanitize=thread", OWN, "-O1"], id="threads"),  # takes longer to run than to compile
]
GCC, CLANG = ["aarch64-linux-gnu-g++"], zig.clang_for("aarch64-linux-gnu")
# Compiler, its flag, and the processor that the emulator stands for; an instruction that this one lacks ends a program.
ARM = [
    pytest.param(GCC, "-mcpu=cortex-a72", "cortex-a72", id="Cortex-A72, without products of bytes"),
    pytest.param(CLANG, "-mcpu=apple-m1", "max", id="M1 by a Mac's compiler, with them"),
    pytest.param(GCC, "-march=armv8.6-a", "max", id="ARMv8.6, with those of unsigned bytes too"),
]
Further = Mapping[str, Sequence[str]]  # flags of a source, by its name
EMULATOR = "qemu-aarch64"
# All sources of the kernels that know nothing of MLX.
KERNELS = tuple(file.stem for file in sorted(SOURCES.glob("*.cpp")) if not file.stem.endswith("primitive"))


def build(
    check: Path,
    compiler: Sequence[str],
    flags: Sequence[str],
    kernels: Sequence[str] = KERNELS,
    further: Further = MappingProxyType({}),
) -> Path:
    """`check`, compiled and linked with sources of the kernels.

    Args:
        kernels: the sources that it needs. further: flags of some of them.
    """
    linker = [*GCC, "-static"] if compiler == CLANG else [*compiler, *flags]
    common = ["-fno-sanitize-recover=all", "-ffp-contract=off", *flags]
    # The plain loops that a check compares with take most of its time.
    language = ["-O2", *(["-x", "c", "-std=c11"] if check.suffix == ".c" else ["-std=c++20"])]
    said = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    version = [line for line in said.splitlines() if not line.startswith("InstalledDir")]  # differs from clone to clone
    made_of = [*version, processor_features(), common, *sorted(SOURCES.glob("*.h")), *sorted(check.parent.glob("*.h"))]

    def compiled(source: Path, own: Sequence[str]) -> Path:
        def make(folder: Path) -> None:
            run_compiler([*compiler, *common, f"-I{SOURCES}", *own, "-c", str(source), "-o", str(folder / "object.o")])

        return object_store.kept([*made_of, own, source], make) / "object.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        of_kernels = pool.map(lambda k: compiled(SOURCES / f"{k}.cpp", ["-std=c++20", *further.get(k, ())]), kernels)
        objects = [compiled(check, language), *of_kernels]

    def link(folder: Path) -> None:
        run_compiler([*linker, "-pthread", *map(str, objects), "-o", str(folder / "check")])

    return object_store.kept([*made_of, *objects], link) / "check"


def run_compiler(command: Sequence[str]) -> None:
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("this compiler lacks a sanitizer")
    assert built.returncode == 0, built.stderr


def run(command: Sequence[str]) -> None:
    """Run a program that reports how many products it checked and how many were wrong; on four threads."""
    environment = os.environ | {"GEARBX_THREADS": "4"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong, 4 threads" in done.stdout


def run_sanitized(
    check: Path, flags: Sequence[str], kernels: Sequence[str] = KERNELS, further: Further = MappingProxyType({})
) -> None:
    run([str(build(check, find_compiler(), ["-O0", *flags], kernels, further))])


@functools.cache
def emulated() -> str:
    """The names of the processors that the emulator knows."""
    return subprocess.run([EMULATOR, "-cpu", "help"], capture_output=True, text=True).stdout


def run_on_arm(check: Path, compiler: Sequence[str], flag: str, processor: str) -> None:
    """On an emulated 64-bit ARM; skipped where a compiler or the emulator is missing."""
    missing = [name for name in (EMULATOR, GCC[0]) if not shutil.which(name)]
    if compiler == CLANG and not zig.find_zig():
        missing.append("zig (pip install ziglang)")
    if not missing and processor not in emulated():
        missing.append(f"a {EMULATOR} that knows {processor}")
    if missing:
        pytest.skip(f"NEON WAS NOT CHECKED: {', '.join(missing)} is not installed")
    program = build(check, compiler, ["-O1", "-static", "-DEMULATED", flag])
    run([EMULATOR, "-cpu", processor, str(program)])
