"""Random numbers of a text's own, whatever other texts draw meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


class OwnRandomState:
    """MLX's random state as one text alone has it after `mx.random.seed(seed)`."""

    def __init__(self, seed: int):
        self.state = mx.random.key(seed % 2**64)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """What is drawn inside comes from this state; afterwards MLX's is as it was."""
        current: Any = mx.random.state
        others = mx.array(current[0])
        current[0][:] = self.state
        try:
            yield
        finally:
            self.state = mx.array(current[0])
            current[0][:] = others
