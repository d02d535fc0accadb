"""Tokens in all gears beside tokens in the top gear: measured, and as GEARBX 9 predicts it.

T = S t_shift + sum of n_g t_g; the speedup is N t_top / T. Times are those of the gears by themselves, in the same run.
"""

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...cli.gearbox import settle_gears
from ...cli.gears import LayoutSettings
from ...cli.parsers.benchmark import MixtureBenchmark
from ...cli.terminal import progress_bar
from ...errors import GearbxError
from ...gears.cost import dynamic_speedup
from ...gears.gearbox import Gearbox
from ...gears.ladder import Gear, Ladder
from .decode import PROMPT, check_llama, load_or_make
from .machine import bandwidth_meter, kernels_here

MIXED = "mixture"


def benchmark_mixture(settings: MixtureBenchmark) -> list[dict[str, Any]]:
    """One row.

    Raises:
        GearbxError: another number of shares than of gears, a model that cannot be loaded, or more than memory allows.
    """
    ladder = settle_gears(settings.model, LayoutSettings(gears=settings.gears)).gears
    plan = plan_of(ladder, settings.shares_of(), settings.tokens, settings.run)
    if settings.model is None:
        check_llama(settings.shape, ladder, 1)
    read_bandwidth = bandwidth_meter()
    gearbox = Gearbox(load_or_make(settings.model, settings.shape), ladder, kernels=kernels_here())
    plans = {gear.name: [gear] * len(plan) for gear in ladder} | {MIXED: plan}
    trials = []
    with progress_bar() as progress:
        for trial in progress.track(range(settings.trials + 1), description="trials"):
            found = {name: seconds_of(gearbox, gears) for name, gears in plans.items()}
            if trial:  # the first one is a warm-up
                trials.append(found)
    return [
        row_of(gearbox, plan, trials) | {"read_bandwidth_gigabytes_per_second": read_bandwidth()} | read_bandwidth.row
    ]


def plan_of(ladder: Ladder, shares: Sequence[float], tokens: int, run: int) -> list[Gear]:
    """The gear of each token: runs of one gear, about `run` tokens long, in turn; each gear has its share.

    Raises:
        GearbxError: another number of shares than of gears.
    """
    if len(shares) != len(ladder):
        raise GearbxError(f"--shares has {len(shares)} numbers, and there are {len(ladder)} gears; give one for each")
    counts = [round(tokens * share) for share in shares]
    counts[-1] = tokens - sum(counts[:-1])
    rounds = max(1, round(tokens / (run * len(ladder))))
    plan: list[Gear] = []
    for number in range(rounds):
        for gear, count in zip(ladder, counts):
            plan += [gear] * (count * (number + 1) // rounds - count * number // rounds)
    return plan


def shifts_of(plan: Sequence[Gear]) -> int:
    return sum(one != other for one, other in pairwise(plan))


def seconds_of(gearbox: Gearbox, plan: Sequence[Gear]) -> tuple[float, float]:
    """Seconds per token of a plan, and seconds of all its shifts, which are in it."""
    cache, shifting = make_prompt_cache(gearbox.model), 0.0
    gearbox.shift(plan[0])
    token = gearbox.model(mx.array([PROMPT]), cache=cache)[:, -1].argmax(-1)
    mx.eval(token)
    start = time.perf_counter()
    for gear in plan:
        shifting += gearbox.shift(gear)
        token = gearbox.model(token[None], cache=cache)[:, -1].argmax(-1)
        mx.eval(token)
    return (time.perf_counter() - start) / len(plan), shifting


def row_of(gearbox: Gearbox, plan: Sequence[Gear], trials: Sequence[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Medians over the trials. predicted_speedup: GEARBX 9; of_bytes: if only bytes took time, and shifts none."""
    top, shifts = gearbox.ladder.top, shifts_of(plan)
    counts = {gear.name: sum(each == gear for each in plan) for gear in gearbox.ladder}
    measured = [trial[top.name][0] / trial[MIXED][0] for trial in trials]
    predicted = [
        dynamic_speedup(counts, {name: trial[name][0] for name in counts}, top.name, 1, trial[MIXED][1])
        for trial in trials
    ]
    read = {gear.name: gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder}
    return {
        "tokens": len(plan),
        "shifts": shifts,
        "milliseconds_of_a_shift": 1e3 * statistics.median(trial[MIXED][1] for trial in trials) / max(shifts, 1),
        "speedup": statistics.median(measured),
        "spread": [min(measured), max(measured)],
        "predicted_speedup": statistics.median(predicted),
        "of_bytes": len(plan) * read[top.name] / sum(count * read[name] for name, count in counts.items()),
        "trials": len(trials),
    }
