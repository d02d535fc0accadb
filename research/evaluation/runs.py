"""The recordings of one report, made in turn, each kept in a file as soon as it is complete.

Among them is the noise floor: how far the reference is from itself where arithmetic is as coarse as bfloat16's.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..compat.arrays import dtype_name
from ..decoding.caches import cache_in_gears
from ..formats.base import dense_weight
from ..gears.adapters import layers_of, put_layers
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear, Ladder
from ..routing.acceptance import FixedLength, ProductRule, best_length
from .metrics import by_bucket, quality
from .policies import PolicyRow, Setting, StaticPolicy, make_policy, shuffled
from .replay import (
    Policy,
    Recording,
    Reference,
    ReplayStep,
    after_prompts,
    best_rule,
    drafted,
    driven,
    record,
    sequences_of,
    targets_of,
)
from .report import (
    SCHEMA,
    VERSION,
    compare_with_chance,
    compare_with_coins,
    compare_with_static,
    quality_arguments,
    row_of,
)
from .session import EvaluationSession

NOISE = "noise"

Track = Callable[[Iterable[ReplayStep], int, str], Iterable[ReplayStep]]


@dataclass
class Runs:
    """The reference, the noise floor, and one recording for each row of the report.

    Args:
        session: keeps them.
        windows: of tokens.
        prompts: what stands before each window, and is not predicted; none where no window has one.
        prompt_gear: reads them; None: the gear that begins the window.
        between: the two gears that policies shift between.
        gate: window, hysteresis and min_gear_duration of routing.
        seed: of the random gate and the noise.
        dtype: the reference is stored in it.
        track: shows the progress: gets steps, their number, and the name of the recording.

    `coins` are the controls of the rows with a schedule, by their names: the same gears as often, in random order.
    """

    session: EvaluationSession
    gearbox: Gearbox
    windows: Sequence[Sequence[int]]
    between: tuple[Gear, Gear]
    gate: Mapping[str, Any]
    seed: int = 0
    dtype: str = "float32"
    prompts: Sequence[Sequence[int]] = ()
    prompt_gear: Gear | None = None
    track: Track = lambda steps, total, name: steps
    recordings: dict[PolicyRow, Recording] = field(default_factory=dict)
    thresholds: dict[PolicyRow, float | None] = field(default_factory=dict)
    coins: dict[str, Recording] = field(default_factory=dict)
    noise: Recording | None = None

    @cached_property
    def targets(self) -> np.ndarray:
        return targets_of(self.windows)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.session.file("reference.npy", self._write_reference), self.targets)

    def compute(self, entries: Sequence[PolicyRow]) -> None:
        """Make the recordings that the session does not have. An interrupt keeps those that are complete."""
        # Static gears first: all thresholds come from the low one.
        for entry in sorted(entries, key=lambda entry: entry.policy != "static"):
            steps, self.thresholds[entry] = self._steps(entry)
            self.recordings[entry] = self._recording(entry.name, steps)
            if entry.schedule is not None:
                self.coins[entry.name] = self._recording(f"coin-of-{entry.name}", self._shuffled(entry))
        with noisy(self.gearbox, self.seed):
            self.noise = self._recording(NOISE, self._in_top_gear())

    def _steps(self, entry: PolicyRow) -> tuple[Iterator[ReplayStep], float | None]:
        """The predictions of a row, and the threshold of its policy."""
        low, high = self.between
        if entry.policy == "static":
            gear = self.gearbox.ladder.find(entry.bits or low)
            return self._driven(StaticPolicy(gear), self.prompt_gear or gear), None
        if entry.policy == "kv":
            return self._in_kv_gear(entry), None
        recorded = self.recordings[PolicyRow("static", bits=low.bits)]
        if entry.policy.startswith("lossless"):
            return self._drafts(entry.policy, recorded)
        setting = Setting(self.windows, low, high, self.reference, recorded, self.gate, self.seed)
        policy, threshold = make_policy(entry, setting)
        first = low if entry.schedule is None else entry.schedule.gears[0]
        return self._driven(policy, self.prompt_gear or first), threshold

    def _driven(
        self, policy: Policy, gear: Gear, make_cache: Callable[[Any], Any] = make_prompt_cache
    ) -> Iterator[ReplayStep]:
        """The predictions of a policy, after prompts that are read in a gear."""
        return driven(self.gearbox, self.windows, policy, after_prompts(self.gearbox, self.prompts, gear, make_cache))

    def _shuffled(self, entry: PolicyRow) -> Iterator[ReplayStep]:
        """The gears of a row with a schedule in random order, after prompts in the gear that read its own."""
        assert entry.schedule is not None
        gears = [self.gearbox.ladder[index] for index in self.recordings[entry].gear]
        return self._driven(shuffled(gears, self.seed), self.prompt_gear or entry.schedule.gears[0])

    def _drafts(self, policy: str, recorded: Recording) -> tuple[Iterator[ReplayStep], float]:
        """Lossless by the best rule, with its bound; or by the best fixed length, with this length."""
        low, top = self.between[0], self.gearbox.ladder.top
        pair = Ladder([low.bits, top.bits])
        costs = [self.gearbox.costed_in(pair).weight_bytes_per_token(gear) for gear in pair]
        begun = after_prompts(self.gearbox, self.prompts, top)
        if policy == "lossless":
            curve, bound, _ = best_rule(recorded, *costs)
            return drafted(self.gearbox, self.windows, low, top, ProductRule(curve, bound), begun), bound
        length, _ = best_length(sequences_of(recorded), *costs)
        return drafted(self.gearbox, self.windows, low, top, FixedLength(length), begun), length

    def _in_kv_gear(self, entry: PolicyRow) -> Iterator[ReplayStep]:
        """The top gear over a KV cache in one of its gears."""
        top = self.gearbox.ladder.top
        make_cache = partial(cache_in_gears, gearbox=self.gearbox, bits=entry.kv_gears, fixed=entry.bits)
        return self._driven(StaticPolicy(top), top, make_cache)

    def _in_top_gear(self) -> Iterator[ReplayStep]:
        return self._driven(StaticPolicy(self.gearbox.ladder.top), self.gearbox.ladder.top)

    def _recording(self, name: str, steps: Iterator[ReplayStep]) -> Recording:
        def make() -> Recording:
            return record(self.track(steps, len(self.targets), name), self.reference)

        tokens, gears = len(self.targets), len(self.gearbox.ladder)
        return self.session.recording(name, make, lambda file: Recording.load(file, tokens, gears))

    def _write_reference(self, place: Path) -> None:
        tracked = self.track(self._in_top_gear(), len(self.targets), "reference")
        Reference.write(place, tracked, len(self.targets), self.dtype)

    def report(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The report of the recordings so far; it begins with `about`, the caller's own fields."""
        low, high = self.between
        rows = []
        for entry, recording in self.recordings.items():
            rows.append(row_of(entry, recording, self.reference, self.gearbox, self.between))
            rows[-1]["threshold"] = self.thresholds[entry]
        recordings = {entry.name: recording for entry, recording in self.recordings.items()}
        compare_with_chance(rows, recordings, low.bits, high.bits)
        compare_with_coins(rows, recordings, self.coins)
        compare_with_static(rows)
        noise = None if self.noise is None else quality(**quality_arguments(self.noise, self.reference.nll))
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **about,
            "tokens": len(self.targets),
            "windows": len(self.windows),
            "ladder": self.gearbox.ladder_report(),
            "prompt_tokens": max(map(len, self.prompts), default=0),
            "prompt_gear": None if self.prompt_gear is None else self.prompt_gear.bits,
            "between": [low.bits, high.bits],
            "gate": dict(self.gate),
            "seed": self.seed,
            "compute_dtype": dtype_name(self.gearbox.compute_dtype),
            "reference": self._about_reference(),
            "noise_floor": noise,
            "policies": rows,
        }

    def _about_reference(self) -> dict[str, Any]:
        """The report's part about the top gear. Its KL of itself is what storing its log-probabilities changed."""
        top = self.recordings.get(PolicyRow("static", bits=self.gearbox.ladder.top.bits))
        about: dict[str, Any] = {
            "bits": self.gearbox.ladder.top.bits,
            "dtype": self.dtype,
            "kl_mean_of_itself": None,
            "perplexity": None,
            "tokens_by_top_probability": [],
        }
        if top is None:
            return about
        exact = quality_arguments(top, self.reference.nll)
        buckets = by_bucket(self.reference.top_probability, exact)
        return about | {
            "kl_mean_of_itself": float(top.kl.mean()),
            "perplexity": quality(**exact)["perplexity"],
            "tokens_by_top_probability": [{key: b[key] for key in ("top_probability", "tokens")} for b in buckets],
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
        """The product of an embedding that is the output head as well."""
        return self.blur(self.layer.as_linear(x))

    def dense_weight(self) -> mx.array:
        """The weight (O, I), whose norms an adapter may need."""
        return dense_weight(self.layer)

    def blur(self, y: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return y * (1 + mx.random.uniform(-UNIT_ROUNDOFF, UNIT_ROUNDOFF, y.shape, key=key)).astype(y.dtype)


@contextlib.contextmanager
def noisy(gearbox: Gearbox, seed: int) -> Iterator[None]:
    """The top gear with noise on the output of every managed layer; do not shift inside the context."""
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
