"""How long passes of lossless mode take on this machine, for `calibrate --mode lossless --cost time`."""

import hashlib
import os
import statistics
import time
import warnings
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..errors import GearbxWarning
from ..gears.activations import dtype_name
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.output_head import vocabulary
from ..kernels.compiler import processor_features
from ..routing.draft_file import DraftTimes
from ..routing.pass_costs import MOST_ROWS
from .rows import Verifier
from .snapshots import Snapshot

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


def measure_times(gearbox: Gearbox, top: Gear, draft: Gear, context: int) -> tuple[float, list[float]]:
    """Seconds of a drafted token, and of verifications of 1, 2, ... 16 tokens: medians of trials in turn.

    Args:
        top, draft: the gears that verify and draft; `top` is engaged afterwards.
        context: tokens in the KV cache before the pass.
    """
    model, size, verifier = gearbox.model, vocabulary(gearbox.model), Verifier(gearbox, top)
    cache = make_prompt_cache(model)
    gearbox.shift(top)
    mx.eval(model(mx.arange(context)[None] % size, cache=cache))
    before = Snapshot(cache)

    def drafted() -> mx.array:
        gearbox.shift(draft)
        return model(mx.array([[1]]), cache=cache)

    def verified(rows: int) -> Callable[[], mx.array]:
        return lambda: verifier.rows(mx.arange(rows)[None] % size, cache).logits

    passes = [drafted, *(verified(rows) for rows in range(1, MOST_ROWS + 1))]
    seconds: list[list[float]] = [[] for _ in passes]
    for _ in range(TRIALS + 1):
        for run, found in zip(passes, seconds):
            begun = time.perf_counter()
            with before.borrowed():
                mx.eval(run())
            found.append(time.perf_counter() - begun)
    gearbox.shift(top)
    medians = [statistics.median(found[1:]) for found in seconds]
    return medians[0], medians[1:]


def times_here(times: DraftTimes | None, gearbox: Gearbox) -> DraftTimes | None:
    """The times of a drafting file if they were measured as this gearbox runs; else none, and a warning says so."""
    if times is None or times.machine == machine_of(gearbox):
        return times
    said = f"the drafting file's times are of other conditions ({times.machine}), and this is {machine_of(gearbox)}"
    warnings.warn(f"{said}: they are not used; calibrate --cost time here", GearbxWarning, stacklevel=4)
    return None
