"""Programs in C over the CPU kernels, without Python and MLX: built with sanitizers, or for another processor."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gearbx_mlx.kernels import cpu

OWN = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
SANITIZED = [
    pytest.param(["-fsanitize=address,undefined", OWN], id="address, undefined"),
    pytest.param(["-fsanitize=address,undefined", "-DGEARBX_PORTABLE"], id="address, undefined, portable"),
    pytest.param(["-fsanitize=thread", OWN], id="threads"),
]
ARM = [
    pytest.param(["-march=armv8-a"], id="NEON"),
    pytest.param(["-march=armv8.2-a+dotprod"], id="NEON with dot products"),
]
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def build(check: Path, program: Path, compiler: Sequence[str], flags: Sequence[str]) -> None:
    """Compile `check` and all sources of the kernels that know nothing of MLX into `program`."""
    common = ["-fno-sanitize-recover=all", "-ffp-contract=off", f"-I{cpu.SOURCES}", *flags]
    sources = [str(file) for file in sorted(cpu.SOURCES.glob("*.cpp")) if not file.stem.endswith("primitive")]
    main = [*compiler, "-x", "c", "-std=c11", *common, "-c", str(check), "-o", f"{program}.o"]
    link = [*compiler, "-std=c++20", *common, "-pthread", *sources, f"{program}.o", "-o", str(program)]
    for step in (main, link):
        built = subprocess.run(step, capture_output=True, text=True)
        if "cannot find" in built.stderr and "san" in built.stderr:
            pytest.skip("this compiler lacks a sanitizer")
        assert built.returncode == 0, built.stderr


def run(command: Sequence[str]) -> None:
    """Run a program that says how many products it checked, and how many were wrong; on four threads."""
    environment = os.environ | {"GEARBX_THREADS": "4"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong, 4 threads" in done.stdout


def run_sanitized(check: Path, directory: Path, flags: Sequence[str]) -> None:
    build(check, directory / "check", cpu.find_compiler(), ["-O1", *flags])
    run([str(directory / "check")])


def run_on_arm(check: Path, directory: Path, flags: Sequence[str]) -> None:
    """On an emulated 64-bit ARM; skipped where its compiler or the emulator is missing."""
    if not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)):
        pytest.skip(f"NEON was not checked: {ARM_COMPILER} or {ARM_EMULATOR} is not installed")
    build(check, directory / "check", [ARM_COMPILER], ["-O2", "-static", *flags])
    run([ARM_EMULATOR, str(directory / "check")])
