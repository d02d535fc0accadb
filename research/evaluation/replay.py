"""A text read one token at a time on a real KV cache, which keeps the entries that a low gear writes.

Lossless along a text: the low gear reads the text's own tokens and drafts, the top gear verifies the draft in one pass.
A drafted token is accepted where both gears have the same most likely token, even if the text has another. The first
token on which they differ ends the draft, and the top gear's prediction stands there. So the passes are those of a
greedy generation that would have written this text.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..decoding.caches import Snapshot
from ..decoding.rows import Verifier
from ..errors import GearbxError
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..routing.acceptance import MOST_DRAFTED, AcceptanceCurve, DraftRule, best_bound, fit_curve
from .metrics import entropy_of_logprobs, kl_divergence, log_softmax

REMAKE = "remove it, and the same command makes it again"
AT_ONCE = 16  # tokens in a pass: as many as native kernels take


class Policy:
    """Chooses the gear of each token in turn. `place` counts predictions over the whole text, from 0.

    `takes_back`: tokens may be computed again, so that the KV cache is put back.
    """

    takes_back = False

    def begin(self) -> None:
        """Start a new window, with an empty KV cache."""

    def first(self, place: int) -> Gear:
        """The gear that computes this token first."""
        raise NotImplementedError

    def again(self, place: int, gear: Gear, logprobs: np.ndarray) -> Gear | None:
        """The higher gear that computes the token again, given its log-probabilities (V,); or None."""
        return None

    def after(self, logprobs: np.ndarray) -> None:
        """Take the log-probabilities (V,) of the last pass."""


@dataclass(frozen=True)
class ReplayStep:
    """One prediction.

    window: number of its window. target: the token of the text. logprobs: (V,), float32. gear: computed them. passes:
    over the weights, in each gear of the ladder.
    """

    window: int
    target: int
    logprobs: np.ndarray
    gear: Gear
    passes: Sequence[int]


@dataclass(frozen=True)
class Recording:
    """The results of n predictions under a policy; arrays of shape (n,), but `passes` (n, gears).

    nll: nats, of the text's own token. kl: of the reference from the policy, kl_reverse: back, nats. agree: both
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

    def save(self, file: Any) -> None:
        np.savez(file, **vars(self))

    @classmethod
    def shapes(cls, tokens: int, gears: int) -> dict[str, tuple[int, ...]]:
        """Name to shape of each array, for these numbers of predictions and gears."""
        return {field.name: (tokens, gears) if field.name == "passes" else (tokens,) for field in fields(cls)}

    @classmethod
    def load(cls, file: Path, tokens: int, gears: int) -> "Recording":
        """The recording in a file, with these numbers of predictions and gears. Raises GearbxError if it is damaged."""
        recording = cls(**load_shaped(file, cls.shapes(tokens, gears)))
        if not ((recording.gear >= 0) & (recording.gear < gears)).all():
            raise GearbxError(f"{file}: damaged: 'gear' has a number outside of the ladder; {REMAKE}")
        return recording


def load_arrays(file: Path) -> Any:
    """The array of an .npy file, unread, or the arrays of an .npz file by name. Raises GearbxError for any other."""
    try:
        loaded = np.load(file, mmap_mode="r", allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return loaded
        with loaded:
            return dict(loaded)
    except Exception as error:  # numpy and zipfile fail in a dozen ways on a damaged file
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        raise GearbxError(f"{file}: cannot be read as recorded numbers ({reason}); {REMAKE}") from error


def load_shaped(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name. Raises GearbxError unless they are numbers of these shapes."""
    loaded = load_arrays(file)
    for name, shape in shapes.items():
        array = loaded.get(name) if isinstance(loaded, dict) else None
        if array is None or array.shape != shape or array.dtype.kind not in "bif":
            raise GearbxError(f"{file}: damaged: '{name}' is not an array of {shape} numbers; {REMAKE}")
    return {name: loaded[name] for name in shapes}


def next_logprobs(model: Any, tokens: Sequence[int], cache: Any) -> np.ndarray:
    """Log-probabilities (len(tokens), V), float32, from one pass over the weights."""
    return logprobs_of(model(mx.array([list(tokens)]), cache=cache))


def logprobs_of(logits: mx.array) -> np.ndarray:
    """Log-probabilities (N, V), float32, of logits (1, N, V)."""
    return log_softmax(np.array(logits[0].astype(mx.float32))).astype(np.float32)


Begun = Callable[[int], Any]
"""Takes the number of a window, and returns the KV cache of what stands before it."""


def after_prompts(
    gearbox: Gearbox,
    prompts: Sequence[Sequence[int]],
    gear: Gear,
    make_cache: Callable[[Any], Any] = make_prompt_cache,
) -> Begun:
    """Reads the prompt of each window in a gear; windows without prompts begin with an empty KV cache."""

    def begun(number: int) -> Any:
        cache = make_cache(gearbox.model)
        if prompts and prompts[number]:
            gearbox.shift(gear)
            mx.eval(gearbox.model(mx.array([prompts[number]]), cache=cache))
        return cache

    return begun


def driven(
    gearbox: Gearbox, windows: Sequence[Sequence[int]], policy: Policy, begun: Begun | None = None
) -> Iterator[ReplayStep]:
    """Read the windows under a policy, and yield every prediction. begun: without it nothing stands before windows."""
    place = itertools.count()
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model) if begun is None else begun(number)
        policy.begin()
        for token, target in itertools.pairwise(window):
            yield ReplayStep(number, target, *computed(gearbox, policy, next(place), token, cache))


def computed(
    gearbox: Gearbox, policy: Policy, place: int, token: int, cache: Any
) -> tuple[np.ndarray, Gear, Sequence[int]]:
    """The prediction after a token: log-probabilities (V,), the gear that computed them, the passes in each gear."""
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
) -> Iterator[ReplayStep]:
    """One gear alone, several tokens in a pass: without shifts, only the last bits differ from one token at a time.

    Args:
        begun: as in `driven`.
    """
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model) if begun is None else begun(number)
        gearbox.shift(gear)
        for start in range(0, len(window) - 1, AT_ONCE):
            part = window[start : min(start + AT_ONCE, len(window) - 1)]
            for target, logprobs in zip(window[start + 1 :], next_logprobs(gearbox.model, part, cache)):
                yield ReplayStep(number, target, logprobs, gear, [0] * len(gearbox.ladder))


class Reference:
    """The top gear's log-probabilities for every prediction, computed once and stored in a file."""

    def __init__(self, path: Path, targets: np.ndarray):
        self.stored = load_arrays(path)
        shape: tuple[int, ...] = getattr(self.stored, "shape", ())
        if len(shape) != 2 or shape[0] != len(targets) or shape[1] <= max(targets) or self.stored.dtype.kind != "f":
            raise GearbxError(f"{path}: damaged: {shape} is not a row of log-probabilities per prediction; {REMAKE}")
        self.nll = np.array([-self.logprobs(place)[target] for place, target in enumerate(targets)])
        self.top_probability = np.array([np.exp(self.logprobs(place).max()) for place in range(len(targets))])

    def logprobs(self, place: int) -> np.ndarray:
        """(V,), float64. Their probabilities add up to one, also where they are stored as float16."""
        return log_softmax(self.stored[place])

    @staticmethod
    def write(path: Path, steps: Iterable[ReplayStep], tokens: int, dtype: str) -> None:
        """Store the log-probabilities. It writes row by row: in a sparse memory map, a full disk would end the process.

        Args:
            tokens: number of steps, one or more.
            dtype: float32, or float16 for half the room: each log-probability is then off by up to 1 in 2048.

        Raises:
            GearbxError: there is not enough room.
        """
        following = iter(steps)
        first = next(following)
        shape, kind = (tokens, len(first.logprobs)), np.dtype(dtype)
        header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
        try:
            with path.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for step in itertools.chain([first], following):
                    file.write(step.logprobs.astype(kind).tobytes())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise GearbxError(
                f"{path.parent}: the top gear's log-probabilities take {tokens * shape[1] * kind.itemsize} bytes and "
                f"cannot be written ({error.strerror}); make room, and the same command goes on"
            ) from error


def targets_of(windows: Sequence[Sequence[int]]) -> np.ndarray:
    """The tokens of the text that are predicted."""
    return np.array([token for window in windows for token in window[1:]])


def positions_of(windows: Sequence[Sequence[int]]) -> np.ndarray:
    """For each prediction, how many predictions of its window come before it."""
    return np.concatenate([np.arange(len(window) - 1) for window in windows])


def record(steps: Iterable[ReplayStep], reference: Reference) -> Recording:
    """The predictions of a policy, compared with the reference."""
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


def sequences_of(recorded: Recording) -> list[tuple[list[float], list[bool]]]:
    """Entropies and agreements of each window."""
    inside = [recorded.window == number for number in np.unique(recorded.window)]
    return [(recorded.entropy[chosen].tolist(), recorded.agree[chosen].tolist()) for chosen in inside]


def best_rule(recorded: Recording, low_bytes: float, top_bytes: float) -> tuple[AcceptanceCurve, float, float]:
    """The rule that reads the fewest bytes on the recorded tokens.

    Args:
        recorded: the low gear alone.
        low_bytes, top_bytes: weight bytes of a pass in either gear.

    Returns:
        the curve a(H), the bound on its product, and weight bytes per token.
    """
    curve = fit_curve(recorded.entropy.tolist(), recorded.agree.tolist())
    return curve, *best_bound(sequences_of(recorded), curve, low_bytes, top_bytes)


def drafted(
    gearbox: Gearbox,
    windows: Sequence[Sequence[int]],
    low: Gear,
    top: Gear,
    rule: DraftRule,
    begun: Begun | None = None,
) -> Iterator[ReplayStep]:
    """The predictions of lossless mode along the windows.

    After every verification the KV cache consists of the top gear's entries alone. The first prediction of a draft
    counts the passes of the draft and of its verification.
    """
    verifier = Verifier(gearbox, top)
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model) if begun is None else begun(number)
        place, last = 0, len(window) - 1  # nothing follows the last token
        while place < last:
            most = min(MOST_DRAFTED, last - place - 1)  # the verification reads one token more than the draft
            gearbox.shift(low)
            with Snapshot(cache).borrowed():
                drafts = draft(gearbox, window[place : place + most], cache, rule)
            read = mx.array([window[place : place + len(drafts) + 1]])
            rows = verifier.rows(read, cache)
            verified = logprobs_of(rows.logits)
            same = (int(row.argmax()) == token for row, token in zip(verified, drafts))
            kept = sum(itertools.takewhile(bool, same)) + 1
            rows.show(kept)
            passes = [0] * len(gearbox.ladder)
            passes[low.index] += len(drafts)
            passes[top.index] += 1
            for offset in range(kept):
                yield ReplayStep(number, window[place + offset + 1], verified[offset], top, passes)
                passes = [0] * len(gearbox.ladder)
            place += kept


def draft(gearbox: Gearbox, tokens: Sequence[int], cache: object, rule: DraftRule) -> list[int]:
    """The engaged gear's most likely token after each of the tokens, until the rule stops the draft."""
    rule.begin()
    drafts: list[int] = []
    for token in tokens:
        logprobs = next_logprobs(gearbox.model, [token], cache)[0]
        drafts.append(int(logprobs.argmax()))
        if not rule.goes_on(float(entropy_of_logprobs(log_softmax(logprobs)))):
            break
    return drafts
