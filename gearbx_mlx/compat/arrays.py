"""Unpromised properties of MLX's arrays: copies of types, the random key, writable memory.

The module also replaces the function by which mlx-lm loads arrays.
"""

import contextlib
import copyreg
import functools
import glob
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx_lm.utils

from ..errors import GearbxError


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def dtype_named(name: str) -> mx.Dtype:
    dtype: mx.Dtype = getattr(mx, name)
    return dtype


# MLX does not define copies of types, but a gearbox has some, and is copied with its model.
copyreg.pickle(mx.Dtype, lambda dtype: (dtype_named, (dtype_name(dtype),)))


_loading = threading.Lock()


@contextlib.contextmanager
def loading_with(load: Callable[[str], Any], files: Sequence[str] | None = None) -> Iterator[None]:
    """Let mlx-lm read files of weights with a replacement of MLX's function in the block; one thread at a time.

    Args:
        files: of the weights; None: those that mlx-lm finds.
    """

    class Other:
        """MLX, with a different `load`."""

        def __getattr__(self, name: str) -> Any:
            return load if name == "load" else getattr(mx, name)

    with _loading:
        utils: Any = mlx_lm.utils
        utils.mx = Other()
        if files is not None:
            utils.glob = SimpleNamespace(glob=lambda pattern: files)
        try:
            yield
        finally:
            utils.mx, utils.glob = mx, glob


class OwnRandomState:
    """MLX's random state of one sequence after `mx.random.seed(seed)`."""

    def __init__(self, seed: int):
        self.state = mx.random.key(seed % 2**64)

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from this state in the block, and restore MLX's afterwards."""
        state: Any = mx.random.state
        before = mx.array(state[0])
        state[0][:] = self.state
        try:
            yield
        finally:
            self.state = mx.array(state[0])
            state[0][:] = before
            mx.async_eval(self.state, state[0])  # otherwise every token would add to both graphs


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the random state after the block, so that its random numbers are drawn again."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def next_key() -> mx.array:
    """Return the key with which MLX draws next without an explicit one, and advance the state."""
    state: Any = mx.random.state
    following, key = mx.random.split(state[0])
    state[0][:] = following
    return key


def random_state() -> mx.array:
    """Return MLX's current random state, for `set_random_state`."""
    state: Any = mx.random.state
    return mx.array(state[0])


def set_random_state(before: mx.array) -> None:
    """Restore a state from `random_state`, so that later random numbers are drawn again."""
    state: Any = mx.random.state
    state[0][:] = before
    mx.async_eval(state[0])  # until a number is drawn, each exchange would add to its graph


def memory_of(array: mx.array) -> memoryview:
    """Return the writable memory of an evaluated array of bytes.

    Raises:
        GearbxError: a version of MLX that copies the memory.
    """
    if not memory_is_shared():
        raise GearbxError("residency stream: this version of MLX copies arrays' memory; use residency disk")
    return memoryview(cast(Any, array))


@functools.cache
def memory_is_shared() -> bool:
    """Return True if writes to the memory of an array change the array."""
    array = mx.zeros(1, mx.uint8)
    mx.eval(array)
    try:
        memoryview(cast(Any, array))[0] = 1
    except TypeError:  # read-only
        return False
    return bool(array.item() == 1)
