"""Which weights one decoding step reads, found by spoiling them: what is read changes what the model says."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from .configs import GROUP

FEW = 8  # rows that are looked at one by one: experts; an embedding has more


@dataclass
class Slot:
    """Where a module keeps an array, and how many rows of it can be read one without another."""

    node: Any  # a dictionary or a list
    key: str | int
    rows: int

    @property
    def array(self) -> mx.array:
        return self.node[self.key]

    def put(self, array: mx.array) -> None:
        self.node[self.key] = array


Spoiling = Callable[[mx.array], mx.array]


def bytes_read(model: nn.Module, prompt: list[int]) -> int:
    """The bytes of weights that the step after a prompt reads: of an embedding one row, of experts the chosen ones."""
    read = step(model, prompt)
    return sum(spoiled_bytes(slot, read) for slot in slots(model))


def step(model: nn.Module, prompt: list[int]) -> Callable[[Callable[[], None], Callable[[], None]], bool]:
    """A function that says whether a step differs: it calls `spoil` before the step and `mend` after it."""
    begun = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt[:-1]]), cache=begun), arrays_of(begun))

    def run(spoil: Callable[[], None], mend: Callable[[], None]) -> list[mx.array]:
        cache = copy.deepcopy(begun)
        spoil()
        try:
            done = [model(mx.array([prompt[-1:]]), cache=cache), *arrays_of(cache)]  # which later steps read
            mx.eval(done)
        finally:
            mend()
        return done

    whole = run(lambda: None, lambda: None)
    return lambda spoil, mend: (
        not all(
            mx.array_equal(ours, theirs, equal_nan=True).item()
            for ours, theirs in zip(run(spoil, mend), whole, strict=True)
        )
    )


def arrays_of(cache: list) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten([entry.state for entry in cache]) if isinstance(leaf, mx.array)]


def slots(model: nn.Module) -> Iterator[Slot]:
    """Every place in a model that has a parameter, each array once."""
    seen = set()
    for module in model.modules():
        places = list(own_places(module))
        experts = {len(node[key]) for node, key in places if node[key].ndim > 2}
        for node, key in places:
            array = node[key]
            if id(array) not in seen:
                seen.add(id(array))
                divides = array.ndim > 1 and ("Embedding" in type(module).__name__ or len(array) in experts)
                yield Slot(node, key, len(array) if divides else 1)


def own_places(node: dict | list) -> Iterator[tuple[Any, str | int]]:
    """Where a module has arrays of its own, also in lists."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        if isinstance(value, mx.array) and not str(key).startswith("_"):
            yield node, key
        elif isinstance(value, dict | list) and not isinstance(value, nn.Module):
            yield from own_places(value)


def spoiled_bytes(slot: Slot, read: Callable) -> int:
    """The bytes of an array that a step reads: whole rows of it, if not all."""
    for spoil in WAYS:
        if is_read(slot, read, spoil, 0, slot.rows):
            return slot.array.nbytes // slot.rows * rows_read(slot, read, spoil, 0, slot.rows)
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
    array, other = slot.array, spoil(slot.array)
    if last - first < slot.rows:
        other = mx.concatenate([array[:first], other[first:last], array[last:]])
    return read(partial(slot.put, other), partial(slot.put, array))


def to_nothing(array: mx.array) -> mx.array:
    """Not a number; of codes, their opposites."""
    return mx.full(array.shape, mx.nan, array.dtype) if mx.issubdtype(array.dtype, mx.floating) else ~array


def far_off(array: mx.array, seed: int) -> mx.array:
    """Other numbers, for arrays that only decide which others are read: the order of what is not a number is open."""
    key = mx.random.key(seed)
    if mx.issubdtype(array.dtype, mx.floating):
        return (100 * mx.random.normal(array.shape, key=key)).astype(array.dtype)
    return mx.random.randint(0, 2**31 - 1, array.shape, key=key).astype(array.dtype)


WAYS: tuple[Spoiling, ...] = to_nothing, *(partial(far_off, seed=seed) for seed in range(6))


OTHERS = "Embedding", "Norm", "Conv"  # classes whose weights no vector is multiplied by


def matrices(model: nn.Module) -> set[str]:
    """The paths of modules that multiply vectors by a matrix of their own: linear layers of any class."""
    return {
        path
        for path, module in model.named_modules()
        if not any(kind in type(module).__name__ for kind in OTHERS)
        and any(isinstance(array, mx.array) and is_matrix(key, array) for key, array in module.items())
    }


def is_matrix(key: str, array: mx.array) -> bool:
    return array.ndim > 1 and (key == "weight" or min(array.shape[-2:]) >= GROUP)
