"""One sequence of a batch: the gears that it wants, the numbers that it draws, and what was seen of its tokens."""

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np

from ...gears.ladder import Gear
from ...routing.gates import Gate
from ...routing.monitor import Monitor
from ..random_state import OwnRandomState
from ..sampler import Sampler
from ..step import Step


class SeenPass:
    """One pass over B rows. step: how it came about; entropies: (B,), bits."""

    def __init__(self, step: Step, entropies: mx.array | np.ndarray):
        self.step, self._entropies = step, entropies

    @cached_property
    def entropies(self) -> np.ndarray:
        """(B,), in bits; waits until they are computed."""
        return np.array(self._entropies).reshape(-1)

    def __len__(self) -> int:
        return self._entropies.size


@dataclass(frozen=True)
class SeenRow:
    """One row of a pass, and the gear that its sequence wanted then."""

    seen: SeenPass
    row: int
    wish: Gear

    @property
    def entropy(self) -> float:
        return float(self.seen.entropies[self.row])


@dataclass
class BatchText:
    """A text that shares its passes with others, but has a monitor, a gate and a sampler of its own.

    first: the gear that reads its prompt. sampler: takes log-probabilities (1, V); None: the batch's. random: None:
    it draws from MLX's random state, as all others without a seed do. error: of a logits
    processor, whose logits are NaN.
    """

    gate: Gate
    monitor: Monitor
    first: Gear
    sampler: Sampler | None = None
    random: OwnRandomState | None = None
    before: Gear | None = None
    error: Exception | None = None
    rows: deque[SeenRow] = field(default_factory=deque)
    """Of tokens that are computed and not handed out yet: mlx-lm runs one ahead."""

    def __post_init__(self) -> None:
        self.wish = self.first
        self.gate.reset(self.first.index)

    def sample(self, logprobs: mx.array, shared: Sampler) -> mx.array:
        """A token (1,) from log-probabilities (1, V)."""
        with nullcontext() if self.random is None else self.random.drawn():
            return (self.sampler or shared)(logprobs)
