"""Outputs of modules, recorded while an unchanged mlx-lm model runs; hidden states after chosen blocks.

During a pass, a subclass of a module's class records its output. Draft heads read hidden states (`drafters/eagle.py`);
recurrent states are computed again from the outputs of linear layers (`rows.py`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..compat.classes import of_classes

Hidden = Mapping[int, mx.array]
"""Mapping from a number of blocks to the hidden states (K, D) after them, one row per token."""
Outputs = Mapping[int, mx.array]
"""Mapping from a number of blocks to the output (B, K, D) of the last one, for B sequences."""

NOTE = "note_of_a_pass"  # attribute of a module during a pass


@contextlib.contextmanager
def noting(notes: Iterable[tuple[nn.Module, Any]], kind_of: Callable[[Any], type[nn.Module]]) -> Iterator[None]:
    """Give each module a note and a derived class that uses it in the context.

    Args:
        kind_of: `recording`, or a function that returns a subclass of a module's class.
    """
    noted = [*notes]
    for module, note in noted:
        object.__setattr__(module, NOTE, note)  # outside of the module's dictionary of parameters
    try:
        with of_classes((module, kind_of(type(module))) for module, _ in noted):
            yield
    finally:
        for module, _ in noted:
            vars(module).pop(NOTE, None)


@functools.cache
def recording(kind: Any) -> type[nn.Module]:
    """Return a subclass of a module's class that calls the module's note with each output and its inputs."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = kind.__call__(self, *args, **kwargs)
        getattr(self, NOTE)(y, *args)
        return y

    return type(kind.__name__, (kind,), {"__call__": call})


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

    def note(tap: int, y: Any, *inputs: Any) -> None:
        if isinstance(y, mx.array) and y.ndim == 3:
            found[tap] = y

    with noting([(blocks_of(model)[tap - 1], functools.partial(note, tap)) for tap in taps], recording):
        yield found


def of_one_sequence(outputs: Outputs) -> Hidden:
    """Return the hidden states of a pass over one sequence."""
    return {tap: output[0] for tap, output in outputs.items()}
