"""Sensitivity of the model to each layer's precision: one layer is reduced, and the text is predicted again.

Only outputs that the layer changes are computed again. Earlier blocks keep their outputs at full precision, and so do
managed layers of its own block with the same inputs: reducing v_proj does not change the outputs of q_proj and k_proj.
The result is exact, since the same operations on the same numbers give the same numbers. Results become the layers of a
precision manifest. The fast method (`estimate_kls`) is mlx-lm's dynamic quantization.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.quant.dynamic_quant import estimate_sensitivities
from msgspec import Meta
from rich.progress import Progress

from ..compat.classes import of_classes
from ..errors import GearbxError
from ..evaluation.predictions import check_windows, kl_divergence, log_softmax, read_documents, windows_of
from ..files.journal import Journal
from ..files.model_directory import context_length
from ..gears.discovery import Layer
from ..gears.gearbox import Gearbox
from ..gears.ladder import DENSE, Ladder
from ..kernels.dispatch import on_cpu
from ..loading import DEMO_MODEL
from . import ACCURACY_THRESHOLD
from .codebook_selection import component_kind
from .precision import LayerPrecision, least_bits

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Distance:
    """The distance from full precision: KL in nats per token, and the change of perplexity in percent."""

    kl: float
    perplexity_change: float


@dataclass
class Cost:
    """The work over all windows, and the work of full passes.

    blocks: a partly computed block counts as its share of the calls of managed layers. calls: of managed
    layers. multiplications: of managed layers, per token. Attention, norms and the KL itself are not counted.
    """

    blocks: float = 0.0
    calls: int = 0
    multiplications: int = 0
    full_blocks: int = 0
    full_calls: int = 0
    full_multiplications: int = 0

    def shares(self) -> dict[str, float]:
        """Return the work as shares of full passes."""
        return {
            "blocks": self.blocks / max(self.full_blocks, 1),
            "layer_calls": self.calls / max(self.full_calls, 1),
            "multiplications": self.multiplications / max(self.full_multiplications, 1),
        }


@contextlib.contextmanager
def intercepted(modules: Mapping[Any, nn.Module], through: Callable[..., Any]) -> Iterator[None]:
    """Route calls of modules through a function (key, own call, arguments, keywords) -> result in the block.

    The modules change their class and keep their place in the model, so that a gearbox finds them.
    """

    def intercepting(key: Hashable, kind: type) -> type:
        def call(self, *args, **kwargs):
            return through(key, partial(kind.__call__, self), args, kwargs)

        return type(kind.__name__, (kind,), {"__call__": call})

    with of_classes((module, intercepting(key, type(module))) for key, module in modules.items()):
        yield


class _PassEnd(Exception):
    """An exception that ends a pass once everything is recorded."""


def same(a: Call, b: Call) -> bool:
    """Return True if two calls have the same arguments; arrays are compared number for number."""

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, mx.array) and isinstance(y, mx.array):
            return x.dtype == y.dtype and bool(mx.array_equal(x, y).item())
        return type(x) is type(y) and bool(x == y)

    return (
        len(a[0]) == len(b[0])
        and a[1].keys() == b[1].keys()
        and all(map(equal, a[0], b[0]))
        and all(equal(a[1][name], b[1][name]) for name in a[1])
    )


@dataclass
class _Window:
    """A window of tokens, the outputs of all blocks at full precision, and the recorded calls of one block's layers."""

    tokens: Sequence[int]
    logprobs: np.ndarray
    blocks: list[Any]
    calls: dict[str, list[tuple[Call, Any]]] = field(default_factory=dict)


class ExactSensitivity:
    """A measurement on windows of tokens, without cache, with one layer reduced, or with any caps of the gearbox.

    gearbox: with a 16-bit top gear, and the widths to measure. Its model must not be called by other code
    meanwhile. progress: called after every window of the first pass.
    """

    def __init__(self, gearbox: Gearbox, windows: Sequence[Sequence[int]], progress: Callable[[], None] = lambda: None):
        self.gearbox, self.cost = gearbox, Cost()
        self.layers = {layer.path: layer for layer in gearbox.layers}
        once = {id(block): block for block in getattr(gearbox.model, "layers", ())}
        self._blocks: dict[Hashable, nn.Module] = dict(enumerate(once.values()))
        # A tied embedding is called as an embedding for inputs. No gear changes these calls.
        self._heads = [path for path, layer in self.layers.items() if isinstance(layer.module, nn.Embedding)]
        self._linear = {path: layer.module for path, layer in self.layers.items() if path not in self._heads}
        self._sizes = {path: layer.module.weight.size for path, layer in self.layers.items()}
        self._passed = 0  # blocks that the current pass has computed or skipped
        self._depth: dict[str, int] = {}  # layer to the number of blocks before it
        self._recorded: int | None = None
        self._counted: set[int] = set()
        gearbox.shift(gearbox.ladder.top)
        gearbox.cap({})
        self._windows = []
        for tokens in windows:
            self._windows.append(self._first_pass(tokens))
            progress()
        chosen = [w.logprobs[np.arange(len(w.logprobs)), w.tokens[1:]] for w in self._windows]
        self.reference_nll = -float(np.concatenate(chosen).mean())

    @property
    def perplexity(self) -> float:
        """Perplexity at full precision."""
        return float(np.exp(self.reference_nll))

    def in_order(self) -> list[Layer]:
        """Return layers in the order of their blocks: one recording of a block serves all of its layers."""
        return sorted(self.layers.values(), key=lambda layer: self.depth(layer.path))

    def depth(self, path: str) -> int:
        """Return the number of blocks before a layer."""
        return self._depth.get(path, len(self._blocks))

    def continue_after(self, paths: Iterable[str]) -> None:
        """Do not count the recording of these layers' blocks, since the run that measured the layers did."""
        self._counted = {self.depth(path) for path in paths if path in self.layers}

    def measure(self, layer: Layer, bits: int) -> Distance:
        """Return the distance of the model in which only this layer has these bits."""
        depth = self.depth(layer.path)
        if self._recorded != depth:
            self._record(depth)
        return self._distance({layer.path: bits}, partial(self._replayed, layer.path, depth))

    def measure_caps(self, caps: Mapping[str, int]) -> Distance:
        """Return the distance of the model with these caps, by full passes."""
        return self._distance(caps, lambda window: self._logits(window.tokens))

    def _distance(self, caps: Mapping[str, int], read: Callable[[_Window], mx.array]) -> Distance:
        kl, nll, count = 0.0, 0.0, 0
        self.gearbox.cap(caps)
        try:
            for window in self._windows:
                found = log_softmax(np.array(read(window)))
                kl += float(kl_divergence(window.logprobs, found).sum())
                nll -= float(found[np.arange(len(found)), window.tokens[1:]].sum())
                count += len(found)
        finally:
            self.gearbox.cap({})
        return Distance(kl / count, 100 * (float(np.exp(nll / count - self.reference_nll)) - 1))

    def _logits(self, tokens: Sequence[int]) -> mx.array:
        """Return (T - 1, V) float32: predictions of all tokens but the first."""
        self._passed = 0
        logits = self.gearbox.model(mx.array([list(tokens[:-1])]))[0].astype(mx.float32)
        mx.eval(logits)
        return logits

    def _first_pass(self, tokens: Sequence[int]) -> _Window:
        blocks: list[Any] = []
        calls = dict.fromkeys(self._heads, 1)

        def through(key: Hashable, own: Callable, args: Any, kwargs: Any) -> Any:
            if isinstance(key, str):
                self._depth.setdefault(key, self._passed)
                calls[key] = calls.get(key, 0) + 1
                return own(*args, **kwargs)
            result = own(*args, **kwargs)
            blocks.append(result)
            self._passed += 1
            return result

        with intercepted(self._blocks | self._linear, through):
            logits = self._logits(tokens)
        mx.eval(blocks)
        self._calls_of_a_pass = calls
        return _Window(tokens, log_softmax(np.array(logits)).astype(np.float32), blocks)

    def _record(self, depth: int) -> None:
        """Keep the inputs and outputs of the managed layers in the block at this depth."""
        here = {path: module for path, module in self._linear.items() if self._depth.get(path) == depth}
        for window in self._windows:
            window.calls.clear()
        self._recorded = depth
        if depth == len(self._blocks):
            return
        cost = Cost() if depth in self._counted else self.cost

        def through(key: Hashable, own: Callable, args: Any, kwargs: Any) -> Any:
            if isinstance(key, str):
                result = own(*args, **kwargs)
                window.calls.setdefault(key, []).append(((args, kwargs), result))
                cost.calls += 1
                cost.multiplications += self._sizes[key]
                return result
            self._passed += 1
            if self._passed <= depth:
                return window.blocks[self._passed - 1]
            own(*args, **kwargs)
            cost.blocks += 1
            raise _PassEnd

        for window in self._windows:
            with intercepted(self._blocks | here, through), contextlib.suppress(_PassEnd):
                self._logits(window.tokens)
            mx.eval(list(window.calls.values()))

    def _replayed(self, changed: str, depth: int, window: _Window) -> mx.array:
        """Return logits with a layer changed; earlier blocks and unaffected layers are replayed."""
        computed = [changed, *(path for path in self._heads if path != changed)]
        own_block = [path for path in self._linear if self._depth.get(path) == depth]

        def through(key: Hashable, own: Callable, args: Any, kwargs: Any) -> Any:
            if isinstance(key, str):
                for call, result in window.calls.get(key, ()):
                    if same(call, (args, kwargs)):
                        return result
                computed.append(key)
                return own(*args, **kwargs)
            self._passed += 1
            if self._passed <= depth:
                return window.blocks[self._passed - 1]
            self.cost.blocks += self._passed > depth + 1
            return own(*args, **kwargs)

        others = {path: module for path, module in self._linear.items() if path != changed}
        with intercepted(self._blocks | others, through):
            logits = self._logits(window.tokens)
        if depth < len(self._blocks):
            self.cost.blocks += sum(path in own_block for path in computed) / len(own_block)
        self.cost.full_blocks += len(self._blocks)
        self.cost.calls += len(computed)
        self.cost.multiplications += sum(self._sizes[path] for path in computed)
        full = self._calls_of_a_pass
        self.cost.full_calls += sum(full.values())
        self.cost.full_multiplications += sum(count * self._sizes[path] for path, count in full.items())
        return logits


CALIBRATION = DEMO_MODEL / "calibration" / "text.jsonl"


def calibration_windows(
    model: nn.Module, tokenizer: Any, config: dict, data: str | Path | None, num_samples: int, sequence_length: int
) -> list[list[int]]:
    """Return at most `num_samples` windows of a calibration text, as tokens.

    data: text or JSON Lines; None: the bundled text. Raises GearbxError for no such text, windows longer than the
    model's context, or tokens outside of its vocabulary.
    """
    longest = context_length(config)
    if longest and sequence_length > longest:
        raise GearbxError(
            f"--sequence-length: exceeds the model's context, got {sequence_length}; use {longest} or less"
        )
    file = Path(data or CALIBRATION)
    documents = read_documents(file)[:num_samples]
    windows = windows_of(tokenizer, documents, sequence_length, num_samples * sequence_length, str(file))
    check_windows(windows, model, str(file))
    return windows[:num_samples]


def single_layer_gearbox(
    model: nn.Module,
    bits: Iterable[int],
    format: str,
    group_size: int,
    manage: str,
    dtype: str = "auto",
    kernels: str = "auto",
) -> Gearbox:
    """Return a gearbox at full precision in which any one layer can have these bits; settings as of `Gearbox`."""
    return Gearbox(
        model,
        Ladder([*sorted({*bits} - {DENSE}), DENSE]),
        format=format,
        manage=manage,
        group_size=group_size,
        dtype=dtype,
        kernels=kernels,
        activations="float",
    )


def exact_of(gearbox: Gearbox, windows: Sequence[Sequence[int]], progress: Progress) -> ExactSensitivity:
    """Return the measurement of a gearbox's layers, after its pass at full precision."""
    task = progress.add_task("full precision", total=len(windows))
    return ExactSensitivity(gearbox, windows, lambda: progress.advance(task))


class MeasuredLayer(TypedDict):
    """A part of the journal: one layer that was reduced by itself.

    distances: width to the KL (nats) and the change of perplexity (percent). cost: the fields of `Cost`, in order.
    """

    distances: Annotated[dict[Annotated[str, Meta(pattern="^[234568]$")], tuple[float, float]], Meta(min_length=1)]
    cost: Annotated[list[float], Meta(min_length=6, max_length=6)]


def measure_layers(
    exact: ExactSensitivity, bits: Sequence[int], journal: Journal, progress: Callable[[], None] = lambda: None
) -> None:
    """Measure every layer at every width that it can have; each layer goes into the journal."""
    exact.continue_after(journal.parts)
    for layer in exact.in_order():
        if layer.path not in journal.parts:
            exact.cost = Cost()  # from zero, so that sums are rounded alike in runs that were stopped anywhere
            widths = [width for width in bits if width in exact.gearbox.widths_of(layer)]
            found = {str(width): exact.measure(layer, width) for width in widths}
            distances = {width: (there.kl, there.perplexity_change) for width, there in found.items()}
            journal.add(layer.path, MeasuredLayer(distances=distances, cost=[*dataclasses.astuple(exact.cost)]))
        progress()


def measuring_cost(parts: Mapping[str, MeasuredLayer]) -> Cost:
    """Return the work of `measure_layers` for all layers of a journal, over all runs that wrote to it."""
    return Cost(*map(sum, zip(*(part["cost"] for part in parts.values()))))


def layer_precisions(
    layers: Sequence[Layer], parts: Mapping[str, MeasuredLayer], threshold: float = ACCURACY_THRESHOLD
) -> dict[str, LayerPrecision]:
    """Return every layer's entry of the manifest. parts: of the journal; other arguments as of `layer_precision`."""
    made = {}
    for layer in layers:
        found = parts[layer.path]["distances"].items()
        kl, change = ({int(width): both[i] for width, both in found} for i in (0, 1))
        made[layer.path] = layer_precision(layer, kl, change, threshold)
    return made


def layer_precision(
    layer: Layer,
    kl: Mapping[int, float],
    perplexity_change: Mapping[int, float],
    threshold: float = ACCURACY_THRESHOLD,
) -> LayerPrecision:
    """Return a layer's entry of the manifest, from KL (nats) and change of perplexity (percent) by its widths.

    The change is empty for estimates. threshold: percent that a layer at its fewest bits may add to the perplexity.
    """
    return LayerPrecision(
        kind=component_kind(layer.path, layer.module),
        weights=layer.module.weight.size,
        min_bits=max(least_bits(kl, perplexity_change, threshold), layer.lowest_bits),
        max_bits=DENSE,
        kl=kl,
        perplexity_change=perplexity_change,
    )


def first_order(
    model: nn.Module, windows: Sequence[Sequence[int]], low: int, high: int, group_size: int
) -> dict[str, float]:
    """Return the sensitivity of each layer (nats per million weights), by path, as mlx_lm.dynamic_quant estimates it.

    It is the gradient of the KL at a `low`-bit model, in the direction of the `high`-bit model: the first-order
    estimate of the KL saved by giving one layer the high bits. The model is as loaded, without a gearbox. Raises
    GearbxError for a layer that mlx-lm cannot quantize.
    """
    if on_cpu():  # half precision is slow there. A copy, since gears depend on the type of the loaded model
        model = copy.deepcopy(model)
        model.set_dtype(mx.float32)
    tokens = [token for window in windows for token in window]
    length = min(len(tokens), max(map(len, windows)))
    rows = mx.array(tokens[: len(tokens) // length * length]).reshape(-1, length)
    try:
        found = estimate_sensitivities(model, rows, low, group_size, high, group_size)
    except ValueError as error:
        raise GearbxError(f"mlx-lm cannot estimate sensitivities of this model ({error}); omit --fast") from error
    return dict(found)


def estimate_kls(
    layers: Sequence[Layer], model: nn.Module, windows: Sequence[Sequence[int]], bits: Sequence[int], group_size: int
) -> dict[str, dict[int, float]]:
    """Return a proxy for the KL (nats, at least 0) of every layer at every width, by path, from one backward pass."""
    low = 4 if 4 in bits else bits[0]  # 4 if possible, as in mlx_lm.dynamic_quant
    high = next((width for width in bits if width > low), 8)
    found = first_order(model, windows, low, high, group_size)
    missing = [layer.path for layer in layers if layer.path not in found]
    if missing:
        raise GearbxError(f"mlx-lm estimates no sensitivity of {missing[0]}; omit --fast to measure it")
    saved = {layer.path: max(found[layer.path], 0.0) * layer.module.weight.size / 1e6 for layer in layers}
    # Every bit halves the error, and the KL is proportional to its square.
    return {path: {width: kl * 4.0 ** (low - width) for width in bits} for path, kl in saved.items()}
