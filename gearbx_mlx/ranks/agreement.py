"""Numbers that decide what comes next are rank 0's on every rank: so all ranks sample and shift alike.

Machines of different kinds round differently, and kernels are chosen by the clock. A rank that took one other token or
gear would compute something else with the others from there on, or wait for ever. A few numbers of rank 0 for each
token rule that out. They are part of the graph: only a reader waits for them.

What all ranks must have in common, flags and versions, is compared before anything is computed together.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..compat.classes import generation_stream, modules_of
from ..errors import GearbxError


class Agreement:
    """What rank 0 says, on all ranks of a group. Every rank has to ask in the same order.

    Args:
        group: None: this process is alone, and agrees with itself.
    """

    def __init__(self, group: mx.distributed.Group | None = None):
        self.group = group if group is not None and group.size() > 1 else None
        self._first = self.group is None or self.group.rank() == 0

    def arrays(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Rank 0's arrays, bit for bit. They have the same shapes on all ranks, and elements of 32 bits."""
        if self.group is None:
            return arrays
        flat = mx.concatenate([array.reshape(-1).view(mx.uint32) for array in arrays])
        # A product keeps every rank's own pass in its graph, as all ranks have to talk in one order. MLX's ring takes
        # one stream: that of the model.
        mine = flat * mx.array(int(self._first), mx.uint32)
        shared = mx.distributed.all_sum(mine, group=self.group)
        ends = [sum(array.size for array in arrays[: i + 1]) for i in range(len(arrays))]
        parts = mx.split(shared, ends[:-1])
        return tuple(part.view(array.dtype).reshape(array.shape) for part, array in zip(parts, arrays))

    def numbers(self, values: Sequence[int]) -> list[int]:
        """Rank 0's whole numbers, below 2^32 x 2^31."""
        if self.group is None:
            return list(values)
        halves = [half for value in values for half in (value >> 32, value & 0xFFFFFFFF)]
        with in_turn():
            (shared,) = self.arrays(mx.array(halves, mx.uint32))
            found = [int(half) for half in np.array(shared)]
        return [high << 32 | low for high, low in zip(found[::2], found[1::2])]


ALONE = Agreement()


def in_turn() -> AbstractContextManager[Any]:
    """Within it, ranks talk after all passes that are still computed: on the stream on which mlx-lm generates.

    mlx-lm leaves a pass behind when a text ends. MLX's ring has one connection for all streams, and mixes up what two
    of them say at once.
    """
    stream = generation_stream()
    return nullcontext() if stream is None else mx.stream(stream)


def agreement_of(model: nn.Module) -> Agreement:
    """Return the agreement of the ranks that share a model; a model that is whole here needs none."""
    for module in modules_of(model):
        if isinstance(getattr(module, "group", None), mx.distributed.Group):  # what tells other ranks its outputs
            return Agreement(module.group)
        if getattr(module, "pipeline_size", 1) > 1:
            return Agreement(mx.distributed.init())
    return ALONE


SHOWN_CHARACTERS = 60  # characters of a value that a message shows
MISSING = "nothing"


def gathered_values(group: mx.distributed.Group, value: Any) -> list[Any]:
    """Return a value of every rank, by rank; it becomes JSON on the way."""
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with in_turn():
        sizes = [int(size) for size in np.array(all_of(group, mx.array([data.size], mx.int32)))]
        padded = np.zeros(max(sizes), np.uint8)
        padded[: data.size] = data
        rows = np.array(all_of(group, mx.array(padded))).reshape(group.size(), -1)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes)]


def all_of(group: mx.distributed.Group, array: mx.array) -> mx.array:
    """Return the arrays of all ranks, one after the other."""
    return mx.distributed.all_gather(array, group=group, stream=mx.cpu)


def check_equal(group: mx.distributed.Group, facts: Mapping[str, str]) -> None:
    """Compare named values of all ranks.

    Raises:
        GearbxError: on all ranks, for the first that differs from rank 0's; it names the rank.
    """
    if problem := first_difference(gathered_values(group, dict(facts))):
        raise GearbxError(problem)


def first_difference(facts: Sequence[Mapping[str, str]]) -> str | None:
    """Return what the first rank that differs from rank 0 has that is different, and what rank 0 has; None: nothing."""
    first = facts[0]
    for rank, own in enumerate(facts):
        for name in {**first, **own}:
            here, there = own.get(name, MISSING), first.get(name, MISSING)
            if here != there:
                return (
                    f"rank {rank} differs from rank 0: {name} is {shortened(here)}, and on rank 0 {shortened(there)}; "
                    "start all ranks with the same model, flags and versions"
                )
    return None


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
