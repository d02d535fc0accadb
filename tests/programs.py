"""Programs in C over the CPU kernels, without Python and MLX: built with sanitizers, or for another processor."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import object_store
import pytest
import zig

from gearbx_mlx.kernels.compiler import SOURCES, find_compiler, processor_features

OWN = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
SANITIZED = [
    pytest.param(["-fsanitize=address,undefined", OWN], id="address, undefined"),
    pytest.param(["-fsanitize=address,undefined", "-DGEARBX_PORTABLE"], id="address, undefined, portable"),
    pytest.param(["-fsanitize=thread", OWN], id="threads"),
]
GCC, CLANG = ["aarch64-linux-gnu-g++"], zig.compiler_for("aarch64-linux-musl")
ARM = [
    pytest.param(GCC, ["-march=armv8-a"], id="NEON"),
    pytest.param(GCC, ["-march=armv8.2-a+dotprod"], id="NEON with dot products"),
    pytest.param(CLANG, ["-mcpu=apple-m1"], id="NEON by a Mac's compiler"),
]
I8MM = GCC, ["-march=armv8.2-a+dotprod+i8mm"]  # products of unsigned codes with signed activations
EMULATOR = "qemu-aarch64"


def build(check: Path, compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """`check`, compiled and linked with all sources of the kernels that know nothing of MLX."""
    common = ["-fno-sanitize-recover=all", "-ffp-contract=off", f"-I{SOURCES}", *flags]
    language = ["-x", "c", "-std=c11"] if check.suffix == ".c" else ["-std=c++20"]
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    made_of = [version, processor_features(), compiler, common, *sorted(SOURCES.glob("*.h"))]
    kernels = [file for file in sorted(SOURCES.glob("*.cpp")) if not file.stem.endswith("primitive")]

    def make_kernels(folder: Path) -> None:
        command = [*compiler, "-std=c++20", *common, "-c"]
        compile_all([[*command, str(file), "-o", str(folder / f"{file.stem}.o")] for file in kernels])

    def make_program(folder: Path) -> None:
        objects = sorted(map(str, object_store.kept([*made_of, *kernels], make_kernels).glob("*.o")))
        compile_all([[*compiler, *language, *common, "-c", str(check), "-o", str(folder / "check.o")]])
        link = [str(folder / "check.o"), *objects, "-o", str(folder / "check")]
        compile_all([[*compiler, *common, "-pthread", *link]])

    return object_store.kept([*made_of, *kernels, check], make_program) / "check"


def compile_all(commands: Sequence[Sequence[str]]) -> None:
    """Run compilers, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands))
    for built in done:
        if "cannot find" in built.stderr and "san" in built.stderr:
            pytest.skip("this compiler lacks a sanitizer")
        assert built.returncode == 0, built.stderr


def run(command: Sequence[str]) -> None:
    """Run a program that says how many products it checked, and how many were wrong; on four threads."""
    environment = os.environ | {"GEARBX_THREADS": "4"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong, 4 threads" in done.stdout


def run_sanitized(check: Path, flags: Sequence[str]) -> None:
    run([str(build(check, find_compiler(), ["-O1", *flags]))])


def run_on_arm(check: Path, compiler: Sequence[str], flags: Sequence[str]) -> None:
    """On an emulated 64-bit ARM; skipped where the compiler or the emulator is missing."""
    missing = [name for name in (EMULATOR, compiler[0]) if not shutil.which(name)]
    if compiler == CLANG and not zig.find_zig():
        missing.append("zig (pip install ziglang)")
    if missing:
        pytest.skip(f"NEON WAS NOT CHECKED: {', '.join(missing)} is not installed")
    program = build(check, compiler, ["-O2", "-static", "-DEMULATED", *flags])
    run([EMULATOR, "-cpu", "max", str(program)])
