"""How long every block of a model takes. Each is waited for, so that on a GPU nothing would run ahead of it."""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError


class BlockTimer:
    """While it is entered, the blocks of a model are timed when they compute a single token.

    A block stays what it is and gets a class of its own, whose call is timed.

    Args:
        model: with `layers`, as mlx-lm's have.
        clock: seconds.

    Raises:
        GearbxError: MLX computes on a GPU, or the model's blocks are not where they are looked for.
    """

    def __init__(self, model: nn.Module, clock: Callable[[], float] = time.perf_counter):
        if mx.default_device().type != mx.DeviceType.cpu:
            raise GearbxError("to time layers would have the GPU wait after each of them; leave out --time-layers")
        wanted = {id(block) for block in getattr(model, "layers", ())}
        self.blocks = {path: module for path, module in model.named_modules() if id(module) in wanted}
        if not self.blocks:
            raise GearbxError(f"{type(model).__name__} has no blocks that could be timed; leave out --time-layers")
        self.clock = clock
        self._seconds: dict[str, float] = {}
        self._classes: dict[str, type] = {}

    def __enter__(self) -> "BlockTimer":
        for path, block in self.blocks.items():
            self._classes[path] = type(block)
            block.__class__ = self._timed(path, type(block))
        return self

    def __exit__(self, *_: object) -> None:
        for path, kind in self._classes.items():
            self.blocks[path].__class__ = kind
        self._classes.clear()

    def take(self) -> dict[str, float]:
        """Path of a block to its seconds since this was last asked; empty where no single token was computed."""
        taken, self._seconds = self._seconds, {}
        return taken

    def _timed(self, path: str, kind: type) -> type:
        timer = self

        class Timed(kind):
            def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
                if x.shape[1] != 1:
                    return super().__call__(x, *args, **kwargs)
                mx.eval(x)
                start = timer.clock()
                y = super().__call__(x, *args, **kwargs)
                mx.eval(y)
                timer._seconds[path] = timer._seconds.get(path, 0.0) + timer.clock() - start
                return y

        Timed.__name__ = kind.__name__
        return Timed
