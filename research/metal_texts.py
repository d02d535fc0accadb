"""GPU cost of the Metal kernels, counted from their source without a GPU, and compared with an earlier commit.

tests/kernels/metal_on_cpu/costs.py counts, and explains the method.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from pages import table

from gearbx_mlx.errors import GearbxError

from . import ROOT
from .studies import Found, study

Counted = Mapping[str, Mapping[str, float]]  # of a launch: figures by name

BEFORE = "c6d4f7ad"  # the last commit before the texts were made faster
COUNTS = {"cycles": ".0f", "loads": ".1f", "branches": ".1f", "registers": ".0f", "spilled": ".0f"}

# Billions of operations a second, and of bytes: philipturner/metal-benchmarks, and Apple's figures of its memory.
CHIPS = {"M1": (1309, 68), "M1 Max": (5308, 400), "M2": (1789, 100), "M2 Max": (6800, 400)}
BYTES = {"exact": 1.5 + 4 / 64 + 0.12, "dense": 2.0}  # of a weight: 12 bits, scales of 64, high bytes near zero


@study("metal/README.md", minutes=3)
def metal_texts(before: str = BEFORE) -> Found:
    """Count cycles, loads, branches and registers of each Metal kernel by clang, now and at an earlier commit.

    Args:
        before: A commit of this repository.
    """
    now = counted(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        extract(before, Path(folder))
        then = counted(Path(folder))
    counts = [[name, *(change(then[name], now[name], each) for each in COUNTS)] for name in now]
    products = [name for name in now if name.partition(",")[0] in BYTES and "decoded" not in name]
    shares = [[name, *(share(now[name]["cycles"], name, chip) for chip in CHIPS)] for name in products]
    tables = {
        "metal_counts": table(["launch", *COUNTS], counts),
        "metal_shares": table(["product, vectors", *CHIPS], shares),
    }
    return Found(tables, {"now": now, "before": then})


def extract(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder. Raises GearbxError if there is no such commit."""
    done = subprocess.run(["git", "archive", commit, "gearbx_mlx", "metal"], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise GearbxError(f"commit {commit} is not in this clone; fetch it, or name another one with --before")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


def counted(checkout: Path) -> Counted:
    """Return the counts of a checkout's kernels, by this checkout's method. Raises GearbxError if that fails."""
    paths = [checkout, ROOT / "tests" / "helpers", ROOT / "tests" / "kernels"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "metal_on_cpu.costs"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise GearbxError(f"the Metal texts were not counted: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout)


def change(then: Mapping[str, float], now: Mapping[str, float], name: str) -> str:
    """Return a figure before and after, or once where it is the same."""
    before, after = (format(each[name], COUNTS[name]) for each in (then, now))
    return after if before == after else f"{before} → {after}"


def share(cycles: float, name: str, chip: str) -> str:
    """Return the time that a product's instructions take, of the time that memory takes for bf16 weights."""
    operations, bandwidth = CHIPS[chip]
    of_memory = BYTES[name.partition(",")[0]] / BYTES["dense"]
    computing = cycles / operations / (BYTES["dense"] / bandwidth)
    return f"{max(of_memory, computing):.2f}"
