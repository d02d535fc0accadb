"""GGUF, the file format of llama.cpp: metadata, and tensors in blocks of quantized weights.

The header is read with bounds of our own: it may claim any number of tensors of any size. Weights are mapped and not
copied; a file that may only be read is enough.

Source: ggml's docs/gguf.md and the block structures in ggml-common.h.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import GearbxError
from .reading import shown, unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless general.alignment says otherwise
MOST_DIMENSIONS = 4
GROUP = 32  # weights that share a scale
CODED = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}  # bits of affine codes in such groups
AT_ONCE = 2**14  # blocks of a K-quant that are packed at a time: bits take a byte each
AGAIN = "download it again"

# Types of values in the metadata, by their number: format of `struct`. 7 is a bool, 8 a string, 9 an array.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Encoding:
    """How a tensor's weights are stored. block: weights of a block. size: its bytes. decode: blocks to float32."""

    name: str
    block: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray]


def halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a place in every block, (blocks, 1), in float32."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def nibbles(blocks: np.ndarray, start: int) -> np.ndarray:
    """32 codes of 4 bits of every block: the low halves of 16 bytes, then the high ones."""
    codes = blocks[:, start : start + 16]
    return np.concatenate([codes & 0xF, codes >> 4], axis=1).astype(np.float32)


def bfloat16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def parts_of_k(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The codes of Q4_K or Q5_K, (blocks, 8, 32) uint8, and a scale and bias for 32 of them, (blocks, 8) float32."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]  # of scales and smallest weights, 6 bits each
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    least = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=1)
    halved = blocks[:, -128:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([halved & 15, halved >> 4], axis=2).reshape(-1, 8, 32)
    if bits == 5:
        fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes = codes | fifth << 4
    return codes, halves(blocks, 0) * scales, -halves(blocks, 2) * least


def from_k(blocks: np.ndarray, bits: int) -> np.ndarray:
    codes, scales, biases = parts_of_k(blocks, bits)
    return scales[..., None] * codes + biases[..., None]


def from_q6_k(blocks: np.ndarray) -> np.ndarray:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8) * halves(blocks, 208)
    return scales[..., None] * codes


# By the number of ggml_type. A weight of a quantized block is its scale times its code; Q4_1 adds its smallest weight.
ENCODINGS = {
    0: Encoding("F32", 1, 4, lambda blocks: blocks.view(np.float32)),
    1: Encoding("F16", 1, 2, lambda blocks: blocks.view(np.float16).astype(np.float32)),
    2: Encoding("Q4_0", 32, 18, lambda blocks: halves(blocks, 0) * (nibbles(blocks, 2) - 8)),
    3: Encoding("Q4_1", 32, 20, lambda blocks: halves(blocks, 0) * nibbles(blocks, 4) + halves(blocks, 2)),
    8: Encoding("Q8_0", 32, 34, lambda blocks: halves(blocks, 0) * blocks[:, 2:].view(np.int8)),
    12: Encoding("Q4_K", 256, 144, lambda blocks: from_k(blocks, 4)),
    13: Encoding("Q5_K", 256, 176, lambda blocks: from_k(blocks, 5)),
    14: Encoding("Q6_K", 256, 210, from_q6_k),
    30: Encoding("BF16", 1, 2, bfloat16),
}
OTHER_TYPES = {  # of ggml, which are not read
    **{6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF. shape: as numpy has it, the rows first. place: of its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    place: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.encoding.block * self.encoding.size


class Gguf:
    """A GGUF file: `metadata` by key, and `tensors` by name.

    Raises:
        GearbxError: no such file, no GGUF, damaged or truncated, or a type of weights that is not read.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:  # an empty file cannot be mapped
            raise self._damaged("is empty") from error
        self._at = 0
        if self._take(4) != MAGIC:
            raise GearbxError(f"{path}: is not a GGUF file; give the file of a model for llama.cpp")
        version = self._number("I")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise GearbxError(
                    f"{path}: is a big-endian GGUF, and little-endian ones can be read; change it with "
                    "gguf-convert-endian (pip install gguf), or give a file that is little-endian"
                )
            raise GearbxError(
                f"{path}: is GGUF of version {version}, and versions 2 and 3 can be read; give a file that a newer "
                "llama.cpp wrote"
            )
        tensors, entries = self._count(), self._count()
        self.metadata: Mapping[str, Any] = dict(self._entry() for _ in range(entries))
        infos = [self._info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment}, not a power of two")
        start = -(-self._at // alignment) * alignment
        self.tensors: Mapping[str, GgufTensor] = {info[0]: self._tensor(*info, start) for info in infos}

    def weights(self, tensor: GgufTensor) -> np.ndarray:
        """The weights of a tensor in float32, of its shape."""
        return tensor.encoding.decode(self.blocks(tensor)).reshape(tensor.shape)

    def blocks(self, tensor: GgufTensor) -> np.ndarray:
        """The bytes of a tensor, (blocks, bytes of a block) uint8, which are mapped and not copied."""
        stored = np.frombuffer(self._bytes, np.uint8, tensor.nbytes, tensor.place)
        return stored.reshape(-1, tensor.encoding.size)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> GgufTensor:
        encoding = ENCODINGS.get(kind)
        if encoding is None:
            readable = ", ".join(each.name for each in ENCODINGS.values())
            found = OTHER_TYPES.get(kind, f"type {kind}")
            raise GearbxError(f"{self.path}: {shown(name)} has weights of {found}; give a file of {readable}")
        if shape and shape[-1] % encoding.block:
            raise self._damaged(
                f"{shown(name)} has rows of {shape[-1]} weights, and {encoding.name} needs blocks of {encoding.block}"
            )
        tensor = GgufTensor(name, shape, encoding, start + offset)
        if tensor.place + tensor.nbytes > len(self._bytes):
            raise self._damaged(f"{shown(name)} ends at byte {tensor.place + tensor.nbytes}, behind the file's end")
        return tensor

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """The name, shape, type and offset of a tensor."""
        name, count = self._text(), self._number("I")
        if count > MOST_DIMENSIONS:
            raise self._damaged(f"{shown(name)} has {count} dimensions")
        shape = tuple(self._number("Q") for _ in range(count))[::-1]  # ggml counts from the innermost
        return name, shape, self._number("I"), self._number("Q")

    def _entry(self) -> tuple[str, Any]:
        return self._text(), self._value(self._number("I"))

    def _value(self, kind: int, inside: bool = False) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY and not inside:
            element, count = self._number("I"), self._count()
            if element in NUMBERS:
                format = NUMBERS[element]
                return list(struct.unpack(f"<{count}{format}", self._take(count * struct.calcsize(format))))
            return [self._value(element, inside=True) for _ in range(count)]
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        raise self._damaged(f"a value of type {kind} at byte {self._at}")

    def _text(self) -> str:
        return self._take(self._count()).decode("utf-8", "replace")

    def _count(self) -> int:
        """A number of things that follow, of which each takes a byte at least."""
        count = self._number("Q")
        if count > len(self._bytes) - self._at:
            raise self._damaged(f"claims {count} things at byte {self._at}, more than the file can hold")
        return count

    def _number(self, format: str) -> Any:
        (value,) = struct.unpack(f"<{format}", self._take(struct.calcsize(f"<{format}")))
        return value

    def _take(self, size: int) -> bytes:
        if size > len(self._bytes) - self._at:
            raise self._damaged(f"ends at byte {len(self._bytes)}, in the middle of its header")
        self._at += size
        return self._bytes[self._at - size : self._at]

    def _damaged(self, what: str) -> GearbxError:
        return GearbxError(f"{self.path}: damaged or truncated ({what}); {AGAIN}")


class Codes(NamedTuple):
    """A matrix of affine codes as MLX packs them, in groups of 32.

    words: (..., I * bits / 32) uint32. scales, biases: (..., I / 32) float16.
    """

    bits: int
    words: np.ndarray
    scales: np.ndarray
    biases: np.ndarray


def codes_of(gguf: Gguf, tensor: GgufTensor) -> Codes | None:
    """The codes of a quantized matrix; None for other tensors, and for Q6_K, where 16 weights share a scale."""
    name = tensor.encoding.name
    if name not in CODED:
        return None
    blocks, bits = gguf.blocks(tensor), CODED[name]
    scales = blocks[:, :2].copy().view(np.float16)
    if name.endswith("_K"):
        parts = [packed_k(blocks[start : start + AT_ONCE], bits) for start in range(0, len(blocks), AT_ONCE)]
        packed, scales, biases = (np.concatenate(arrays) for arrays in zip(*parts))
    elif name == "Q8_0":
        packed, biases = blocks[:, 2:] ^ 0x80, scales * np.float16(-128)  # from signed to unsigned codes
    else:
        codes = blocks[:, -16:]
        codes = np.concatenate([codes & 0xF, codes >> 4], axis=1)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        biases = scales * np.float16(-8) if name == "Q4_0" else blocks[:, 2:4].copy().view(np.float16)
    groups = (*tensor.shape[:-1], tensor.shape[-1] // GROUP)
    words = np.ascontiguousarray(packed).view(np.uint32).reshape(*tensor.shape[:-1], -1)
    return Codes(bits, words, scales.reshape(groups), biases.reshape(groups))


def packed_k(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of Q4_K or Q5_K as a stream of bits, and their scales and biases in float16."""
    codes, scales, biases = parts_of_k(blocks, bits)
    stream = codes.reshape(len(blocks), -1, 1) >> np.arange(bits, dtype=np.uint8) & 1
    packed = np.packbits(stream.reshape(len(blocks), -1), axis=1, bitorder="little")
    return packed, scales.astype(np.float16), biases.astype(np.float16)
