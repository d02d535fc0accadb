"""A calibrated base: the lowest gear in codes that are chosen for the inputs that its layers see in a text (`gptq`).

The model reads the text block by block with its original weights, and what each block made of it is kept: so one
block's weights and Hessians are in memory at a time. A layer is rounded to the nearest codes where its format leaves no
choice, where it has experts, or where its inputs are not finite.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..compat.classes import of_classes
from ..errors import GearbxError, one_line
from ..formats.base import Format, WithBase, stored_bits
from ..formats.native import NativeDense
from ..formats.tied import linear_of
from ..gears.adapters import layers_of
from ..gears.discovery import Layer, block_number, stored_widths
from ..kernels.bit_planes import Planes
from .gptq import Factored, Hessian, calibrated

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
    advance: Callable[[], object] = lambda: None,
) -> CalibratedBase:
    """The lowest gear of a model, calibrated.

    Args:
        model: not quantized, without gears. It stays as it is.
        layers: those that change gear (`discover`).
        ladder: bits of all gears, ascending.
        texts: tokens; at most 512 of each are read.
        advance: called after every block, and after the head: `steps` times.

    Raises:
        GearbxError: a format or a ladder whose lowest codes are not free, no text of two tokens, or a model whose
            blocks cannot be read one by one.
    """
    read = [list(text[:LONGEST]) for text in texts if len(text) > 1]
    if not read:
        raise GearbxError("no text of two tokens or more to calibrate with; give one")
    if not isinstance(format, WithBase):
        raise GearbxError(f"format {format.name} has no codes to calibrate; give --format planes, affine or exact")
    fit, found = list[Layer](), CalibratedBase()
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
            walk.read(number, BlockCodes(of_block, format, ladder, group_size, found))
        advance()
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
    """A block has been read: what comes after it is not computed."""


@dataclass
class Watched:
    """A linear layer while a text is read: its inputs are summed up, its products are numpy's.

    weight: (O, I) float32. rows: which of the inputs count.
    """

    weight: np.ndarray
    hessian: Hessian
    rows: Any = None

    def add(self, x: mx.array) -> np.ndarray:
        """Sum up inputs, and return them, (n, I) float32."""
        inputs = np.array(x.astype(mx.float32)).reshape(-1, x.shape[-1])
        self.hessian.add(inputs[self.rows])
        return inputs

    def product(self, inputs: np.ndarray, module: nn.Module, x: mx.array) -> mx.array:
        """The layer's outputs for x, whose numbers are `inputs`."""
        y = mx.array(inputs @ self.weight.T).reshape(*x.shape[:-1], -1)
        return y + module.bias if "bias" in module else y


class BlockCodes:
    """The layers of a block, with their Hessians and codes.

    Args:
        layers: of the block. found: gets their codes.
    """

    def __init__(
        self, layers: Sequence[Layer], format: WithBase, ladder: Sequence[int], group_size: int, found: CalibratedBase
    ):
        self.layers, self.format, self.group_size, self.found = layers, format, group_size, found
        self.ladders = {layer.path: ladder_of(layer, format, ladder) for layer in layers}
        weights = {layer.path: weight_of(layer) for layer in layers}
        self.watched = {path: Watched(weight, Hessian(weight.shape[1])) for path, weight in weights.items()}

    def takes(self, rows: np.ndarray) -> None:
        """Which inputs of the next pass count."""
        for watched in self.watched.values():
            watched.rows = rows

    def choose(self) -> None:
        """Choose the codes of all layers."""
        factored: dict[bytes, Factored | None] = {}  # layers of one input have one
        for layer in self.layers:
            watched = self.watched.pop(layer.path)
            key = np.diag(watched.hessian.sum).tobytes()
            if key not in factored:
                factored[key] = watched.hessian.factored()
            hessian = factored[key]
            if hessian is None or not np.isfinite(watched.weight).all():
                self.found.rounded[layer.path] = "its inputs, or its weights, are not finite, or all 0"
                continue
            weight = linear_of(layer.module).weight
            planes = self.format.nearest(weight, self.ladders[layer.path], self.group_size)
            assert planes is not None
            self.found.layers[layer.path] = calibrated(watched.weight, planes, hessian, self.format.window)


def ladder_of(layer: Layer, format: Format, ladder: Sequence[int]) -> tuple[int, ...]:
    """The bits at which a format stores a layer."""
    return stored_bits(format, stored_widths(layer, format, ladder))


def unfit(layer: Layer, format: WithBase, stored: Sequence[int], group_size: int) -> str | None:
    """Why a layer, which is stored at these bits, cannot be calibrated."""
    module = layer.module
    if layer.is_table or (type(module) not in (nn.Linear, NativeDense) and not isinstance(module, nn.Embedding)):
        return "experts, heads and tables are rounded"
    if not stored or (format.ladders and tuple(stored) not in format.ladders):
        return "has no gear of few bits"
    if format.nearest(linear_of(module).weight[:1], stored, group_size) is None:
        return f"the gears {','.join(map(str, stored))} begin with the same codes"
    return None


def weight_of(layer: Layer) -> np.ndarray:
    """(O, I) float32."""
    return np.array(linear_of(layer.module).weight.astype(mx.float32))


class Walk:
    """Reads texts block by block with the original weights.

    The model's own code calls its blocks. Those before the current one hand out what they made before, and the current
    one ends the pass.

    Args:
        batches: of texts.
    """

    def __init__(self, model: nn.Module, batches: Sequence[TextBatch]):
        self.model, self.batches, self.blocks = model, batches, blocks_of(model)
        self.states: list[Any] = []  # what the last block made of each batch

    def read(self, number: int, codes: BlockCodes) -> None:
        """Read a block, or the head after all of them, and let `codes` choose its codes."""
        made: list[Any] = []
        for index, batch in enumerate(self.batches):
            codes.takes(batch.rows)
            with self._changed(number, index, codes, made):
                try:
                    self.model(batch.tokens)
                except WasRead:
                    continue
                except Exception as error:
                    raise unreadable(self.model, one_line(error)) from error
            raise unreadable(self.model, "it does not call them in order")
        self.states = made
        codes.choose()

    @contextmanager
    def _changed(self, number: int, index: int, codes: BlockCodes, made: list[Any]) -> Iterator[None]:
        """The model while block `number` reads batch `index`: `made` gets its output."""
        changes: list[tuple[nn.Module, Any]] = []

        def past(block: nn.Module, h: Any, *others: Any, **named: Any) -> Any:
            return h

        def before(block: nn.Module, *others: Any, **named: Any) -> Any:
            return self.states[index]

        def current(block: nn.Module, h: Any, *others: Any, **named: Any) -> Any:
            if number == 0 and isinstance(h, mx.array) and mx.issubdtype(h.dtype, mx.floating):
                h = h.astype(mx.float32)
            out = kinds[number].__call__(block, h, *others, **named)
            mx.eval(out)
            made.append(out)
            raise WasRead

        kinds = [type(block) for block in self.blocks]
        for place, block in enumerate(self.blocks[: number + 1]):
            call = current if place == number else before if place == number - 1 else past
            changes.append((block, type("Block", (kinds[place],), {"__call__": call})))
        is_head = number == len(self.blocks)
        for layer in codes.layers:
            kind = type(layer.module)
            changes.append((layer.module, watching(kind, codes.watched[layer.path], is_head)))
        with of_classes(changes):
            yield


def watching(kind: Any, watched: Watched, is_head: bool) -> type[nn.Module]:
    """A subclass of a linear layer whose products are those of `watched`; after the head, nothing is computed."""
    name = "as_linear" if issubclass(kind, nn.Embedding) else "__call__"

    def call(module: nn.Module, x: mx.array) -> mx.array:
        inputs = watched.add(x)
        if is_head:
            raise WasRead
        return watched.product(inputs, module, x)

    return type(kind.__name__, (kind,), {name: call})


def unreadable(model: nn.Module, why: str) -> GearbxError:
    return GearbxError(f"{type(model).__name__}: its blocks cannot be read one by one ({why}), so it is not calibrated")
