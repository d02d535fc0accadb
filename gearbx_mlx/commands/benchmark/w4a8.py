"""AION's Table 2, its Figure 2 and its cost model: are products of integers faster than those of widened weights?

Every implementation multiplies the same matrix, all but float32 in format `groupwise` (AION 3.2: 4 bits, a scale for 32
inputs). The terms of the cost model (AION 5.2) are of one thread, from products whose weights are in a cache.
"""

import statistics
from typing import Any

from rich.console import Console

from ...cli.output import output_path
from ...cli.parsers.benchmark import W4A8Benchmark
from ...files.writing import write_text
from ...formats.groupwise import GROUP, GROUP_BYTES, SCALE_SIZE
from ...telemetry.summary import as_json
from .machine import machine_name
from .pictures import draw_w4a8, picture_path
from .tables import table_of
from .threads import trials_on_threads

TRIAL = f"{__package__}.w4a8_trial"
FLOAT32, WEIGHT_ONLY, W4A16, W4A8 = "float32", "4 bits, weight-only", "W4A16", "W4A8"
EMULATED, SCALAR = "4 bits, numpy", "4 bits, scalar"  # on one thread alone
W8A8 = "W8A8"  # for the terms alone
COLUMNS = ("implementation", "threads", "products_per_second", "times_float32", "spread")
TERMS = ("term", "meaning", "picoseconds_per_weight", "spread")
MEANINGS = {
    "memory, float32": "what a weight takes more from memory than from the cache",
    "memory, 4 bits": "the same (W4A8)",
    "fma": "multiply and add float32",
    "dequant": "widen 4 bits to float32",
    "sdot": "multiply and add bytes",
    "unpack": "widen 4 bits to bytes",
    "quant_act": "round the activations, shared by all rows",
    "arithmetic": "fma - sdot: what integers save (equation 3)",
    "overhead": "quant_act + unpack - dequant: what they cost more (equation 4 leaves unpack out)",
}
Trial = dict[str, Any]


def run_w4a8(settings: W4A8Benchmark) -> int:
    out = None if settings.json is None else output_path(settings.json)
    picture = picture_path(settings.json, settings.picture)
    trials = trials_on_threads(TRIAL, settings)
    machine, rows, terms = machine_name(), rows_of(trials, settings), terms_of(trials[1], settings)
    console = Console(width=160)
    console.print(table_of(rows, COLUMNS))
    console.print(table_of(terms, TERMS))
    print(f"{settings.rows} x {settings.cols}, {settings.trials} trials, {machine}")
    if out is not None:
        write_text(out, as_json({"machine": machine, "rows": rows, "terms": terms}))
    if picture is not None:
        draw_w4a8(rows, picture)
    return 0


def rows_of(trials: dict[int, list[Trial]], settings: W4A8Benchmark) -> list[dict[str, Any]]:
    """A row for each implementation and number of threads: medians over trials.

    `times_float32`: over float32 on as many threads, in the same trial; `spread` is of it. `bytes`: of the matrix.
    """
    sizes = {FLOAT32: 4 * settings.rows * settings.cols}
    packed = settings.rows * -(-settings.cols // GROUP) * (GROUP_BYTES + SCALE_SIZE)
    shared = {"rows": settings.rows, "cols": settings.cols, "trials": settings.trials}
    names = [EMULATED, SCALAR, *(name for name in trials[1][0]["seconds"] if name not in (EMULATED, SCALAR))]
    rows = []
    for name in names:
        for threads, found in trials.items():
            if name in found[0]["seconds"]:
                ratios = [one["seconds"][FLOAT32] / one["seconds"][name] for one in found]
                rows.append(
                    {
                        "implementation": name,
                        "threads": threads,
                        "bytes": sizes.get(name, packed),
                        "products_per_second": 1 / statistics.median(one["seconds"][name] for one in found),
                        "times_float32": statistics.median(ratios),
                        "spread": [min(ratios), max(ratios)],
                        "read_bandwidth_gigabytes_per_second": statistics.median(one["bandwidth"] for one in found),
                    }
                    | shared
                )
    return rows


def terms_of(alone: list[Trial], settings: W4A8Benchmark) -> list[dict[str, Any]]:
    """A row for each term of the cost model: the median over trials on one thread, in picoseconds per weight."""
    weights = settings.rows * settings.cols
    each = [terms_of_trial(trial, weights) for trial in alone]
    return [
        {
            "term": term,
            "meaning": meaning,
            "picoseconds_per_weight": statistics.median(found[term] for found in each),
            "spread": [min(found[term] for found in each), max(found[term] for found in each)],
        }
        for term, meaning in MEANINGS.items()
    ]


def terms_of_trial(trial: Trial, weights: int) -> dict[str, float]:
    """The terms of one trial, in picoseconds per weight of a matrix with so many weights."""
    cached = {name: 1e12 * line[0] for name, line in trial["cached"].items()}
    calls = {name: 1e12 * line[1] for name, line in trial["cached"].items()}
    whole = {name: 1e12 * seconds / weights for name, seconds in trial["seconds"].items()}
    rounding = (calls[W4A8] - calls[FLOAT32]) / weights
    unpack, dequant = cached[W4A8] - cached[W8A8], cached[WEIGHT_ONLY] - cached[FLOAT32]
    return {
        "memory, float32": whole[FLOAT32] - cached[FLOAT32],
        "memory, 4 bits": whole[W4A8] - cached[W4A8] - rounding,
        "fma": cached[FLOAT32],
        "dequant": dequant,
        "sdot": cached[W8A8],
        "unpack": unpack,
        "quant_act": rounding,
        "arithmetic": cached[FLOAT32] - cached[W8A8],
        "overhead": rounding + unpack - dequant,
    }
