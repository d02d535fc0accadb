"""MLX's random numbers, as if nothing had been drawn."""

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Random numbers drawn in the block will be drawn again after it."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)  # a key is its seed
