"""Run mlx-lm's own tests with this package's models in place of mlx-lm's.

    python scripts/run_mlx_lm_tests.py                                  the four files of tests, with every wrapper
    python scripts/run_mlx_lm_tests.py --only generate --wrapper "low gear"

A wrapper replaces a model, so a test that passes with the model has to pass with the wrapper. The tests are
those of the installed mlx-lm's source distribution, which pip downloads once; the demo model replaces the Hub's.
Models that are too large to be quantized in a test are omitted, for mlx-lm too. Every logit is computed, for mlx-lm
too: some tests check only shapes, of matmuls that MLX cannot compute on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import platformdirs
from mlx_lm_tests.wrappers import PLAIN, WRAPPERS
from pages import table

from gearbx_mlx.errors import GearbxError
from gearbx_mlx.loading import DEMO_MODEL

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "", "TQDM_DISABLE": "1"}
FILES = ("generate", "prompt_cache", "server", "models")

Losses = list[tuple[str, str, str, str]]  # file, test, wrapper and why, of tests that mlx-lm's model passes


# Where the tests come from, and their outcomes, each file of them in a process of its own


@dataclass
class Outcomes:
    """Names of a file's tests, by how they ended: passed, failed (with the error's first line) or left out."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    late: bool = False


def get_tests(cache: Path, seconds: float = 300) -> Path:
    """Return the directory of the installed mlx-lm's tests, from its source distribution, which `cache` keeps.

    Raises:
        GearbxError: the source distribution is not available.
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
        raise GearbxError(f"{place} has no tests; remove it, and give tests with --tests")
    return tests


def download(name: str, directory: Path, seconds: float) -> Path:
    """Return the file that pip gets. Raises GearbxError if it gets none."""
    options = ["-q", "--no-deps", "--no-binary", ":all:", "-d"]
    command = [sys.executable, "-m", "pip", "download", *options, str(directory), name]
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
        seconds: after which the process is ended; tests that did not run by then have no outcome.
        only: pytest's -k.
    """
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory) / "outcomes.jsonl"
        environment = os.environ | OFFLINE | {"GEARBX_WRAPPER": wrapper, "GEARBX_OUTCOMES": str(lines)}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(DEMO_MODEL.parents[1])])
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


# With a wrapper, beside mlx-lm's own model


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FILES, action="append", help="Run this file of tests; may be repeated.")
    parser.add_argument("--wrapper", choices=[*WRAPPERS][1:], action="append", help="Try this one; may be repeated.")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="Run tests that pytest's -k takes.")
    parser.add_argument("--tests", type=Path, metavar="DIR", help="The directory of mlx-lm's tests; nothing is got.")
    cache = platformdirs.user_cache_path("gearbx-mlx") / "mlx-lm-tests"
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help="Where the tests are kept.")
    parser.add_argument("--seconds", type=float, default=900, help="After which a file's tests are ended.")
    return parser


def lost(plain: Outcomes, wrapped: Outcomes) -> dict[str, str]:
    """Tests that pass with mlx-lm's model and not with a wrapper, and why."""
    late = "did not run in time" if wrapped.late else "did not run"
    return {
        name: wrapped.failed.get(name) or wrapped.skipped.get(name) or late for name in plain.passed - wrapped.passed
    }


def compare(tests: Path, file: str, names: list[str], args: argparse.Namespace) -> tuple[list[object], Losses]:
    """Return a row of the table, and what is lost with each wrapper.

    Raises:
        GearbxError: mlx-lm itself passes none of the tests.
    """
    plain = run(tests, file, PLAIN, args.seconds, args.k)
    if not plain.passed:
        raise GearbxError(f"no test of {tests / f'test_{file}.py'} passes with mlx-lm itself; choose others")
    counts, losses = [], []
    for name in names:
        wrapped = run(tests, file, name, args.seconds, args.k)
        counts.append(len(plain.passed & wrapped.passed))
        losses += [(f"test_{file}", test, name, why) for test, why in lost(plain, wrapped).items()]
    return [f"test_{file}", len(plain.passed), *counts, len(plain.failed), len(plain.skipped)], losses


def main() -> int:
    args = setup_arg_parser().parse_args()
    names = args.wrapper or [*WRAPPERS][1:]
    rows, losses = [], []
    try:
        tests = args.tests or get_tests(args.cache)
        for file in args.only or FILES:
            row, lost_here = compare(tests, file, names, args)
            rows.append(row)
            losses += lost_here
            print(*row, file=sys.stderr)
    except GearbxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(["tests", PLAIN, *names, f"fail with {PLAIN}", "left out"], rows))
    for each in sorted(losses):
        print(*each, sep=": ")
    return int(bool(losses))


if __name__ == "__main__":
    sys.exit(main())
