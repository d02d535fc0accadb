"""Recordings of one report: policies along a text, one after the other.

They include the noise floor: the distance of the reference from itself with arithmetic as coarse as bfloat16's.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from gearbx_mlx.compat.arrays import dtype_name
from gearbx_mlx.evaluation.predictions import Recording, TextPrediction, quality, recording_of
from gearbx_mlx.formats.base import dense_weight
from gearbx_mlx.gears.adapters import layers_of, put_layers
from gearbx_mlx.gears.gearbox import Gearbox, costed_in
from gearbx_mlx.gears.ladder import Gear, Ladder
from gearbx_mlx.routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION, DEFAULT_WINDOW

from .driving import Policy, StaticPolicy, driven
from .policies import PolicyRow, Setting, make_policy
from .replay import Reference, after_prompts, best_length, drafted, sequences_of, targets_of
from .report import compare_with_chance, compare_with_static, quality_arguments, row_of
from .statistics import by_bucket

GATE = {"window": DEFAULT_WINDOW, "hysteresis": DEFAULT_HYSTERESIS, "min_gear_duration": DEFAULT_MIN_GEAR_DURATION}
Track = Callable[[Iterable[TextPrediction], int, str], Iterable[TextPrediction]]


@dataclass
class Runs:
    """The reference, the noise floor, and one recording for each row of the report.

    Args:
        folder: for the reference, which is large: tokens by vocabulary.
        windows: of tokens.
        prompts: what stands before each window, and is not predicted; none where no window has one.
        prompt_gear: reads them; None: the gear that begins the window.
        between: the two gears that policies shift between.
        seed: of the random gate and the noise.
        track: shows the progress: gets steps, their number, and the name of the recording.
    """

    folder: Path
    gearbox: Gearbox
    windows: Sequence[Sequence[int]]
    between: tuple[Gear, Gear]
    seed: int = 0
    prompts: Sequence[Sequence[int]] = ()
    prompt_gear: Gear | None = None
    track: Track = lambda steps, total, name: steps
    recordings: dict[PolicyRow, Recording] = field(default_factory=dict)
    thresholds: dict[PolicyRow, float | None] = field(default_factory=dict)
    noise: Recording | None = None

    @cached_property
    def targets(self) -> np.ndarray:
        return targets_of(self.windows)

    @cached_property
    def reference(self) -> Reference:
        tracked = self.track(self._in_top_gear(), len(self.targets), "reference")
        return Reference(self.folder / "reference.npy", tracked, self.targets)

    def compute(self, entries: Sequence[PolicyRow]) -> None:
        """Make the recordings."""
        # Static gears first: all thresholds come from the low one.
        for entry in sorted(entries, key=lambda entry: entry.policy != "static"):
            steps, self.thresholds[entry] = self._steps(entry)
            self.recordings[entry] = self._recording(entry.name, steps)
        with noisy(self.gearbox, self.seed):
            self.noise = self._recording("noise", self._in_top_gear())

    def _steps(self, entry: PolicyRow) -> tuple[Iterator[TextPrediction], float | None]:
        """Return the predictions of a row, and the threshold of its policy."""
        low, high = self.between
        if entry.policy == "static":
            gear = self.gearbox.ladder.find(entry.bits or low)
            return self._driven(StaticPolicy(gear), self.prompt_gear or gear), None
        recorded = self.recordings[PolicyRow("static", bits=low.bits)]
        if entry.policy == "lossless":
            return self._drafts(recorded)
        setting = Setting(self.windows, low, high, self.reference, recorded, self.seed)
        policy, threshold = make_policy(entry, setting)
        return self._driven(policy, self.prompt_gear or low), threshold

    def _driven(self, policy: Policy, gear: Gear) -> Iterator[TextPrediction]:
        """Return the predictions of a policy, after prompts that are read in a gear."""
        return driven(self.gearbox, self.windows, policy, after_prompts(self.gearbox, self.prompts, gear))

    def _drafts(self, recorded: Recording) -> tuple[Iterator[TextPrediction], float]:
        """Lossless with drafts of the fixed length that reads the fewest bytes, and this length."""
        low, top = self.between[0], self.gearbox.ladder.top
        pair = Ladder([low.bits, top.bits])
        costs = [costed_in(self.gearbox, pair).weight_bytes_per_token(gear) for gear in pair]
        length = best_length(sequences_of(recorded), *costs)
        begun = after_prompts(self.gearbox, self.prompts, top)
        return drafted(self.gearbox, self.windows, low, top, length, begun), length

    def _in_top_gear(self) -> Iterator[TextPrediction]:
        return self._driven(StaticPolicy(self.gearbox.ladder.top), self.gearbox.ladder.top)

    def _recording(self, name: str, steps: Iterator[TextPrediction]) -> Recording:
        return recording_of(self.track(steps, len(self.targets), name), self.reference)

    def report(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return the report of the recordings so far; it begins with `about`, the caller's own fields."""
        low, high = self.between
        rows = []
        for entry, recording in self.recordings.items():
            rows.append(row_of(entry, recording, self.reference, self.gearbox, self.between))
            rows[-1]["threshold"] = self.thresholds[entry]
        recordings = {entry.name: recording for entry, recording in self.recordings.items()}
        compare_with_chance(rows, recordings, low.bits, high.bits)
        compare_with_static(rows)
        noise = None if self.noise is None else quality(**quality_arguments(self.noise, self.reference.nll))
        return {
            **about,
            "tokens": len(self.targets),
            "windows": len(self.windows),
            "ladder": self.gearbox.ladder_report(),
            "prompt_tokens": max(map(len, self.prompts), default=0),
            "prompt_gear": None if self.prompt_gear is None else self.prompt_gear.bits,
            "between": [low.bits, high.bits],
            "gate": GATE,
            "seed": self.seed,
            "compute_dtype": dtype_name(self.gearbox.compute_dtype),
            "reference": self._about_reference(rows),
            "noise_floor": noise,
            "policies": rows,
        }

    def _about_reference(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the report's part about the top gear."""
        bits = self.gearbox.ladder.top.bits
        buckets = by_bucket(self.reference.top_probability, {})
        return {
            "bits": bits,
            "perplexity": next((row["perplexity"] for row in rows if row["name"] == f"static-{bits}"), None),
            "tokens_by_top_probability": buckets,
        }


UNIT_ROUNDOFF = 2.0**-8  # of bfloat16: the most by which rounding to it changes a number, relatively


class Noisy(nn.Module):
    """A layer that changes each of its outputs by a random relative error, uniform within bfloat16's unit roundoff."""

    def __init__(self, layer: nn.Module, seed: int):
        super().__init__()
        self.layer = layer
        self._key = mx.random.key(seed)

    def __call__(self, *args, **kwargs) -> mx.array:
        return self.blur(self.layer(*args, **kwargs))

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the product of an embedding that is the output head as well."""
        return self.blur(self.layer.as_linear(x))

    def dense_weight(self) -> mx.array:
        """Return the weight (O, I), whose norms an adapter may need."""
        return dense_weight(self.layer)

    def blur(self, y: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return y * (1 + mx.random.uniform(-UNIT_ROUNDOFF, UNIT_ROUNDOFF, y.shape, key=key)).astype(y.dtype)


@contextlib.contextmanager
def noisy(gearbox: Gearbox, seed: int) -> Iterator[None]:
    """Return a context with noise on the outputs of the top gear's managed layers; do not shift inside."""
    gearbox.shift(gearbox.ladder.top)
    modules = layers_of(gearbox.model)
    engaged = {layer.path: modules[layer.path] for layer in gearbox.layers}
    wrapped = {path: Noisy(module, seed + i) for i, (path, module) in enumerate(engaged.items())}
    put_layers(gearbox.model, wrapped)
    try:
        with gearbox.compiled.aside():
            yield
    finally:
        put_layers(gearbox.model, engaged)
