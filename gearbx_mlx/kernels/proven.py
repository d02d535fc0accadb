"""Proofs of Metal kernels on this machine: kernels that compiled, were correct, and were timed beside MLX's.

Unproven Metal kernels run only on request. `gearbx_mlx benchmark mac --own-kernels` proves kernels for the shapes of a
model and calls `keep`. Models only read `proof` and `won`, and measure no time. An entry applies to one chip, macOS,
MLX and source of the kernel: after a change of any of these, MLX's operations run until the kernel is proven again.

    {"machines": {"Apple M4 Pro, macOS 26.1, mlx 0.32.1": {"exact 1f0c...": {"product exact, group 64, ...": {...}}}}}
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
from .metal import source_text

LEAD = 1.05  # factor by which a kernel must be faster than MLX's

MATVEC_TEXT, EXACT_TEXT, DENSE_TEXT = TEXTS = "matvec", "exact", "dense"
FILES_OF_TEXT = {  # source files in metal/
    MATVEC_TEXT: ("matvec", "codes"),
    EXACT_TEXT: ("exact", "exact_weights", "codes", "loads"),
    DENSE_TEXT: ("dense", "loads"),
}

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Proof(msgspec.Struct, frozen=True):
    """Seconds of one correct launch, and of MLX's operations for the same matmul."""

    ours: Seconds
    mlx: Seconds

    @property
    def won(self) -> bool:
        return self.ours * LEAD < self.mlx  # seconds


Entries = dict[str, dict[str, Proof]]
"""Proofs by source and its hash, then by matmul."""


class ProvenFile(msgspec.Struct):
    """The file: proofs by machine."""

    machines: dict[str, Entries] = {}


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
        form: of `Kind`, such as "planes 4+4, group 64". shape: (O, I), or (E, O, I) of experts. dtype: of activations.
        vectors: number of vectors. candidate: of `Kind.candidates`.
    """
    sizes, many = " x ".join(map(str, shape)), "s" * (vectors > 1)
    return f"product {form}, {sizes}, {dtype_name(dtype)}, {vectors} vector{many}, {candidate}"


def decoder_key(group_size: int) -> str:
    """Return the name in the file for decoding weights of format exact, of any shape."""
    return f"decoding, group {group_size}"


def proof(text: str, key: str) -> Proof | None:
    """Return the proof of a kernel on this machine; None if it is unproven.

    Args:
        text: of TEXTS. key: of `product_key` or `decoder_key`.
    """
    return proofs_here().get(text_name(text), {}).get(key)


def won(text: str, key: str) -> bool:
    """Return whether a kernel was correct, and faster than MLX's operations, on this machine."""
    found = proof(text, key)
    return found is not None and found.won


def any_won() -> bool:
    """Return whether any kernel was proven faster than MLX's on this machine."""
    return any(each.won for name in map(text_name, TEXTS) for each in proofs_here().get(name, {}).values())


@functools.cache
def metal_machine() -> str:
    """Return a name for chip, macOS and MLX."""
    system = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.platform(terse=True)
    return f"{mx.device_info().get('device_name', platform.machine())}, {system}, mlx {version('mlx')}"


@functools.cache
def text_name(text: str) -> str:
    """Return the name of a source with 12 hexadecimal digits that change with its files and the code of its macros."""
    digest = hashlib.sha256()
    for part in FILES_OF_TEXT[text]:
        digest.update(source_text(part).encode() + b"\0")
    for path in sorted(Path(__file__).parent.glob("metal*.py")):
        digest.update(path.read_bytes() + b"\0")
    return f"{text} {digest.hexdigest()[:12]}"


def proofs_here() -> Entries:
    """Return the proofs of this machine."""
    return proofs_in(PROOFS.place())


@functools.cache
def proofs_in(place: Path | None) -> Entries:
    """Return the proofs of this machine in a file, and read each file once."""
    return PROOFS.read().machines.get(metal_machine(), {})


def keep(text: str, key: str, proof: Proof | None) -> None:
    """Keep the proof of a kernel that was correct here; None: delete it, since it does not compile or is wrong."""

    def write(content: ProvenFile) -> None:
        of_text = content.machines.get(metal_machine(), {}).get(text_name(text), {})
        of_text.pop(key, None)
        if proof is not None:
            of_text[key] = proof
        become_newest(content.machines, metal_machine(), {text_name(text): of_text})

    PROOFS.change(write)
    proofs_in.cache_clear()
