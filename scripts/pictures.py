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


def chat(results: Path) -> None:
    """chat.png and chat.txt in docs/chat.md"""
    run("scripts/draw_chat.py", f"{IMAGES}/chat.png")


def analysis(results: Path) -> None:
    """entropy_trace.png, entropy_histogram.png, gear_shares.png in docs/usage.md"""
    out = results / "analysis"
    run("-m", "gearbx_mlx.analyze", "--prompts", HELD_OUT, "--num-prompts", "12", "--out", str(out))
    for picture in out.glob("*.png"):
        (ROOT / IMAGES / picture.name).write_bytes(picture.read_bytes())


def page(results: Path) -> None:
    """page_light.png, page_dark.png, page_phone.png in docs/server.md; needs Chromium"""
    run("scripts/screenshot_page.py", IMAGES)


def throttling(results: Path) -> None:
    """throttling.png and the table of docs/machine.md"""
    run("scripts/simulate_throttling.py", f"{IMAGES}/throttling.png", "--page", "docs/machine.md")


def sensitivity(results: Path) -> None:
    """sensitivity.png and the tables of docs/sensitivity.md"""
    manifest = str(results / "manifest.json")
    run("-m", "gearbx_mlx.sensitivity", "--format", "affine", "--compare", "--out", manifest)
    run("-m", "gearbx_mlx.allocate", "--manifest", manifest, "--gears", "4,5,16")
    run("scripts/measure_allocation.py", str(results), "docs/sensitivity.md")
    models = [str(results / name) for name in ("stories260K", "babyllama105") if (results / name).is_dir()]
    run("scripts/measure_small_parts.py", "--models", *models, "--page", "docs/sensitivity.md")


def codebook(results: Path) -> None:
    """the tables of docs/codebook.md"""
    for what in CODEBOOK_TABLES:
        run("scripts/measure_codebook.py", what, "--page", "docs/codebook.md")
    tables = str(results / "codebook_tables.json")
    run("scripts/measure_codebook_tables.py", "--results", tables, "--page", "docs/codebook.md")
    run("scripts/time_codebook_experts.py", "--page", "docs/codebook.md")
    groups = str(results / "codebook_groups.json")  # with other models' rows where it has been made with --model
    run("scripts/measure_codebook_groups.py", "--results", groups, "--page", "docs/codebook.md")


def exact(results: Path) -> None:
    """exact.png and the tables of docs/exact.md; needs --results, with two models as well"""
    run("scripts/draw_exact.py", f"{IMAGES}/exact.png")
    models = [str(results / name) for name in ("stories260K", "babyllama105")]
    run("scripts/measure_exact.py", "bits", "--page", "docs/exact.md", "--models", *models)
    run("scripts/measure_exact.py", "memory", "--page", "docs/exact.md")
    run("scripts/measure_exact.py", "lossless", "--page", "docs/exact.md", "--results", str(results))


def errors(results: Path) -> None:
    """error_analysis.png and the tables of docs/error_analysis.md"""
    found = str(results / "errors.json")
    run("scripts/measure_errors.py", found)
    page, picture = "docs/error_analysis.md", f"{IMAGES}/error_analysis.png"
    run("scripts/measure_errors.py", found, "--page", page, "--picture", picture)


def startup(results: Path) -> None:
    """the table of starting times in docs/performance.md"""
    run("scripts/time_startup.py", "--page", "docs/performance.md")


def proxy(results: Path) -> None:
    """the table of docs/proxy.md"""
    run("scripts/time_proxy.py", "--page", "docs/proxy.md")


def kv_gears(results: Path) -> None:
    """the tables of loss and cost in docs/kv_gears.md; needs --results, with two models as well"""
    models = [str(results / name) for name in ("babyllama105", "stories260K")]
    run("scripts/measure_kv_gears.py", "quality", "--page", "docs/kv_gears.md", "--models", *models)
    run("scripts/measure_kv_gears.py", "cost", "--page", "docs/kv_gears.md")


def kv_groups(results: Path) -> None:
    """the table of groups in docs/kv_gears.md; needs --results, with two models as well"""
    models = [str(results / name) for name in ("babyllama105", "stories260K")]
    run("scripts/measure_kv_groups.py", "--page", "docs/kv_gears.md", "--models", *models)


def batches(results: Path) -> None:
    """the table of docs/batches.md: what sharing costs"""
    run("scripts/measure_batches.py", "--page", "docs/batches.md")


def batch_speed(results: Path) -> None:
    """the tables of speed in docs/batches.md: mode lossless, and mlx-lm's batches"""
    run("scripts/time_lossless_batches.py", "--prompts", HELD_OUT, "--page", "docs/batches.md")
    rows = str(results / "batch.json")
    run("-m", "gearbx_mlx.benchmark", "batch", "--batch-size", "1,4,8", "--json", rows)
    run("scripts/write_batch_figures.py", rows, "--page", "docs/batches.md")


def threads(results: Path) -> None:
    """threads.svg, w4a8.png, and the tables of threads and of AION's cost model in docs/performance.md"""
    for what, picture in (("threads", "threads.svg"), ("w4a8", "w4a8.png")):
        rows = str(results / f"{what}.json")
        run("-m", "gearbx_mlx.benchmark", what, "--trials", "7", "--json", rows, "--picture", f"{IMAGES}/{picture}")
    run("scripts/write_thread_figures.py", str(results), "--page", "docs/performance.md")


def hints(results: Path) -> None:
    """the table of hints to the system in docs/performance.md"""
    run("scripts/time_hints.py", "--directory", str(results), "--page", "docs/performance.md")


def ranks(results: Path) -> None:
    """the table of docs/distributed.md: what agreeing costs"""
    run("scripts/time_ranks.py", "--page", "docs/distributed.md")


def models(results: Path) -> None:
    """the table of docs/models.md"""
    run("scripts/describe_models.py")


def figures(results: Path) -> None:
    """the pictures and the tables of docs/figures.md"""
    run("-m", "gearbx_mlx.figures", "--out", str(results / "figures"))
    run("scripts/write_figures.py", str(results / "figures"), "--page", "docs/figures.md")


def evidence(results: Path) -> None:
    """kl_*.png, pair.png and the tables of docs/evidence.md and docs/pair.md; needs --results"""
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
        Task(chat, 1),
        Task(analysis, 1),
        Task(page, 1),
        Task(throttling, 4),
        Task(sensitivity, 30),
        Task(codebook, 30),
        Task(exact, 1, needs_results=True),
        Task(errors, 3),
        Task(startup, 1),
        Task(proxy, 2),
        Task(models, 3),
        Task(kv_gears, 20, needs_results=True),
        Task(kv_groups, 1, needs_results=True),
        Task(batches, 3),
        Task(batch_speed, 20),
        Task(threads, 8),
        Task(hints, 4),
        Task(ranks, 3),
        Task(figures, 1),
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
