"""The CPU kernels without MLX's graph: plain C functions, called with the memory of evaluated arrays.

For machines where the kernels compile and their bindings to MLX do not work. Every product waits for its activations,
which MLX would otherwise compute while the next operations are still being written down; the numbers are the same.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

MAX_PLANES = 8
SYMMETRIC_GROUPS, SYMMETRIC_ROWS = 1, 2  # kinds of stack
TYPES = {mx.float32: 0, mx.bfloat16: 1, mx.float16: 2}


class Stack(ctypes.Structure):
    """gearbx_stack of cpu/matvec.h."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group", ctypes.c_int),
        ("planes", ctypes.c_int),
        ("widths", ctypes.c_int * MAX_PLANES),
        ("weights", ctypes.c_void_p * MAX_PLANES),
        ("scales", ctypes.c_void_p),
        ("biases", ctypes.c_void_p * MAX_PLANES),
        ("scale_type", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("inputs", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("x_bits", ctypes.c_int),
    ]


class Dense(ctypes.Structure):
    """gearbx_dense of cpu/matvec.h."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("type", ctypes.c_int),
    ]


class Pairs(ctypes.Structure):
    """gearbx_pairs of cpu/products.h."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("experts", ctypes.c_int),
        ("vector", ctypes.c_void_p),
        ("expert", ctypes.c_void_p),
    ]


class Rotation(ctypes.Structure):
    """gearbx_rotation of cpu/between.h."""

    _fields_ = [
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("frequencies", ctypes.c_void_p),
        ("dims", ctypes.c_int),
        ("traditional", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("offset", ctypes.c_int64),
    ]


class Attention(ctypes.Structure):
    """gearbx_attention of cpu/attention.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "shared", "length", "keys", "width")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("query", "key", "value")),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int),
        ("mask", ctypes.c_void_p),
        ("mask_strides", ctypes.c_int64 * 4),
    ]


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def in_memory(arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """The memory of arrays, evaluated, row after row; not a copy of those that lie so already."""
    # numpy has no bfloat16: its bits travel as integers.
    views = [a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in arrays]
    mx.eval(views)
    return [np.ascontiguousarray(view) for view in views]


class Library:
    """The functions of the compiled extension, over the library of plain C at `file`."""

    def __init__(self, file: Path):
        self.__file__ = str(file)
        library = ctypes.CDLL(str(file))
        pointer = ctypes.c_void_p
        for name in ("stack", "dense"):
            getattr(library, f"gearbx_{name}_product").argtypes = [pointer, pointer, ctypes.c_int64, pointer]
            getattr(library, f"gearbx_{name}_experts").argtypes = [pointer] * 4
        shape = ctypes.c_int64, ctypes.c_int64
        library.gearbx_rms_norm.argtypes = [pointer, *shape, pointer, ctypes.c_int, ctypes.c_float, pointer]
        library.gearbx_rope.argtypes = [pointer] * 3
        library.gearbx_swiglu.argtypes = [pointer, pointer, ctypes.c_int64, pointer]
        library.gearbx_attend.argtypes = [pointer] * 5
        library.gearbx_read_sum.argtypes = [pointer, ctypes.c_int64]
        library.gearbx_entropy_bits.argtypes = [pointer, ctypes.c_int64, ctypes.c_int64, pointer]
        library.gearbx_read_sum.restype = ctypes.c_uint32
        self._library = library

    def threads(self) -> int:
        return self._library.gearbx_threads()

    def read_sum(self, words: mx.array) -> int:
        (memory,) = in_memory([words])
        return self._library.gearbx_read_sum(memory.ctypes.data, words.size)

    def entropy_bits(self, logprobs: mx.array) -> mx.array:
        require(logprobs.size > 0, "log-probabilities of at least one token")
        (rows,) = in_memory([logprobs.astype(mx.float32)])
        bits = np.empty(rows.shape[:-1], np.float32)
        self._library.gearbx_entropy_bits(rows.ctypes.data, bits.size, rows.shape[-1], bits.ctypes.data)
        return mx.array(bits)

    def rms_norm(self, x, weight, eps) -> mx.array:
        require(weight.ndim == 1, "the weight of a norm is a vector")
        require(weight.dtype in TYPES, "weights are float32, bfloat16 or float16")
        require(x.shape[-1] == weight.size and x.size > 0, "x and the weights differ in width")
        rows, held = in_memory([x.astype(mx.float32), weight])
        y = np.empty_like(rows)
        shape = rows.size // weight.size, weight.size
        self._library.gearbx_rms_norm(
            rows.ctypes.data, *shape, held.ctypes.data, TYPES[weight.dtype], eps, y.ctypes.data
        )
        return mx.array(y)

    def rope(self, x, frequencies, traditional, scale, offset) -> mx.array:
        require(frequencies.ndim == 1 and frequencies.dtype == mx.float32, "frequencies are a vector of float32")
        require(x.ndim == 4 and x.size > 0, "x is (batch, heads, length, width), and not empty")
        require(2 * frequencies.size <= x.shape[3], "two numbers of x or more for each frequency")
        rows, held = in_memory([x.astype(mx.float32), frequencies])
        four = ctypes.c_int64 * 4
        shape, strides = four(*rows.shape), four(*(stride // 4 for stride in rows.strides))
        rotation = Rotation(shape, strides, held.ctypes.data, 2 * frequencies.size, traditional, scale, offset)
        y = np.empty_like(rows)
        self._library.gearbx_rope(ctypes.addressof(rotation), rows.ctypes.data, y.ctypes.data)
        return mx.array(y)

    def swiglu(self, gate, up) -> mx.array:
        require(gate.shape == up.shape and gate.size > 0, "gate and up of one shape, and not empty")
        first, second = in_memory([gate.astype(mx.float32), up.astype(mx.float32)])
        y = np.empty_like(first)
        self._library.gearbx_swiglu(first.ctypes.data, second.ctypes.data, y.size, y.ctypes.data)
        return mx.array(y)

    def attention(self, queries, keys, values, scale, causal, mask=None) -> mx.array:
        arrays = queries, keys, values
        require(
            all(a.ndim == 4 and a.size > 0 and a.dtype == mx.float32 for a in arrays),
            "float32 (batch, heads, positions, width)",
        )
        batch, heads, length, width = queries.shape
        together = keys.shape == values.shape and keys.shape[0] == batch and keys.shape[3] == width
        require(together, "queries, keys and values that go together")
        require(heads % keys.shape[1] == 0, "a whole number of query heads for each head of keys")
        require(not causal or keys.shape[2] >= length, "as many keys as queries, or more")
        memory = in_memory(arrays)
        strides = [(ctypes.c_int64 * 3)(*(stride // 4 for stride in rows.strides[:3])) for rows in memory]
        shape = batch, heads, heads // keys.shape[1], length, keys.shape[2], width
        form = Attention(*shape, *strides, scale, causal)
        if mask is not None:
            require(mask.dtype == mx.bool_, "a mask of true and false")
            seen = np.broadcast_to(np.array(mask), (batch, heads, length, keys.shape[2]))
            form.mask, form.mask_strides = seen.ctypes.data, (ctypes.c_int64 * 4)(*seen.strides)
        y = np.empty(queries.shape, np.float32)
        self._library.gearbx_attend(ctypes.addressof(form), *(rows.ctypes.data for rows in memory), y.ctypes.data)
        return mx.array(y)

    def stack_matvec(self, x, weights, scales, biases, widths, group, x_bits=0) -> mx.array:
        matrix, x, held = self._stack(x, weights, scales, biases, widths, group, x_bits, 2)
        return self._product("stack", matrix, x, held)

    def symmetric_matvec(self, x, weight, scales, bits, x_bits=0) -> mx.array:
        width = x.shape[-1]
        require(x_bits in (0, 8, 16), "activations of 8 or 16 bits, or as they are (0)")
        require(bits in (2, 4, 6, 8), "symmetric codes of 2, 4, 6 or 8 bits")
        signed = mx.int8 if bits == 8 else mx.uint8
        require(weight.dtype == signed and weight.ndim == 2, "rows of bytes, with a sign where a code is one")
        require(x.size > 0, "one vector or more")
        require(-(-width * bits // 8) <= weight.shape[1], "x is wider than the weights")
        require(scales.dtype in TYPES, "scales are float32, bfloat16 or float16")
        by_row = scales.ndim == 1
        shape = (len(weight),) if by_row else (len(weight), -(-width // 32))
        require(scales.shape == shape, "a scale for each row, or for each 32 of its inputs")
        group = 64 if by_row else 32
        memory, *held = in_memory([x.astype(mx.float32), weight, scales])
        matrix = Stack(len(weight), -(-width // group) * group, group, planes=1, inputs=width, x_bits=x_bits)
        matrix.kind = SYMMETRIC_ROWS if by_row else SYMMETRIC_GROUPS
        matrix.widths[0], matrix.weights[0], matrix.row_bytes = bits, held[0].ctypes.data, weight.shape[1]
        matrix.scales, matrix.scale_type = held[1].ctypes.data, TYPES[scales.dtype]
        return self._product("stack", matrix, memory, held)

    def dense_matvec(self, x, weight) -> mx.array:
        matrix, x, held = self._dense(x, weight, 2)
        return self._product("dense", matrix, x, held)

    def stack_experts(self, x, weights, scales, biases, widths, group, indices, x_bits=0) -> mx.array:
        matrix, x, held = self._stack(x, weights, scales, biases, widths, group, x_bits, 3)
        return self._experts("stack", matrix, x, held, scales.shape[0], indices)

    def dense_experts(self, x, weight, indices) -> mx.array:
        matrix, x, held = self._dense(x, weight, 3)
        return self._experts("dense", matrix, x, held, weight.shape[0], indices)

    def _stack(self, x, weights, scales, biases, widths, group, x_bits, dimensions) -> tuple[Stack, np.ndarray, list]:
        """The matrix as C has it, the activations, and the memory that must live as long."""
        planes = len(widths)
        require(1 <= planes <= MAX_PLANES and len(weights) == len(biases) == planes, "1 to 8 planes, each with arrays")
        require(x_bits in (0, 8, 16), "activations of 8 or 16 bits, or as they are (0)")
        require(group in (32, 64, 128), "groups of 32, 64 or 128")
        require(scales.ndim == dimensions, "scales of a matrix, or one for each expert")
        require(all(w in (1, 2, 3, 4, 5, 6, 8) for w in widths) and sum(widths) <= 8, "planes of 8 bits together")
        columns = scales.shape[-1] * group
        for words, width in zip(weights, widths):
            shape = (*scales.shape[:-1], columns // 32 * width)
            require(words.dtype == mx.uint32 and words.shape == shape, "packed weights that do not go with the scales")
        require(scales.dtype in TYPES, "scales are float32, bfloat16 or float16")
        require(
            all(b.dtype == scales.dtype and b.shape == scales.shape for b in biases),
            "biases that do not go with the scales",
        )
        require(x.shape[-1] == columns and x.size > 0, "x and the weights differ in width")
        memory, *held = in_memory([x.astype(mx.float32), *weights, scales, *biases])
        at = [array.ctypes.data for array in held]
        pointers = ctypes.c_void_p * MAX_PLANES
        matrix = Stack(
            scales.shape[-2],
            columns,
            group,
            planes,
            (ctypes.c_int * MAX_PLANES)(*widths),
            pointers(*at[:planes]),
            at[planes],
            pointers(*at[planes + 1 :]),
            TYPES[scales.dtype],
            x_bits=x_bits,
        )
        return matrix, memory, held

    def _dense(self, x, weight, dimensions) -> tuple[Dense, np.ndarray, list]:
        require(weight.ndim == dimensions, "weights are a matrix, or one for each expert")
        require(weight.dtype in TYPES, "weights are float32, bfloat16 or float16")
        require(x.shape[-1] == weight.shape[-1] and x.size > 0, "x and the weights differ in width")
        memory, *held = in_memory([x.astype(mx.float32), weight])
        return Dense(weight.shape[-2], weight.shape[-1], held[0].ctypes.data, TYPES[weight.dtype]), memory, held

    def _product(self, kind: str, matrix: Stack | Dense, x: np.ndarray, held: list) -> mx.array:
        y = np.empty((*x.shape[:-1], matrix.rows), np.float32)
        multiply = getattr(self._library, f"gearbx_{kind}_product")
        multiply(ctypes.addressof(matrix), x.ctypes.data, x.size // x.shape[-1], y.ctypes.data)
        return mx.array(y)

    def _experts(
        self, kind: str, matrix: Stack | Dense, x: np.ndarray, held: list, experts: int, indices: mx.array
    ) -> mx.array:
        require(x.ndim >= 2 and x.shape[-2] == 1, "one vector for each index: x of shape (..., 1, I)")
        require(mx.issubdtype(indices.dtype, mx.integer) and indices.size > 0, "indices are whole numbers")
        own = x.shape[:-2]
        vectors = np.arange(x.size // x.shape[-1], dtype=np.int32).reshape(own)
        vectors, chosen = map(np.ascontiguousarray, np.broadcast_arrays(vectors, np.array(indices.astype(mx.int32))))
        y = np.empty((*chosen.shape, 1, matrix.rows), np.float32)
        pairs = Pairs(chosen.size, experts, vectors.ctypes.data, chosen.ctypes.data)
        multiply = getattr(self._library, f"gearbx_{kind}_experts")
        multiply(ctypes.addressof(matrix), ctypes.addressof(pairs), x.ctypes.data, y.ctypes.data)
        return mx.array(y)
