"""A model's predictions along a text, in one gear or in a mode that shifts, and how far they are from the top gear's.

A text is read on a real KV cache, which keeps the entries that a low gear writes.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..decoding.caches import Snapshot
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear, Ladder
from ..routing.gates import RUN_AHEAD, Gate, Monitor
from .metrics import entropy_of_logprobs, kl_divergence, log_softmax

AT_ONCE = 16  # tokens in a pass: as many as native kernels take


class Policy:
    """Chooses the gear of each token in turn. `place` counts predictions over the whole text, from 0.

    `takes_back`: tokens may be computed again, so that the KV cache is put back.
    """

    takes_back = False

    def begin(self) -> None:
        """Start a new window, with an empty KV cache."""

    def first(self, place: int) -> Gear:
        """Return the gear that computes this token first."""
        raise NotImplementedError

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        """Return the higher gear that computes the token again, given its log-probabilities (V,); or None."""
        return None

    def after(self, logprobs: np.ndarray) -> None:
        """Take the log-probabilities (V,) of the last pass."""


@dataclass
class StaticPolicy(Policy):
    """Stay in one gear."""

    gear: Gear

    def first(self, place: int) -> Gear:
        return self.gear


@dataclass
class RoutePolicy(Policy):
    """GEARBX's gate over the entropies of past tokens, which acts two passes later, as in `decoding.route`.

    Args:
        gears: the gate numbers them from 0.
        initial_gear: number of the gear to begin in.
    """

    gears: Sequence[Gear]
    gate: Gate
    monitor: Monitor
    initial_gear: int = 0

    def begin(self) -> None:
        self.gate.reset(self.initial_gear)
        self.monitor.reset()
        self.coming = deque([self.gears[self.initial_gear]] * RUN_AHEAD)

    def first(self, place: int) -> Gear:
        return self.coming.popleft()

    def after(self, logprobs: np.ndarray) -> None:
        reading = self.monitor.update(float(entropy_of_logprobs(log_softmax(logprobs))))
        self.coming.append(self.gears[self.gate.update(reading)])


@dataclass
class KickdownPolicy(Policy):
    """Begin in the lowest gear, and climb while the token's entropy is above the gear's threshold in bits."""

    gears: Sequence[Gear]
    thresholds: Sequence[float]
    takes_back = True

    def first(self, place: int) -> Gear:
        return self.gears[0]

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        if gear == self.gears[-1] or entropy_of_logprobs(log_softmax(logprobs)) <= self.thresholds[gear.index]:
            return None
        return self.gears[gear.index + 1]


@dataclass(frozen=True)
class TextPrediction:
    """One prediction.

    window: number of its window. target: the token of the text. logprobs: (V,), float32. gear: computed them. passes:
    over the weights, in each gear of the ladder.
    """

    window: int
    target: int
    logprobs: np.ndarray
    gear: Gear
    passes: Sequence[int]


Begun = Callable[[int], Any]
"""Takes the number of a window, and returns the KV cache of what stands before it."""


def driven(
    gearbox: Gearbox, windows: Sequence[Sequence[int]], policy: Policy, begun: Begun | None = None
) -> Iterator[TextPrediction]:
    """Read the windows under a policy, and yield every prediction. begun: without it nothing stands before windows."""
    place = itertools.count()
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model) if begun is None else begun(number)
        policy.begin()
        for token, target in itertools.pairwise(window):
            yield TextPrediction(number, target, *computed(gearbox, policy, next(place), token, cache))


def computed(
    gearbox: Gearbox, policy: Policy, place: int, token: int, cache: Any
) -> tuple[np.ndarray, Gear, Sequence[int]]:
    """Return the prediction after a token: log-probabilities (V,), the gear that computed them, passes in each gear."""
    passes = [0] * len(gearbox.ladder)
    gear: Gear | None = policy.first(place)
    before = Snapshot(cache) if policy.takes_back else None
    while gear is not None:
        if before is not None and any(passes):
            before.restore()
        gearbox.shift(gear)
        logprobs = next_logprobs(gearbox.model, [token], cache)[0]
        passes[gear.index] += 1
        engaged, gear = gear, policy.again(place, gear, logprobs)
    policy.after(logprobs)
    return logprobs, engaged, passes


def read_at_once(
    gearbox: Gearbox, windows: Sequence[Sequence[int]], gear: Gear, begun: Begun | None = None
) -> Iterator[TextPrediction]:
    """Read windows in one gear, several tokens in a pass: only the last bits differ from one token at a time.

    Args:
        begun: as in `driven`.
    """
    passes = [int(each is gear) for each in gearbox.ladder]  # of a token that is read alone
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model) if begun is None else begun(number)
        gearbox.shift(gear)
        for start in range(0, len(window) - 1, AT_ONCE):
            part = window[start : min(start + AT_ONCE, len(window) - 1)]
            for target, logprobs in zip(window[start + 1 :], next_logprobs(gearbox.model, part, cache)):
                yield TextPrediction(number, target, logprobs, gear, passes)


def next_logprobs(model: Any, tokens: Sequence[int], cache: Any) -> np.ndarray:
    """Return log-probabilities (len(tokens), V), float32, from one pass over the weights."""
    return logprobs_of(model(mx.array([list(tokens)]), cache=cache))


def logprobs_of(logits: mx.array) -> np.ndarray:
    """Return log-probabilities (N, V), float32, of logits (1, N, V)."""
    return log_softmax(np.array(logits[0].astype(mx.float32))).astype(np.float32)


@dataclass(frozen=True)
class Recording:
    """Keep the results of n predictions; arrays of shape (n,), but `passes` (n, gears).

    nll: nats, of the text's own token. kl: of the reference from these predictions, kl_reverse: back, nats. agree: both
    give the same token the highest probability. entropy: bits. gear: index in the ladder. passes: over the weights, in
    each gear.
    """

    window: np.ndarray
    nll: np.ndarray
    kl: np.ndarray
    kl_reverse: np.ndarray
    agree: np.ndarray
    entropy: np.ndarray
    gear: np.ndarray
    passes: np.ndarray


def record(predictions: Iterable[TextPrediction], reference: Sequence[np.ndarray]) -> Recording:
    """Compare predictions with the reference's log-probabilities, (V,) for each."""
    rows = []
    for place, each in enumerate(predictions):
        p, q = log_softmax(reference[place]), log_softmax(each.logprobs)
        rows.append(
            (
                each.window,
                -q[each.target],
                kl_divergence(p, q),
                kl_divergence(q, p),
                p.argmax() == q.argmax(),
                entropy_of_logprobs(q),
                each.gear.index,
                each.passes,
            )
        )
    return Recording(*(np.array(column) for column in zip(*rows)))


Read = Callable[[Sequence[int]], Iterable[TextPrediction]]
"""Takes a window, and returns its predictions."""


def compared(gearbox: Gearbox, window: Sequence[int], readers: Iterable[Read], uncounted: int = 0) -> list[Recording]:
    """Return what each reader predicts in a window, compared with the top gear.

    Args:
        uncounted: predictions at the beginning that are left out.
    """
    top = read_at_once(gearbox, [window], gearbox.ladder.top)
    reference = [each.logprobs for each in itertools.islice(top, uncounted, None)]
    return [record(itertools.islice(read(window), uncounted, None), reference) for read in readers]


def joined(parts: Sequence[Recording]) -> Recording:
    """Return the recordings of windows as one."""
    return Recording(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Recording)))


def read_per_token(gearbox: Gearbox, used: Sequence[Gear], recording: Recording) -> tuple[float, float]:
    """Return what a recording read per token: bytes of weights, and bits per weight of the managed layers.

    Each pass costs what it would read in a ladder of the used gears alone: a model that stays in one gear need not
    store it in planes that other gears share. A token that is computed twice reads twice.

    Args:
        used: the gears that the recording has passes in.
    """
    ladder = Ladder([gear.bits for gear in used])
    alone = gearbox.costed_in(ladder)
    costs = {gear.bits: (alone.weight_bytes_per_token(gear), alone.bits_per_weight(gear)) for gear in ladder}
    of_gears = np.array([costs.get(gear.bits, (0, 0)) for gear in gearbox.ladder]).T
    weight_bytes, bits = (float((recording.passes @ each).mean()) for each in of_gears)
    return weight_bytes, bits
