"""How long passes of lossless mode take on this machine, for `calibrate --mode lossless --cost time`."""

import hashlib
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ..compat.arrays import dtype_name
from ..errors import GearbxWarning
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..kernels.compiler import processor_features
from ..routing.draft_file import DraftTimes
from ..routing.pass_costs import MOST_ROWS
from .rows import Verifier
from .snapshots import Snapshot

LOOP = 8  # tokens of a trial of mlx-lm's own loop
TRIALS = 9  # after one that compiles and fills caches


def machine_of(gearbox: Gearbox) -> str:
    """What times depend on beside the weights: the machine and how the gearbox computes. Equal where times compare.

    Processor, cores, kernels and device; format, group size, type of activations, and type to compute in.
    """
    processor = hashlib.sha256(processor_features().encode()).hexdigest()[:8]
    kernels = "native" if gearbox.kernels.native else "mlx"
    device = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"
    threads = os.environ.get("GEARBX_THREADS", "")
    machine = f"{processor}, {os.cpu_count()} cores{threads and f', {threads} threads'}, {kernels} kernels on {device}"
    activations = f"int{gearbox.kernels.x_bits}" if gearbox.kernels.x_bits else "float"
    stored = f"format {gearbox.format.name} in groups of {gearbox.group_size}"
    return f"{machine}, {stored}, {activations} activations, {dtype_name(gearbox.compute_dtype)}"


def measure_times(gearbox: Gearbox, top: Gear, draft: Gear, context: int) -> tuple[float, float, list[float]]:
    """Seconds of a token alone, of a drafted one, and of verifications of 1, 2, ... 16: medians of trials in turn.

    Alone, the top gear writes in mlx-lm's own loop, which runs ahead.

    Args:
        top, draft: the gears that verify and draft; `top` is engaged afterwards.
        context: tokens in the KV cache before the pass.
    """
    model, size, verifier = gearbox.model, vocabulary(gearbox.model), Verifier(gearbox, top)
    gearbox.shift(top)
    cache = filled_cache(model, context)
    before = Snapshot(cache)

    def alone() -> float:
        gearbox.shift(top)
        return seconds_alone(model, cache)

    def drafted() -> mx.array:
        gearbox.shift(draft)
        return model(mx.array([[1]]), cache=cache)

    def verified(rows: int) -> Callable[[], mx.array]:
        return lambda: verifier.rows(mx.arange(rows)[None] % size, cache).logits

    trials = [alone, timed(drafted), *(timed(verified(rows)) for rows in range(1, MOST_ROWS + 1))]
    seconds: list[list[float]] = [[] for _ in trials]
    for _ in range(TRIALS + 1):
        for trial, found in zip(trials, seconds):
            with before.borrowed():
                found.append(trial())
    gearbox.shift(top)
    medians = [statistics.median(found[1:]) for found in seconds]
    return medians[0], medians[1], medians[2:]


def filled_cache(model: nn.Module, context: int) -> list[Any]:
    """A KV cache that has been given so many tokens, whatever they are."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.arange(context)[None] % vocabulary(model), cache=cache))
    return cache


def seconds_alone(model: nn.Module, cache: list[Any]) -> float:
    """Seconds of a token in mlx-lm's own loop."""
    begun = [time.perf_counter() for _ in generate_step(mx.array([1]), model, max_tokens=LOOP, prompt_cache=cache)]
    mx.eval([layer.state for layer in cache])  # the loop has begun one token more
    return (begun[-1] - begun[0]) / (LOOP - 1)


def timed(run: Callable[[], mx.array]) -> Callable[[], float]:
    """How long it takes until what `run` returns is computed."""

    def seconds() -> float:
        begun = time.perf_counter()
        mx.eval(run())
        return time.perf_counter() - begun

    return seconds


def times_here(times: DraftTimes | None, gearbox: Gearbox) -> DraftTimes | None:
    """The times of a drafting file if they were measured as this gearbox runs; else none, and a warning says so."""
    if times is None or times.machine == machine_of(gearbox):
        return times
    said = f"the drafting file's times are of other conditions ({times.machine}), and this is {machine_of(gearbox)}"
    warnings.warn(f"{said}: they are not used; calibrate --cost time here", GearbxWarning, stacklevel=4)
    return None
