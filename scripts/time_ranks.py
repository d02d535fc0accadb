"""What agreeing costs ranks on this machine, for docs/distributed.md.

    python scripts/time_ranks.py [--sizes 2] [--page docs/distributed.md]

All ranks sample as rank 0 does (gearbx_mlx/ranks/agreement.py). For each number of ranks, mlx.launch starts this script
on all of them, each with its share of the cores. Texts with and without the agreement alternate there; rank 0 says
what their tokens took.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from pages import fill, table

from gearbx_mlx import Gearbox, Static, load, stream_generate
from gearbx_mlx.benchmark.measuring import machine_name
from gearbx_mlx.decoding import sampling
from gearbx_mlx.ranks.agreement import ALONE, Agreement
from gearbx_mlx.ranks.meeting import meet
from gearbx_mlx.ranks.place import begin, current, place_here

TEXTS = 8  # of each kind
TOKENS = 16
SUMS = 400
HEAD = ["ranks", "a token, agreed", "not agreed", "of that", "the shared numbers alone"]
PERCENTILES = 25, 50, 75


def timed_here(place):
    """Milliseconds of this rank: of tokens with and without agreement, and of the agreement alone."""
    channels = meet(place)  # open until the end: nobody is to leave before
    begin(place)
    group = current().group
    model, tokenizer = load(group=group)
    gearbox, agreement = Gearbox(model, "4,16"), Agreement(group)
    kinds = {"agreed": agreement, "not agreed": ALONE}
    seconds = {name: [] for name in kinds}
    for number in range(2 * TEXTS + 2):
        name = list(kinds)[number % 2]
        sampling.agreement_of = lambda _, chosen=kinds[name]: chosen
        found = token_seconds(model, tokenizer, gearbox)
        seconds[name] += found if number > 1 else []  # the first of each kind warms up
    seconds["shared"] = sum_seconds(agreement)
    mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))
    del channels
    return {name: np.percentile(np.array(found) * 1e3, PERCENTILES).tolist() for name, found in seconds.items()}


def token_seconds(model, tokenizer, gearbox) -> list[float]:
    """Seconds of each token of a text but the first."""
    mode, times = Static(gear=16), [time.perf_counter()]
    for _ in stream_generate(model, tokenizer, "A baker makes", TOKENS, mode=mode, gearbox=gearbox):
        times.append(time.perf_counter())
    return np.diff(times)[1:].tolist()


def sum_seconds(agreement: Agreement) -> list[float]:
    """Seconds until what rank 0 says of a token is there, again and again."""
    token, entropy, times = mx.array([1], mx.uint32), mx.array([0.5]), []
    for _ in range(SUMS):
        begun = time.perf_counter()
        mx.eval(agreement.arrays(token, entropy))
        times.append(time.perf_counter() - begun)
    return times


def on_ranks(count: int) -> dict:
    """What rank 0 of so many says."""
    launcher = Path(sys.executable).with_name("mlx.launch")
    command = [launcher, "-n", str(count), "--backend", "ring", "--python", sys.executable, __file__]
    threads = max(1, (os.cpu_count() or 1) // count)  # of each rank: they share the cores
    environment = os.environ | {"GEARBX_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, (done.returncode, done.stdout, done.stderr)
    return json.loads(lines[0])


def row(count: int, found: dict) -> list:
    agreed, alone, shared = (found[name] for name in ("agreed", "not agreed", "shared"))
    return [count, written(agreed), written(alone), f"{agreed[1] / alone[1]:.2f}", written(shared)]


def written(percentiles: list[float]) -> str:
    low, middle, high = percentiles
    return f"{middle:.2f} ms ({low:.2f}-{high:.2f})"


def main() -> None:
    place = place_here()
    if place is not None:
        found = timed_here(place)
        if place.rank == 0:
            print(json.dumps(found), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2", help="Numbers of ranks. Default: 2, as many as key-value heads")
    parser.add_argument("--page", type=Path, help="Write the table into this page, after <!-- ranks -->.")
    args = parser.parse_args()
    rows = [row(count, on_ranks(count)) for count in map(int, args.sizes.split(","))]
    text = table(HEAD, rows) + f"\n{machine_name()}, {time.strftime('%Y-%m-%d')}\n"
    print(text)
    if args.page:
        fill(args.page, {"ranks": lambda: text})


if __name__ == "__main__":
    main()
