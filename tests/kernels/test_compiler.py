"""Where the CPU kernels cannot be compiled, one line says why, and MLX's kernels are used."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import PROMPT, tiny_model

from gearbx_mlx import Gearbox, GearbxWarning
from gearbx_mlx.kernels import compiler, cpu
from gearbx_mlx.kernels.library_cache import BUILDING_LOCK


@pytest.fixture
def script(afresh, tmp_path):
    """Make CXX a program with this text, and return its file."""
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(text: str) -> Path:
        file = tmp_path / "own-compiler"
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755)
        afresh.setenv("CXX", str(file))
        return file

    return write


def test_without_a_compiler(afresh, tmp_path):
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    afresh.setenv("PATH", str(tmp_path))
    afresh.delenv("CXX", raising=False)
    assert cpu.why_not() == "no C++ compiler was found; install g++ or clang, or set CXX"
    expected = Gearbox(tiny_model(), kernels="mlx").model(PROMPT)
    for kernels in ("auto", "native"):
        with pytest.warns(GearbxWarning, match="MLX's own kernels are used: no C\\+\\+ compiler was found"):
            gearbox = Gearbox(tiny_model(), kernels=kernels)
        assert "mlx (no C++ compiler was found" in gearbox.describe()
        assert mx.array_equal(gearbox.model(PROMPT), expected).item()


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("no-such-compiler -O3", "CXX is 'no-such-compiler -O3', and there is no such compiler"),
        (" ", "CXX is ' ', and there is no such compiler"),
        ("/", "CXX is '/', and there is no such compiler"),
        ("'", 'CXX is "\'", which is not a command (No closing quotation); set it to one such as g++'),
        ('g++ "-O3', "CXX is 'g++ \"-O3', which is not a command (No closing quotation); set it to one such as g++"),
    ],
)
def test_a_name_that_is_no_compiler(afresh, tmp_path, named, reason):
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    afresh.setenv("CXX", named)
    assert cpu.why_not() == reason
    with pytest.warns(GearbxWarning, match="MLX's own kernels are used: CXX is "):
        gearbox = Gearbox(tiny_model(), kernels="auto")
    assert f"mlx ({reason})" in gearbox.describe()
    assert mx.array_equal(gearbox.model(PROMPT), Gearbox(tiny_model(), kernels="mlx").model(PROMPT)).item()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#!/bin/sh\necho 'error: out of luck' >&2\nexit 3\n", "could not compile the CPU kernels: error: out of luck"),
        ("#!/bin/sh\nexit 4\n", "could not compile the CPU kernels: status 4"),
        ("#!/bin/sh\nkill -9 $$\n", "could not compile the CPU kernels: status -9"),
        ("#!/bin/sh\nprintf '\\377 error' >&2\nexit 1\n", "could not compile the CPU kernels: \ufffd error"),
        ("#!/bin/sh\nexit 0\n", "reported success and wrote no CPU kernels"),
        ("#!/no/such/interpreter\n", "cannot be run: No such file or directory"),
        ("\x7fELF and no more", "cannot be run: Exec format error"),
    ],
)
def test_a_compiler_that_fails(script, text, reason):
    cache = script(text).parent / "cache" / "gearbx-mlx"
    assert cpu.why_not() == f"own-compiler {reason}"
    assert [file.name for file in cache.iterdir()] == [BUILDING_LOCK]


def test_a_compiler_that_writes_something_else_is_run_once(script, tmp_path):
    log = tmp_path / "log"
    script(f'#!/bin/sh\nfor last; do :; done\necho "$last" >> {log}\necho text > "$last"\n')
    for _ in range(2):
        cpu._kernels_or_reason.cache_clear()
        assert cpu.why_not().startswith("the compiled CPU kernels cannot be loaded: ")
    assert sum(line.endswith(cpu.SUFFIX) for line in log.read_text().splitlines()) == 1


def test_a_compiler_that_takes_too_long(afresh, script):
    afresh.setattr(compiler, "SECONDS", 0.2)
    script("#!/bin/sh\nexec sleep 60\n")
    assert cpu.why_not() == "own-compiler did not compile the CPU kernels within 0.2 s"


def test_a_compilation_that_is_interrupted_leaves_nothing(afresh, script, tmp_path):
    script("#!/bin/sh\nexit 1\n")

    def interrupt(files: int) -> None:
        raise KeyboardInterrupt

    afresh.setattr(cpu, "while_compiling", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cpu.why_not()
    assert [file.name for file in (tmp_path / "cache" / "gearbx-mlx").iterdir()] == [BUILDING_LOCK]


@pytest.mark.processes
@pytest.mark.parametrize("named", ["no-such-compiler", "'"])
def test_a_command_says_so_in_one_line_and_goes_on(tmp_path, named):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": named}
    run = [sys.executable, "-m", "gearbx_mlx.generate", "--device", "cpu", "-m", "3", "--kernels", "native"]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning")]
    assert len(warned) == 1
    assert warned[0].startswith(f"warning: MLX's own kernels are used: CXX is {named!r}, ")
