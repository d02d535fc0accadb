"""Strips: parts of a layer that a separate thread reads from disk, ahead of their use.

They are read into memory that is reused, since the system takes time to provide new memory.
"""

import contextlib
import hashlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..compat.arrays import memory_of
from ..errors import GearbxError
from ..kernels.exact import ExactMatrix, tile_ends
from .manifest import RESTORE
from .tensor_files import ArrayHashes


def zeros(size: int) -> mx.array:
    """Return bytes, in memory."""
    array = mx.zeros(size, mx.uint8)
    mx.eval(array)
    return array


ALIGNED = 64  # bytes: alignment of the second array of a strip in memory


class Piece(NamedTuple):
    """A piece of an array in a file: name of the array, first byte in the file, and the one after the last."""

    array: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class Strip:
    """Consecutive rows of a layer, and their pieces of `low` and `high`. Compared by identity."""

    def __init__(self, first: int, end: int, low: Piece, high: Piece):
        self.first, self.end, self.low, self.high = first, end, low, high
        self.second = -(-low.size // ALIGNED) * ALIGNED
        """Offset of `high` in the memory of a strip; `low` is at 0."""
        self.size = self.second + max(1, high.size)
        """Bytes of memory."""


@dataclass(frozen=True)
class Remainder:
    """The arrays of one layer that stay in the file, without its base."""

    low: Piece
    high: Piece

    @property
    def nbytes(self) -> int:
        return self.low.size + self.high.size

    def rows(self, first: int, end: int, offsets: np.ndarray) -> Strip:
        """Return the rows from `first` to before `end`. offsets: of the layer."""
        width = self.low.size // (len(offsets) - 1)
        low = (self.low.begin + width * row for row in (first, end))
        high = (self.high.begin + int(offsets[row]) for row in (first, end))
        return Strip(first, end, Piece(self.low.array, *low), Piece(self.high.array, *high))


def strips_of(remainder: Remainder, matrix: ExactMatrix, offsets: np.ndarray) -> list[Strip]:
    """Return the strips of a matrix (O, I): the tiles of rows that MLX's kernels decode together.

    They cover every byte of the two arrays, including an unused byte of `high`.
    """
    *strips, last = (remainder.rows(first, end, offsets) for first, end in tile_ends(matrix))
    return [*strips, Strip(last.first, last.end, last.low, last.high._replace(end=remainder.high.end))]


def with_strip(matrix: ExactMatrix, strip: Strip, memory: mx.array) -> ExactMatrix:
    """Return the rows of a strip, complete: from a matrix (O, I) without low and high, and the strip's memory."""
    rows = matrix.rows(strip.first, strip.end)
    return rows._replace(
        low=memory[: strip.low.size].reshape(strip.end - strip.first, -1),
        high=memory[strip.second : strip.size],
        offsets=rows.offsets - rows.offsets[0],
    )


def with_blocks(
    matrix: ExactMatrix, chosen: np.ndarray, height: int, strips: Sequence[Strip], low: mx.array, high: mx.array
) -> ExactMatrix:
    """Return blocks of rows, by number, of a matrix (O, I) without low and high, concatenated, complete.

    strips: of each block. low, high: the pieces of the strips, concatenated.
    """
    rows = mx.array((chosen[:, None] * height + np.arange(height)).reshape(-1))
    lengths = mx.concatenate([matrix.offsets[strip.first + 1 : strip.end + 1] for strip in strips])
    lengths = lengths - matrix.offsets[rows]
    return matrix.each(lambda array: array[rows])._replace(
        low=low.reshape(len(rows), -1),
        high=high,
        offsets=mx.concatenate([mx.zeros(1, mx.uint32), mx.cumsum(lengths)]).astype(mx.uint32),
    )


OLDER_SHARE = 0.99  # decay of earlier reads in the speed, per read


class Bandwidth:
    """Recent bytes per second. `add` takes one measurement."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    def add(self, size: int, seconds: float) -> None:
        self._bytes, self._seconds = self._bytes * OLDER_SHARE + size, self._seconds * OLDER_SHARE + seconds

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes per second; None before the first measurement."""
        return self._bytes / self._seconds if self._seconds else None


class StripReader:
    """A reader of strips that reads ahead, in the order of the previous forward pass.

    An array is compared with its hash when its strips are first read, before the last of them is returned. After an
    error, reading ahead stops and the thread ends; the next request starts again. Threads may share a reader, and a
    copy of a model gets its own.

    keeps_cache: True if the system may cache the file for the next pass. speed: of the disk. bytes_read: in total.
    """

    def __init__(self, hashes: ArrayHashes, keeps_cache: bool):
        self.hashes, self.keeps_cache = hashes, keeps_cache
        self.speed, self.bytes_read = Bandwidth(), 0
        self._files: dict[Path, int] = {}
        self._sums: dict[str, tuple[Any, int]] = {}  # partial hashes, and the byte that they have reached
        self._free: list[mx.array] = []  # unused memory, oldest first
        self._in_use: deque[tuple[mx.array, mx.array]] = deque()  # results, and the memory that they are computed from
        self._next: dict[Strip, Strip] = {}
        self._size = self._largest = 0  # bytes of the strips that have a next one, and of the largest strip
        self._last: Strip | None = None  # last requested strip
        self._reading: dict[Strip, tuple[mx.array, Future]] = {}  # in the expected order of requests
        self._thread: ThreadPoolExecutor | None = None
        self._lock, self._files_lock = threading.RLock(), threading.Lock()
        weakref.finalize(self, close, self._files)

    def __deepcopy__(self, memo: dict) -> "StripReader":
        return StripReader(self.hashes, self.keeps_cache)

    def over(self, strips: Sequence[Strip], compute: Callable[[Strip, mx.array], mx.array]) -> list[mx.array]:
        """Return the results for all strips. They are being computed, and at most two strips wait for that.

        compute: makes an array from a strip and its memory. Raises GearbxError for a file that cannot be read any
        more, or was changed.
        """
        with self._lock:
            for before, after in itertools.pairwise(strips):
                if before not in self._next:
                    self._follow(before, after)
        made = []
        with self._stopping_at_errors():  # including errors of `compute`
            for strip in strips:
                memory = self._wanted(strip)
                made.append(compute(strip, memory))
                mx.async_eval(made[-1])
                self._used(made[-1], memory)
        return made

    def verify(self, *names: str) -> None:
        """Compare arrays that are read in pieces with their hashes. Raises GearbxError as `over`."""
        if self.hashes.pending.isdisjoint(names):
            return
        with self._stopping_at_errors():
            self.hashes.verify(names, RESTORE)
        for place in (self.hashes.places[name] for name in names):
            self._forget(self._opened(place.file), place.begin, place.size)

    def joined(self, parts: Sequence[Piece]) -> mx.array:
        """Return pieces of an array concatenated, uint8, at least one byte. Raises GearbxError as `over`."""
        array = zeros(sum(part.size for part in parts) or 1)
        view, place = memory_of(array), 0
        with self._stopping_at_errors():
            for part in parts:
                self.read(part, view[place : place + part.size])
                place += part.size
        return array

    def read(self, part: Piece, memory: memoryview) -> None:
        """Read a piece of an array. Raises GearbxError as `over`."""
        path = self.hashes.places[part.array].file
        try:
            file, done = self._opened(path), 0
            while done < part.size:
                start = time.perf_counter()
                count = os.preadv(file, [memory[done:]], part.begin + done)
                if not count:
                    raise GearbxError(f"{path}: ends before {part.array} does; {RESTORE}")
                self.speed.add(count, time.perf_counter() - start)  # time of the disk, without waits for a lock
                done += count
            self._forget(file, part.begin, part.size)
            self.bytes_read += part.size
        except OSError as error:
            raise GearbxError(f"{path}: cannot be read any more ({error.strerror}); {RESTORE}") from error

    def stop(self) -> None:
        """Stop reading ahead, and end the thread."""
        with self._lock:
            for strip in list(self._reading):
                self._drop(strip)
            if self._thread is not None:
                self._thread.shutdown(wait=False)  # strips that other threads wait for are still read
            self._thread = self._last = None
            self._in_use.clear()

    @contextlib.contextmanager
    def _stopping_at_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _wanted(self, strip: Strip) -> mx.array:
        """Return the memory of a strip, once it is read."""
        with self._lock:
            if self._last is not None:
                self._follow(self._last, strip)
            self._last = strip
            for other in list(self._reading):  # earlier ones were not requested
                if other is strip:
                    break
                self._drop(other)
            if strip not in self._reading:
                self._begin(strip)
            self._read_ahead()
            memory, future = self._reading.pop(strip)
        future.result()
        return memory

    def _follow(self, before: Strip, after: Strip) -> None:
        """Expect `after` to be requested after `before`."""
        self._size += 0 if before in self._next else before.size
        self._next[before] = after

    def _read_ahead(self) -> None:
        """Start reading the expected strips, as far as memory allows."""
        latest = next(reversed(self._reading), self._last)
        while latest is not None:
            latest = self._next.get(latest)
            if latest is None or latest is self._last or latest in self._reading or latest.size > self._room:
                return
            self._begin(latest)

    @property
    def _room(self) -> int:
        """Bytes of memory for more strips."""
        memories = itertools.chain((memory for memory, _ in self._reading.values()), (free for _, free in self._in_use))
        most = max(4 * self._largest, self._size // 8)  # the disk reads an eighth while the low gear drafts
        return most - sum(memory.size for memory in memories)

    def _begin(self, strip: Strip) -> None:
        self._largest = max(self._largest, strip.size)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="gearbx stream")
        memory = self._take(strip.size)
        self._reading[strip] = memory, self._thread.submit(self._read_strip, strip, memory)

    def _take(self, size: int) -> mx.array:
        """Return memory of at least `size` bytes: the smallest free one, or a new one in exchange for free memory."""
        fitting = [(free.size, place) for place, free in enumerate(self._free) if size <= free.size <= 1.25 * size]
        if fitting:
            return self._free.pop(min(fitting)[1])
        self._shrink(self._room - size)
        return zeros(size)

    def _drop(self, strip: Strip) -> None:
        """Forget a strip; its memory is free once no read uses it."""
        memory, future = self._reading.pop(strip)
        future.cancel()
        future.add_done_callback(lambda _: self._give(memory))

    def _give(self, memory: mx.array) -> None:
        """Keep memory for a later strip, as far as there is room."""
        with self._lock:
            self._free.append(memory)
            self._shrink(self._room)

    def _shrink(self, room: int) -> None:
        """Release the oldest free memory, until at most `room` bytes are free."""
        while self._free and sum(free.size for free in self._free) > room:
            self._free.pop(0)

    def _used(self, made: mx.array, memory: mx.array) -> None:
        """Reclaim memory once its result is computed; wait for that if too much is in use."""
        with self._lock:
            self._in_use.append((made, memory))
            waiting = [self._in_use.popleft() for _ in range(len(self._in_use) - 2)]
        mx.eval([made for made, _ in waiting])  # without the lock: other threads take strips meanwhile
        with self._lock:
            while waiting:
                self._give(waiting.pop()[1])
            if self._thread is not None:
                self._read_ahead()

    def _read_strip(self, strip: Strip, memory: mx.array) -> None:
        """Read a strip, in the thread."""
        view = memory_of(memory)
        pieces = (strip.low, view[: strip.low.size]), (strip.high, view[strip.second :][: strip.high.size])
        for part, piece in pieces:
            self.read(part, piece)
            if part.array in self.hashes.pending:
                self._add_to_hash(part, piece)

    def _add_to_hash(self, part: Piece, piece: memoryview) -> None:
        """Add a piece to the hash of its array, and compare it at the last strip."""
        place = self.hashes.places[part.array]
        digest, end = self._sums.pop(part.array, (None, 0))
        if part.begin == place.begin:
            digest, end = hashlib.sha256(), place.begin
        in_order = digest is not None and end == part.begin
        if in_order:
            digest.update(piece)
            self._sums[part.array] = digest, part.end
        if part.end == place.end and in_order:
            self.hashes.confirm(part.array, self._sums.pop(part.array)[0].hexdigest(), RESTORE)
        elif part.end == place.end:  # a second thread read different strips in between
            self.hashes.verify([part.array], RESTORE)

    def _forget(self, file: int, begin: int, size: int) -> None:
        """Drop a file's bytes from the system's cache, unless it may keep them."""
        if not self.keeps_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, begin, size, os.POSIX_FADV_DONTNEED)

    def _opened(self, path: Path) -> int:
        """Return the descriptor of a file; it stays open."""
        with self._files_lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
                if not self.keeps_cache:
                    without_cache(self._files[path])
            return self._files[path]


def without_cache(file: int) -> None:
    """Disable a Mac's cache for a file. Other systems need a call after each read."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        if hasattr(fcntl, "F_NOCACHE"):
            fcntl.fcntl(file, fcntl.F_NOCACHE, 1)


def close(files: dict[Path, int]) -> None:
    for file in files.values():
        os.close(file)
