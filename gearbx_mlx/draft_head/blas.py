"""Matmuls and the loss by numpy's OpenBLAS, for training on a CPU: on x86 MLX's own matmuls take ten times as long.

OpenBLAS's threads wait for each other by spinning, so on a machine with other work two take ten times as long as one.
Here each thread of a pool calls it for some of the rows instead, and OpenBLAS itself has one thread.
"""

import contextlib
import ctypes
import functools
import os
import platform
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels.dispatch import on_cpu

SET_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHARED_WORK = 2**24  # multiplications from which rows are shared among threads
BLOCK = 128  # draft positions whose logits are computed at a time, so that they stay in the processor's caches


def uses_blas() -> bool:
    """Return whether numpy multiplies: on a CPU, except a Mac's, where MLX calls Accelerate."""
    return on_cpu() and platform.system() != "Darwin"


@functools.cache
def pool() -> ThreadPoolExecutor:
    """Return the threads, one for each core, and let OpenBLAS start none of its own."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        for library in {*re.findall(r"/\S*openblas\S*", maps)}:
            loaded = ctypes.CDLL(library)
            for name in SET_THREADS:
                if hasattr(loaded, name):
                    getattr(loaded, name)(1)
    return ThreadPoolExecutor(CORES)


def shared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a @ b for float32 matrices, or equally many of them."""
    threads, rows = pool(), a.shape[-2]
    if CORES == 1 or a.ndim > 2 or a.size * b.shape[-1] < SHARED_WORK:
        return np.matmul(a, b)
    found = np.empty((rows, b.shape[-1]), np.float32)
    cuts = [rows * part // CORES for part in range(CORES + 1)]
    list(threads.map(lambda i, j: np.matmul(a[i:j], b, out=found[i:j]), cuts, cuts[1:]))
    return found


def numpy_matmul(a: mx.array, b: mx.array) -> mx.array:
    """Return the matmul of equally many matrices (..., N, K) and (..., K, M), by numpy."""
    return mx.array(shared(np.asarray(a), np.asarray(b)))


blas: Any = mx.custom_function(numpy_matmul)


@blas.vjp
def blas_vjp(primals: Sequence[mx.array], cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    a, b = map(np.asarray, primals)
    c = np.asarray(cotangent)
    return mx.array(shared(c, b.swapaxes(-1, -2))), mx.array(shared(a.swapaxes(-1, -2), c))


def matmul(a: mx.array, b: mx.array) -> mx.array:
    """Return a @ b for float32 arrays with equal leading dimensions."""
    return blas(a, b) if uses_blas() else a @ b


def soft_cross_entropy(drafted: mx.array, after: mx.array, rows: mx.array, shares: mx.array) -> mx.array:
    """Return the weighted sum of cross-entropies -sum(p log q) + constant, in nats, with a gradient for `drafted` only.

    q is softmax(drafted @ rows.T). p is softmax(after @ rows.T) of the position `place` later.

    Args:
        drafted: (P, M, D) normed outputs of the head at each place.
        after: (M, D) normed states of the model.
        rows: (V, D) output rows.
        shares: (P, M) weights.
    """
    if not uses_blas():
        targets, total = mx.softmax(after @ rows.T, axis=-1), mx.array(0.0)
        for place in range(len(drafted)):
            logits = drafted[place] @ rows.T
            wanted = mx.concatenate([targets[place:], targets[:place]]) if place else targets
            total = total + (shares[place] * (mx.logsumexp(logits, axis=-1) - (wanted * logits).sum(-1))).sum()
        return total

    def by_numpy(drafted: mx.array) -> tuple[mx.array, mx.array]:
        lost, gradient = loss_in_blocks(*map(np.asarray, (drafted, after, rows, shares)))
        return mx.array(lost), mx.array(gradient)

    loss: Any = mx.custom_function(by_numpy)

    @loss.vjp
    def gradient_of(primals: mx.array, cotangents: Sequence[mx.array], outputs: Sequence[mx.array]) -> mx.array:
        return cotangents[0] * outputs[1]

    found: mx.array = loss(drafted)[0]
    return found


def loss_in_blocks(
    drafted: np.ndarray, after: np.ndarray, rows: np.ndarray, shares: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return `soft_cross_entropy`, and its gradient (P, M, D): both in one pass over blocks of positions."""
    places, count, _ = drafted.shape
    gradient = np.empty_like(drafted)

    def block(start: int) -> float:
        stop, lost = min(start + BLOCK, count), 0.0
        wanted, _ = softmax(after[np.arange(start, stop + places - 1) % count] @ rows.T)
        for place in range(places):
            logits = drafted[place, start:stop] @ rows.T
            p, share = wanted[place : place + stop - start], shares[place, start:stop]
            expected = np.einsum("mv,mv->m", p, logits)
            q, logsumexp = softmax(logits)
            lost += float((share * (logsumexp - expected)).sum())
            q -= p
            gradient[place, start:stop] = share[:, None] * (q @ rows)
        return lost

    return sum(pool().map(block, range(0, count, BLOCK))), gradient


def softmax(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the softmax of logits (M, V), in their memory, and their logsumexp (M,)."""
    most = logits.max(-1, keepdims=True)
    logits -= most
    np.exp(logits, out=logits)
    total = logits.sum(-1, keepdims=True)
    logits /= total
    return logits, (most + np.log(total))[:, 0]
