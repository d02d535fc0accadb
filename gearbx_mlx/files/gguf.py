"""GGUF, the file format of llama.cpp: metadata, and tensors in blocks of quantized weights.

The package gguf decodes the blocks of each type. The header is parsed here and bounded: it may claim any number of
tensors of any size, and the package's reader makes an object of every number in it. Headers are read and not mapped,
since a process that reads a mapped file is killed if another process truncates it.

Source: ggml's docs/gguf.md and the block structures in ggml-common.h.
"""

import functools
import itertools
import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ..errors import GearbxError
from .model_directory import REFETCH
from .reading import shown, unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_THINGS, MAX_ITEMS = 2**16, 2**22  # tensors or entries; items of all lists, all in memory

# Types of values in the metadata, by their number. 8 is a string, 9 an array.
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9


@functools.cache
def is_known(kind: GGMLQuantizationType) -> bool:
    """Return whether the package decodes weights of a type."""
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file. shape: in numpy's order, rows first. place: its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    place: int

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size


class GgufFile:
    """An open GGUF file, for the blocks of tensors whose places are known.

    Raises:
        GearbxError: a file that cannot be read, or is shorter than its tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - open as long as this object exists
            weakref.finalize(self, self._file.close)
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise unreadable(path, error) from error

    def fileno(self) -> int:
        """Return the number that the system has for the file."""
        return self._file.fileno()

    def weights(self, tensor: GgufTensor) -> np.ndarray:
        """Return the weights of a tensor in float32, of its shape."""
        rows = self.blocks(tensor).reshape(math.prod(tensor.shape[:-1]), -1)
        return dequantize(rows, tensor.kind).reshape(tensor.shape)

    def blocks(self, tensor: GgufTensor) -> np.ndarray:
        """Return the bytes of a tensor, (blocks, bytes of a block) uint8."""
        return self._read("u1", tensor.nbytes, tensor.place).reshape(-1, GGML_QUANT_SIZES[tensor.kind][1])

    def _read(self, format: str, count: int, start: int) -> np.ndarray:
        """Return `count` numbers from byte `start` on."""
        numbers = np.empty(count, format)
        try:
            self._file.seek(start)
            size = self._file.readinto(numbers.view("u1").data)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if size < numbers.nbytes:
            raise self.damaged(f"ends at byte {start + size}, earlier than when it was opened")
        return numbers

    def damaged(self, problem: str) -> GearbxError:
        """Return the error for a file that is not whole."""
        return GearbxError(f"{self.path}: damaged or truncated ({problem}); {REFETCH}")


class Gguf(GgufFile):
    """A GGUF file: `metadata` by key, with arrays of numbers as numpy's, and `tensors` by name.

    Raises:
        GearbxError: no such file, no GGUF, damaged or truncated, or an unknown type of weights.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        if not self._size:
            raise self.damaged("is empty")
        self._at = self._items = 0
        if self._numbers("u1", len(MAGIC)).tobytes() != MAGIC:
            raise GearbxError(f"{path}: is not a GGUF file; use the file of a model for llama.cpp")
        self._check_version(self._number("<u4"))
        tensors, entries = self._count(MAX_THINGS), self._count(MAX_THINGS)
        self.metadata: Mapping[str, Any] = self._unique((self._text(), self._value()) for _ in range(entries))
        infos = [self._info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment is {alignment}, not a power of two")
        start = -(-self._at // alignment) * alignment
        self.tensors: Mapping[str, GgufTensor] = self._unique(
            (info[0], self._tensor(*info, start, alignment)) for info in infos
        )
        ordered = sorted(self.tensors.values(), key=lambda tensor: tensor.place)
        for one, other in itertools.pairwise(ordered):  # else a small file could become any number of weights
            if one.place + one.nbytes > other.place:
                raise self.damaged(f"{shown(one.name)} and {shown(other.name)} overlap")

    def _check_version(self, version: int) -> None:
        if version in VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise GearbxError(
                f"{self.path}: is a big-endian GGUF, and only little-endian ones can be read; use "
                "gguf-convert-endian of the package gguf, or a little-endian file"
            )
        raise GearbxError(
            f"{self.path}: is GGUF of version {version}, and versions 2 and 3 can be read; use a file by a newer "
            "llama.cpp"
        )

    def _tensor(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, start: int, alignment: int
    ) -> GgufTensor:
        """Return a tensor after validating its type, its shape and its place in the file."""
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            kind = None
        if kind is None or not is_known(kind):
            known = ", ".join(each.name for each in GGMLQuantizationType if is_known(each))
            found = f"type {number}" if kind is None else kind.name
            raise GearbxError(f"{self.path}: {shown(name)} has weights of {found}; use a file of {known}")
        tensor, block = GgufTensor(name, shape, kind, start + offset), GGML_QUANT_SIZES[kind][0]
        if not shape or min(shape) < 1:
            raise self.damaged(f"{shown(name)} has the shape {shape}")
        if shape[-1] % block:
            raise self.damaged(
                f"{shown(name)} has rows of {shape[-1]} weights, and {kind.name} needs blocks of {block}"
            )
        if offset % alignment:
            raise self.damaged(f"{shown(name)} is at byte {offset}, not a multiple of {alignment}")
        if tensor.place + tensor.nbytes > self._size:
            raise self.damaged(f"{shown(name)} ends at byte {tensor.place + tensor.nbytes}, behind the file's end")
        return tensor

    def _unique(self, pairs: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise self.damaged(f"has {shown(name)} twice")
            found[name] = value
        return found

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the name, shape, type and offset of a tensor."""
        name, count = self._text(), self._number("<u4")
        if count > 4:
            raise self.damaged(f"{shown(name)} has {count} dimensions")
        shape = tuple(self._number("<u8") for _ in range(count))[::-1]  # ggml counts from the innermost
        return name, shape, self._number("<u4"), self._number("<u8")

    def _value(self) -> Any:
        kind = self._number("<u4")
        if kind == STRING:
            return self._text()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        element = self._number("<u4") if kind == ARRAY else kind
        if kind == ARRAY and (element == STRING or element in SCALARS):
            count = self._count(MAX_ITEMS - self._items)
            self._items += count
            if element == STRING:
                return [self._text() for _ in range(count)]
            return self._numbers(SCALARS[element], count)
        raise self.damaged(f"{'an array' if kind == ARRAY else 'a value'} of type {element} at byte {self._at}")

    def _text(self) -> str:
        return self._numbers("u1", self._count()).tobytes().decode("utf-8", "replace")

    def _count(self, most: int | None = None) -> int:
        """Read the number of items that follow; each takes at least one byte."""
        count, room = self._number("<u8"), self._size - self._at
        if count > room or (most is not None and count > most):
            more = "more than the file can hold" if count > room else f"more than {most}"
            raise self.damaged(f"claims {count} things at byte {self._at}, {more}")
        return count

    def _number(self, format: str) -> Any:
        return self._numbers(format, 1)[0].item()

    def _numbers(self, format: str, count: int) -> np.ndarray:
        """Read numbers of the header."""
        start, size = self._at, count * np.dtype(format).itemsize
        if size > self._size - start:
            raise self.damaged(f"ends at byte {self._size}, in the middle of its header")
        self._at += size
        return self._read(format, count, start)


# Affine codes

GGUF_GROUP = 32  # weights that share a scale
CODED = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}  # bits of codes in such groups
BLOCKS_AT_ONCE = 2**12  # blocks packed at a time, few enough for a cache


def affine_codes(gguf: GgufFile, tensor: GgufTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return the codes of a matrix as MLX packs them; None for types without codes in groups of 32, such as Q6_K.

    The arrays are words (..., I * bits / 32) uint32, and scales and biases (..., I / 32) float16.
    """
    if tensor.kind.name not in CODED:
        return None
    blocks = gguf.blocks(tensor)
    parts = [
        packed(blocks[start : start + BLOCKS_AT_ONCE], tensor.kind.name)
        for start in range(0, len(blocks), BLOCKS_AT_ONCE)
    ]
    words, scales, biases = (np.concatenate(arrays) for arrays in zip(*parts))
    groups = (*tensor.shape[:-1], tensor.shape[-1] // GGUF_GROUP)
    return words.reshape(*tensor.shape[:-1], -1), scales.reshape(groups), biases.reshape(groups)


def packed(blocks: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack the codes of blocks into words, and return these with the scales and biases in float16."""
    bits, k_quant = CODED[name], name.endswith("_K")
    codes, scales, biases = parts_of_k(blocks, bits) if k_quant else parts_of_32(blocks, bits, name.endswith("_1"))
    eights = codes.reshape(-1, 8).view("<u8")
    for width in (1, 2, 4):  # pairs of 1, 2 and 4 codes move next to each other
        lowest = sum((1 << width * bits) - 1 << at for at in range(0, 64, 16 * width))
        above = eights >> np.uint64(width * (8 - bits)) & np.uint64(lowest << width * bits)
        eights = eights & np.uint64(lowest) | above
    stream = np.ascontiguousarray(eights.view(np.uint8).reshape(-1, 8)[:, :bits])
    return stream.reshape(-1).view(np.uint32), scales.astype(np.float16), biases.astype(np.float16)


def halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 at a place in every block, (blocks, 1), in float32."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def parts_of_32(blocks: np.ndarray, bits: int, with_least: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes of blocks of 32 weights, (blocks, 32) uint8, and a scale and bias of each, (blocks, 1).

    Args:
        with_least: whether a block stores its smallest weight; if not, its codes are signed.
    """
    scales = halves(blocks, 0)
    biases = halves(blocks, 2) if with_least else -(2.0 ** (bits - 1)) * scales
    if bits == 8:
        return blocks[:, 2:] ^ 0x80, scales, biases
    low = blocks[:, -16:]
    codes = np.concatenate([low & 15, low >> 4], axis=1)
    if bits == 5:
        codes |= np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little") << 4
    return codes, scales, biases


def parts_of_k(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes of Q4_K or Q5_K, (blocks, 8, 32) uint8, and a scale and bias of 32 of them, (blocks, 8)."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]  # scales and smallest weights, 6 bits each
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    least = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=1)
    halved = blocks[:, -128:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([halved & 15, halved >> 4], axis=2).reshape(-1, 8, 32)
    if bits == 5:
        fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes = codes | fifth << 4
    return codes, halves(blocks, 0) * scales, -halves(blocks, 2) * least
