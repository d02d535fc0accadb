"""Memory that strips are read into: used again and again, since new memory costs the system time."""

from typing import Any, cast

import mlx.core as mx

LARGER = 1.25  # times the size of a strip that its memory may have


class StripMemory:
    """Memory that no strip is in, for the strips to come. Its caller sees to it that one thread uses it at a time."""

    def __init__(self) -> None:
        self._free: list[mx.array] = []  # in the order in which they came

    def take(self, size: int, room: int) -> mx.array:
        """Memory of at least `size` bytes: the smallest that is free, or new.

        Args:
            room: bytes that this memory and what stays free may have; for more, what is free goes.
        """
        fitting = [(free.size, place) for place, free in enumerate(self._free) if size <= free.size <= LARGER * size]
        if fitting:
            return self._free.pop(min(fitting)[1])
        self._shrink(room - size)
        return zeros(size)

    def give(self, memory: mx.array, room: int) -> None:
        """Keep memory for another strip, as far as `room`, the bytes that may be free, goes."""
        self._free.append(memory)
        self._shrink(room)

    def _shrink(self, room: int) -> None:
        """Let go of what has been free longest, until no more bytes are free than `room`."""
        while self._free and sum(free.size for free in self._free) > room:
            self._free.pop(0)


def zeros(size: int) -> mx.array:
    """Bytes, in memory."""
    array = mx.zeros(size, mx.uint8)
    mx.eval(array)
    return array


def bytes_of(array: mx.array) -> memoryview:
    """The memory of bytes that are evaluated; what is written into it is in the array."""
    return memoryview(cast(Any, array))
