"""The H-Process: the highest two floors whose model fits a budget and generates no garbage (XFP 6.3).

Memory bounds the floors from above. During encoding, the encoded layers and the current layer are in memory together;
during generation, the model and a reserve for its cache and activations. XFP reserves 8 GiB and 10 GiB for its model;
here both are measured by a forward pass over a few tokens.

Garbage bounds the floors from below, and cosines of weights do not show it: a quantized model's output is garbage if
its distributions on a calibration text are far from the original's, or if only this model repeats itself. The search
therefore tries points from aggressive to conservative, and takes the last one that fits and passes the check.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from rich.progress import Progress
from rich.table import Table

from ..errors import GearbxError
from ..files.model_directory import context_length
from ..formats import get_format
from ..formats.codebook import CodebookFormat
from ..gears.activations import layer_bytes, stored_dtype
from ..gears.discovery import Layer, Predicate, discover
from ..gears.gearbox import Gearbox
from ..kernels.dispatch import choose
from . import Floors
from .codebook_selection import LayerQualities, Selection, measure_qualities, select

KL_BOUND = 0.5  # nats per token: the measured models generate broken text well below it


@dataclass(frozen=True)
class CheckResult:
    """The outcome of the check.

    kl: mean over tokens, nats. looped: outputs that end in repetition when the original's do not; more than a quarter
    of them fail. reason: of a failed check; empty if it passed.
    """

    kl: float
    looped: int
    reason: str

    @property
    def passed(self) -> bool:
        return not self.reason


def log_probabilities(model: nn.Module, tokens: Sequence[int]) -> mx.array:
    """Return (T, V) float32: after each of T tokens, the log-probability of every token."""
    logits = model(mx.array(list(tokens))[None])[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def loops(tokens: Sequence[int]) -> bool:
    """Return True if tokens end in a repeated sequence of up to 8, at least 4 times and over 16 tokens or more."""
    for period in range(1, 9):
        repeats = max(4, math.ceil(16 / period))
        tail = list(tokens[-period * repeats :])
        if len(tail) == period * repeats and tail == tail[-period:] * repeats:
            return True
    return False


def continuation(model: nn.Module, tokens: Sequence[int], length: int, ends: Collection[int] = ()) -> list[int]:
    """Return the tokens that greedy decoding generates after others, at most `length`, before the first of `ends`."""
    steps = (int(token) for token, _ in generate_step(mx.array(list(tokens)), model, max_tokens=length))
    return list(itertools.takewhile(lambda token: token not in ends, steps))


class GarbageCheck:
    """A comparison of models with the original, in its top gear, whose distributions and outputs are kept.

    sequences: tokens; distributions are compared over whole sequences, and outputs after their first halves.
    kl_bound: the most nats per token that pass. written: tokens to generate for each sequence, before any of `ends`.
    Raises GearbxError without a sequence of two tokens or more.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: Sequence[Sequence[int]],
        kl_bound: float = KL_BOUND,
        written: int = 64,  # tokens of each output
        ends: Collection[int] = (),
    ):
        self.sequences = [list(text) for text in sequences if len(text) > 1]
        if not self.sequences:
            raise GearbxError("no calibration text has two tokens or more; use longer ones")
        self.kl_bound, self.written, self.ends = kl_bound, written, ends
        self._logprobs = []
        for text in self.sequences:
            self._logprobs.append(log_probabilities(model, text))
            mx.eval(self._logprobs[-1])
        self._loops = [loops(self._written(model, text)) for text in self.sequences]

    def __call__(self, model: nn.Module) -> CheckResult:
        kl = self.divergence(model)
        if not kl <= self.kl_bound:  # includes NaN
            return CheckResult(kl, 0, f"KL {kl:.3g} above {self.kl_bound:g}")
        looped = sum(loops(self._written(model, own)) and not known for own, known in zip(self.sequences, self._loops))
        return CheckResult(kl, looped, "repeats itself" if 4 * looped > len(self.sequences) else "")

    def divergence(self, model: nn.Module) -> float:
        """Return the mean KL from the original to the model over all tokens, in nats."""
        total = 0.0
        for text, original in zip(self.sequences, self._logprobs):
            total += float(np.array((mx.exp(original) * (original - log_probabilities(model, text))).sum()))
        return total / sum(map(len, self.sequences))

    def _written(self, model: nn.Module, text: list[int]) -> list[int]:
        return continuation(model, text[: len(text) // 2], self.written, self.ends) if self.written else []


CONTEXT = 8192  # tokens, for models with longer contexts, since few sequences are longer
CACHE_STEP = 256  # tokens by which mlx-lm's caches grow; one and two steps are measured


@dataclass(frozen=True)
class Reserve:
    """Bytes in addition to the weights. tokens: of the context that the cache is for; 0 if the user set the bytes."""

    cache: int
    activations: int = 0
    tokens: int = 0

    @property
    def bytes(self) -> int:
        return self.cache + self.activations


def cache_bytes(model: nn.Module, tokens: int) -> tuple[int, int]:
    """Return bytes of the cache after `tokens`, and of that pass's activations. Resets MLX's peak memory."""
    caches = make_prompt_cache(model)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    logits = model(mx.zeros((1, tokens), mx.int32), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    kept = sum(a.nbytes for _, a in tree_flatten([cache.state for cache in caches]) if isinstance(a, mx.array))
    return kept, max(0, mx.get_peak_memory() - before - kept)


def measure_reserve(model: nn.Module) -> Reserve:
    """Return the reserve for the model's context, at most 8192 tokens of it, in passes of 2048.

    Two short passes give the cost of 256 tokens. A window or a state that stops growing counts as if it kept growing.
    """
    made_for = context_length(vars(model.args)) if hasattr(model, "args") else None
    context = min(made_for or CONTEXT, CONTEXT)
    if context <= 2 * CACHE_STEP:
        return Reserve(*cache_bytes(model, context), context)
    (start, _), (end, activations) = cache_bytes(model, CACHE_STEP), cache_bytes(model, 2 * CACHE_STEP)
    steps = math.ceil(context / CACHE_STEP)
    pass_tokens = min(2048, context)  # mlx-lm's limit for one pass
    return Reserve(end + (end - start) * (steps - 2), round(activations * pass_tokens / (2 * CACHE_STEP)), context)


STRICT_FLOORS = (0.90, 0.93, 0.96, 0.98, 0.99, 0.995)
LAZY_FLOORS = (0.80, 0.88, 0.92, 0.93, 0.935, 0.94, 0.96, 0.98, 0.99)
FITS, OVER = "fits", "over budget"


@dataclass(frozen=True)
class OperatingPoint:
    """One operating point. steady: bytes of the model. spike: bytes at the peak, while the model is encoded.

    reserve: bytes that generation needs beside the model.
    """

    selection: Selection
    steady: int
    spike: int
    outcome: str = ""
    verdict: CheckResult | None = None
    reserve: int = 0

    @property
    def needed(self) -> int:
        """The most bytes at any time: while the model is encoded, or while it generates."""
        return max(self.spike, self.steady + self.reserve)

    @property
    def row(self) -> dict[str, Any]:
        """The point as a row of XFP's table 10."""
        verdict = self.verdict
        return {
            "strict": self.selection.floors.strict,
            "lazy": self.selection.floors.lazy,
            "steady": self.steady,
            "spike": self.spike,
            "reserve": self.reserve,
            "effective_bits": self.selection.effective_bits,
            "kl": verdict.kl if verdict else None,
            "looped": verdict.looped if verdict else None,
            "outcome": self.outcome,
        }


@dataclass(frozen=True)
class Limits:
    """Limits of an operating point.

    memory_budget: bytes, during encoding and generation, with the reserve. target_bpw: effective
    bits per weight of the managed layers. reserve: bytes that generation needs in addition to the model.
    """

    memory_budget: int | None = None
    target_bpw: float | None = None
    reserve: int = 0

    def exceeded_by(self, point: OperatingPoint) -> bool:
        """Return True if a point exceeds the limits."""
        if self.memory_budget is not None and point.needed > self.memory_budget:
            return True
        return self.target_bpw is not None and point.selection.effective_bits > self.target_bpw


@dataclass(frozen=True)
class FloorSearch:
    """The chosen point, and all tried points, from aggressive to conservative."""

    best: OperatingPoint
    tried: Sequence[OperatingPoint]


def encoding_spike(layers: Sequence[Layer], format: CodebookFormat, bits: int) -> int:
    """Return the measured peak (bytes) of encoding the largest layer, including itself. Resets MLX's peak memory."""
    largest = max(layers, key=lambda layer: layer.module.weight.size).module
    mx.eval(largest.weight)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    made = format.modules(largest, bits, (bits,), 64, largest.weight.dtype)
    needed = max(0, mx.get_peak_memory() - before)
    del made
    mask = largest.weight.size  # bytes of the mask of outliers, allocated by numpy
    return needed + largest.weight.nbytes + mask


def operating_points(
    measured: Sequence[LayerQualities],
    unmanaged: int,
    spike: int,
    grid: Iterable[tuple[float, float]] | None = None,
    most: int = 8,
    reserve: int = 0,
) -> list[OperatingPoint]:
    """Return points of a grid of floors with different bits for the layers, by bytes ascending.

    The strict floor is never below the lazy one. Pairs of floors with the same bits are one point, named by the
    highest of them. More than `most` points are thinned out evenly. measured: layers, each up to the first bits that
    reach the highest floors. unmanaged: bytes of the rest of the model. reserve: bytes for generation.
    """
    pairs = itertools.product(STRICT_FLOORS, LAZY_FLOORS) if grid is None else grid
    different: dict[tuple, Selection] = {}
    for strict, lazy in sorted(pairs):
        if strict >= lazy:
            selection = select(measured, Floors(strict, lazy))
            different[tuple(selection.bits.values())] = selection
    ordered = sorted(different.values(), key=lambda s: (s.bytes, s.floors.strict, s.floors.lazy))
    if len(ordered) > most:
        ordered = [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]
    return [OperatingPoint(s, s.bytes + unmanaged, s.bytes + unmanaged + spike, reserve=reserve) for s in ordered]


def search(
    points: Sequence[OperatingPoint],
    judge: Callable[[Selection], CheckResult],
    limits: Limits,
    progress: Callable[[OperatingPoint], None] = lambda point: None,
) -> FloorSearch:
    """Try points from aggressive to conservative, and take the last that fits and passes the check.

    The first point beyond the budget ends the search, because more conservative points are larger. It is not made.
    points: ascending in bytes. judge: makes the model of a selection and checks it end to end. Raises GearbxError
    with the closest point, if none meets the budget, or none of those passes the check.
    """
    tried: list[OperatingPoint] = []
    for point in points:
        over = limits.exceeded_by(point)
        if over:
            tried.append(replace(point, outcome=OVER))
        else:
            verdict = judge(point.selection)
            tried.append(replace(point, verdict=verdict, outcome=FITS if verdict.passed else verdict.reason))
        progress(tried[-1])
        if over:
            break
    good = [point for point in tried if point.outcome == FITS]
    if good:
        return FloorSearch(good[-1], tried)
    failed = [point for point in tried if point.verdict]
    if failed:
        closest = min(failed, key=lambda point: point.verdict.kl if point.verdict else 0.0)
        raise GearbxError(
            f"every point within the budget generates garbage; the closest has {described(closest)} and "
            f"{closest.outcome}; use a larger budget"
        )
    raise GearbxError(f"no point meets the budget; the smallest has {described(points[0])}; use that much or more")


def described(point: OperatingPoint) -> str:
    return (
        f"floors {point.selection.floors.strict:g} and {point.selection.floors.lazy:g}, "
        f"{point.selection.effective_bits:.2f} bits per weight, {point.needed / 1e9:.3g} GB at its peak"
    )


def fit_floors(
    model: nn.Module,
    tokenizer: Any,
    format: str,
    manage: str,
    prompts: Sequence[str],
    limits: Limits,
    progress: Progress,
) -> FloorSearch:
    """Run `fit_budget` on text that the model generates from the prompts."""
    codebooks = get_format(format)
    assert isinstance(codebooks, CodebookFormat)
    ends = tokenizer.eos_token_ids
    starts = [tokenizer.encode(prompt) for prompt in prompts[:16]]
    fast_gearbox(model, codebooks, manage)
    sequences = [
        start + continuation(model, start, 48, ends)
        for start in progress.track(starts, description="writing calibration text")
    ]
    judging, trying = progress.add_task("judging codebooks", total=None), progress.add_task("trying", total=None)
    return fit_budget(
        model,
        sequences,
        codebooks,
        manage,
        limits,
        ends,
        judged=lambda path: progress.advance(judging),
        progress=lambda point: progress.advance(trying),
    )


def fit_budget(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    format: CodebookFormat,
    manage: str | Predicate = "all",
    limits: Limits = Limits(),
    ends: Sequence[int] = (),
    kl_bound: float = KL_BOUND,
    judged: Callable[[str], None] = lambda path: None,
    progress: Callable[[OperatingPoint], None] = lambda point: None,
    grid: Iterable[tuple[float, float]] | None = None,
) -> FloorSearch:
    """Return the last point of a grid of floors that meets the budget and passes the garbage check.

    The model must not be quantized, and is left in its top gear.

    Args:
        judged, progress: called with the path of each measured layer, and with each tried point.
        grid: pairs of strict and lazy floors, if not all of them.

    Raises:
        GearbxError: no point meets the budget, or none of those passes the check.
    """
    layers, _ = discover(model, manage, 64, format)
    if not layers:
        raise GearbxError("codebooks can store no layer of this model; choose a different format")
    storage = stored_dtype(model)
    rest = layer_bytes(model, storage) - storage.size * sum(layer.module.weight.size for layer in layers)
    fast_gearbox(model, format, manage)
    check = GarbageCheck(model, sequences, kl_bound, ends=ends)
    measured = measure_qualities(layers, format, Floors(STRICT_FLOORS[-1], LAZY_FLOORS[-1]), judged)

    def judge(selection: Selection) -> CheckResult:
        gearbox = fast_gearbox(model, format, selection.predicate)
        gearbox.shift("low")
        try:
            return check(model)
        finally:
            gearbox.shift("high")

    spike = encoding_spike(layers, format, max(format.layer_bits))
    points = operating_points(measured, rest, spike, grid, reserve=limits.reserve)
    return search(points, judge, limits, progress)


def fast_gearbox(model: nn.Module, format: CodebookFormat, manage: str | Predicate) -> Gearbox:
    """Return a gearbox in its top gear, whose low gear has native kernels, or weights that are reconstructed once."""
    native = choose("native", "float").native and format.native
    fast = format if native else type(format)(cache=True, options=format.options)
    kernels = "native" if native else "mlx"
    return Gearbox(model, "2,16", format=fast, manage=manage, kernels=kernels, activations="float")


def points_table(found: FloorSearch) -> Table:
    """Return all tried points, in the form of XFP's table 10."""
    table = Table(title="Points tried, from aggressive to conservative")
    for name in ("strict", "lazy", "steady", "reserve", "peak", "bits", "KL", "repeats", ""):
        table.add_column(name, justify="left" if not name else "right")
    for point in found.tried:
        table.add_row(*point_cells(point.row), style="bold" if point is found.best else None)
    return table


def point_cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['strict']:g}",
        f"{row['lazy']:g}",
        *(f"{row[name] / 1e9:.3g} GB" for name in ("steady", "reserve", "spike")),
        f"{row['effective_bits']:.2f}",
        "-" if row["kl"] is None else f"{row['kl']:.4f}",
        "-" if row["looped"] is None else str(row["looped"]),
        row["outcome"],
    ]
