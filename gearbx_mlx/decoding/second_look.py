"""The head of a draft looks twice: its best few tokens get their logits from the top gear's rows of the head.

Many drafts fail where the head is rounded, although what it reads would have chosen the right token: on SmolLM2 that is
one token in thirty. A few rows of the top gear's head are some kilobytes beside the megabytes of a draft's pass. Only
drafts look twice; a text that the low gear writes itself is its own.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..formats.exact import ExactModule
from ..formats.tied import IN_DRAFTS, TiedEmbedding, linear_of
from ..gears.discovery import DENSE_LAYERS
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.sharding import sharding_of
from ..kernels.dispatch import on_cpu

HEAD = "lm_head"
SEEN_TWICE = 4  # with more, hardly another token wins
CHUNK = 256  # logits, of which the largest is found first: to sort all of a vocabulary takes ten times as long


@dataclass(frozen=True)
class SecondHead:
    """The head of the top gear, a linear layer or an embedding, and where a draft looks for its own: `holder[name]`."""

    top: nn.Module
    holder: nn.Module
    name: str


def second_head(gearbox: Gearbox, gear: Gear) -> SecondHead | None:
    """What a draft of this gear looks at twice; None where the top gear has the same head, or none in memory."""
    path = next((layer.path for layer in gearbox.layers if layer.path.split(".")[-1] == HEAD), gearbox.head)
    if path is None or not gearbox.keeps_all or sharding_of(gearbox.model) is not None:
        return None
    own, top = gearbox.module_in(path, gear), gearbox.module_in(path, gearbox.ladder.top)
    if own is None or top is None or own is top:
        return None
    if isinstance(own, TiedEmbedding):
        return SecondHead(top, own, IN_DRAFTS)
    place, _, name = path.rpartition(".")
    return SecondHead(top, dict(gearbox.model.named_modules())[place], name)


Rows = Callable[[mx.array], mx.array]  # numbers (...) to rows (..., D) of a head


@contextlib.contextmanager
def looking(second: SecondHead | None) -> Iterator[None]:
    """The head of the gear that is engaged looks twice, where rows are looked up fast. Nothing may shift meanwhile."""
    rows = None if second is None else rows_of(linear_of(second.top))
    if second is None or rows is None:
        yield
        return
    holder, name = second.holder, second.name
    before = holder.get(name)  # none in a tied embedding, whose rows are looked up in its projection
    holder[name] = SecondLook(holder["projection"] if before is None else before, rows)
    try:
        yield
    finally:
        if before is None:
            del holder[name]
        else:
            holder[name] = before


def rows_of(head: nn.Module) -> Rows | None:
    """The rows of dense weights, and on a GPU of exact ones.

    To decode some rows by MLX's operations takes a CPU a third of a draft's pass; natively it takes nothing
    (formats/block.py).
    """
    if type(head) in DENSE_LAYERS:
        return lambda chosen: head["weight"][chosen]
    return head.rows if isinstance(head, ExactModule) and not on_cpu() else None


class SecondLook(nn.Module):
    """A linear layer (..., D) -> (..., V) whose largest outputs come from the rows of another weight (V, D)."""

    def __init__(self, head: nn.Module, rows: Rows):
        super().__init__()
        self.head, self._rows = head, rows

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.head(x)
        best = largest(logits, min(SEEN_TWICE, logits.shape[-1]))
        again = (self._rows(best).astype(mx.float32) * x[..., None, :].astype(mx.float32)).sum(axis=-1)
        if "bias" in self.head:
            again = again + self.head.bias[best]
        return mx.put_along_axis(logits, best, again.astype(logits.dtype), axis=-1)


def largest(logits: mx.array, count: int) -> mx.array:
    """Where the largest numbers of each row (..., V) are: (..., count), in no order."""
    *lead, size = logits.shape
    if size <= CHUNK * count:
        return mx.argpartition(-logits, count - 1, axis=-1)[..., :count]
    filled = mx.pad(logits, [*[(0, 0)] * len(lead), (0, -size % CHUNK)], constant_values=-mx.inf)
    chunks = filled.reshape(*lead, -1, CHUNK)
    # A number that is among the largest lies in a chunk whose own largest is among those of all chunks.
    chosen = mx.argpartition(-chunks.max(axis=-1), count - 1, axis=-1)[..., :count]
    among = mx.take_along_axis(chunks, chosen[..., None], axis=-2).reshape(*lead, -1)
    places = mx.argpartition(-among, count - 1, axis=-1)[..., :count]
    return mx.take_along_axis(chosen, places // CHUNK, axis=-1) * CHUNK + places % CHUNK
