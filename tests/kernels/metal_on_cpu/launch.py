"""Runs a compiled kernel, and reports what it did to memory."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .compiler import library
from .text import generated_text, parameters

GUARD = 1 << 16  # accesses this far outside a buffer are seen as such
FILL = 0xFF  # outputs start as NaN: MLX does not clear them
ALIGNMENT = 64


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("output", ctypes.c_int32),
        ("reads", ctypes.c_void_p),
        ("writes", ctypes.c_void_p),
    ]


class _Job(ctypes.Structure):
    _fields_ = [
        ("threads", ctypes.c_uint32),
        ("group_size", ctypes.c_uint32),
        ("order", ctypes.c_int32),
        ("schedule", ctypes.c_int32),
        ("buffer_count", ctypes.c_int32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("guard", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("simd_operations", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("errors", ctypes.c_int32),
        ("message", ctypes.c_char * 512),
    ]


@dataclass
class Report:
    """The effects of a launch.

    error: the first fault, or "". out: per output, float64 or integers. reads, writes: per buffer name, how often each
    byte was read or written. threadgroup_bytes: of one threadgroup.
    """

    error: str
    out: list[np.ndarray]
    reads: dict[str, np.ndarray]
    writes: dict[str, np.ndarray]
    barriers: int
    simd_operations: int
    threadgroup_bytes: int


def _as_it_lies(array: mx.array) -> np.ndarray:
    """An array as it lies in memory, with its strides; bfloat16, which numpy lacks, is uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _content(value: Any) -> np.ndarray:
    """Return the bytes of an array or a number."""
    if not isinstance(value, mx.array):
        return np.array(value, np.float32 if isinstance(value, float) else np.int32)
    return np.ascontiguousarray(_as_it_lies(value))


def _from_bytes(raw: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    """An output's values, in float64 if floating."""
    if dtype == mx.bfloat16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(shape)
    values = raw.view(np.dtype(str(dtype).removeprefix("mlx.core."))).reshape(shape)
    return values.astype(np.float64) if mx.issubdtype(dtype, mx.floating) else values


class _Memory:
    """A buffer between guards, with counters for each byte."""

    def __init__(self, size: int, content: np.ndarray | None):
        self.raw = np.empty(size + 2 * GUARD + ALIGNMENT, np.uint8)
        self.offset = GUARD + (-(self.raw.ctypes.data + GUARD)) % ALIGNMENT
        self.bytes = self.raw[self.offset : self.offset + size]
        self.bytes[:] = FILL if content is None else np.frombuffer(content.tobytes(), np.uint8)
        self.output = content is None
        self.reads = np.zeros(size, np.uint32)
        self.writes = np.zeros(size, np.uint32)

    def described(self) -> _Buffer:
        address = self.raw.ctypes.data + self.offset
        return _Buffer(address, self.bytes.size, self.output, self.reads.ctypes.data, self.writes.ctypes.data)


def run_text(
    text: str,
    inputs: dict[str, Any],
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
    grid: int,
    threadgroup: int,
    order: int = 0,
    schedule: int = 0,
    compiled: Path | None = None,
) -> Report:
    """Runs a kernel's text.

    Args:
        inputs: arrays and whole numbers, by name. outputs: shape and type, by name.
        grid: threads in all. threadgroup: threads of one; the last one may be partial, as with Metal.
        order: of reductions, 0 to 2. schedule: any number; it sets the order of threads between barriers.
        compiled: the text's library, if it is not the one of `compiler.library`.
    """

    def memory(name: str) -> _Memory:
        if name in outputs:
            shape, dtype = outputs[name]
            return _Memory(int(np.prod(shape)) * dtype.size, None)
        content = _content(inputs[name])
        return _Memory(content.nbytes, content)

    names = [p.name for p in parameters(text) if p.is_buffer]
    memories = {name: memory(name) for name in names}
    buffers = (_Buffer * len(names))(*(m.described() for m in memories.values()))
    pointers = (ctypes.c_void_p * len(names))(*(b.data for b in buffers))
    job = _Job(grid, threadgroup, order, schedule, len(names), buffers, GUARD)
    ctypes.CDLL(str(compiled or library(text))).run(ctypes.byref(job), pointers)
    return Report(
        error=job.message.decode(),
        out=[_from_bytes(memories[name].bytes.copy(), *outputs[name]) for name in outputs],
        reads={name: m.reads for name, m in memories.items()},
        writes={name: m.writes for name, m in memories.items()},
        barriers=job.barriers,
        simd_operations=job.simd_operations,
        threadgroup_bytes=job.threadgroup_bytes,
    )


def run_call(
    kernel: Any,
    input_names: list[str],
    inputs: list[Any],
    options: dict[str, Any],
    order: int = 0,
    schedule: int = 0,
    change: Any = None,
) -> Report:
    """Runs what a call of an `mx.fast.metal_kernel` with one output named `out` would run.

    Args:
        options: the keyword arguments of the call. change: a function of the text, for tests that break it.
    """
    text = generated_text(kernel, inputs, options)
    outputs = {"out": (options["output_shapes"][0], options["output_dtypes"][0])}
    assert options["grid"][1:] == options["threadgroup"][1:] == (1, 1)
    named = dict(zip(input_names, inputs))
    return run_text(
        change(text) if change else text, named, outputs, options["grid"][0], options["threadgroup"][0], order, schedule
    )
