"""The error of cached keys and values by the gear that wrote them, and by how long a gear stays (GEARBX 13.2)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ...gears.gearbox import Gearbox
from ...gears.ladder import Gear
from ..metrics import kl_divergence
from ..replay import next_logprobs

BIT = np.log(2.0)  # nats


def runs_of(gears: Sequence[Gear], tokens: int, length: int) -> list[tuple[int, int, Gear]]:
    """Runs of `length` tokens, each in the next of some gears in turn: first token, end, gear."""
    edges = [*range(0, tokens, length), tokens]
    return [(begin, end, gears[i % len(gears)]) for i, (begin, end) in enumerate(pairwise(edges))]


def written(gearbox: Gearbox, tokens: Sequence[int], runs: Sequence[tuple[int, int, Gear]]) -> tuple[Any, np.ndarray]:
    """The caches and the log-probabilities (S, V) of a text whose runs are read in their own gears."""
    cache = make_prompt_cache(gearbox.model)
    found = []
    for begin, end, gear in runs:
        gearbox.shift(gear)
        found.append(next_logprobs(gearbox.model, tokens[begin:end], cache))
    return cache, np.concatenate(found)


def entries(caches: Any) -> tuple[list[mx.array], list[mx.array]]:
    """Keys and values of each layer, (1, H, S, D) in float32."""
    keys, values = ([c.state[i][..., : c.offset, :].astype(mx.float32) for c in caches] for i in (0, 1))
    return keys, values


def by_position(layers: Sequence[mx.array]) -> np.ndarray:
    """The sum of squares of each position (S,), over layers (1, H, S, D)."""
    return np.sum([np.array(mx.square(each).sum(axis=(0, 1, 3))) for each in layers], axis=0)


def squares(caches: Any, exact: Any) -> np.ndarray:
    """(4, S): squared errors of the keys and of the values of each position, and the squares of the exact ones."""
    pairs = list(zip(entries(caches), entries(exact)))
    errors = [by_position([a - b for a, b in zip(made, true)]) for made, true in pairs]
    return np.stack([*errors, *(by_position(true) for _, true in pairs)])


def kv_errors(
    gearbox: Gearbox, texts: Sequence[Sequence[int]], gears: Sequence[Gear], lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """Read texts in gears that take turns, for several lengths of their runs, and compare with the top gear alone.

    Args:
        texts: tokens. gears: those that take turns. lengths: tokens of a run; each shift begins a run.

    Returns:
        a row for each length and gear: `length`, `gear`, `positions` that the gear wrote, `keys` and `values` (squared
        error over squared size of these positions' entries), `kl` (mean, bits, of all predictions of this length).
    """
    top = gearbox.ladder[-1]
    exact = [written(gearbox, text, [(0, len(text), top)]) for text in texts]
    rows = []
    for length in lengths:
        found = [np.zeros((len(gears), 4)), np.zeros(len(gears), int)]
        kl = []
        for text, (cache, logprobs) in zip(texts, exact):
            runs = runs_of(gears, len(text), length)
            made, changed = written(gearbox, text, runs)
            kl.append(kl_divergence(logprobs, changed) / BIT)
            columns = squares(made, cache)
            for i, (begin, end, _) in enumerate(runs):
                found[0][i % len(gears)] += columns[:, begin:end].sum(axis=1)
                found[1][i % len(gears)] += end - begin
        for gear, sums, count in zip(gears, *found):
            row = {"length": length, "gear": gear.name, "positions": int(count)}
            errors = {"keys": float(sums[0] / sums[2]), "values": float(sums[1] / sums[3])} if count else {}
            rows.append(row | errors | {"kl": float(np.concatenate(kl).mean())})
    return rows
