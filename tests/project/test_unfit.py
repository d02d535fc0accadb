"""Python and macOS that cannot run MLX: one line each, also in the Python 3.9 that comes with macOS."""

import ast
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

import gearbx_mlx

INIT = ROOT / "gearbx_mlx" / "__init__.py"


def pythons() -> list[str]:
    """A Python 3.9 on this machine, if there is one."""
    places = [shutil.which("python3.9"), *Path.home().glob(".pyenv/versions/3.9.*/bin/python"), "/usr/bin/python3"]
    version = ("-c", "import sys; print(sys.version_info[:2] == (3, 9))")
    found = [str(place) for place in places if place and Path(place).exists()]
    return [each for each in found if "True" in subprocess.run([each, *version], capture_output=True, text=True).stdout]


def test_first_file_parses_in_python_3_9():
    ast.parse(INIT.read_text(encoding="utf-8"), feature_version=(3, 9))


@pytest.mark.skipif(not pythons(), reason="no Python 3.9 here")
@pytest.mark.parametrize("command", [("-m", "gearbx_mlx", "benchmark", "mac"), ("-m", "gearbx_mlx.generate")])
def test_python_3_9_is_refused_in_one_line(command):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([pythons()[0], *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Python: must be 3.10 or later, got 3.9.")


@pytest.mark.parametrize(
    ("machine", "version", "reason"),
    [
        ("x86_64", "15.2", "Python: must be for Apple silicon, got x86_64 (Rosetta"),
        ("arm64", "13.6.1", "macOS: must be 14 or later, as MLX requires, got 13.6.1"),
        ("arm64", "14.0", ""),
    ],
)
def test_unfit_mac_is_named_with_a_remedy(monkeypatch, machine, version, reason):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), machine))
    found = gearbx_mlx._unfit()
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_missing_mlx_is_named(monkeypatch):
    monkeypatch.setattr(gearbx_mlx, "find_spec", lambda name: None)
    assert gearbx_mlx._unfit().startswith("mlx: not installed for ")
