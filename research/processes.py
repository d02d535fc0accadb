"""Ranks: cost of agreeing on each token."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from itertools import chain
from pathlib import Path

import mlx.core as mx
import numpy as np

from gearbx_mlx import Gearbox, Static, load, stream_generate
from gearbx_mlx.decoding import route
from gearbx_mlx.ranks.agreement import SINGLE_PROCESS, Agreement
from gearbx_mlx.ranks.place import begin, current
from gearbx_mlx.ranks.watch import meet

from . import ROOT
from .studies import Found, results_in_turn, study, table_here

TEXTS = 8  # of each kind
TOKENS = 16
SUMS = 400
PERCENTILES = 25, 50, 75


def timed_here(place):
    """Return milliseconds of this rank: of tokens with and without agreement, and of the agreement alone."""
    channels = meet(place)  # open until the end: no rank may leave before
    begin(place)
    run = current()
    assert run is not None, "mlx.launch starts this"
    group = run.group
    model, tokenizer = load(group=group)
    gearbox, agreement = Gearbox(model, "4,16"), Agreement(group)

    def with_agreement(chosen: Agreement) -> list[float]:
        route.agreement_of = lambda model: chosen
        return token_seconds(model, tokenizer, gearbox)

    kinds = {"agreed": agreement, "not agreed": SINGLE_PROCESS}
    found = results_in_turn({name: partial(with_agreement, kind) for name, kind in kinds.items()}, TEXTS)
    seconds = {name: [*chain(*each)] for name, each in found.items()}
    seconds["shared"] = sum_seconds(agreement)
    mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))
    del channels
    return {name: np.percentile(np.array(found) * 1e3, PERCENTILES).tolist() for name, found in seconds.items()}


def token_seconds(model, tokenizer, gearbox) -> list[float]:
    """Return seconds of each token of a text but the first."""
    mode, times = Static(gear=16), [time.perf_counter()]
    for _ in stream_generate(model, tokenizer, "A baker makes", TOKENS, mode=mode, gearbox=gearbox):
        times.append(time.perf_counter())
    return np.diff(times)[1:].tolist()


def sum_seconds(agreement: Agreement) -> list[float]:
    """Return seconds until what rank 0 says of a token arrives, again and again."""
    token, entropy, times = mx.array([1], mx.uint32), mx.array([0.5]), []
    for _ in range(SUMS):
        begun = time.perf_counter()
        mx.eval(agreement.arrays(token, entropy))
        times.append(time.perf_counter() - begun)
    return times


def on_ranks(count: int) -> dict:
    """Return the report of rank 0 in a run of `count` ranks."""
    launcher = Path(sys.executable).with_name("mlx.launch")
    program = Path(__file__).with_name("on_rank.py")
    command = [launcher, "-n", count, "--backend", "ring", "--python", sys.executable, program]
    threads = max(1, (os.cpu_count() or 1) // count)  # of each rank: they share the cores
    environment = os.environ | {"GEARBX_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, (done.returncode, done.stdout, done.stderr)
    return json.loads(lines[0])


def row(count: int, found: dict) -> list:
    agreed, alone, shared = (found[name] for name in ("agreed", "not agreed", "shared"))
    return [count, written(agreed), written(alone), f"{agreed[1] / alone[1]:.2f}", written(shared)]


def written(percentiles: list[float]) -> str:
    low, middle, high = percentiles
    return f"{middle:.2f} ms ({low:.2f}-{high:.2f})"


@study("docs/distributed.md", minutes=3)
def ranks(sizes: list[int] = [2]) -> Found:  # noqa: B006 - nothing changes it
    """Time the agreement of ranks on this machine: all use the tokens of rank 0 (gearbx_mlx/ranks/agreement.py).

    For each number of ranks, mlx.launch starts on_rank.py, each rank with its share of the cores. Outputs with and
    without the agreement alternate there; rank 0 reports the times of their tokens.

    Args:
        sizes: Numbers of ranks; up to the number of KV heads if omitted.
    """
    head = ["ranks", "time per token, shared", "not shared", "ratio", "sharing only"]
    return Found({"ranks": table_here(head, [row(count, on_ranks(count)) for count in sizes])})
