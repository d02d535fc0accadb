"""A transformer block as one native operation.

Of one token MLX makes some 27 operations a layer on a CPU, and to hand them from thread to thread takes as long as the
products. A block that has the code of a known one runs as one operation instead, over the same modules and with the
same arithmetic, bit for bit. Whatever is not recognised runs as it did.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma3_text, llama, phi3, qwen3

from ..compat.caches import entries, set_entries
from ..compat.classes import ORIGIN, Code, code_of, standing_for
from ..kernels.dispatch import NATIVE, WHOLE_BLOCKS, block_kernels
from .fused import (
    NativeGeGLU,
    NativeLlama3RoPE,
    NativeRMSNorm,
    NativeRoPE,
    NativeShiftedNorm,
    inverse_frequencies,
    left_padding,
)
from .kv_cache import NestedKVCache, has_room, planes_of, read_before, takes_cache, takes_in_place

MOST = 8  # programs of a layer: one for each gear, and for what a mode puts into it for a while
FEW = 16  # tokens that go through a block at once; whoever wants the KV cache of more need not compute the block's rest
PROGRAMS = "_gearbx_programs"


# Norms of a block: before attention and its MLP; behind them, if there are some.
BLOCKS: dict[Code, tuple[Sequence[str], Sequence[str]]] = {
    code_of(llama.TransformerBlock): (("input_layernorm", "post_attention_layernorm"), ()),
    code_of(gemma3_text.TransformerBlock): (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
THREE, OF_HEADS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
ATTENTION: dict[Code, tuple[Sequence[str], Sequence[str]]] = {  # projections, and norms of heads
    code_of(llama.Attention): (THREE, ()),
    code_of(qwen3.Attention): (THREE, OF_HEADS),
    code_of(gemma3_text.Attention): (THREE, OF_HEADS),
    code_of(phi3.Attention): (("qkv_proj",), ()),
}
GELU = code_of(gemma3_text.MLP)
MLP: dict[Code, Sequence[str]] = {  # what makes gate and up
    code_of(llama.MLP): ("gate_proj", "up_proj"),
    code_of(phi3.MLP): ("gate_up_proj",),
    GELU: ("gate_proj", "up_proj"),
}


class Programs:
    """The native programs of a layer, one for each set of modules that it had lately; None where there can be none."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, Any]] = []

    def __deepcopy__(self, memo: object) -> "Programs":
        return Programs()

    def find(self, layer: nn.Module, kernels: ModuleType) -> Any:
        """The program for the modules, settings and arrays that the layer has now."""
        for i, (watched, program) in enumerate(self._made):
            if kernels.is_same(watched, layer):
                self._made.insert(0, self._made.pop(i))
                return program
        if kernels.has_tracer(layer):  # within mx.compile, whose weights are no numbers yet
            return None
        mx.eval(layer.parameters())
        program = program_of(layer, kernels)
        self._made = [(kernels.watched(layer), program), *self._made[: MOST - 1]]
        return program

    def forget(self) -> None:
        """Make all programs anew."""
        self._made = []


class NativeBlock(nn.Module):
    """What a native block adds to mlx-lm's class, which computes whatever the native operation does not take."""

    operation = WHOLE_BLOCKS

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = run(self, x, mask, cache)
        return super().__call__(x, mask, cache) if y is None else y


ADDED: dict[Code, type] = {  # code of a class to what makes it native
    **dict.fromkeys(BLOCKS, NativeBlock),
    code_of(gemma3_text.RMSNorm): NativeShiftedNorm,
    GELU: NativeGeGLU,
}


@functools.cache
def coded_class(kind: Any) -> type[nn.Module] | None:
    """A native subclass of mlx-lm's class `kind`, which is known by its code; None for classes of other code."""
    added = ADDED.get(code_of(kind))
    return None if added is None else standing_for(kind, {}, added)


_single_operations = False


@contextlib.contextmanager
def single_operations() -> Iterator[None]:
    """In the block, no transformer block runs as one operation."""
    global _single_operations
    before, _single_operations = _single_operations, True
    try:
        yield
    finally:
        _single_operations = before


def run(layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
    """The result of a block (B, L, D) float32, with its keys and values in the cache; None if it must run as it did."""
    if _single_operations:
        return None
    causal = isinstance(mask, str) and mask == "causal"
    if x.dtype != mx.float32 or x.ndim != 3 or not (causal or mask is None or is_bool(mask)):
        return None
    kernels = block_kernels(x.shape[0] * x.shape[1])
    if kernels is None or not takes_cache(cache):
        return None
    program = programs_of(layer).find(layer, kernels)
    if program is None:
        return None
    seen = None if causal else mask
    if takes_in_place(cache) and x.shape[1] <= FEW and has_room(cache, x):
        before, padding, nested = entries(cache), left_padding(cache), read_before(cache)
        y = kernels.run_block(program, x, cache.keys, cache.values, before, causal, seen, padding, *planes_of(nested))
        if y is not None:
            set_entries(cache, before + x.shape[1])
        if y is not None and type(cache) is NestedKVCache:
            cache.count(nested, x.shape[1])
        return given(layer, y)
    return in_halves(layer, program, kernels, x, causal, seen, cache)


def in_halves(
    layer: nn.Module, program: Any, kernels: ModuleType, x: mx.array, causal: bool, mask: mx.array | None, cache: Any
) -> mx.array | None:
    """As `run`, in two operations: the cache takes the keys and values in its own way in between."""
    padding = left_padding(cache)
    first = kernels.run_block_heads(program, x, entries(cache), padding)
    if first is None:
        return given(layer, None)
    heads, kept = first
    shared = layer.self_attn.n_kv_heads
    keys, values = heads[:, -2 * shared : -shared], heads[:, -shared:]
    if type(cache) is NestedKVCache and (nested := cache.update(keys, values)) is not None:
        return kernels.run_block_rest(
            program, kept, x, heads, *nested.entries, causal, mask, padding, *planes_of(nested)
        )
    if type(cache) is NestedKVCache:
        keys, values = cache.keys_and_values()
    elif cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    return kernels.run_block_rest(program, kept, x, heads, keys, values, causal, mask, padding)


def given(layer: nn.Module, y: mx.array | None) -> mx.array | None:
    """The result; if there is none, since memory of the program was given up, programs are made anew."""
    if y is None:
        programs_of(layer).forget()
    return y


def is_bool(mask: object) -> bool:
    return isinstance(mask, mx.array) and mask.dtype == mx.bool_


def programs_of(layer: nn.Module) -> Programs:
    """The programs of a layer."""
    found: Programs | None = vars(layer).get(PROGRAMS)
    if found is None:
        found = vars(layer)[PROGRAMS] = Programs()
    return found


def forget_programs(model: nn.Module) -> None:
    """Make all programs of a model anew: its layers may have other kernels from now on."""
    for module in model.modules():
        if PROGRAMS in vars(module):
            vars(module)[PROGRAMS].forget()


def program_of(layer: nn.Module, kernels: ModuleType) -> Any:
    """The native program of a block over the modules that it has; None if there is none for these."""
    try:
        return known_program(layer, kernels)
    except ValueError:  # arrays that are not contiguous, or do not fit each other
        return None


def known_program(layer: nn.Module, kernels: ModuleType) -> Any:
    """As `program_of`.

    Raises:
        ValueError: arrays that native kernels do not read in place.
    """
    attention, mlp = layer.get("self_attn"), layer.get("mlp")
    known, gates = ATTENTION.get(stock_code(attention)), MLP.get(stock_code(mlp))
    if known is None or gates is None:
        return None
    native = next(kind for kind in type(layer).__mro__ if ORIGIN in vars(kind))  # a timer may have derived a class
    (before, after), (projections, of_heads) = BLOCKS[code_of(vars(native)[ORIGIN])], known
    linears = [*(attention[name] for name in (*projections, "o_proj")), *(mlp[name] for name in (*gates, "down_proj"))]
    parts = [part_of(module, kernels) for module in linears]
    modules = *(layer[name] for name in (*before, *after)), *(attention[name] for name in of_heads)
    norms = [norm_of(module, kernels) for module in modules]
    rotation = rotation_of(attention["rope"])
    if None in parts or None in norms or rotation is None:
        return None
    count = len(projections)
    behind = norms[2 : 2 + len(after)] or (None, None)
    queries, keys = norms[2 + len(after) :] or (None, None)
    return kernels.block(
        before_attention=norms[0],
        projections=parts[:count],
        output=parts[count],
        before_mlp=norms[1],
        gates=parts[count + 1 : -1],
        down=parts[-1],
        after_attention=behind[0],
        after_mlp=behind[1],
        of_queries=queries,
        of_keys=keys,
        heads=attention.n_heads,
        key_heads=attention.n_kv_heads,
        gelu=stock_code(mlp) == GELU,
        **rotation,
        scale=attention.scale,
    )


def stock_code(module: Any) -> Code:
    """The code of mlx-lm's class for a module, which may be of the native class for this code."""
    return code_of(vars(type(module)).get(ORIGIN, type(module)))


def part_of(module: nn.Module, kernels: ModuleType) -> Any:
    """A linear layer as a part of a block; None if its class does not say how (a class derived from it need not).

    Nor where another kernel than ours was chosen for it.
    """
    part = vars(type(module)).get("part")
    if part is None or (module.chosen is not None and module.chosen(1) != NATIVE):
        return None
    return part(module, kernels)


def norm_of(module: nn.Module, kernels: ModuleType) -> Any:
    """A norm as a part of a block; None if it is another."""
    shifted = isinstance(module, NativeShiftedNorm) and ORIGIN in vars(type(module))
    if not shifted and type(module) is not NativeRMSNorm:
        return None
    return kernels.norm_part(module["weight"], module.eps, plus_one=shifted)


def rotation_of(rope: nn.Module) -> dict[str, Any] | None:
    """The rotation of queries and keys; None if it is another."""
    if type(rope) is NativeRoPE:
        frequencies, scale = inverse_frequencies(rope.dims, rope.base), rope.scale
    elif type(rope) is NativeLlama3RoPE:
        frequencies, scale = rope.frequencies, 1.0
    else:
        return None
    return {"frequencies": frequencies, "traditional": rope.traditional, "rotation_scale": scale}
