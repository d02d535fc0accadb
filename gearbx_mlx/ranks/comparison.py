"""What all ranks have to have in common, compared before anything is computed together."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import GearbxError

LONGEST = 60  # characters of a value that a message shows
MISSING = "nothing"


def gathered(group: mx.distributed.Group, value: Any) -> list[Any]:
    """A value of every rank, by rank; it becomes JSON on the way."""
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = [int(size) for size in np.array(all_of(group, mx.array([data.size], mx.int32)))]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: data.size] = data
    rows = np.array(all_of(group, mx.array(padded))).reshape(group.size(), -1)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes)]


def all_of(group: mx.distributed.Group, array: mx.array) -> mx.array:
    """The arrays of all ranks, one after the other."""
    return mx.distributed.all_gather(array, group=group, stream=mx.cpu)


def check_equal(group: mx.distributed.Group, facts: Mapping[str, str]) -> None:
    """Compare named values of all ranks.

    Raises:
        GearbxError: on all ranks, for the first that differs from rank 0's; it names the rank.
    """
    problem = difference(gathered(group, dict(facts)))
    if problem is not None:
        raise GearbxError(problem)


def difference(facts: Sequence[Mapping[str, str]]) -> str | None:
    """What the first rank that differs from rank 0 has that is different, and what rank 0 has; None: nothing."""
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
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
