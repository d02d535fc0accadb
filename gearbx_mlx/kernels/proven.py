"""Proofs of Metal kernels on this machine: kernels that compiled, were correct, and were timed beside MLX's.

Unproven Metal kernels run only on request. `gearbx_mlx benchmark mac --own-kernels` proves kernels for the shapes of a
model and calls `keep`. Models only read `proof` and `won`, and measure no time. An entry applies to one chip, macOS,
MLX and source of the kernels: after a change of any of these, MLX's operations run until kernels are proven again.

    {"machines": {"Apple M4 Pro, macOS 26.1, mlx 0.32.1, kernels 1f0c...": {"product exact, group 64, ...": {...}}}}
"""

import functools
import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import msgspec

from ..compat.arrays import dtype_name
from ..files.measured_file import MeasuredFile, become_newest
from .compiler import SOURCES
from .metal import metal_folder

LEAD = 1.05  # factor by which a kernel must be faster than MLX's

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Proof(msgspec.Struct, frozen=True):
    """Seconds of one correct launch, and of MLX's operations for the same matmul."""

    ours: Seconds
    mlx: Seconds

    @property
    def won(self) -> bool:
        return self.ours * LEAD < self.mlx  # seconds


class ProvenFile(msgspec.Struct):
    """The file: proofs by machine and matmul."""

    machines: dict[str, dict[str, Proof]] = {}


PROOFS = MeasuredFile(
    "proven.json",
    ProvenFile,
    "proofs of kernels",
    "run gearbx_mlx benchmark mac --own-kernels again",
    "MLX's kernels stay in use",
)


def product_key(form: str, shape: Sequence[int], dtype: mx.Dtype, vectors: int, candidate: str) -> str:
    """Return the name of a matmul in the file.

    Args:
        form: of `MatmulKind`, such as "planes 4+4, group 64". shape: (O, I), or (E, O, I) of experts.
        dtype: of activations. vectors: number of vectors. candidate: of `MatmulKind.candidates`.
    """
    sizes, many = " x ".join(map(str, shape)), "s" * (vectors > 1)
    return f"product {form}, {sizes}, {dtype_name(dtype)}, {vectors} vector{many}, {candidate}"


def decoder_key(group_size: int) -> str:
    """Return the name in the file for decoding weights of format exact, of any shape."""
    return f"decoding, group {group_size}"


def proof(key: str) -> Proof | None:
    """Return the proof of a kernel on this machine, by `product_key` or `decoder_key`; None if it is unproven."""
    return proofs_here().get(key)


def won(key: str) -> bool:
    """Return whether a kernel was correct, and faster than MLX's operations, on this machine."""
    found = proof(key)
    return found is not None and found.won


def any_won() -> bool:
    """Return whether any kernel was proven faster than MLX's on this machine."""
    return any(each.won for each in proofs_here().values())


@functools.cache
def metal_machine() -> str:
    """Return a name for chip, macOS, MLX and the source of the kernels."""
    system = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.platform(terse=True)
    device = mx.device_info().get("device_name", platform.machine())
    return f"{device}, {system}, mlx {version('mlx')}, kernels {kernels_hash()}"


@functools.cache
def kernels_hash() -> str:
    """Return 8 hexadecimal digits that change with the source of the native kernels, and of their macros on Metal."""
    digest = hashlib.sha256()
    macros = Path(__file__).parent.glob("metal*.py")
    for path in sorted((*SOURCES.iterdir(), *metal_folder().iterdir(), *macros), key=lambda path: path.name):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def proofs_here() -> dict[str, Proof]:
    """Return the proofs of this machine."""
    return proofs_in(PROOFS.place())


@functools.cache
def proofs_in(place: Path | None) -> dict[str, Proof]:
    """Return the proofs of this machine in a file, and read each file once."""
    return PROOFS.read().machines.get(metal_machine(), {})


def keep(key: str, proof: Proof | None) -> None:
    """Keep the proof of a kernel that was correct here; None: delete it, since it does not compile or is wrong."""

    def write(content: ProvenFile) -> None:
        content.machines.get(metal_machine(), {}).pop(key, None)
        become_newest(content.machines, metal_machine(), {} if proof is None else {key: proof})

    PROOFS.change(write)
    proofs_in.cache_clear()
