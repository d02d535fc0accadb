"""How far distributions are from the reference's: figures of numpy arrays, in float64.

The set is llama.cpp's, and so are standard errors, which take tokens to be independent: perplexity and its ratio, mean,
median and far quantiles of KL, same top token. KL is in nats, entropy in bits.
"""

import math

import numpy as np


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
    ratio = float(np.exp((nll - reference_nll).mean()))
    return {
        "perplexity": float(np.exp(nll.mean())),
        "perplexity_ratio": ratio,
        "perplexity_ratio_error": ratio * error_of_mean(nll - reference_nll),
        **spread("kl", kl),
        **spread("kl_reverse", kl_reverse),
        "kl_mean_error": error_of_mean(kl),
        "top1_agreement": float(agree.mean()),
        "top1_agreement_error": error_of_mean(agree),
    }


def error_of_mean(values: np.ndarray) -> float:
    """Return the standard error of a mean over tokens (n,); NaN for a single one."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, median, 90th, 99th and 99.9th percentile, maximum."""
    median, p90, p99, p999 = np.quantile(values, (0.5, 0.9, 0.99, 0.999))
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_median": float(median),
        f"{name}_p90": float(p90),
        f"{name}_p99": float(p99),
        f"{name}_p999": float(p999),
        f"{name}_max": float(values.max()),
    }
