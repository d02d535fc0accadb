"""Measurements of drafting, kept for later sequences and processes; and reports of speed.

A gearbox has one `KeptPolicy` per drafter and kind of sampler. The tuner's cache keeps its numbers for the next start
on this machine.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..compat.arrays import dtype_name
from ..gears.gearbox import Gearbox, Observer
from ..kernels.compiler import vectors_at_once
from ..kernels.dispatch import CPU, METAL, device, native_instructions
from .drafters import Drafter
from .policy import ACCEPTANCE, MAX_DRAFTED, MAX_ON_GPU, MAX_ROWS, LearnedPolicy
from .sampling import Chooser

CALIBRATED = 0.4  # share of rejected drafts that are right with a calibrated base: 0.38 to 0.54 in docs/convert.md
MIN_TOKENS = 32  # generated tokens between two writes to the cache
OLD_GPUS = range(1, 15)  # generations before the M3's, for which MLX has no kernel of a few rows
NEIGHBORS = 8  # passes compared before and after a change between rounds and plain decoding
MIN_COMPARED = {True: 32, False: 16}  # tokens of a valid comparison, in rounds and in plain decoding


class MeasuredPolicy(LearnedPolicy):
    """A learned policy that records the times of rounds and plain tokens of this process for reports.

    The speed of a machine varies, so only passes next to a change between rounds and plain decoding are compared.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._latest = deque[tuple[int, float]](maxlen=NEIGHBORS)  # passes of the same kind before the next change
        self._is_round, self._after_change = True, NEIGHBORS
        self._has_drafted = False
        self._tokens_of, self._seconds_of = {True: 0, False: 0}, {True: 0.0, False: 0.0}

    def add_round(self, *, drafted: int, tokens: int, rows: int, seconds: float | None, **found: Any) -> None:
        self._has_drafted |= drafted > 0
        if seconds is not None and not self.is_first(drafted, rows):
            self._note(True, tokens, seconds)
        super().add_round(drafted=drafted, tokens=tokens, rows=rows, seconds=seconds, **found)

    def add_plain(self, seconds: float) -> None:
        self._note(False, 1, seconds)
        super().add_plain(seconds)

    def _note(self, is_round: bool, tokens: int, seconds: float) -> None:
        if is_round is not self._is_round:
            for before in self._latest:
                self._count(self._is_round, *before)
            self._latest.clear()
            self._is_round, self._after_change = is_round, 0
        if self._after_change < NEIGHBORS:
            self._after_change += 1
            self._count(is_round, tokens, seconds)
        else:
            self._latest.append((tokens, seconds))

    def _count(self, is_round: bool, tokens: int, seconds: float) -> None:
        self._tokens_of[is_round] += tokens
        self._seconds_of[is_round] += seconds

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Seconds per token in rounds and in plain decoding; None if this process has compared too few tokens."""
        tokens, seconds = self._tokens_of, self._seconds_of
        if any(tokens[kind] < MIN_COMPARED[kind] for kind in tokens):
            return None
        return seconds[True] / tokens[True], seconds[False] / tokens[False]

    def speedup(self, accepted: float) -> float | None:
        """Return the speedup if this share of rejected drafts were accepted; None before the first draft."""
        if not self._has_drafted:
            return None
        better = self.acceptance + accepted * (1 - self.acceptance)
        return min(self.best(self.acceptance)[0], self.trials.plain) / self.best(better)[0]


@dataclass
class KeptPolicy:
    """Learned policy of drafting with a gearbox.

    Attributes:
        keep: writes the policy's numbers for the next start.
        generated: tokens since the last write.
    """

    policy: LearnedPolicy
    keep: Callable[[Mapping[str, float]], None] = lambda state: None
    generated: int = 0

    def note(self, tokens: int) -> None:
        """Count the tokens of a sequence, and keep the policy's numbers from time to time."""
        self.generated += tokens
        if self.generated >= MIN_TOKENS:
            self.generated = 0
            self.keep(self.policy.state)


# The values must not refer to the gearbox.
POLICIES: WeakKeyDictionary[Gearbox, dict[str, KeptPolicy]] = WeakKeyDictionary()


def policy_of(gearbox: Gearbox, drafter: Drafter | None, chooser: Chooser) -> KeptPolicy:
    """Return the policy of a gearbox and a drafter, initially from earlier starts on this machine."""
    known, name = POLICIES.setdefault(gearbox, {}), cache_key(gearbox, drafter, chooser)
    if name not in known:
        cache = gearbox.kernel_choices.tuner.cache

        def keep(state: Mapping[str, float]) -> None:
            cache.keep(name, dict(state))
            cache.save_soon()

        share, rate = (None, ACCEPTANCE) if drafter is None else (drafter.cost, drafter.acceptance)
        policy = MeasuredPolicy(cache.times.get(name, {}), share, *rows_of_pass(gearbox), rate)
        known[name] = KeptPolicy(policy, keep)
    return known[name]


def rows_of_pass(gearbox: Gearbox) -> tuple[int, int]:
    """Return the most tokens of a draft, and the rows that the top gear's kernels multiply in one pass over weights.

    Metal's figures are those of MLX 0.32 (matmul.cpp, gemv_wide_config; quantized.cpp, qmv_wide), even if kernels of
    this package were proven faster for a few shapes.
    """
    on, is_dense = device(), gearbox.ladder.top.dense
    if on == CPU:
        return MAX_DRAFTED, vectors_at_once(native_instructions()) if gearbox.kernels.native else MAX_ROWS
    if on != METAL:
        return MAX_ON_GPU, MAX_ROWS
    if is_dense and gearbox.compute_dtype == mx.float32:
        return MAX_ON_GPU, MAX_ROWS  # a GEMM with tiles of 16 rows
    if gpu_generation() in OLD_GPUS:  # dense weights: that GEMM; quantized ones: a pass per row
        return (MAX_DRAFTED, MAX_ROWS) if is_dense else (MAX_ON_GPU, 1)
    return MAX_ON_GPU, MAX_ON_GPU + 1


def gpu_generation() -> int:
    """Return the generation of an Apple GPU, as MLX reads it: 13 for M1, 14 for M2, 15 for M3; 0 for other devices."""
    name = str(mx.device_info().get("architecture", ""))  # such as applegpu_g15s
    found = re.fullmatch(r"applegpu_g(\d+)[a-z]", name)
    return int(found[1]) if found else 0


def cache_key(gearbox: Gearbox, drafter: Drafter | None, chooser: Chooser) -> str:
    """Return a key for measurements: drafter, model, kernels, and the sampler's support of kernels and margins."""
    kernels = "native" if gearbox.kernels.native else "mlx"
    if gearbox.base:
        kernels += ", calibrated,"
    if gearbox.kernels.x_bits:
        kernels += f" with activations of {gearbox.kernels.x_bits} bits"
    how = f"{gearbox.format.name}, {dtype_name(gearbox.compute_dtype)}, {kernels} kernels"
    if not chooser.has_kernel:
        how += ", another sampler" if chooser.has_margins else ", a sampler without margins"
    by = "prompt lookup" if drafter is None else drafter.name
    return f"drafts by {by} for {gearbox.ladder.top.bits} bits, model {gearbox.fingerprint[:8]}, {how}"


def policies(gearbox: Gearbox | Observer) -> list[MeasuredPolicy]:
    known = POLICIES.get(gearbox, {}).values() if isinstance(gearbox, Gearbox) else ()
    return [each.policy for each in known if isinstance(each.policy, MeasuredPolicy)]


def measured_seconds(gearbox: Gearbox | Observer) -> dict[str, float]:
    """Return the fields of a summary with the seconds per token in rounds and in plain decoding of this process.

    They are absent if it has compared too few tokens.
    """
    found = [seconds for policy in policies(gearbox) if (seconds := policy.seconds) is not None]
    return dict(zip(("seconds_in_rounds", "plain_seconds"), found[-1])) if found else {}


def speedup_of_calibration(gearbox: Gearbox | Observer) -> float | None:
    """Return the expected speedup of a calibrated base, from this process; None before its first draft."""
    found = [policy.speedup(CALIBRATED) for policy in policies(gearbox)]
    return max((speedup for speedup in found if speedup is not None), default=None)


def speed_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a table's line that compares rounds with plain decoding; none without a comparison."""
    rounds, plain = summary.get("seconds_in_rounds"), summary.get("plain_seconds")
    if not rounds or not plain or not summary.get("drafted"):
        return []
    times = f"{1000 * rounds:.3g} ms/token in rounds, {1000 * plain:.3g} ms/token in plain decoding"
    return [("speed", f"{plain / rounds:.2f}× with drafts: {times}")]
