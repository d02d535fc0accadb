"""Hidden states after chosen blocks, recorded while an unchanged mlx-lm model runs.

Draft heads read them (`drafters/eagle.py`). During a pass, a subclass of a block's class records its output.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..compat.classes import of_classes

Hidden = Mapping[int, mx.array]
"""Mapping from a number of blocks to the hidden states (K, D) after them, one row per token."""
Outputs = Mapping[int, mx.array]
"""Mapping from a number of blocks to the output (B, K, D) of the last one, for B sequences."""

NOTE = "hidden_states_of_a_pass"  # attribute of a block during a pass


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the blocks of a model in order; none if mlx-lm's class does not list them."""
    blocks = getattr(model, "layers", ())
    known = isinstance(blocks, list | tuple) and all(isinstance(block, nn.Module) for block in blocks)
    return blocks if known else ()


@contextlib.contextmanager
def recorded(model: nn.Module, taps: Sequence[int]) -> Iterator[Outputs]:
    """Record the outputs of blocks in the latest pass of the context.

    Args:
        taps: numbers of blocks, from 1.
    """
    found: dict[int, mx.array] = {}
    if not taps:
        yield found
        return
    blocks = [blocks_of(model)[tap - 1] for tap in taps]
    for tap, block in zip(taps, blocks):
        object.__setattr__(block, NOTE, (found, tap))  # outside of the module's dictionary of parameters
    try:
        kinds: list[Any] = [type(block) for block in blocks]
        with of_classes((block, recording(kind)) for block, kind in zip(blocks, kinds)):
            yield found
    finally:
        for block in blocks:
            vars(block).pop(NOTE, None)


@functools.cache
def recording(kind: Any) -> type[nn.Module]:
    """Return a subclass of a block's class that notes its output (B, K, D)."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = kind.__call__(self, *args, **kwargs)
        found, tap = getattr(self, NOTE)
        if isinstance(y, mx.array) and y.ndim == 3:
            found[tap] = y
        return y

    return type(kind.__name__, (kind,), {"__call__": call})


def of_one_sequence(outputs: Outputs) -> Hidden:
    """Return the hidden states of a pass over one sequence."""
    return {tap: output[0] for tap, output in outputs.items()}
