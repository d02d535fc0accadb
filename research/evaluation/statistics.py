"""Figures of tokens in groups, their standard errors, and tests of paired results; numpy arrays, in float64.

By buckets of the reference's top probability, as in exllamav3's quality bench: the tokens on which the reference itself
is undecided dominate mean KL.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from gearbx_mlx.evaluation.predictions import quality

EDGES = (0.25, 0.5, 0.75, 0.95)  # of the reference's top probability
MIN_BLOCKS = 32


def by_bucket(top_probability: np.ndarray, tokens: Mapping[str, np.ndarray]) -> list[dict]:
    """`quality` of the tokens whose reference has its top probability between two EDGES (at or above the lower one).

    Args:
        top_probability: (n,), of the reference.
        tokens: the arguments of `quality`; none: tokens are only counted.
    """
    place = np.digitize(top_probability, EDGES)
    rows = []
    for index, (low, high) in enumerate(itertools.pairwise((0.0, *EDGES, 1.0))):
        inside = place == index
        chosen = {key: values[inside] for key, values in tokens.items()}
        figures = quality(**chosen) if tokens else {}
        rows.append({"top_probability": f"{low:g}-{high:g}", "tokens": int(inside.sum()), **figures})
    return rows


def blocks_of(window: np.ndarray) -> np.ndarray:
    """Return the block of each token: its window, or where there are few windows, stretches of equal length.

    Tokens of a block share a context and so are not independent; standard errors take the blocks to be independent.
    """
    if len(np.unique(window)) >= MIN_BLOCKS:
        return window
    return np.arange(len(window)) * MIN_BLOCKS // max(len(window), 1)


def standard_error(values: np.ndarray, blocks: np.ndarray) -> float:
    """Return the standard error of a mean over tokens (n,), from the spread of blocks (n,); NaN for a single block."""
    names, place = np.unique(blocks, return_inverse=True)
    if len(names) < 2:
        return math.nan
    off = np.bincount(place, weights=values - values.mean())  # by how much each block adds to the sum
    return float(math.sqrt((off**2).sum() * len(names) / (len(names) - 1)) / len(values))


def paired(values: np.ndarray, control: np.ndarray, blocks: np.ndarray) -> dict[str, float]:
    """Return the mean difference to a control on the same tokens, and its standard error."""
    difference = values - control
    return {"difference": float(difference.mean()), "standard_error": standard_error(difference, blocks)}


def mcnemar(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Exact two-sided McNemar test of whether two policies, right or wrong (n,) on the same problems, are equally good.

    Returns:
        how many problems only the first and only the second got right, and the p value.
    """
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    trials = only_a + only_b
    tail = sum(math.comb(trials, k) for k in range(min(only_a, only_b) + 1)) / 2**trials
    return {"only_first": only_a, "only_second": only_b, "p_value": min(1.0, 2 * tail)}


LEVEL, POWER = 0.05, 0.8


def holm(p_values: Sequence[float]) -> list[bool]:
    """Return which of several tests are significant: the wrong finding of even one has a probability of at most LEVEL.

    Holm, "A simple sequentially rejective multiple test procedure" (Scandinavian Journal of Statistics 6, 1979).
    """
    order = np.argsort(p_values, kind="stable")
    allowed = LEVEL / np.arange(len(p_values), 0, -1)  # for the smallest p value first
    is_found = np.cumprod(np.array(p_values)[order] <= allowed).astype(bool)
    return is_found[np.argsort(order)].tolist()


MOST_PROBLEMS = 3000
LOG_FACTORIALS = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, MOST_PROBLEMS + 1)))])


def binomial(trials: int, share: float) -> np.ndarray:
    """Probabilities (trials + 1,) of 0 to `trials` successes."""
    if share in (0.0, 1.0):
        return np.eye(trials + 1)[round(share) * trials]
    k = np.arange(trials + 1)
    logs = LOG_FACTORIALS[trials] - LOG_FACTORIALS[k] - LOG_FACTORIALS[trials - k]
    return np.exp(logs + k * math.log(share) + (trials - k) * math.log1p(-share))


@functools.cache
def rejected(trials: int) -> int:
    """Return the largest number of wins of one side that McNemar's exact test finds significant.

    -1: even none is enough.
    """
    return int((2 * np.cumsum(binomial(trials, 0.5)) <= LEVEL).sum()) - 1


def power(problems: int, disagreement: float, loss: float) -> float:
    """Return the probability that McNemar's exact test finds a loss (two-sided, LEVEL).

    Args:
        disagreement: share of problems that only one of two policies solves. loss: by how much more often the first
            one does, in parts of 1, at most the disagreement.
    """
    lost = (disagreement + loss) / (2 * disagreement) if disagreement else 0.0
    found = 0.0
    for trials, probability in enumerate(binomial(problems, disagreement)):
        sure = rejected(trials)
        if probability > 1e-9 and sure >= 0:
            few = binomial(trials, 1 - lost)  # wins of the second one
            found += probability * float(few[: sure + 1].sum() + few[trials - sure :].sum())
    return found


def problems_needed(disagreement: float, loss: float, most: int = MOST_PROBLEMS) -> int | None:
    """Return the number of problems, in tens, that find a loss with POWER; None: more than `most`."""
    low, high = 0, most // 10
    if power(10 * high, disagreement, loss) < POWER:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(10 * middle, disagreement, loss) >= POWER else (middle, high)
    return 10 * high
