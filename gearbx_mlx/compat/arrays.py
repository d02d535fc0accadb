"""What MLX does not promise of its arrays: how a type is copied, where the random key is, that bytes can be written.

And what mlx-lm does not promise of how it loads them.
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


# MLX does not say how a type is copied, and a gearbox, which is copied with its model, has some.
copyreg.pickle(mx.Dtype, lambda dtype: (dtype_named, (dtype_name(dtype),)))


_loading = threading.Lock()


@contextlib.contextmanager
def loading_with(load: Callable[[str], Any], files: Sequence[str] | None = None) -> Iterator[None]:
    """In the block, mlx-lm reads files of weights with another function than MLX's; in one thread at a time.

    Args:
        files: of the weights; None: those that mlx-lm finds.
    """

    class Other:
        """MLX, but for its function `load`."""

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
    """MLX's random state as one text alone has it after `mx.random.seed(seed)`."""

    def __init__(self, seed: int):
        self.state = mx.random.key(seed % 2**64)

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw inside from this state; afterwards MLX's is as it was."""
        state: Any = mx.random.state
        before = mx.array(state[0])
        state[0][:] = self.state
        try:
            yield
        finally:
            self.state = mx.array(state[0])
            state[0][:] = before
            mx.async_eval(self.state, state[0])  # else every token would add to both graphs


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Random numbers drawn in the block will be drawn again after it."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def next_key() -> mx.array:
    """Return the key with which MLX draws next, if it draws without one; it then counts as drawn."""
    state: Any = mx.random.state
    following, key = mx.random.split(state[0])
    state[0][:] = following
    return key


def random_state() -> mx.array:
    """Return MLX's random state as it is now, for `set_random_state`."""
    state: Any = mx.random.state
    return mx.array(state[0])


def set_random_state(before: mx.array) -> None:
    """Have the random numbers that were drawn since `random_state` returned this drawn again."""
    state: Any = mx.random.state
    state[0][:] = before
    mx.async_eval(state[0])  # until a number is drawn, each exchange would add to its graph


def memory_of(array: mx.array) -> memoryview:
    """Return the memory of bytes that are evaluated; what is written into it is in the array.

    Raises:
        GearbxError: a version of MLX of which this is not true.
    """
    if not memory_is_shared():
        raise GearbxError("residency stream writes into the memory of arrays, which this version of MLX copies")
    return memoryview(cast(Any, array))


@functools.cache
def memory_is_shared() -> bool:
    """Return whether what is written into the memory of an array is in the array."""
    array = mx.zeros(1, mx.uint8)
    mx.eval(array)
    try:
        memoryview(cast(Any, array))[0] = 1
    except TypeError:  # read-only
        return False
    return bool(array.item() == 1)
