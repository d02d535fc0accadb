"""Costs of decoding besides forward passes: routing, shifts of mixed gears, and batches, compared with mlx-lm's.

routing: overhead of entropy, monitor, gate and record per token. mixture: speed of mixed gears over the top gear, as
measured and as GEARBX 9 predicts it: T = S t_shift + sum of n_g t_g, the speedup is N t_top / T; times of single gears
are from the same run. batch-speed: sequences that share passes in one gear, by this package's batch generator and by
mlx-lm's over the same model with the same kernels.
"""

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import batch_generate as mlx_batch_generate
from mlx_lm.models.cache import make_prompt_cache
from rich.progress import track

from gearbx_mlx.benchmark import ModelBenchmark, parse_shape
from gearbx_mlx.benchmark.decode import FIRST_TOKENS, check_gears, model_of
from gearbx_mlx.benchmark.measuring import BandwidthMeter, Rows, cell, paths_here, spread_of, timed
from gearbx_mlx.calibrate import parse_shares
from gearbx_mlx.decoding.route import Route, Static
from gearbx_mlx.decoding.stream import batch_generate, stream_generate
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.gears.discovery import vocabulary
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.gears.ladder import Gear, Ladder
from gearbx_mlx.loading import load
from gearbx_mlx.routing.gates import ThresholdGate

from .studies import Found, in_turn, ratios, results_in_turn, study, table_here


def engaged(model: str | None, shape: str, gears: str | None, context: int = 0) -> Gearbox:
    """Return a gearbox of the model or of a random Llama. context: tokens of a KV cache that must fit into memory."""
    ladder = None if gears is None else Ladder.parse(gears)
    settings = ModelBenchmark(model=model, shape=parse_shape(shape), gears=ladder)
    check_gears(settings, context=context)
    return Gearbox(model_of(settings), ladder, kernels=paths_here()[0][1])


def as_table(columns: Sequence[str], rows: Rows) -> str:
    return table_here(columns, [[cell(row[name]) for name in columns] for row in rows])


def ratio_row(gear: Gear, ratios: Sequence[float], figures: dict[str, Any], read_bandwidth: Any) -> dict[str, Any]:
    """Return the row of a gear.

    Args:
        ratios: one of each trial.
        figures: what else the row says of the loops.
        read_bandwidth: of memory while they ran.
    """
    return {
        "gear": gear.name,
        "bits": gear.bits,
        **figures,
        "ratio": statistics.median(ratios),
        "spread": spread_of(ratios),
        "read_bandwidth_gigabytes_per_second": read_bandwidth(),
        "trials": len(ratios),
        **read_bandwidth.row,
    }


# Routing

ROUTING_COLUMNS = ("gear", "bits", "seconds", "seconds_of_mlx_lm", "ratio", "spread")


class Stay(ThresholdGate):
    """Does all the work of a gate, and stays in the gear."""

    def update(self, *reading: Any) -> int:
        gear = self.gear
        super().update(*reading)
        self.gear = gear
        return gear


@study(minutes=3)
def routing(
    model: str | None = None, shape: str = "1024x8", gears: str | None = None, tokens: int = 16, trials: int = 5
) -> Found:
    """Time the overhead of routing per token, in each gear, relative to mlx-lm's own loop.

    Args:
        model: Model; a random Llama if omitted.
        shape: WIDTHxLAYERS of the random Llama.
    """
    gearbox, read_bandwidth, tokenizer = engaged(model, shape, gears), BandwidthMeter(), load()[1]
    rows = []

    def plain() -> float:
        steps = mlx_lm.stream_generate(gearbox.model, tokenizer, FIRST_TOKENS, max_tokens=tokens + 1)
        return seconds_per_token(steps, tokens)

    def routed() -> float:
        gate = Stay(tuple(map(float, range(1, len(gearbox.ladder)))))
        mode = Route(gate=gate, initial_gear=gearbox.gear.name)
        steps = stream_generate(gearbox.model, tokenizer, FIRST_TOKENS, tokens + 1, mode=mode, gearbox=gearbox)
        return seconds_per_token(steps, tokens)

    for gear in track(gearbox.ladder, "gears"):
        gearbox.shift(gear)
        theirs, ours = results_in_turn({"mlx-lm": plain, "ours": routed}, trials).values()
        figures = {"seconds": statistics.median(ours), "seconds_of_mlx_lm": statistics.median(theirs)}
        rows.append(ratio_row(gear, ratios(ours, theirs), figures, read_bandwidth))
    return Found({"routing": as_table(ROUTING_COLUMNS, rows)}, rows)


def seconds_per_token(steps: Iterator, tokens: int) -> float:
    """Return the time of a loop after its first token."""
    next(steps)
    return timed(lambda: list(steps)) / tokens


# A mixture of gears

MIXED = "mixture"
MIXTURE_COLUMNS = "tokens", "shifts", "milliseconds_of_a_shift", "speedup", "spread", "predicted_speedup", "of_bytes"


@study(minutes=3)
def mixture(
    model: str | None = None,
    shape: str = "1024x8",
    gears: str | None = None,
    tokens: int = 120,
    shares: str = "0.55,0.25,0.2",
    run: int = 10,
    trials: int = 5,
) -> Found:
    """Time mixed gears against only the top gear, and predict their speed as GEARBX 9 does.

    Args:
        model: Model; a random Llama if omitted.
        shape: WIDTHxLAYERS of the random Llama.
        shares: Shares of the tokens in each gear, lowest gear first.
        run: Approximate number of tokens between two shifts.
    """
    asked = parse_shares(shares)
    gearbox, read_bandwidth = engaged(model, shape, gears), BandwidthMeter()
    plan = plan_of(gearbox.ladder, asked, tokens, run)
    plans = {gear.name: [gear] * len(plan) for gear in gearbox.ladder} | {MIXED: plan}
    measured = results_in_turn({name: partial(seconds_of, gearbox, each) for name, each in plans.items()}, trials)
    bandwidth = {"read_bandwidth_gigabytes_per_second": read_bandwidth(), **read_bandwidth.row}
    rows = [mixture_row(gearbox, plan, measured) | bandwidth]
    return Found({"mixture": as_table(MIXTURE_COLUMNS, rows)}, rows)


def plan_of(ladder: Ladder, shares: Sequence[float], tokens: int, run: int) -> list[Gear]:
    """Return the gear of each token: runs of one gear, about `run` tokens long, in turn; each gear has its share.

    Raises:
        GearbxError: there are not as many shares as gears.
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


def seconds_of(gearbox: Gearbox, plan: Sequence[Gear]) -> tuple[float, float]:
    """Return seconds per token of a plan, and seconds of all its shifts, which are in it."""
    cache, shifting = make_prompt_cache(gearbox.model), 0.0
    gearbox.shift(plan[0])
    token = gearbox.model(mx.array([FIRST_TOKENS]), cache=cache)[:, -1].argmax(-1)
    mx.eval(token)
    start = time.perf_counter()
    for gear in plan:
        shifting += gearbox.shift(gear)
        token = gearbox.model(token[None], cache=cache)[:, -1].argmax(-1)
        mx.eval(token)
    return (time.perf_counter() - start) / len(plan), shifting


def dynamic_speedup(
    gear_tokens: Mapping[str, int], gear_seconds: Mapping[str, float], top: str, shifting: float
) -> float:
    """Speed of a run that changes gear relative to one in the top gear (GEARBX 9): N t_top / T_dynamic.

    Args:
        gear_tokens: tokens computed in each gear.
        gear_seconds: seconds per token of each gear, `top` among them.
        shifting: seconds of all shifts.
    """
    spent = shifting + sum(count * gear_seconds[gear] for gear, count in gear_tokens.items())
    return sum(gear_tokens.values()) * gear_seconds[top] / spent


def mixture_row(
    gearbox: Gearbox, plan: Sequence[Gear], measured: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, Any]:
    """Return medians over the trials. predicted_speedup: by GEARBX 9; of_bytes: by bytes only, without shifts."""
    top, shifts = gearbox.ladder.top.name, sum(one != other for one, other in pairwise(plan))
    counts = {gear.name: sum(each == gear for each in plan) for gear in gearbox.ladder}
    seconds = {name: [spent for spent, _ in trials] for name, trials in measured.items()}
    shifting = [spent for _, spent in measured[MIXED]]
    speedups = ratios(seconds[top], seconds[MIXED])
    predicted = [
        dynamic_speedup(counts, {name: seconds[name][trial] for name in counts}, top, spent)
        for trial, spent in enumerate(shifting)
    ]
    read = {gear.name: gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder}
    return {
        "tokens": len(plan),
        "shifts": shifts,
        "milliseconds_of_a_shift": 1e3 * statistics.median(shifting) / max(shifts, 1),
        "speedup": statistics.median(speedups),
        "spread": spread_of(speedups),
        "predicted_speedup": statistics.median(predicted),
        "of_bytes": len(plan) * read[top] / sum(count * read[name] for name, count in counts.items()),
        "trials": len(speedups),
    }


# Batches

PROMPT_TOKENS = 16


@study("docs/batches.md", minutes=5)
def batch_speed(
    model: str | None = None,
    shape: str = "1024x8",
    gears: str | None = None,
    tokens: int = 16,
    batch_size: list[int] = [1, 4, 8],  # noqa: B006
    trials: int = 5,
) -> Found:
    """Time batches in one gear against mlx-lm's own batches of the same model.

    Args:
        model: Model; a random Llama if omitted.
        shape: WIDTHxLAYERS of the random Llama.
        batch_size: Numbers of sequences.
    """
    gearbox, read_bandwidth = engaged(model, shape, gears), BandwidthMeter()
    never_ends = EndlessTokenizer(load(model)[1])
    cases = [(gear, size) for gear in gearbox.ladder for size in batch_size]
    rows = []
    for gear, size in track(cases, "batches"):
        prompts = random_prompts(gearbox.model, size)

        def by_ours(gear: Gear = gear, prompts: Any = prompts) -> None:
            batch_generate(
                gearbox.model, never_ends, prompts, max_tokens=tokens, mode=Static(gear.name), gearbox=gearbox
            )

        def by_theirs(gear: Gear = gear, prompts: Any = prompts) -> None:
            gearbox.shift(gear)
            mlx_batch_generate(gearbox.model, never_ends, prompts, max_tokens=tokens)

        seconds = in_turn({"ours": by_ours, "mlx-lm": by_theirs}, trials)
        ours, theirs = ([spent / tokens for spent in each] for each in seconds.values())
        figures = {
            "batch_size": size,
            "tokens_per_second": size / statistics.median(ours),
            "tokens_per_second_of_mlx_lm": size / statistics.median(theirs),
        }
        rows.append(ratio_row(gear, ratios(theirs, ours), figures, read_bandwidth))
    lines = [
        [
            *(row["batch_size"], row["bits"], f"{row['tokens_per_second']:.0f}"),
            *(f"{row['tokens_per_second_of_mlx_lm']:.0f}", f"{row['ratio']:.2f}", cell(row["spread"])),
        ]
        for row in rows
    ]
    head = ["sequences", "bits", "tokens/s", "tokens/s of mlx-lm", "ratio", "spread"]
    return Found({"beside": table_here(head, lines)}, rows)


def random_prompts(model: nn.Module, size: int) -> list[list[int]]:
    """So many prompts of one length, the same in every run."""
    drawn, count = random.Random(0), vocabulary(model)
    return [[drawn.randrange(1, count) for _ in range(PROMPT_TOKENS)] for _ in range(size)]


class EndlessTokenizer:
    """A tokenizer without a token that ends a text, so that every text has the same length."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
