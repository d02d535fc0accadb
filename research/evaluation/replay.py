"""Shared code of policies along a text: the reference, prompts, and lossless with its passes.

Lossless along a text: the low gear reads the text's own tokens and drafts, the top gear verifies the draft in one pass.
A drafted token is accepted if both gears have the same most likely token, even if the text has a different one. The
first token on which they differ ends the draft, and the top gear's prediction takes its place. So the passes are those
of a greedy generation of this text.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx.decoding.caches import Snapshot
from gearbx_mlx.decoding.policy import MAX_DRAFTED
from gearbx_mlx.decoding.rows import Verification, Verifier
from gearbx_mlx.evaluation.predictions import Recording, TextPrediction, log_softmax, logprobs_of, next_logprobs
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.gears.ladder import Gear

from .driving import Begun


def after_prompts(gearbox: Gearbox, prompts: Sequence[Sequence[int]], gear: Gear) -> Begun:
    """Reads the prompt of each window in a gear; windows without prompts begin with an empty KV cache."""

    def begun(number: int) -> Any:
        cache = make_prompt_cache(gearbox.model)
        if prompts and prompts[number]:
            gearbox.shift(gear)
            mx.eval(gearbox.model(mx.array([prompts[number]]), cache=cache))
        return cache

    return begun


class Reference(Sequence[np.ndarray]):
    """The top gear's log-probabilities for every prediction, in a file that is read as it is needed.

    Args:
        path: of the file, which is written.
        predictions: of the top gear, one or more.
        targets: the tokens of the text.
    """

    def __init__(self, path: Path, predictions: Iterable[TextPrediction], targets: np.ndarray):
        rows = iter(predictions)
        first = next(rows)
        shape = len(targets), len(first.logprobs)
        self.stored = np.lib.format.open_memmap(path, "w+", np.dtype("float32"), shape)
        for place, row in enumerate(itertools.chain([first], rows)):
            self.stored[place] = row.logprobs
        self.vocab_size = shape[1]
        exact = map(log_softmax, self.stored)  # whose probabilities add up to one
        found = np.array([(-row[target], np.exp(row.max())) for row, target in zip(exact, targets)])
        self.nll, self.top_probability = found.T

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, place: Any) -> Any:
        """(V,), float32."""
        return self.stored[place]


def targets_of(windows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the tokens of the text that are predicted."""
    return np.array([token for window in windows for token in window[1:]])


def sequences_of(recorded: Recording) -> list[tuple[list[float], list[bool]]]:
    """Entropies and agreements of each window."""
    inside = [recorded.window == number for number in np.unique(recorded.window)]
    return [(recorded.entropy[chosen].tolist(), recorded.agree[chosen].tolist()) for chosen in inside]


Recorded = Sequence[tuple[Sequence[float], Sequence[bool]]]
"""Of each text the entropy of the low gear (bits) at each token, and whether it agrees with the top gear there."""


def best_length(sequences: Recorded, low_bytes: float, top_bytes: float) -> int:
    """Return the fixed draft length with which a token of recorded texts reads the fewest bytes of weights.

    Args:
        low_bytes, top_bytes: of a pass in either gear.
    """

    def read(length: int) -> float:
        drafted, verifications, tokens = replay_drafts(sequences, length)
        return (drafted * low_bytes + verifications * top_bytes) / tokens

    return min(range(1, MAX_DRAFTED + 1), key=read)


def replay_drafts(sequences: Recorded, length: int) -> tuple[int, int, int]:
    """Return tokens drafted, verifications and tokens written, by drafts of so many tokens, without a model."""
    drafted = verifications = tokens = 0
    for _, agrees in sequences:
        place = 0
        while place < len(agrees):
            drafts = agrees[place : min(place + length, len(agrees) - 1)]
            drafted += len(drafts)
            verifications += 1
            accepted = next((i for i, agreed in enumerate(drafts) if not agreed), len(drafts))
            place += accepted + 1
        tokens += place
    return drafted, verifications, tokens


def drafted(
    gearbox: Gearbox,
    windows: Sequence[Sequence[int]],
    low: Gear,
    top: Gear,
    length: int,
    begun: Begun | None = None,
) -> Iterator[TextPrediction]:
    """Yield the predictions of lossless mode along the windows.

    After every verification the KV cache consists of the top gear's entries alone. The first prediction of a draft
    counts the passes of the draft and of its verification.
    """
    verifier = Verifier(gearbox, top)
    for number, window in enumerate(windows):
        cache = make_prompt_cache(gearbox.model) if begun is None else begun(number)
        place, last = 0, len(window) - 1  # nothing follows the last token
        while place < last:
            most = min(length, last - place - 1)  # the verification reads one token more than the draft
            gearbox.shift(low)
            with Snapshot(cache).borrowed():
                drafts = draft(gearbox, window[place : place + most], cache)
            rows = Verification(verifier, window[place : place + len(drafts) + 1], cache)
            verified = logprobs_of(rows.logits)
            same = (int(row.argmax()) == token for row, token in zip(verified, drafts))
            kept = sum(itertools.takewhile(bool, same)) + 1
            rows.keep(kept)
            passes = [0] * len(gearbox.ladder)
            passes[low.index] += len(drafts)
            passes[top.index] += 1
            for offset in range(kept):
                yield TextPrediction(number, window[place + offset + 1], verified[offset], top, passes)
                passes = [0] * len(gearbox.ladder)
            place += kept


def draft(gearbox: Gearbox, tokens: Sequence[int], cache: object) -> list[int]:
    """Return the engaged gear's most likely token after each of the tokens."""
    return [int(next_logprobs(gearbox.model, [token], cache)[0].argmax()) for token in tokens]
