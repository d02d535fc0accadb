"""Calibrated base: the lowest gear with codes that GPTQ (`gptq`) chooses for the layers' inputs in a calibration text.

The model reads the text block by block, once with original weights and once as the draft, with the codes of previous
layers. So a layer's codes are chosen for its inputs in the draft. Each block's outputs are kept, so only one block's
inputs and Hessians are in memory at a time. A layer is rounded to nearest if its format has no free codes, or if
its inputs are not finite.

Each expert of a mixture has codes for the tokens that the draft routes to it; an expert with few of them is rounded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear

from ..compat.classes import of_classes
from ..errors import GearbxError, one_line
from ..formats.base import Format, stored_bits
from ..formats.fused import ATTENTION, native_class
from ..formats.native import NativeDense, NativeSwitchLinear, with_expert_bias
from ..formats.tied import linear_of
from ..gears.adapters import layers_of
from ..gears.discovery import Layer, block_number, stored_widths
from ..kernels.bit_planes import Planes
from .gptq import Factored, factored, with_codes

MAX_LENGTH = 512  # tokens that are read of a sequence
MAX_BATCH_TOKENS = 2048  # tokens of a batch, in sequences of similar lengths
MIN_EXPERT_INPUTS = 32  # inputs that an expert needs for its codes


@dataclass
class CalibratedBase:
    """The result of a calibration.

    layers: path to the plane of the lowest gear. rounded: path to reason of layers that are rounded to nearest, all
    or in some of their experts. file: None if it is not kept.
    """

    layers: dict[str, Planes] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    file: Path | None = None


def calibrate_base(
    model: nn.Module,
    layers: Sequence[Layer],
    format: Format,
    ladder: Sequence[int],
    group_size: int,
    sequences: Sequence[Sequence[int]],
    advance: Callable[[], object] = lambda: None,
) -> CalibratedBase:
    """Return the calibrated lowest gear of a model that is not quantized and has no gears; the model does not change.

    Args:
        layers: those that change gear (`discover`).
        ladder: bits of all gears, ascending.
        sequences: tokens; at most 512 of each are read.
        advance: called after every block, and after the head: `steps` times.

    Raises:
        GearbxError: a format or a ladder without free lowest codes, no sequence of two tokens, or a model whose blocks
            cannot be run one by one.
    """
    read = [list(tokens[:MAX_LENGTH]) for tokens in sequences if len(tokens) > 1]
    if not read:
        raise GearbxError("no text of two tokens or more to calibrate with; use a longer text")
    fit, rounded = free_layers(layers, format, ladder, group_size)
    found = CalibratedBase(rounded=rounded)
    # Mixtures that sort tokens by expert mix up the positions of padding, so their sequences are not padded.
    run = CalibrationRun(model, batches(read, 0 if any(has_experts(layer) for layer in fit) else MAX_BATCH_TOKENS))
    for number in range(len(run.blocks) + 1):
        block = number if number < len(run.blocks) else None
        of_block = [layer for layer in fit if block_number(layer.path) == block]
        if of_block or block is not None:
            run.read(number, BlockCodes(of_block, format, ladder, group_size, found, block is None))
            mx.clear_cache()  # otherwise MLX keeps arrays of every batch size
        advance()
    return found


def free_layers(
    layers: Sequence[Layer], format: Format, ladder: Sequence[int], group_size: int
) -> tuple[list[Layer], dict[str, str]]:
    """Return layers with free lowest codes, and path to reason of the others. Raises GearbxError if there are none."""
    if not format.takes_base:
        raise GearbxError(f"format {format.name} has no codes to calibrate; use --format planes, affine or exact")
    free, rounded = list[Layer](), dict[str, str]()
    for layer in layers:
        reason = unfit(layer, format, ladder_of(layer, format, ladder), group_size)
        if reason:
            rounded[layer.path] = reason
        else:
            free.append(layer)
    if not free:
        reasons = "; ".join(sorted({*rounded.values()}))
        raise GearbxError(f"no layer has codes to calibrate: {reasons}; use --gears 4,16")
    return free, rounded


@dataclass(frozen=True)
class SequenceBatch:
    """A batch of sequences. Causal attention ignores their padding on the right.

    tokens: (sequences, longest). lengths: of the sequences.
    """

    tokens: mx.array
    lengths: list[int]

    @property
    def rows(self) -> np.ndarray:
        """Mask of the tokens, flattened, that are not padding."""
        return (np.arange(self.tokens.shape[1]) < np.array(self.lengths)[:, None]).flatten()


def batches(sequences: Sequence[Sequence[int]], together: int = MAX_BATCH_TOKENS) -> list[SequenceBatch]:
    """Return batches of at most `together` tokens, or of one sequence, from the longest sequence to the shortest."""
    made: list[list[Sequence[int]]] = []
    for tokens in sorted(sequences, key=len, reverse=True):
        if not made or len(made[-1][0]) * (len(made[-1]) + 1) > together:
            made.append([])
        made[-1].append(tokens)
    padded = [[[*row, *[0] * (len(rows[0]) - len(row))] for row in rows] for rows in made]
    return [SequenceBatch(mx.array(array), [*map(len, rows)]) for array, rows in zip(padded, made)]


def steps(model: nn.Module) -> int:
    """Return how often `calibrate_base` calls `advance`."""
    return len(blocks_of(model)) + 1


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the stack, in order: the modules whose path ends with their number, and has no other."""
    found = {}
    for path in layers_of(model):
        parts = path.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if place is not None:
            found[int(parts[place])] = tuple(parts[: place + 1])
    modules = dict(model.named_modules())
    return [modules[".".join(found[number])] for number in sorted(found)]


class PassEnd(Exception):
    """An exception that ends a forward pass once the wanted part is computed."""


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def multiplied_by(weight: mx.array) -> np.ndarray | mx.array:
    """Return a weight for `LayerState`: experts become float32 one by one, on use."""
    return floats(weight) if weight.ndim == 2 else weight


class Inputs(NamedTuple):
    """A layer's inputs in a batch. rows: (n, I) float32. experts: (n,), index of each row's expert in a mixture."""

    rows: np.ndarray
    experts: np.ndarray | None = None

    @classmethod
    def of(cls, x: mx.array, indices: mx.array | None) -> "Inputs":
        """Return the inputs of a linear layer, x (..., I); or of experts, x (..., 1, I), one or several for each."""
        width = x.shape[-1]
        if indices is None:
            return cls(floats(x).reshape(-1, width))
        rows = np.broadcast_to(floats(x)[..., 0, :], (*indices.shape, width))
        return cls(rows.reshape(-1, width), np.array(indices).flatten())

    def times(self, weight: np.ndarray | mx.array) -> np.ndarray:
        """Return the products (n, O), float32. weight: as of `LayerState`."""
        if self.experts is None:
            return self.rows @ np.asarray(weight).T
        products = np.empty((len(self.rows), weight.shape[-2]), np.float32)
        for expert in np.unique(self.experts).tolist():
            own = self.experts == expert
            products[own] = self.rows[own] @ floats(mx.array(weight[expert])).T
        return products


@dataclass(eq=False)
class LayerState:
    """A layer during calibration.

    weight: (O, I) float32; for experts (E, O, I) in their own type. outputs: in the draft, per batch, (n, O) float32;
    empty before its codes are chosen.
    """

    layer: Layer
    weight: np.ndarray | mx.array
    outputs: list[np.ndarray] = field(default_factory=list)

    @property
    def matrices(self) -> Sequence[int | None]:
        """Indices of the experts; [None] for the only matrix of a linear layer."""
        return range(len(self.weight)) if self.weight.ndim > 2 else [None]


@dataclass(eq=False)
class SharedInputs:
    """Layers that multiply the same inputs, such as a block's queries, keys and values.

    original, draft: their inputs per batch.
    """

    layers: list[LayerState]
    original: list[Inputs] = field(default_factory=list)
    draft: list[Inputs] = field(default_factory=list)

    def factored(self, expert: int | None, counts: Sequence[np.ndarray]) -> Factored | None:
        """Return the Hessian of a layer's or an expert's inputs in the draft; None if there are too few, or not finite.

        The draft may route a token to other experts than the original does, so an expert has no drift.
        counts: masks of the tokens that count, per batch; for experts, all tokens count.
        """
        if expert is not None:
            reached = np.concatenate([draft.rows[draft.experts == expert] for draft in self.draft])
            return factored(reached) if len(reached) >= MIN_EXPERT_INPUTS else None
        in_draft = [draft.rows[tokens] for draft, tokens in zip(self.draft, counts)]
        own = [original.rows[tokens] for original, tokens in zip(self.original, counts)]
        with np.errstate(invalid="ignore"):  # infinities are found in the Hessian
            drift = np.concatenate([*map(np.subtract, own, in_draft)])
        return factored(np.concatenate(in_draft), drift)


class BlockCodes:
    """The layers of a block during calibration, and their codes. numpy computes their matmuls.

    found: result to extend. is_head: True if no block follows, so that no matmul is needed. inputs: of the layers, in
    the order in which the block multiplies them.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        format: Format,
        ladder: Sequence[int],
        group_size: int,
        found: CalibratedBase,
        is_head: bool,
    ):
        self.format, self.ladder, self.group_size = format, ladder, group_size
        self.found, self.is_head = found, is_head
        self.watched = [LayerState(layer, multiplied_by(linear_of(layer.module).weight)) for layer in layers]
        self.inputs: list[SharedInputs] = []
        self._last: tuple[Any, Any] = (None, None)

    def original(self, watched: LayerState, x: mx.array, indices: mx.array | None = None, *, batch: int) -> mx.array:
        """Return the original's matmul with a batch. Inputs are kept, and layers with shared inputs are grouped."""
        shared = x is self._last[0]
        inputs = self._inputs(x, indices)
        place = next((inputs for inputs in self.inputs if watched in inputs.layers), None)
        if place is None and shared:
            self.inputs[-1].layers.append(watched)
        elif place is None:
            self.inputs.append(place := SharedInputs([watched]))
        if place is not None and watched is place.layers[0] and len(place.original) == batch:
            place.original.append(inputs)
        if self.is_head:
            raise PassEnd
        return shaped(inputs.times(watched.weight), watched, x, indices)

    def draft(
        self,
        watched: LayerState,
        x: mx.array,
        indices: mx.array | None = None,
        *,
        batch: int,
        wanted: SharedInputs | None = None,
    ) -> mx.array:
        """Return the draft's matmul. Layers whose inputs are `wanted` keep them and end the pass."""
        if wanted is not None and watched in wanted.layers:
            wanted.draft.append(self._inputs(x, indices))
            raise PassEnd
        return shaped(watched.outputs[batch], watched, x, indices)

    def choose(self, inputs: SharedInputs, counts: Sequence[np.ndarray]) -> None:
        """Choose the codes of the layers with these inputs. counts: masks of the tokens that count, per batch."""
        known = self.found.layers
        layers = {each.layer.path: each for each in inputs.layers}
        made: dict[str, list[tuple[Planes, bool]]] = {path: [] for path in layers}
        for expert in inputs.layers[0].matrices:
            hessian = inputs.factored(expert, counts)
            for path, watched in layers.items():
                made[path].append(self._codes(watched, expert, hessian))
        for path, codes in made.items():
            planes, chosen = zip(*codes)
            of_experts = layers[path].weight.ndim > 2
            if not all(chosen):
                some = f"; or fewer than {MIN_EXPERT_INPUTS} reach some of its experts" if of_experts else ""
                self.found.rounded[path] = f"its inputs, or its weights, are not finite, or all 0{some}"
            if any(chosen):
                known[path] = stacked(planes) if of_experts else planes[0]
        for watched in inputs.layers:
            if not self.is_head:
                base = known.get(watched.layer.path)
                weight = watched.weight if base is None else multiplied_by(base.dequantize())
                watched.outputs = [draft.times(weight) for draft in inputs.draft]
        inputs.original, inputs.draft = [], []

    def _codes(self, watched: LayerState, expert: int | None, hessian: Factored | None) -> tuple[Planes, bool]:
        """Return codes of a layer or an expert, and True if they are chosen for its inputs, False for RTN codes."""
        dense = linear_of(watched.layer.module).weight
        dense = dense if expert is None else dense[expert]
        nearest = self.format.nearest(dense, ladder_of(watched.layer, self.format, self.ladder), self.group_size)
        assert nearest is not None  # other layers are `unfit`
        weight = np.asarray(watched.weight) if expert is None else floats(dense)
        if hessian is None or not np.isfinite(weight).all():
            return nearest, False
        return with_codes(weight, nearest, hessian, self.format.window), True

    def _inputs(self, x: mx.array, indices: mx.array | None) -> Inputs:
        """Return the inputs x as rows; layers that share x share the result."""
        if x is not self._last[0]:
            self._last = x, Inputs.of(x, indices)
        return self._last[1]


def stacked(planes: Sequence[Planes]) -> Planes:
    """Return the planes (O, I) of experts as one, (E, O, I)."""
    words, scales, biases = (mx.stack([*arrays]) for arrays in zip(*(each.arrays for each in planes)))
    return planes[0]._replace(weights=[words], scales=scales, biases=[biases])


def shaped(y: np.ndarray, watched: LayerState, x: mx.array, indices: mx.array | None) -> mx.array:
    """Return a layer's output, with its bias, from its matmul (n, O) with x."""
    module = watched.layer.module
    if indices is not None:
        return with_expert_bias(module, mx.array(y).reshape(*indices.shape, 1, -1), indices)
    out = mx.array(y).reshape(*x.shape[:-1], -1)
    return out + module.bias if "bias" in module else out


def ladder_of(layer: Layer, format: Format, ladder: Sequence[int]) -> tuple[int, ...]:
    """Return the bits at which a format stores a layer."""
    return stored_bits(format, stored_widths(layer, format, ladder))


def unfit(layer: Layer, format: Format, stored: Sequence[int], group_size: int) -> str | None:
    """Return why a layer, stored at these bits, cannot be calibrated; None if it can."""
    module = layer.module
    known = type(module) in (nn.Linear, NativeDense) or isinstance(module, nn.Embedding) or has_experts(layer)
    if not known:
        return "heads and tables are rounded"
    if not stored or (format.ladders and tuple(stored) not in format.ladders):
        return "has no low gear"
    weight = linear_of(module).weight
    if format.nearest(weight.reshape(-1, weight.shape[-1])[:1], stored, group_size) is None:
        return f"the gears {','.join(map(str, stored))} share their first codes"
    return None


def has_experts(layer: Layer) -> bool:
    return type(layer.module) in (SwitchLinear, NativeSwitchLinear)


class CalibrationRun:
    """A calibration run, block by block, of the original and of its draft with the codes of previous blocks.

    The model's own code calls its blocks. Earlier blocks return stored outputs, and the current block ends the pass.
    original, draft: outputs of the last block, per batch.
    """

    def __init__(self, model: nn.Module, batches: Sequence[SequenceBatch]):
        self.model, self.batches, self.blocks = model, batches, blocks_of(model)
        self.original: list[Any] = []
        self.draft: list[Any] = []

    def read(self, number: int, codes: BlockCodes) -> None:
        """Run a block, or the head after all of them, and let `codes` choose its codes."""
        original = self._pass(number, self.original, codes, codes.original)
        for inputs in codes.inputs:
            self._pass(number, self.draft, codes, partial(codes.draft, wanted=inputs))
            codes.choose(inputs, [batch.rows for batch in self.batches])
        if number < len(self.blocks):
            self.original, self.draft = original, self._pass(number, self.draft, codes, codes.draft)

    def _pass(
        self, number: int, states: Sequence[Any], codes: BlockCodes, product: Callable[..., mx.array]
    ) -> list[Any]:
        """Run every batch up to block `number`, or until a matmul ends the pass, and return the block's outputs.

        states: outputs of the previous block, per batch. product: computes the matmul of a watched layer.
        """
        made: list[Any] = []
        for index, batch in enumerate(self.batches):
            with self._changed(number, states[index : index + 1], codes, partial(product, batch=index), made):
                try:
                    self.model(batch.tokens)
                except PassEnd:
                    continue
                except Exception as error:
                    raise not_block_by_block(self.model, one_line(error)) from error
            raise not_block_by_block(self.model, "it does not call them in order")
        return made

    @contextmanager
    def _changed(
        self, number: int, state: Sequence[Any], codes: BlockCodes, product: Callable[..., mx.array], made: list[Any]
    ) -> Iterator[None]:
        """Replace classes while block `number` runs a batch, and append its output to `made`."""
        changes: list[tuple[nn.Module, Any]] = []

        def past(block: nn.Module, h: Any, *others: Any, **named: Any) -> Any:
            return h

        def before(block: nn.Module, *others: Any, **named: Any) -> Any:
            return state[0]

        def current(block: nn.Module, h: Any, *others: Any, **named: Any) -> Any:
            if number == 0 and isinstance(h, mx.array) and mx.issubdtype(h.dtype, mx.floating):
                h = h.astype(mx.float32)
            out = kinds[number].__call__(block, h, *others, **named)
            mx.eval(out)
            made.append(out)
            raise PassEnd

        kinds = [type(block) for block in self.blocks]
        if mx.default_device() == mx.cpu and number < len(self.blocks):  # MLX's attention takes most of the time there
            for module in self.blocks[number].modules():
                stock: Any = type(module)
                native = native_class(stock, (ATTENTION,))
                changes += [] if native is None else [(module, native)]
        for place, block in enumerate(self.blocks[: number + 1]):
            call = current if place == number else before if place == number - 1 else past
            changes.append((block, type("Block", (kinds[place],), {"__call__": call})))
        changes += [(watched.layer.module, watching(watched, product)) for watched in codes.watched]
        with of_classes(changes):
            yield


def watching(watched: LayerState, product: Callable[..., mx.array]) -> type[nn.Module]:
    """Return a subclass of a linear layer that calls `product`."""
    kind: Any = type(watched.layer.module)
    name = "as_linear" if issubclass(kind, nn.Embedding) else "__call__"

    def called(module: nn.Module, x: mx.array, indices: mx.array | None = None, *order: Any, **named: Any) -> mx.array:
        return product(watched, x, indices)

    return type(kind.__name__, (kind,), {name: called})


def not_block_by_block(model: nn.Module, why: str) -> GearbxError:
    return GearbxError(f"{type(model).__name__}: cannot be calibrated, since its blocks do not run one by one ({why})")
