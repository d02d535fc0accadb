"""A text, one token at a time on a real KV cache: what a low gear writes into it stays there."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..decoding.caches import room, take_back, untrimmable
from ..errors import GearbxError
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from .metrics import entropy_of_logprobs, kl_divergence, log_softmax
from .policies import Policy

AT_ONCE = 16  # tokens in a pass: as many as native kernels take


@dataclass(frozen=True)
class Step:
    """One prediction: in which window, of which token, with which log-probabilities (V,), float32, computed in which
    gear, and how many passes over the weights it took in each gear of the ladder."""

    window: int
    target: int
    logprobs: np.ndarray
    gear: Gear
    passes: Sequence[int]


@dataclass(frozen=True)
class Recording:
    """What n predictions came to under a policy; arrays of shape (n,), but `passes` (n, gears).

    nll: nats, of the text's own token. kl: of the reference from the policy, kl_reverse: back, nats. agree: both
    like the same token best. entropy: bits. gear: index in the ladder. passes: over the weights, in each gear.
    """

    window: np.ndarray
    nll: np.ndarray
    kl: np.ndarray
    kl_reverse: np.ndarray
    agree: np.ndarray
    entropy: np.ndarray
    gear: np.ndarray
    passes: np.ndarray

    def save(self, file: Any) -> None:
        np.savez(file, **vars(self))

    @classmethod
    def load(cls, file: Path) -> "Recording":
        with np.load(file) as stored:
            return cls(**{field.name: stored[field.name] for field in fields(cls)})


def next_logprobs(model: Any, tokens: Sequence[int], cache: Any) -> np.ndarray:
    """Log-probabilities (len(tokens), V), float32, from one pass over the weights."""
    logits = model(mx.array([list(tokens)]), cache=cache)[0].astype(mx.float32)
    return log_softmax(np.array(logits)).astype(np.float32)


def driven(gearbox: Gearbox, windows: Sequence[Sequence[int]], policy: Policy) -> Iterator[Step]:
    """Read the windows under a policy, each with an empty cache, and yield every prediction.

    Raises:
        GearbxError: the policy may compute tokens again, and from the model's cache nothing can be taken back.
    """
    place = itertools.count()
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model)
        if policy.takes_back and room(cache) < len(window):
            raise untrimmable(cache, "kickdown")
        policy.begin()
        for token, target in itertools.pairwise(window):
            yield Step(number, target, *computed(gearbox, policy, next(place), token, cache))


def computed(
    gearbox: Gearbox, policy: Policy, place: int, token: int, cache: Any
) -> tuple[np.ndarray, Gear, Sequence[int]]:
    """What follows a token: log-probabilities (V,), the gear that they come from, and the passes in each gear."""
    passes = [0] * len(gearbox.ladder)
    gear: Gear | None = policy.first(place)
    while gear is not None:
        if any(passes):
            take_back(cache, 1)
        gearbox.shift(gear)
        logprobs = next_logprobs(gearbox.model, [token], cache)[0]
        passes[gear.index] += 1
        engaged, gear = gear, policy.again(place, gear, logprobs)
    policy.after(logprobs)
    return logprobs, engaged, passes


def read_at_once(gearbox: Gearbox, windows: Sequence[Sequence[int]], gear: Gear) -> Iterator[Step]:
    """One gear alone, several tokens in a pass: nothing shifts, so that only last bits differ from one at a time."""
    gearbox.shift(gear)
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model)
        for start in range(0, len(window) - 1, AT_ONCE):
            part = window[start : min(start + AT_ONCE, len(window) - 1)]
            for target, logprobs in zip(window[start + 1 :], next_logprobs(gearbox.model, part, cache)):
                yield Step(number, target, logprobs, gear, [0] * len(gearbox.ladder))


class Reference:
    """The top gear's log-probabilities for every prediction, computed once and kept in a file."""

    def __init__(self, path: Path, targets: np.ndarray):
        self.stored = np.load(path, mmap_mode="r")
        if len(self.stored) != len(targets):
            raise GearbxError(f"{path}: holds {len(self.stored)} predictions, not {len(targets)}; remove it")
        self.nll = np.array([-self.logprobs(place)[target] for place, target in enumerate(targets)])
        self.top_probability = np.array([np.exp(self.logprobs(place).max()) for place in range(len(targets))])

    def logprobs(self, place: int) -> np.ndarray:
        """(V,), float64, of a sum of one whatever the type that they were stored in."""
        return log_softmax(self.stored[place])

    @staticmethod
    def write(path: Path, steps: Iterable[Step], tokens: int, dtype: str) -> None:
        """`dtype`: float32, or float16 for half the room: each log-probability is then off by up to 1 in 2048."""
        stored = None
        for place, step in enumerate(steps):
            if stored is None:
                stored = np.lib.format.open_memmap(path, "w+", dtype, (tokens, len(step.logprobs)))
            stored[place] = step.logprobs
        if stored is not None:
            stored.flush()


def targets_of(windows: Sequence[Sequence[int]]) -> np.ndarray:
    """The tokens that are predicted."""
    return np.array([token for window in windows for token in window[1:]])


def positions_of(windows: Sequence[Sequence[int]]) -> np.ndarray:
    """How many predictions of its window come before each."""
    return np.concatenate([np.arange(len(window) - 1) for window in windows])


def record(steps: Iterable[Step], reference: Reference) -> Recording:
    """Compare what a policy yields with the reference."""
    rows = []
    for place, step in enumerate(steps):
        p, q = reference.logprobs(place), log_softmax(step.logprobs)
        rows.append(
            (
                step.window,
                -q[step.target],
                kl_divergence(p, q),
                kl_divergence(q, p),
                p.argmax() == q.argmax(),
                entropy_of_logprobs(q),
                step.gear.index,
                step.passes,
            )
        )
    return Recording(*(np.array(column) for column in zip(*rows)))
