"""Programs in C over the CPU kernels, built with sanitizers and run."""

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gearbx_mlx.kernels import cpu

WAYS = [("address,undefined", "native"), ("address,undefined", "portable"), ("thread", "native")]


def run(directory: Path, check: Path, sources: Sequence[str], sanitizer: str, path: str) -> None:
    """Build `check` with sources of the kernels, for this processor or portably, and see that nothing is wrong."""
    compiler = cpu.find_compiler()
    program = directory / "check"
    processor = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    flags = ["-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{cpu.SOURCES}"]
    flags += ["-ffp-contract=off", processor if path == "native" else "-DGEARBX_PORTABLE"]
    main = [*compiler, "-x", "c", "-std=c11", *flags, "-c", str(check), "-o", f"{program}.o"]
    files = [str(cpu.SOURCES / name) for name in sources]
    link = [*compiler, "-std=c++20", *flags, "-pthread", *files, f"{program}.o", "-o", str(program)]
    for step in (main, link):
        built = subprocess.run(step, capture_output=True, text=True)
        if built.returncode:
            break
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [program], capture_output=True, text=True, env=os.environ | {"GEARBX_THREADS": "4"}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong, 4 threads" in done.stdout
