"""The choice of a kernel for each operation.

| operation                                       | kernel, if `choose` allows native ones                      |
| ---                                             | ---                                                         |
| matmul of 1 to 16 vectors                       | native                                                      |
| matmul of more vectors (prefill, batch), Linux  | native                                                      |
| matmul of more vectors, macOS                   | MLX's (Accelerate, or the GPU's matrix units)               |
| mixture of experts, CPU                         | same as a matmul of that many vectors                       |
| mixture of experts, packed but not exact, Metal | native, for up to 256 pairs of a vector and an expert       |
| attention, rotary positions, norm, gate, CPU    | native                                                      |
| transformer block of a known form, CPU          | native                                                      |

MLX computes everything else. A native matmul reads weights once for 512 vectors (packed ones with unquantized
activations: for 16), with float32 sums. It is batch-invariant: other vectors or queries in the call change no bit
of a result. On Metal, MLX's norm, SwiGLU and experts are batch-invariant too (metal/README.md). MLX's Linux wheels have
the reference BLAS and scalar quantized matmuls, 25 to 40 times slower for many vectors (docs/performance.md).

`choose` decides once for a model whether it uses native kernels: by default on a CPU, and on Metal if some were proven
on that machine (`proven.py`). Measured times select among a layer's candidates (`MatmulKind.candidates`, `tuner.py`),
for each kind of layer and number of vectors; by default on Metal, proofs do. All native candidates are bit-identical.
MLX's matmul, and a matmul with reconstructed weights, differ in the last bits. For other operations, the number of
vectors decides at each call (experts: `products.py`). Experts are measured on Metal only, once for any number of
vectors.
"""

import os
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from . import ACTIVATIONS, MEASURE, cpu, metal, proven
from .compiler import vector_instructions
from .proven import product_key

MLX, RECONSTRUCT, NATIVE = "mlx", "reconstruct", "native"
STOCK = (MLX, RECONSTRUCT)  # computed by MLX's kernels
MIN_WEIGHTS = 2**18  # weights; with fewer, a launch takes longer than the matmul

CPU, METAL, GPU = "cpu", "metal", "gpu"  # GPU: not Apple's

NATIVE_VECTORS = 16  # vectors for which native CPU kernels read the weights once
MAX_NATIVE_VECTORS = NATIVE_VECTORS if sys.platform == "darwin" else None
TILES = {1: ", by matrix tiles (AMX)", 0: "", -1: "; the system refuses matrix tiles (AMX)"}  # by the kernels' `tiles`
UNPROVEN = "no native kernel was proven faster on this Mac; gearbx_mlx benchmark mac --own-kernels tries them"
BFLOAT16_BITS = 8  # bits of a significand, with the leading one that is not stored


@dataclass(frozen=True)
class KernelChoice:
    """The choice of native or MLX's kernels for a model, with the reason.

    Attributes:
        native: whether linear layers may use native kernels; with `ours_alone` always, otherwise if they are fastest.
        reason: a few words.
        x_bits: bits to which CPU kernels quantize activations (to bfloat16 with bfloat16 weights); 0: not at all.
        ours_alone: whether MLX's kernels are used only for lack of a native one.
        again: whether every candidate is measured again.
    """

    native: bool
    reason: str
    x_bits: int = 0
    ours_alone: bool = False
    again: bool = False

    def why(self, rounds: bool) -> str:
        """Return the reason for a layer. rounds: whether the layer may quantize its activations."""
        how = f"; packed weights by {self.x_bits}-bit activations" if self.x_bits and rounds else ""
        return self.reason + how


def choose(kernels: str, activations: str = "int16") -> KernelChoice:
    """Choose native or MLX's kernels for a model on this machine; compile the CPU kernels if needed.

    Args:
        kernels: one of KERNELS. activations: one of ACTIVATIONS.
    """
    if kernels == "mlx":
        return KernelChoice(False, "as requested")
    how = {"ours_alone": kernels == "native", "again": kernels == MEASURE}
    fastest = "the fastest as measured here" if is_tuning() else "the fastest as expected"
    on = device()
    if kernels == "auto" and on != CPU and not (on == METAL and proven.any_won()):
        return KernelChoice(False, UNPROVEN if on == METAL else "no native kernels exist for this GPU")
    if on == METAL:
        used = {"native": "native kernels", "auto": "native kernels proven faster here"}.get(kernels, fastest)
        return KernelChoice(True, f"Metal: {used}, up to {metal.MAX_VECTORS} vectors; MLX beyond", **how)
    if on == GPU and kernels != "native":
        return KernelChoice(True, f"MLX's kernels: {fastest}", **how)
    if on == GPU:
        return KernelChoice(False, "native kernels are for a CPU or Metal, and MLX uses a different GPU")
    reason = cpu.why_not()
    if reason is not None:
        return KernelChoice(False, reason)
    limited = MAX_NATIVE_VECTORS is not None
    how_many = f"up to {NATIVE_VECTORS} vectors, MLX beyond" if limited else f"{NATIVE_VECTORS} vectors at a time"
    compiled = cpu.native()
    tiles = TILES[compiled.tiles()] if compiled is not None else ""
    return KernelChoice(True, how_many + tiles, ACTIVATIONS[activations], **how)


def device() -> str:
    """Return the kind of MLX's default device: CPU, METAL or GPU."""
    if metal.available():
        return METAL
    return CPU if mx.default_device().type == mx.DeviceType.cpu else GPU


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU, as native CPU kernels require."""
    return mx.default_device().type == mx.DeviceType.cpu


def is_metal(x: mx.array) -> bool:
    """Return whether a Metal kernel takes activations (..., I)."""
    return metal.available() and metal.takes(x, x.shape[-1])


def cpu_kernels(vectors: int) -> ModuleType | None:
    """Return the native CPU kernels; None if they do not take this number of vectors."""
    fits = vectors > 0 and (MAX_NATIVE_VECTORS is None or vectors <= MAX_NATIVE_VECTORS)
    return cpu.native() if fits and device() == CPU else None


def native_instructions() -> str:
    """Return the name of the CPU kernels' instructions: AMX if they use matrix tiles, otherwise vector instructions."""
    kernels = cpu_kernels(1)
    return "AMX" if kernels is not None and kernels.tiles() > 0 else vector_instructions()


def bits_beside_bfloat16() -> int:
    """Return the bits to which CPU kernels quantize activations with bfloat16 weights; 0 if they do not."""
    kernels = cpu_kernels(1)
    return BFLOAT16_BITS if kernels is not None and kernels.rounds_to_bf16() else 0


@dataclass(frozen=True)
class MatmulKind:
    """The properties of a layer's matmul that its speed depends on.

    Attributes:
        form: storage of the weights, such as "planes 4+4, group 64".
        shape: (O, I) of the weight, or (E, O, I) of experts.
        stock: whether MLX has a kernel for this form.
        variants: names of the Metal kernel's variants.
        most_bits: most bits of an activation in CPU kernels that quantize them; 0: they never do.
        decoding: key of the proof of the Metal kernel that decodes the whole weight; "" without such a kernel.
    """

    form: str
    shape: tuple[int, ...]
    stock: bool
    variants: tuple[str, ...] = metal.VARIANTS
    most_bits: int = 16
    decoding: str = ""

    def candidates(self, vectors: int, dtype: mx.Dtype, ours_alone: bool = False) -> tuple[str, ...]:
        """Return the candidates for a matmul of this number of vectors here, the default first.

        Native kernels for packed weights avoid reconstructing them, also if MLX has no kernel.

        Args:
            dtype: of the activations. ours_alone: omit MLX's kernels if there are native ones.
        """
        native = self._native(vectors, dtype)
        if ours_alone and native:
            return native
        stock = (MLX,) if self.stock else ()
        reconstructed = (RECONSTRUCT,) if vectors > 1 or not (native or stock) else ()
        if device() == CPU:
            return (*native, *stock) or reconstructed
        return (*stock, *native, *reconstructed)

    def proven(self, vectors: int, dtype: mx.Dtype) -> str:
        """Return the default candidate on a Mac: native if proven faster there, otherwise MLX's operations."""
        keys = {each: product_key(self.form, self.shape, dtype, vectors, each) for each in self._native(vectors, dtype)}
        proofs = {each: proven.proof(key) for each, key in keys.items()}
        seconds = {each: proof.ours for each, proof in proofs.items() if proof is not None and proof.won}
        decodes = vectors > 1 and self.decoding and proven.won(self.decoding)
        return min(seconds, key=lambda each: seconds[each], default=RECONSTRUCT if decodes else MLX)

    def _native(self, vectors: int, dtype: mx.Dtype) -> tuple[str, ...]:
        if device() == CPU:
            return (NATIVE,) if cpu.native() is not None else ()
        if device() == GPU or vectors > metal.MAX_VECTORS:
            return ()
        possible = metal.fitting_variants(self.variants, self.shape[-1], vectors, dtype)
        return tuple(sorted(possible, key=lambda name: name != metal.expected_variant(vectors)))


class ChosenKernels:
    """The candidate for a layer's matmuls, by number of vectors.

    Args:
        choose: returns the candidate for a number of vectors; called once per number, and again after CannotMeasure.
        is_trial: whether a candidate that cannot run raises, instead of MLX computing in its place.

    Attributes:
        prepared: the layer's Metal launches, without arrays, by activations and presence of a bias.
    """

    def __init__(self, choose: Callable[[int], str], is_trial: bool = False):
        self._choose, self.is_trial = choose, is_trial
        self._by_vectors: dict[int, str] = {}
        self.prepared: dict[Hashable, metal.Prepared] = {}

    def __call__(self, vectors: int) -> str:
        if vectors not in self._by_vectors:
            try:
                self._by_vectors[vectors] = self._choose(vectors)
            except CannotMeasure as now:
                return now.instead
        return self._by_vectors[vectors]

    def __deepcopy__(self, memo: object) -> "ChosenKernels":
        return self

    def __reduce__(self) -> tuple:
        return type(None), ()  # a pickled layer has no choice


class CannotMeasure(Exception):
    """Error if no time can be measured now, such as inside mx.compile. instead: the candidate to use meanwhile."""

    def __init__(self, instead: str):
        super().__init__(instead)
        self.instead = instead


def always(candidate: str) -> ChosenKernels:
    """Return a trial of the same candidate for any number of vectors."""
    return ChosenKernels(lambda vectors: candidate, is_trial=True)


def is_tuning() -> bool:
    """Return whether candidates are measured; with GEARBX_TUNE=0, the expected fastest is used instead."""
    return os.environ.get("GEARBX_TUNE", "1") != "0"


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return x (..., D) / sqrt(mean(x^2) + eps) * weight (D,), of the wider type of the two, as MLX does."""
    kernel = fused_kernel("rms_norm") if x.size else None
    if kernel is None or x.dtype not in (mx.float32, weight.dtype):
        return mx.fast.rms_norm(x, weight, eps)
    return kernel(x, weight, eps).astype(x.dtype)


def rope(
    x: mx.array, frequencies: mx.array, offset: int | mx.array, traditional: bool = False, scale: float = 1.0
) -> mx.array | None:
    """Return x (B, H, T, D) with rotary positions, of x's type; None without a kernel.

    Args:
        frequencies: (dims / 2,) float32, radians per position; the first `dims` of D are rotated.
        offset: position of the first token, for all sequences or (B,) int32.
        traditional: whether neighbors form a pair; otherwise the first and second half of `dims` do.
        scale: factor of positions.
    """
    takes = x.ndim == 4 and x.size > 0
    where = (offset,) if isinstance(offset, int) else (0, -offset)
    known = isinstance(offset, int) or (offset.dtype == mx.int32 and offset.shape == x.shape[:1])
    kernel = fused_kernel("rope") if takes and known else None
    return None if kernel is None else kernel(x, frequencies, traditional, scale, *where).astype(x.dtype)


def gated(unit: str, gate: mx.array, up: mx.array) -> mx.array | None:
    """Return silu(gate) * up, or gelu(gate) * up with the tanh approximation, of gate's type; None without a kernel.

    Args:
        unit: "swiglu" or "geglu".
    """
    kernel = fused_kernel(unit) if gate.shape == up.shape and gate.size > 0 else None
    return None if kernel is None else kernel(gate, up).astype(gate.dtype)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    padding: mx.array | None = None,
) -> mx.array | None:
    """Return softmax(scale * queries keys^T) values, (B, H, L, D) of the queries' type; None without a kernel.

    Args:
        queries: (B, H, L, D).
        keys, values: (B, H / a whole number, S, D).
        mask: "causal"; a bool array that broadcasts to (B, H, L, S), true for keys that a query sees; or None for all.
        padding: (B,) int32, number of first keys of each sequence that the mask hides from every query. A
            sequence's result is then bit-identical to that without these keys.
    """
    arrays = queries, keys, values
    kernel = fused_kernel("attention") if takes_attention(*arrays, mask, keys.shape[2]) else None
    how = (False, mask) if isinstance(mask, mx.array) else (mask == "causal", None)
    wide = (array.astype(mx.float32) for array in arrays)
    return None if kernel is None else kernel(*wide, scale, *how, padding).astype(queries.dtype)


def nested_attention(
    queries: mx.array,
    entries: tuple[mx.array, mx.array],
    planes: tuple[Sequence[mx.array], Sequence[mx.array], int, int],
    scale: float,
    mask: mx.array | str | None,
) -> mx.array | None:
    """Return `attention` over keys and values whose first positions are read from planes; None without a kernel.

    Args:
        entries: keys and values (B, H, S, D) of all positions; with any S if all positions are packed.
        planes: arrays of keys and of values, number of positions in them, numbers that share a scale
            (`formats.kv_cache.block_planes`).
    """
    packed, length = planes[2], entries[0].shape[2]
    fits = queries.dtype == mx.float32 and takes_attention(queries, *entries, mask, max(packed, length))
    kernel = fused_kernel("nested_attention") if fits else None
    how = (False, mask) if isinstance(mask, mx.array) else (mask == "causal",)
    return None if kernel is None else kernel(queries, *entries, *planes, scale, *how)


def takes_attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None, positions: int
) -> bool:
    """Return whether native attention takes these arrays of one type, over this number of positions.

    Args:
        queries: (B, H, L, D), L at most `positions`.
        keys, values: (B, H / a whole number, S, D).
        mask: "causal", a bool array or None; kernels take no other mask.
    """
    known = mask.dtype == mx.bool_ if isinstance(mask, mx.array) else mask in ("causal", None)
    if not known or any(a.ndim != 4 or a.size == 0 or a.dtype != queries.dtype for a in (queries, keys, values)):
        return False
    batch, heads, length, width = queries.shape
    fits = keys.shape == values.shape and (keys.shape[0], keys.shape[3]) == (batch, width)
    return fits and heads % keys.shape[1] == 0 and length <= positions


def pack_kv(vectors: mx.array, planes: int, group_size: int) -> list[mx.array] | None:
    """Return 4-bit planes, scales, offsets of vectors (B, H, S, D) (`formats/kv_cache.py`); None without a kernel."""
    kernel: Any = fused_kernel("pack_kv") if vectors.dtype == mx.float32 and vectors.size > 0 else None
    return None if kernel is None else kernel(vectors, planes, group_size)


def fused_kernel(name: str) -> Callable[..., mx.array] | None:
    """Return the native CPU kernel of an operation (cpu/fused.h, attention.h, matvec.h); None without one."""
    module = cpu_kernels(1)
    return None if module is None else getattr(module, name)
