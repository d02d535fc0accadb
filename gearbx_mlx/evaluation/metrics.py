"""How far distributions are from the reference's: figures of numpy arrays, in float64.

The set is llama.cpp's (perplexity and its ratio, mean, median and far quantiles of KL, same top token), by buckets of
the reference's top probability, as in exllamav3's quality bench: the tokens on which the reference itself is undecided
dominate mean KL. KL is in nats, entropy in bits.
"""

import itertools
import math
from collections.abc import Mapping

import numpy as np

EDGES = (0.25, 0.5, 0.75, 0.95)  # of the reference's top probability
LEAST_BLOCKS = 32


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis, float64."""
    z = np.asarray(logits, np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def kl_divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) = sum p (log p - log q) in nats, from log-probabilities of shape (..., V); at least 0."""
    possible = np.isfinite(p)  # a token that p never says adds nothing
    difference = np.subtract(p, q, out=np.zeros(np.broadcast_shapes(p.shape, q.shape)), where=possible)
    return np.maximum((np.exp(p) * difference).sum(axis=-1), 0.0)


def entropy_of_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """H = -sum p log2 p in bits over the last axis, float64, from log-probabilities of shape (..., V).

    `decoding.sampling.entropy_bits` is the same on MLX, from logits as well.
    """
    finite = np.where(np.isfinite(logprobs), logprobs, 0.0)
    return np.maximum(-(np.exp(logprobs) * finite).sum(axis=-1) / math.log(2), 0.0)


def quality(
    nll: np.ndarray, kl: np.ndarray, kl_reverse: np.ndarray, agree: np.ndarray, reference_nll: np.ndarray
) -> dict[str, float]:
    """The figures of a policy over n tokens; {} for none. Every argument has shape (n,).

    Args:
        nll, reference_nll: negative log-likelihoods (nats) under the policy and under the reference.
        kl, kl_reverse: KL of the reference from the policy, and back (nats).
        agree: whether both have the same most likely token.
    """
    if not len(nll):
        return {}
    return {
        "perplexity": float(np.exp(nll.mean())),
        "perplexity_ratio": float(np.exp((nll - reference_nll).mean())),
        **spread("kl", kl),
        **spread("kl_reverse", kl_reverse),
        "top1_agreement": float(agree.mean()),
    }


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, median, 99th and 99.9th percentile, maximum."""
    median, p99, p999 = np.quantile(values, (0.5, 0.99, 0.999))
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_median": float(median),
        f"{name}_p99": float(p99),
        f"{name}_p999": float(p999),
        f"{name}_max": float(values.max()),
    }


def by_bucket(top_probability: np.ndarray, tokens: Mapping[str, np.ndarray]) -> list[dict]:
    """`quality` of the tokens whose reference has its top probability between two EDGES (at or above the lower one).

    Args:
        top_probability: (n,), of the reference.
        tokens: the arguments of `quality`.
    """
    place = np.digitize(top_probability, EDGES)
    rows = []
    for index, (low, high) in enumerate(itertools.pairwise((0.0, *EDGES, 1.0))):
        inside = place == index
        chosen = {key: values[inside] for key, values in tokens.items()}
        rows.append({"top_probability": f"{low:g}-{high:g}", "tokens": int(inside.sum()), **quality(**chosen)})
    return rows


def blocks_of(window: np.ndarray) -> np.ndarray:
    """The block of each token: its window, or where there are few windows, stretches of equal length.

    Tokens of a block share a context and so are not independent; standard errors take the blocks to be independent.
    """
    if len(np.unique(window)) >= LEAST_BLOCKS:
        return window
    return np.arange(len(window)) * LEAST_BLOCKS // max(len(window), 1)


def standard_error(values: np.ndarray, blocks: np.ndarray) -> float:
    """The standard error of a mean over tokens (n,), from the spread between blocks (n,); NaN for a single block."""
    names, place = np.unique(blocks, return_inverse=True)
    if len(names) < 2:
        return math.nan
    off = np.bincount(place, weights=values - values.mean())  # by how much each block adds to the sum
    return float(math.sqrt((off**2).sum() * len(names) / (len(names) - 1)) / len(values))


def paired(values: np.ndarray, control: np.ndarray, blocks: np.ndarray) -> dict[str, float]:
    """The mean difference to a control on the same tokens, and its standard error."""
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
