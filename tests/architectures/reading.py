"""Which weights one decoding step reads, found by spoiling them: what is read changes what the model says."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

FEW = 8  # rows along the first axis that are looked at one by one: experts; an embedding has more

Slot = tuple[dict | list, str | int]  # where a module keeps an array
Spoiling = Callable[[mx.array], mx.array]


def bytes_read(model: nn.Module, prompt: list[int]) -> int:
    """The bytes of weights that the step after a prompt reads: of an embedding one row, of experts the chosen ones."""
    read = step(model, prompt)
    return sum(spoiled_bytes(slot, read) for slot in slots(model))


def step(model: nn.Module, prompt: list[int]) -> Callable[[Callable[[], None], Callable[[], None]], bool]:
    """A function that says whether a step differs: it calls `spoil` before the step and `mend` after it."""
    begun = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt[:-2]]), cache=begun), [entry.state for entry in begun])

    def run(spoil: Callable[[], None], mend: Callable[[], None]) -> Iterator[mx.array]:
        cache = copy.deepcopy(begun)
        spoil()
        try:
            logits = model(mx.array([prompt[-2:-1]]), cache=cache)
            mx.eval(logits, [entry.state for entry in cache])
        finally:
            mend()
        yield logits
        yield model(mx.array([prompt[-1:]]), cache=cache)  # what the step left in the cache shows in the next one

    whole = list(run(lambda: None, lambda: None))
    return lambda spoil, mend: any(
        not mx.array_equal(ours, theirs, equal_nan=True).item() for ours, theirs in zip(run(spoil, mend), whole)
    )


def slots(tree: Any) -> Iterator[Slot]:
    """Every place in a model that has an array, each array once."""
    seen = set()
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if isinstance(value, dict | list):
                stack.append(value)
            elif isinstance(value, mx.array) and not str(key).startswith("_") and id(value) not in seen:
                seen.add(id(value))
                yield node, key


def spoiled_bytes(slot: Slot, read: Callable) -> int:
    """The bytes of an array that a step reads: whole rows of it, if not all."""
    array = slot[0][slot[1]]
    rows = len(array) if array.ndim > 1 else 1
    for spoil in WAYS:
        if is_read(slot, read, spoil, 0, rows):
            return array.nbytes // rows * rows_read(slot, read, spoil, 0, rows)
    return 0


def rows_read(slot: Slot, read: Callable, spoil: Spoiling, first: int, last: int) -> int:
    """How many of these rows, of which at least one is read, a step reads.

    Where both halves of many rows are read, all of them are.
    """
    if last - first == 1:
        return 1
    middle = (first + last) // 2
    halves = [half for half in ((first, middle), (middle, last)) if is_read(slot, read, spoil, *half)]
    if last - first > FEW and len(halves) == 2:
        return last - first
    return sum(rows_read(slot, read, spoil, *half) for half in halves)


def is_read(slot: Slot, read: Callable, spoil: Spoiling, first: int, last: int) -> bool:
    """Whether a step differs with these rows spoiled."""
    node, key = slot
    array = node[key]
    other = spoil(array)
    if array.ndim > 1:
        other = mx.concatenate([array[:first], other[first:last], array[last:]])
    return read(partial(node.__setitem__, key, other), partial(node.__setitem__, key, array))


def to_nothing(array: mx.array) -> mx.array:
    """Not a number; of codes, their opposites."""
    return mx.full(array.shape, mx.nan, array.dtype) if mx.issubdtype(array.dtype, mx.floating) else ~array


def far_off(array: mx.array) -> mx.array:
    """Large numbers, for arrays that only decide which others are read: the order of what is not a number is open."""
    return (100 * mx.random.normal(array.shape)).astype(array.dtype)


WAYS: tuple[Spoiling, ...] = to_nothing, far_off
