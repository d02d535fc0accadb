"""Run every operation on a kernel.

| operation                                          | kernel, where `choose` allows native ones and there are some |
| ---                                                | ---                                                          |
| product of 1 to 16 vectors                         | native                                                       |
| product of more vectors (prefill, a batch), Linux  | native, 16 vectors at a time, or 512 rounded ones            |
| product of more vectors, macOS                     | MLX's, which use Accelerate or the GPU's matrix units        |
| mixture of experts, CPU                            | as a product of as many vectors                              |
| mixture of experts, packed but not exact, Metal    | as a product, for up to 256 pairs of a vector and an expert  |
| attention, rotary positions, norm, SwiGLU, GeGLU, CPU | native                                                    |
| a whole transformer block of a known form, CPU     | native                                                       |

Everything else runs on MLX's kernels. A native product reads packed weights, or dense weights of two bytes, once for 16
vectors (512 if they are rounded), and accumulates in float32; a vector's or query's result has the same bits whichever
others are in the call. On Metal that is true of MLX's norm, SwiGLU and experts too (metal/README.md). MLX's wheels for
Linux have the reference BLAS and scalar quantized products, which take 25 to 40 times as long for many vectors
(docs/performance.md).

`choose` decides once for a model whether native kernels are used at all: unasked on a CPU, and on Metal where some were
proven on that machine (`proven.py`). Among those that compute a linear layer's product (`Kind.candidates`), what was
measured on this machine decides (`tuner.py`), for each kind of layer and number of vectors; on Metal unasked what was
proven. All of ours give a result the same bits; MLX's, and a product with reconstructed weights, differ from them in
the last. For other operations the number of vectors decides at each call (experts: `products.py`). Experts are measured
on Metal alone, once for any number of vectors.
"""

import os
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from . import ACTIVATIONS, MEASURE, cpu, metal, proven
from .compiler import vector_instructions
from .proven import product_key

MLX, RECONSTRUCT, NATIVE = "mlx", "reconstruct", "native"
STOCK = (MLX, RECONSTRUCT)  # what is not ours
MIN_WEIGHTS = 2**18  # weights: of fewer, a launch takes longer than the product

CPU, METAL, GPU = "cpu", "metal", "gpu"  # GPU: one that is not Apple's

OPERATIONS = NORMS, GATES, POSITIONS, FUSED_ATTENTION, WHOLE_BLOCKS = (
    "norms",
    "gates",
    "positions",
    "attention",
    "whole blocks",
)

NATIVE_VECTORS = 16  # vectors for which native CPU kernels read the weights once
MAX_NATIVE_VECTORS = NATIVE_VECTORS if sys.platform == "darwin" else None
TILES = {1: ", by matrix tiles (AMX)", 0: "", -1: "; the system refuses matrix tiles (AMX)"}  # by the kernels' `tiles`
UNPROVEN = "none of ours was proven faster on this Mac; gearbx_mlx benchmark mac --own-kernels tries them"
BFLOAT16_BITS = 8  # of a significand, with the first one, which is not stored


@dataclass(frozen=True)
class KernelChoice:
    """Whether a model uses native kernels, and the reason in a few words.

    native: whether linear layers may run on our kernels, or on the fastest of several, as `ours_alone` says.
    x_bits: bits to which CPU kernels round activations, beside weights of bfloat16 to that type; 0: they do not.
    ours_alone: whether MLX's kernels are used only where we have no kernel.
    again: whether everything is measured once more.
    """

    native: bool
    reason: str
    x_bits: int = 0
    ours_alone: bool = False
    again: bool = False

    def why(self, rounds: bool) -> str:
        """Return the reason for a layer. rounds: whether the activations that its packed weights meet may be
        rounded."""
        how = f"; packed weights by activations of {self.x_bits} bits" if self.x_bits and rounds else ""
        return self.reason + how


def choose(kernels: str, activations: str = "int16") -> KernelChoice:
    """Choose native kernels or MLX's for a model on this machine; compiles the CPU kernels if they are needed.

    Args:
        kernels: one of KERNELS. activations: one of ACTIVATIONS.
    """
    if kernels == "mlx":
        return KernelChoice(False, "as asked")
    how = {"ours_alone": kernels == "native", "again": kernels == MEASURE}
    fastest = "the fastest as measured here" if is_tuning() else "those that should be fastest"
    on = device()
    if kernels == "auto" and on != CPU and not (on == METAL and proven.any_won()):
        return KernelChoice(False, UNPROVEN if on == METAL else "they are the ones for this GPU")
    if on == METAL:
        which = {"native": "ours", "auto": "ours where they were proven faster here"}.get(kernels, fastest)
        return KernelChoice(True, f"Metal: {which}, up to {metal.MAX_VECTORS} vectors; MLX beyond", **how)
    if on == GPU and kernels != "native":
        return KernelChoice(True, f"MLX's kernels: {fastest}", **how)
    if on == GPU:
        return KernelChoice(False, "native kernels are for the CPU and for Metal, and MLX computes on another GPU")
    reason = cpu.why_not()
    if reason is not None:
        return KernelChoice(False, reason)
    how_many = (
        f"{NATIVE_VECTORS} vectors at a time"
        if MAX_NATIVE_VECTORS is None
        else f"up to {MAX_NATIVE_VECTORS} vectors, MLX beyond"
    )
    compiled = cpu.native()
    tiles = TILES[compiled.tiles()] if compiled is not None else ""
    return KernelChoice(True, how_many + tiles, ACTIVATIONS[activations], **how)


def device() -> str:
    """Return what MLX computes on."""
    if metal.available():
        return METAL
    return CPU if mx.default_device().type == mx.DeviceType.cpu else GPU


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU. If it does not, CPU kernels are not used."""
    return mx.default_device().type == mx.DeviceType.cpu


def is_metal(x: mx.array) -> bool:
    """Return whether a Metal kernel takes activations (..., I), in a model for which `choose` allows native kernels."""
    return metal.available() and metal.takes(x, x.shape[-1])


def cpu_kernels(vectors: int) -> ModuleType | None:
    """Return the native CPU kernels, if they take this number of vectors; else None."""
    fits = vectors > 0 and (MAX_NATIVE_VECTORS is None or vectors <= MAX_NATIVE_VECTORS)
    return cpu.native() if fits and on_cpu() else None


def native_instructions() -> str:
    """Name the instructions of native CPU kernels: AMX where they multiply by matrix tiles, else those for vectors."""
    kernels = cpu_kernels(1)
    return "AMX" if kernels is not None and kernels.tiles() > 0 else vector_instructions()


def bits_beside_bfloat16() -> int:
    """Return the bits of activations that CPU kernels keep beside weights of bfloat16: its own, or 0 where they round
    none."""
    kernels = cpu_kernels(1)
    return BFLOAT16_BITS if kernels is not None and kernels.rounds_to_bf16() else 0


@dataclass(frozen=True)
class Kind:
    """What the speed of a layer's product depends on.

    form: how weights are stored, such as "planes 4+4, group 64". shape: (O, I) of the weight, or (E, O, I) of experts.
    stock: whether MLX has a kernel for this form. variants: names of our Metal kernel's. most_bits: of an
    activation that CPU kernels keep where they round; 0: they never round. text: of `proven.TEXTS`, our Metal kernel's.
    decoding: the key of the proof of our Metal kernel that decodes the whole weight; "" where there is none.
    """

    form: str
    shape: tuple[int, ...]
    stock: bool
    variants: tuple[str, ...] = metal.VARIANTS
    most_bits: int = 16
    text: str = proven.MATVEC_TEXT
    decoding: str = ""

    def candidates(self, vectors: int, dtype: mx.Dtype, ours_alone: bool = False) -> tuple[str, ...]:
        """Return what can compute a product of this number of vectors here. The first is what is used without
        measuring.

        A packed kernel of ours spares a token that weights are reconstructed; where MLX has none, nothing else does.

        Args:
            dtype: of the activations. ours_alone: leave MLX's kernels out where there are others.
        """
        ours = self._ours(vectors, dtype)
        if ours_alone and ours:
            return ours
        stock = (MLX,) if self.stock else ()
        reconstructed = (RECONSTRUCT,) if vectors > 1 or not (ours or stock) else ()
        if device() == CPU:
            return (*ours, *stock) or reconstructed
        return (*stock, *ours, *reconstructed)

    def rounding(self, x_bits: int) -> int:
        """Return the bits to which kernels here round activations where `x_bits` are asked for; 0: not at all."""
        return min(x_bits, self.most_bits) if device() == CPU else 0

    def proven(self, vectors: int, dtype: mx.Dtype) -> str:
        """Return what computes it on a Mac unasked: ours where it was proven faster there, and else MLX's
        operations."""
        ours = ((each, product_key(self.form, self.shape, dtype, vectors, each)) for each in self._ours(vectors, dtype))
        proofs = {each: proven.proof(self.text, key) for each, key in ours}
        seconds = {each: proof.ours for each, proof in proofs.items() if proof is not None and proof.won}
        decodes = vectors > 1 and self.decoding and proven.won(self.text, self.decoding)
        return min(seconds, key=lambda each: seconds[each], default=RECONSTRUCT if decodes else MLX)

    def _ours(self, vectors: int, dtype: mx.Dtype) -> tuple[str, ...]:
        if device() == CPU:
            return (NATIVE,) if cpu.native() is not None else ()
        if device() == GPU or vectors > metal.MAX_VECTORS:
            return ()
        possible = metal.fitting_variants(self.variants, self.shape[-1], vectors, dtype)
        return tuple(sorted(possible, key=lambda name: name != metal.expected_variant(vectors)))


def size_class(count: int) -> int:
    """Return the power of two at `count` or above it: sizes between two powers share what was measured."""
    return 1 << max(0, count - 1).bit_length()


class ChosenKernels:
    """The candidate for a layer's products, by the number of vectors.

    `prepared`: the layer's launches of Metal kernels, without arrays, by the activations and whether there is a bias.

    Args:
        choose: gives the candidate for a number of vectors; asked once for each, or again after CannotMeasure.
        is_trial: of one candidate, for which nothing else is to compute where it cannot run.
    """

    def __init__(self, choose: Callable[[int], str], is_trial: bool = False):
        self._choose, self.is_trial = choose, is_trial
        self._by_vectors: dict[int, str] = {}
        self.prepared: dict[Hashable, metal.Prepared] = {}

    def __call__(self, vectors: int) -> str:
        found = self._by_vectors.get(vectors)
        if found is None:
            try:
                found = self._by_vectors[vectors] = self._choose(vectors)
            except CannotMeasure as now:
                found = now.instead
        return found

    def __deepcopy__(self, memo: object) -> "ChosenKernels":
        return self

    def __reduce__(self) -> tuple:
        return type(None), ()  # a layer that was pickled has nothing chosen


class CannotMeasure(Exception):
    """Nothing can be measured now, inside of mx.compile for instance. `instead`: the candidate to use meanwhile."""

    def __init__(self, instead: str):
        super().__init__(instead)
        self.instead = instead


def always(candidate: str) -> ChosenKernels:
    """Return a trial of the same candidate for any number of vectors."""
    return ChosenKernels(lambda vectors: candidate, is_trial=True)


def is_tuning() -> bool:
    """Return whether candidates are to be measured: GEARBX_TUNE=0 leaves it at what is expected to be best."""
    return os.environ.get("GEARBX_TUNE", "1") != "0"


def native_operations() -> tuple[str, ...]:
    """Return the operations whose modules are replaced in a model with native kernels: all on a CPU, none on a GPU."""
    return OPERATIONS if device() == CPU else ()


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x (..., D) / sqrt(mean(x^2) + eps) * weight (D,), of the wider type of the two, as MLX's."""
    kernel = fused_kernel("rms_norm") if x.size else None
    if kernel is None or x.dtype not in (mx.float32, weight.dtype):
        return mx.fast.rms_norm(x, weight, eps)
    return kernel(x, weight, eps).astype(x.dtype)


def rope(
    x: mx.array, frequencies: mx.array, offset: int | mx.array, traditional: bool = False, scale: float = 1.0
) -> mx.array | None:
    """x (B, H, T, D) with rotary positions from `offset` on, of x's type; None if there is no kernel for it.

    Args:
        frequencies: (dims / 2,) float32, radians from position to position; the first `dims` of D are turned.
        offset: of all sequences, or (B,) int32.
    """
    takes = x.ndim == 4 and x.size > 0
    where = (offset,) if isinstance(offset, int) else (0, -offset)
    known = isinstance(offset, int) or (offset.dtype == mx.int32 and offset.shape == x.shape[:1])
    kernel = fused_kernel("rope") if takes and known else None
    return None if kernel is None else kernel(x, frequencies, traditional, scale, *where).astype(x.dtype)


def swiglu(gate: mx.array, up: mx.array) -> mx.array | None:
    """silu(gate) * up, of gate's type; None if there is no kernel for it."""
    return _gated("swiglu", gate, up)


def geglu(gate: mx.array, up: mx.array) -> mx.array | None:
    """gelu(gate) * up with the approximation by tanh, of gate's type; None if there is no kernel for it."""
    return _gated("geglu", gate, up)


def _gated(name: str, gate: mx.array, up: mx.array) -> mx.array | None:
    kernel = fused_kernel(name) if gate.shape == up.shape and gate.size > 0 else None
    return None if kernel is None else kernel(gate, up).astype(gate.dtype)


@dataclass(frozen=True)
class NestedEntries:
    """Keys and values of which the first `packed` positions are read from nested planes (formats/kv_cache.py).

    entries: keys and values (B, H, S, D) of all positions; of any S if all positions are packed.
    planes: of keys and of values, the arrays that a gear reads: one plane or two, scales, offsets.
    """

    entries: tuple[mx.array, mx.array]
    planes: tuple[list[mx.array], list[mx.array]]
    packed: int

    @property
    def positions(self) -> int:
        """The number of positions."""
        return max(self.packed, self.entries[0].shape[2])

    @property
    def group_size(self) -> int:
        """The numbers of a key or value that share a scale."""
        return self.entries[0].shape[-1] // self.planes[0][-1].shape[-1]


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    padding: mx.array | None = None,
) -> mx.array | None:
    """softmax(scale * queries keys^T) values, (B, H, L, D) of the queries' type; None if there is no kernel for it.

    Args:
        keys, values: (B, H / a whole number, S, D).
        mask: "causal"; a bool array that broadcasts to (B, H, L, S), true for keys that a query sees; or None for all.
        padding: (B,) int32, how many first keys of each sequence no query sees, as the mask says too. On a CPU a
            sequence then has the bits that it has without these keys.
    """
    arrays = queries, keys, values
    kernel = fused_kernel("attention") if takes_attention(*arrays, mask, keys.shape[2]) else None
    how = (False, mask) if isinstance(mask, mx.array) else (mask == "causal", None)
    wide = (array.astype(mx.float32) for array in arrays)
    return None if kernel is None else kernel(*wide, scale, *how, padding).astype(queries.dtype)


def nested_attention(
    queries: mx.array, nested: NestedEntries, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """Like `attention`, with the first keys and values read from planes; None if there is no kernel."""
    keys, values = nested.entries
    fits = queries.dtype == mx.float32 and takes_attention(queries, keys, values, mask, nested.positions)
    kernel = fused_kernel("nested_attention") if fits else None
    how = (False, mask) if isinstance(mask, mx.array) else (mask == "causal",)
    where = *nested.planes, nested.packed, nested.group_size
    return None if kernel is None else kernel(queries, keys, values, *where, scale, *how)


def takes_attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None, positions: int
) -> bool:
    """Return whether native attention takes these arrays of one type, over this number of positions.

    Args:
        queries: (B, H, L, D), L at most `positions`.
        keys, values: (B, H / a whole number, S, D).
        mask: "causal", a bool array or None; no kernel takes another one.
    """
    known = mask.dtype == mx.bool_ if isinstance(mask, mx.array) else mask in ("causal", None)
    if not known or any(a.ndim != 4 or a.size == 0 or a.dtype != queries.dtype for a in (queries, keys, values)):
        return False
    batch, heads, length, width = queries.shape
    fits = keys.shape == values.shape and (keys.shape[0], keys.shape[3]) == (batch, width)
    return fits and heads % keys.shape[1] == 0 and length <= positions


def pack_kv(vectors: mx.array, planes: int, group_size: int) -> list[mx.array] | None:
    """Planes of 4 bits, scales and offsets of vectors (B, H, S, D) (`formats/kv_cache.py`); None without a kernel."""
    kernel: Any = fused_kernel("pack_kv") if vectors.dtype == mx.float32 and vectors.size > 0 else None
    return None if kernel is None else kernel(vectors, planes, group_size)


def block_kernels(vectors: int) -> ModuleType | None:
    """Return the native CPU kernels if they compute a transformer block for this many vectors, else None."""
    return None if metal.available() else cpu_kernels(vectors)


def fused_kernel(name: str) -> Callable[..., mx.array] | None:
    """Return the native CPU kernel of an operation (cpu/fused.h, attention.h, matvec.h); None if there is none."""
    module = cpu.native() if on_cpu() else None
    return None if module is None else getattr(module, name)
