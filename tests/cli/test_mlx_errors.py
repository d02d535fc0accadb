"""Errors of MLX that a user can mend are one line with the remedy."""

import os
import subprocess
import sys

import pytest


@pytest.mark.processes
def test_generate_without_room_for_compiler_is_refused(tmp_path):
    (tmp_path / "mlx").touch()  # MLX makes a directory of this name, as impossible as on a full disk
    command = [sys.executable, "-m", "gearbx_mlx", "generate", "--prompt", "Hi", "-m", "2"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}

    def run(**more: str) -> subprocess.CompletedProcess:
        flags = ["--device", "cpu", "--kernels", "mlx", "--gears", "16"]
        return subprocess.run([*command, *flags], env=environment | more, capture_output=True, text=True, timeout=120)

    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"error: {tmp_path}: MLX cannot compile a function there (")
    assert "set TMPDIR to another directory" in error
    assert run(MLX_DISABLE_COMPILE="1").returncode == 0
