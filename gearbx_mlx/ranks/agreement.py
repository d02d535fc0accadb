"""Agreement of all ranks on rank 0's numbers, so that all ranks sample the same tokens and shift at the same time.

Different machines round differently, and kernels are chosen by measured times. A rank with a different token or gear
would compute wrong results with the others, or block forever. A few numbers of rank 0 per token prevent this. They are
part of the graph, so that only code that reads them waits.

Flags and versions are compared before the first common computation.
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
    """Values of rank 0 on all ranks of a group. Every rank must request them in the same order.

    Args:
        group: None for a single process; it keeps its own values.
    """

    def __init__(self, group: mx.distributed.Group | None = None):
        self.group = group if group is not None and group.size() > 1 else None
        self._first = self.group is None or self.group.rank() == 0

    def arrays(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return rank 0's arrays, bit-identical. They have the same shapes on all ranks, and 32-bit elements."""
        if self.group is None:
            return arrays
        flat = mx.concatenate([array.reshape(-1).view(mx.uint32) for array in arrays])
        # The multiplication keeps every rank's own forward pass in its graph. This fixes one order of communication.
        # MLX's ring takes one stream: the model's.
        mine = flat * mx.array(int(self._first), mx.uint32)
        shared = mx.distributed.all_sum(mine, group=self.group)
        ends = [sum(array.size for array in arrays[: i + 1]) for i in range(len(arrays))]
        parts = mx.split(shared, ends[:-1])
        return tuple(part.view(array.dtype).reshape(array.shape) for part, array in zip(parts, arrays))


SINGLE_PROCESS = Agreement()


def in_turn() -> AbstractContextManager[Any]:
    """Return a context for communication after all pending forward passes: mlx-lm's generation stream.

    mlx-lm leaves a forward pass pending when a sequence ends. MLX's ring has one connection for all streams, and would
    mix up simultaneous messages of two streams.
    """
    stream = generation_stream()
    return nullcontext() if stream is None else mx.stream(stream)


def agreement_of(model: nn.Module) -> Agreement:
    """Return the agreement of the ranks that share a model; `SINGLE_PROCESS` for a model of one process."""
    for module in modules_of(model):
        if isinstance(getattr(module, "group", None), mx.distributed.Group):  # it sends outputs to other ranks
            return Agreement(module.group)
        if getattr(module, "pipeline_size", 1) > 1:
            return Agreement(mx.distributed.init())
    return SINGLE_PROCESS


SHOWN_CHARACTERS = 60  # characters of a value in a message
MISSING = "missing"


def gathered_values(group: mx.distributed.Group, value: Any) -> list[Any]:
    """Return the JSON-serializable value of every rank, by rank."""
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with in_turn():
        sizes = [int(size) for size in np.array(all_of(group, mx.array([data.size], mx.int32)))]
        padded = np.zeros(max(sizes), np.uint8)
        padded[: data.size] = data
        rows = np.array(all_of(group, mx.array(padded))).reshape(group.size(), -1)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes)]


def all_of(group: mx.distributed.Group, array: mx.array) -> mx.array:
    """Return the concatenated arrays of all ranks."""
    return mx.distributed.all_gather(array, group=group, stream=mx.cpu)


def check_equal(group: mx.distributed.Group, facts: Mapping[str, str]) -> None:
    """Validate that named values are equal on all ranks.

    Raises:
        GearbxError: on all ranks, with the first rank that differs from rank 0.
    """
    if problem := first_difference(gathered_values(group, dict(facts))):
        raise GearbxError(problem)


def first_difference(facts: Sequence[Mapping[str, str]]) -> str | None:
    """Return an error message with the first value that differs from rank 0's; None if all are equal."""
    first = facts[0]
    for rank, own in enumerate(facts):
        for name in {**first, **own}:
            here, there = own.get(name, MISSING), first.get(name, MISSING)
            if here != there:
                problem = f"{name} is {shortened(here)}, and on rank 0 {shortened(there)}"
                return (
                    f"rank {rank} differs from rank 0: {problem}; use the same model, flags and versions on all ranks"
                )
    return None


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
