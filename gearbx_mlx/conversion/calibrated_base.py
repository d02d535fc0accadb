"""A calibrated base: the lowest gear in codes that are chosen for the inputs that its layers see in a text (`gptq`).

The model reads the text block by block, once as it is and once as the draft will, with the codes of the layers before:
a layer's codes are chosen for what it will see. What each block made of the text is kept, so one block's inputs and
Hessians are in memory at a time. A layer is rounded to the nearest codes where its format leaves no
choice, where it has experts, or where its inputs are not finite.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..compat.classes import of_classes
from ..errors import GearbxError, one_line
from ..formats.base import Format, stored_bits
from ..formats.fused import native_class
from ..formats.native import NativeDense
from ..formats.tied import linear_of
from ..gears.adapters import layers_of
from ..gears.discovery import Layer, block_number, stored_widths
from ..kernels.bit_planes import Planes
from ..kernels.dispatch import ATTENTION
from .gptq import Hessian, calibrated

LONGEST = 512  # tokens of a text that are read
TOGETHER = 2048  # tokens that are read at a time, in texts of similar lengths


@dataclass
class CalibratedBase:
    """What a calibration found.

    layers: path to the plane of the lowest gear. rounded: path to reason of layers that have the nearest codes.
    """

    layers: dict[str, Planes] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)


def calibrate_base(
    model: nn.Module,
    layers: Sequence[Layer],
    format: Format,
    ladder: Sequence[int],
    group_size: int,
    texts: Sequence[Sequence[int]],
    advance: Callable[[CalibratedBase], object] = lambda found: None,
    begun: Mapping[str, Planes] | None = None,
) -> CalibratedBase:
    """The lowest gear of a model, calibrated.

    Args:
        model: not quantized, without gears. It stays as it is.
        layers: those that change gear (`discover`).
        ladder: bits of all gears, ascending.
        texts: tokens; at most 512 of each are read.
        advance: called after every block, and after the head, with what has been found: `steps` times.
        begun: path to plane of layers whose codes an earlier run, which was interrupted, chose.

    Raises:
        GearbxError: a format or a ladder whose lowest codes are not free, no text of two tokens, or a model whose
            blocks cannot be read one by one.
    """
    read = [list(text[:LONGEST]) for text in texts if len(text) > 1]
    if not read:
        raise GearbxError("no text of two tokens or more to calibrate with; give one")
    if not format.takes_base:
        raise GearbxError(f"format {format.name} has no codes to calibrate; give --format planes, affine or exact")
    fit, found = list[Layer](), CalibratedBase({**(begun or {})})
    for layer in layers:
        reason = unfit(layer, format, ladder_of(layer, format, ladder), group_size)
        if reason:
            found.rounded[layer.path] = reason
        else:
            fit.append(layer)
    if not fit:
        reasons = "; ".join(sorted({*found.rounded.values()}))
        raise GearbxError(f"no layer has codes to calibrate: {reasons}; give --gears 4,16")
    walk = Walk(model, batches(read))
    for number in range(len(walk.blocks) + 1):
        block = number if number < len(walk.blocks) else None
        of_block = [layer for layer in fit if block_number(layer.path) == block]
        if of_block or block is not None:
            walk.read(number, BlockCodes(of_block, format, ladder, group_size, found, block is None))
        advance(found)
    return found


@dataclass(frozen=True)
class TextBatch:
    """Texts that are read at once, filled up on the right, where nothing before looks.

    tokens: (texts, longest). lengths: of the texts.
    """

    tokens: mx.array
    lengths: list[int]

    @property
    def rows(self) -> np.ndarray:
        """Which of the tokens, one text after the other, belong to a text."""
        return (np.arange(self.tokens.shape[1]) < np.array(self.lengths)[:, None]).flatten()


def batches(texts: Sequence[Sequence[int]]) -> list[TextBatch]:
    """Texts, the longest first, in batches of at most TOGETHER tokens."""
    made: list[list[Sequence[int]]] = []
    for text in sorted(texts, key=len, reverse=True):
        if not made or len(made[-1][0]) * (len(made[-1]) + 1) > TOGETHER:
            made.append([])
        made[-1].append(text)
    filled = [[[*text, *[0] * (len(texts[0]) - len(text))] for text in texts] for texts in made]
    return [TextBatch(mx.array(rows), [*map(len, texts)]) for rows, texts in zip(filled, made)]


def steps(model: nn.Module) -> int:
    """How often `calibrate_base` advances."""
    return len(blocks_of(model)) + 1


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of the stack, in order: the modules whose path ends with their number, and has no other."""
    found = {}
    for path in layers_of(model):
        parts = path.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if place is not None:
            found[int(parts[place])] = tuple(parts[: place + 1])
    modules = dict(model.named_modules())
    return [modules[".".join(found[number])] for number in sorted(found)]


class WasRead(Exception):
    """As much has been read as was wanted: what comes after it is not computed."""


@dataclass(eq=False)
class Watched:
    """A linear layer while texts are read.

    weight: (O, I) float32. outputs: in the draft, of each batch, (tokens, O) float32; none before its codes are chosen.
    """

    layer: Layer
    weight: np.ndarray
    outputs: list[np.ndarray] = field(default_factory=list)


@dataclass(eq=False)
class SharedInputs:
    """Layers that multiply the same inputs, such as a block's queries, keys and values.

    original, draft: what they see there of each batch, (tokens, I) float32.
    """

    layers: list[Watched]
    original: list[np.ndarray] = field(default_factory=list)
    draft: list[np.ndarray] = field(default_factory=list)


class BlockCodes:
    """The layers of a block while texts are read, and their codes. Their products are numpy's.

    Args:
        layers: of the block. found: gets their codes. is_head: no block follows, and no product is wanted.

    Attributes:
        inputs: of the layers, in the order in which the block multiplies them.
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
        self.watched = [Watched(layer, np.array(linear_of(layer.module).weight.astype(mx.float32))) for layer in layers]
        self.inputs: list[SharedInputs] = []
        self._last: tuple[Any, Any] = (None, None)

    def original(self, watched: Watched, x: mx.array, batch: int) -> mx.array:
        """The original's product. Inputs are kept, and layers that share theirs are found.

        Args:
            batch: its number.
        """
        shared = x is self._last[0]
        numbers = self._numbers(x)
        place = next((inputs for inputs in self.inputs if watched in inputs.layers), None)
        if place is None and shared:
            self.inputs[-1].layers.append(watched)
        elif place is None:
            self.inputs.append(place := SharedInputs([watched]))
        if place is not None and watched is place.layers[0] and len(place.original) == batch:
            place.original.append(numbers)
        if self.is_head:
            raise WasRead
        return shaped(numbers @ watched.weight.T, watched, x)

    def draft(self, watched: Watched, x: mx.array, batch: int, wanted: SharedInputs | None = None) -> mx.array:
        """The draft's product. The pass ends at layers whose inputs are `wanted`: they are kept."""
        if wanted is not None and watched in wanted.layers:
            wanted.draft.append(self._numbers(x))
            raise WasRead
        return shaped(watched.outputs[batch], watched, x)

    def choose(self, inputs: SharedInputs, rows: Sequence[np.ndarray]) -> None:
        """Choose the codes of the layers with these inputs.

        Args:
            rows: of each batch, which of its tokens count.
        """
        known, factored = self.found.layers, None
        if any(watched.layer.path not in known for watched in inputs.layers):
            hessian = Hessian(inputs.draft[0].shape[1])
            for draft, original, counts in zip(inputs.draft, inputs.original, rows):
                hessian.add(draft[counts], original[counts])
            factored = hessian.factored()
        for watched in inputs.layers:
            path = watched.layer.path
            if path not in known:
                if factored is None or not np.isfinite(watched.weight).all():
                    self.found.rounded[path] = "its inputs, or its weights, are not finite, or all 0"
                else:
                    stored = ladder_of(watched.layer, self.format, self.ladder)
                    dense = linear_of(watched.layer.module).weight
                    nearest = self.format.nearest(dense, stored, self.group_size)
                    assert nearest is not None  # or it is `unfit`
                    known[path] = calibrated(watched.weight, nearest, factored, self.format.window)
            if not self.is_head:
                used = np.array(known[path].dequantize().astype(mx.float32)) if path in known else watched.weight
                watched.outputs = [draft @ used.T for draft in inputs.draft]
        inputs.original, inputs.draft = [], []

    def _numbers(self, x: mx.array) -> np.ndarray:
        """(n, I) float32; layers that share their inputs have them once."""
        if x is not self._last[0]:
            self._last = x, np.array(x.astype(mx.float32)).reshape(-1, x.shape[-1])
        return self._last[1]


def shaped(y: np.ndarray, watched: Watched, x: mx.array) -> mx.array:
    """A layer's product with x from its numbers (n, O), with its bias."""
    module, out = watched.layer.module, mx.array(y).reshape(*x.shape[:-1], -1)
    return out + module.bias if "bias" in module else out


def ladder_of(layer: Layer, format: Format, ladder: Sequence[int]) -> tuple[int, ...]:
    """The bits at which a format stores a layer."""
    return stored_bits(format, stored_widths(layer, format, ladder))


def unfit(layer: Layer, format: Format, stored: Sequence[int], group_size: int) -> str | None:
    """Why a layer, which is stored at these bits, cannot be calibrated."""
    module = layer.module
    if layer.is_table or (type(module) not in (nn.Linear, NativeDense) and not isinstance(module, nn.Embedding)):
        return "experts, heads and tables are rounded"
    if not stored or (format.ladders and tuple(stored) not in format.ladders):
        return "has no gear of few bits"
    if format.nearest(linear_of(module).weight[:1], stored, group_size) is None:
        return f"the gears {','.join(map(str, stored))} begin with the same codes"
    return None


class Walk:
    """Reads texts block by block, in the original and in its draft: with the codes of the blocks before.

    The model's own code calls its blocks. Those before the current one hand out what they made before, and the current
    one ends the pass.

    Args:
        batches: of texts.

    Attributes:
        original, draft: what the last block made of each batch.
    """

    def __init__(self, model: nn.Module, batches: Sequence[TextBatch]):
        self.model, self.batches, self.blocks = model, batches, blocks_of(model)
        self.original: list[Any] = []
        self.draft: list[Any] = []

    def read(self, number: int, codes: BlockCodes) -> None:
        """Read a block, or the head after all of them, and let `codes` choose its codes."""
        original = self._pass(number, self.original, codes, codes.original)
        for inputs in codes.inputs:
            self._pass(number, self.draft, codes, partial(codes.draft, wanted=inputs))
            codes.choose(inputs, [batch.rows for batch in self.batches])
        if number < len(self.blocks):
            self.original, self.draft = original, self._pass(number, self.draft, codes, codes.draft)

    def _pass(
        self, number: int, states: Sequence[Any], codes: BlockCodes, product: Callable[..., mx.array]
    ) -> list[Any]:
        """Read every batch up to block `number`, or until a product ends it.

        Args:
            states: what the block before made of each batch.
            product: of a watched layer.

        Returns:
            What the block makes of each batch.
        """
        made: list[Any] = []
        for index, batch in enumerate(self.batches):
            with self._changed(number, states[index : index + 1], codes, partial(product, batch=index), made):
                try:
                    self.model(batch.tokens)
                except WasRead:
                    continue
                except Exception as error:
                    raise unreadable(self.model, one_line(error)) from error
            raise unreadable(self.model, "it does not call them in order")
        return made

    @contextmanager
    def _changed(
        self, number: int, state: Sequence[Any], codes: BlockCodes, product: Callable[..., mx.array], made: list[Any]
    ) -> Iterator[None]:
        """The model while block `number` reads a batch: `made` gets its output."""
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
            raise WasRead

        kinds = [type(block) for block in self.blocks]
        if mx.default_device() == mx.cpu and number < len(self.blocks):  # whose own attention takes most of the time
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


def watching(watched: Watched, product: Callable[..., mx.array]) -> type[nn.Module]:
    """A subclass of a linear layer that multiplies by `product`."""
    kind: Any = type(watched.layer.module)
    name = "as_linear" if issubclass(kind, nn.Embedding) else "__call__"
    return type(kind.__name__, (kind,), {name: lambda module, x: product(watched, x)})


def unreadable(model: nn.Module, why: str) -> GearbxError:
    return GearbxError(f"{type(model).__name__}: its blocks cannot be read one by one ({why}), so it is not calibrated")
