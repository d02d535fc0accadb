"""Products per second on 1, 2, ... all cores."""

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from ...cli.parsers.benchmark import ThreadBenchmark
from ...cli.terminal import progress_bar
from ...errors import GearbxError
from .machine import GIBIBYTE, native_module
from .memory import check_memory

TRIAL = f"{__package__}.thread_trial"
Trial = dict[int, dict[str, Any]]  # bits to what was measured


def benchmark_threads(settings: ThreadBenchmark) -> list[dict[str, Any]]:
    """A row for each number of threads and precision; a trial goes through all numbers in turn.

    Raises:
        GearbxError: no native kernels, more than memory allows, or a trial that fails.
    """
    measured = trials_on_threads(TRIAL, settings)
    trials = {threads: [{row["bits"]: row for row in rows} for rows in found] for threads, found in measured.items()}
    shared = {"rows": settings.rows, "cols": settings.cols, "trials": settings.trials}
    return [
        row_of(threads, bits, found, trials[1]) | shared for bits in trials[1][0] for threads, found in trials.items()
    ]


def trials_on_threads(module: str, settings: ThreadBenchmark) -> dict[int, list[Any]]:
    """Number of threads to what a module printed in each trial, each in a process of its own.

    Raises:
        GearbxError: as benchmark_threads.
    """
    matrix = 4 * settings.rows * settings.cols
    check_memory(2 * matrix + 2 * max(settings.megabytes * 2**20, matrix) + GIBIBYTE, "a matrix of this size")
    native_module()  # compiled before anything is timed
    trials: dict[int, list[Any]] = {threads: [] for threads in counts(settings.most or os.cpu_count() or 1)}
    with progress_bar() as progress:
        for _ in progress.track(range(settings.trials), description="trials"):
            for threads, found in trials.items():
                found.append(run_trial(module, settings, threads))
    return trials


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`; each number up to 4."""
    return sorted({n for n in (1, 2, 3, *(2**i for i in range(2, 9)), most) if n <= most})


def run_trial(module: str, settings: ThreadBenchmark, threads: int) -> Any:
    """What a module prints in one trial: a process with this number of threads, and one for numpy."""
    command = [sys.executable, "-m", module, *map(str, (settings.rows, settings.cols, settings.megabytes))]
    environment = os.environ | {"GEARBX_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise GearbxError(f"a trial with {threads} threads failed: {reason}")
    return json.loads(done.stdout)


def row_of(threads: int, bits: int, found: list[Trial], alone: list[Trial]) -> dict[str, Any]:
    """Medians over trials. Speedups are over one thread in the same trial; `spread` is of these."""
    speedups = [one[bits]["seconds"] / many[bits]["seconds"] for one, many in zip(alone, found)]
    seconds, shares, bandwidths = (
        statistics.median(trial[bits][name] for trial in found)
        for name in ("seconds", "bandwidth_ratio", "read_bandwidth_gigabytes_per_second")
    )
    return {
        "threads": threads,
        "bits": bits,
        "products_per_second": 1 / seconds,
        "speedup": statistics.median(speedups),
        "spread": [min(speedups), max(speedups)],
        "bandwidth_ratio": shares,
        "read_bandwidth_gigabytes_per_second": bandwidths,
        "read_by": "native",
    }
