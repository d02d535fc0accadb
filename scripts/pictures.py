"""Make the pictures and the measured tables of the README and of docs/ anew.

    python scripts/pictures.py                        # those that take minutes
    python scripts/pictures.py --list
    python scripts/pictures.py evidence --results RESULTS

RESULTS is a directory in which the commands of docs/evidence.md and docs/pair.md were run; they need models and texts
that do not ship.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = "docs/images"
HELD_OUT = "tests/data/gsm8k_held_out.jsonl"
CODEBOOK_TABLES = ("error", "kl", "points", "speed")


def terminal(results: Path) -> None:
    """generate.png and generate.txt: the terminal in the README"""
    run("scripts/draw_terminal.py", f"{IMAGES}/generate.png", "--max-tokens", "200")


def analysis(results: Path) -> None:
    """entropy_trace.png, entropy_histogram.png, gear_shares.png in docs/usage.md"""
    out = results / "analysis"
    run("-m", "gearbx_mlx.analyze", "--prompts", HELD_OUT, "--num-prompts", "12", "--out", str(out))
    for picture in out.glob("*.png"):
        (ROOT / IMAGES / picture.name).write_bytes(picture.read_bytes())


def throttling(results: Path) -> None:
    """throttling.png and the table of docs/machine.md"""
    run("scripts/simulate_throttling.py", f"{IMAGES}/throttling.png", "--page", "docs/machine.md")


def sensitivity(results: Path) -> None:
    """sensitivity.png and the tables of docs/sensitivity.md"""
    manifest = str(results / "manifest.json")
    run("-m", "gearbx_mlx.sensitivity", "--format", "affine", "--compare", "--out", manifest)
    run("-m", "gearbx_mlx.allocate", "--manifest", manifest, "--gears", "4,5,16")
    run("scripts/measure_allocation.py", str(results), "docs/sensitivity.md")


def codebook(results: Path) -> None:
    """the tables of docs/codebook.md"""
    for what in CODEBOOK_TABLES:
        run("scripts/measure_codebook.py", what, "--page", "docs/codebook.md")


def exact(results: Path) -> None:
    """exact.png and the tables of docs/exact.md; needs --results, with two models as well"""
    run("scripts/draw_exact.py", f"{IMAGES}/exact.png")
    models = [str(results / name) for name in ("stories260K", "babyllama105")]
    run("scripts/measure_exact.py", "bits", "--page", "docs/exact.md", "--models", *models)
    run("scripts/measure_exact.py", "memory", "--page", "docs/exact.md")
    run("scripts/measure_exact.py", "lossless", "--page", "docs/exact.md", "--results", str(results))


def startup(results: Path) -> None:
    """the table of starting times in docs/performance.md"""
    run("scripts/time_startup.py", "--page", "docs/performance.md")


def models(results: Path) -> None:
    """the table of docs/models.md"""
    run("scripts/describe_models.py")


def evidence(results: Path) -> None:
    """kl_*.png and the tables of docs/evidence.md and docs/pair.md; needs --results"""
    run("scripts/write_evidence.py", str(results), "docs/evidence.md", "docs/pair.md")


@dataclass(frozen=True)
class Task:
    """make: its docstring says what it makes. minutes: about how long it takes on two cores."""

    make: Callable[[Path], None]
    minutes: int
    needs_results: bool = False


SHORT = 5  # minutes: what takes longer is made by name alone
TASKS = {
    task.make.__name__: task
    for task in (
        Task(terminal, 1),
        Task(analysis, 1),
        Task(throttling, 4),
        Task(sensitivity, 30),
        Task(codebook, 30),
        Task(exact, 1, needs_results=True),
        Task(startup, 1),
        Task(models, 3),
        Task(evidence, 1, needs_results=True),
    )
}


def run(*arguments: str) -> None:
    """Run Python in the root of the repository; a failure ends everything."""
    print("python", *arguments, flush=True)
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"What to make: {', '.join(TASKS)}.")
    parser.add_argument("--list", action="store_true", help="Show the names and what they make.")
    parser.add_argument("--results", type=Path, help="Where measurements are kept. Default: a temporary directory")
    args = parser.parse_args()
    if args.list:
        for name, task in TASKS.items():
            print(f"{name:12} {task.minutes:2} min  {task.make.__doc__}")
        return
    short = [name for name, task in TASKS.items() if task.minutes <= SHORT and not task.needs_results]
    for name in args.names or short:
        if name not in TASKS:
            parser.error(f"{name}: no such picture; choose from {', '.join(TASKS)}")
        if TASKS[name].needs_results and args.results is None:
            parser.error(f"{name} needs --results")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names or short:
            TASKS[name].make(args.results.resolve() if args.results else Path(folder))


if __name__ == "__main__":
    main()
