"""What agreeing costs: `mlx.launch -n 2 --backend ring --python PYTHON scripts/time_ranks.py`.

All ranks sample as rank 0 does (gearbx_mlx/ranks/agreement.py).
Texts with and without the agreement alternate in one process; rank 0 prints medians and quartiles of their tokens.
"""

import time

import mlx.core as mx
import numpy as np

from gearbx_mlx import Gearbox, Static, load, stream_generate
from gearbx_mlx.decoding import entropy_sampler
from gearbx_mlx.ranks.agreement import ALONE, Agreement
from gearbx_mlx.ranks.meeting import meet
from gearbx_mlx.ranks.place import place_here
from gearbx_mlx.ranks.run import begin, current

TEXTS = 8  # of each kind
TOKENS = 24
SUMS = 200


def main() -> None:
    place = place_here()
    assert place is not None, "start it with mlx.launch"
    channels = meet(place)
    begin(place)
    run = current()
    model, tokenizer = load(group=run.group)
    gearbox = Gearbox(model, "4,16")
    agreement = Agreement(run.group)
    kinds = {"agreed": agreement, "not agreed": ALONE}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for place_of_text in range(2 * TEXTS + 2):
        name = list(kinds)[place_of_text % 2]
        entropy_sampler.agreement_of = lambda _, chosen=kinds[name]: chosen
        found = token_seconds(model, tokenizer, gearbox)
        seconds[name] += found if place_of_text > 1 else []
    seconds["eight bytes"] = sum_seconds(agreement)
    if place.rank == 0:
        for name, found in seconds.items():
            low, middle, high = np.percentile(np.array(found) * 1e3, (25, 50, 75))
            print(f"{name}: {middle:.2f} ms ({low:.2f} to {high:.2f}), {place.size} ranks, {len(found)} times")
    del channels


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


if __name__ == "__main__":
    main()
