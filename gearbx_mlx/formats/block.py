"""Transformer blocks as native operations: all blocks of a known model in one, or each separately.

For one token, MLX runs some 27 operations per layer on a CPU, and passing them between threads takes as long as the
matmuls. A block with known code runs as one operation instead, over the same modules, with bit-identical arithmetic. So
do all blocks of a model whose class runs them in sequence. Other blocks run unchanged.

In lossless mode, a forward pass over a few tokens of one sequence is one call that returns finished logits
(`pass_logits`). In a draft it returns the next token and its entropy, or its logits (`begin_draft`). A pass of a draft
head is one call too (`begin_head_draft`; decoding/heads.py).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma3_text, llama, phi3, qwen2, qwen3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ..compat.classes import ORIGIN, Code, code_of, standing_for
from ..compat.loops import POSITIONS, positions_in, set_entries
from ..kernels.dispatch import NATIVE, cpu_kernels
from .fused import (
    NativeGeGLU,
    NativeLlama3RoPE,
    NativeRMSNorm,
    NativeRoPE,
    NativeShiftedNorm,
    inverse_frequencies,
    left_padding,
)
from .kv_cache import NestedKVCache, block_planes, has_room, read_before, takes_cache, takes_in_place

FEW_TOKENS = 16  # tokens of a block in one operation; with more, the KV cache may be needed without the output
PROGRAMS = "_gearbx_programs"

# Norms of a block: before attention and its MLP; after them, if there are any.
BLOCK_NORMS: dict[Code, tuple[Sequence[str], Sequence[str]]] = {
    code_of(llama.TransformerBlock): (("input_layernorm", "post_attention_layernorm"), ()),
    code_of(gemma3_text.TransformerBlock): (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
PROJECTIONS, HEAD_NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
DRAFT_HEAD_NORMS = ("hidden_norm", "post_attention_layernorm")
ATTENTION_PARTS: dict[Code, tuple[Sequence[str], Sequence[str]]] = {  # projections, and norms of heads
    code_of(llama.Attention): (PROJECTIONS, ()),
    code_of(qwen3.Attention): (PROJECTIONS, HEAD_NORMS),
    code_of(gemma3_text.Attention): (PROJECTIONS, HEAD_NORMS),
    code_of(phi3.Attention): (("qkv_proj",), ()),
}
GELU = code_of(gemma3_text.MLP)
MLP: dict[Code, Sequence[str]] = {  # projections to gate and up
    code_of(llama.MLP): ("gate_proj", "up_proj"),
    code_of(phi3.MLP): ("gate_up_proj",),
    GELU: ("gate_proj", "up_proj"),
}

LAYERED = {code_of(kind) for kind in (llama.LlamaModel, qwen2.Qwen2Model, qwen3.Qwen3Model, phi3.Phi3Model)}
"""Classes that run embedding, blocks and norm, without other operations, with one rank and no window."""
WHOLE_MODELS = {code_of(kind) for kind in (llama.Model, qwen2.Model, qwen3.Model, phi3.Model)}
"""Classes that run one of these and the head, or the tied embedding with `args.tie_word_embeddings`."""


class Programs:
    """Native programs of a module, one for each recent set of its modules; None if impossible."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, Any]] = []

    def __deepcopy__(self, memo: object) -> "Programs":
        return Programs()

    def find(
        self, module: nn.Module, kernels: ModuleType, make: Callable[[nn.Module, ModuleType], Any] | None = None
    ) -> Any:
        """Return the program for the module's current modules, settings, arrays. make: `program_of` for a block."""
        for i, (watched, program) in enumerate(self._made):
            if kernels.is_same(watched, module):
                self._made.insert(0, self._made.pop(i))
                return program
        if kernels.has_tracer(module):  # within mx.compile, where weights have no values yet
            return None
        mx.eval(module.parameters())
        program = (make or program_of)(module, kernels)
        # Eight: one for each gear, and for layers that a mode changes temporarily.
        self._made = [(kernels.watched(module), program), *self._made[:7]]
        return program

    def forget(self) -> None:
        """Drop all programs, so that they are made again."""
        self._made = []


class NativeBlock(nn.Module):
    """A mixin that makes mlx-lm's class of a block native; mlx-lm's code computes unsupported inputs."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = run_block(self, x, mask, cache)
        return super().__call__(x, mask, cache) if y is None else y


class NativeLayers(nn.Module):
    """A mixin that runs all blocks of mlx-lm's class of a model without its head in one native operation."""

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        tokens = inputs if input_embeddings is None else input_embeddings
        kernels = cpu_kernels(tokens.shape[0] * tokens.shape[1])
        if kernels is not None and runs_in_turn(self, cache, tokens.shape[:2]):
            x = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
            y = run_layers(self, x, cache, kernels)
            if y is not None:
                return y
        given = () if input_embeddings is None else (input_embeddings,)  # Phi 3 has no such argument
        return super().__call__(inputs, cache, *given)


ADDED: dict[Code, type] = {  # code of a class to its native mixin
    **dict.fromkeys(BLOCK_NORMS, NativeBlock),
    **dict.fromkeys(LAYERED, NativeLayers),
    code_of(gemma3_text.RMSNorm): NativeShiftedNorm,
    GELU: NativeGeGLU,
}


@functools.cache
def coded_class(kind: Any) -> type[nn.Module] | None:
    """Return a native subclass of mlx-lm's class `kind`, identified by its code; None for classes of other code."""
    added = ADDED.get(code_of(kind))
    return None if added is None else standing_for(kind, {}, added)


def run_block(layer: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
    """Return the result of a block (B, L, D) float32, its keys and values in the cache; None if mlx-lm has to run."""
    causal = isinstance(mask, str) and mask == "causal"
    plain = causal or mask is None or (isinstance(mask, mx.array) and mask.dtype == mx.bool_)
    if x.dtype != mx.float32 or x.ndim != 3 or not plain:
        return None
    kernels = cpu_kernels(x.shape[0] * x.shape[1])
    if kernels is None or not takes_cache(cache):
        return None
    program = programs_of(layer).find(layer, kernels)
    if program is None:
        return None
    seen = None if causal else mask
    if takes_in_place(cache) and x.shape[1] <= FEW_TOKENS and has_room(cache, x.shape):
        before, padding, nested = positions_in(cache), left_padding(cache), read_before(cache)
        kept, planes = ([cache.keys], [cache.values]), block_planes(nested)
        y = kernels.run_blocks(program.chain, x, *kept, before, causal, seen, padding, *planes)
        if y is not None:
            set_entries(cache, before + x.shape[1])
        if y is not None and type(cache) is NestedKVCache:
            cache.count(nested, x.shape[1])
        return kept_result(layer, y)
    return in_two_parts(layer, program.block, kernels, x, causal, seen, cache)


def run_layers(model: nn.Module, x: mx.array, cache: Any, kernels: ModuleType) -> mx.array | None:
    """Return the normed result of all blocks (B, L, D) float32, caches filled, if `runs_in_turn`; None for none."""
    if x.dtype != mx.float32:
        return None
    chain = programs_of(model).find(model, kernels, chain_of)
    if chain is None:
        return None
    mask, before, padding = create_attention_mask(x, cache[0]), positions_in(cache[0]), left_padding(cache[0])
    causal = isinstance(mask, str)
    seen = None if causal else mask
    arrays = [part.keys for part in cache], [part.values for part in cache]
    y = kernels.run_blocks(chain, x, *arrays, before, causal, seen, padding)
    if y is None:
        return kept_result(model, None)
    for part in cache:
        set_entries(part, before + x.shape[1])
    return y


def runs_in_turn(model: nn.Module, cache: Any, shape: tuple[int, ...]) -> bool:
    """Return True if a model runs its blocks in sequence over B x L tokens, each with room in its cache.

    For more than a few tokens this is False, since a caller may need only the keys and values.
    """
    first: Any = cache[0] if cache else None
    positions = POSITIONS.get(type(first))
    if positions is None or len(cache) != len(model.layers) or shape[1] > FEW_TOKENS:
        return False
    if getattr(model, "swa_idx", None) is not None or getattr(model, "pipeline_size", 1) != 1:
        return False
    count = positions(first)
    for part in cache:
        if type(part) is not type(first) or positions(part) != count or part.keys is None:
            return False
        sequences, _, room, _ = part.keys.shape
        if part.keys.dtype != mx.float32 or sequences != shape[0] or room < count + shape[1]:
            return False
    return True


def chain_of(model: nn.Module, kernels: ModuleType) -> Any:
    """Return all blocks of a model and its last norm as one native program; None if a part is not native."""
    found = [programs_of(layer).find(layer, kernels) if is_block(layer) else None for layer in model.layers]
    blocks = [program.block for program in found if program is not None]
    norm = norm_of(model.norm, kernels)
    if len(blocks) < len(found) or norm is None:
        return None
    try:
        return kernels.chain(blocks, norm)
    except ValueError:  # blocks of different width
        return None


def is_block(layer: nn.Module) -> bool:
    """Return True if a layer runs as a native block, and no class is derived from its class."""
    return isinstance(layer, NativeBlock) and ORIGIN in vars(type(layer))


class PassParts(NamedTuple):
    """The parts of a native pass: the embedding, whose dense rows (V, D) are read directly, all blocks, and the head.

    `second`, if any, is a better head for draft rescoring; `draft_head` has the parts of one (`head_parts`). A gear's
    parts stay valid while a different gear is engaged, as long as its weights stay in memory.
    """

    kernels: ModuleType
    layers: nn.Module
    chain: Any
    head: Any
    embedding: nn.Module
    table: mx.array | None
    second: Any
    draft_head: Any = None

    def rows(self, tokens: Sequence[int]) -> tuple[mx.array, Sequence[int]]:
        """Return an array, and the numbers of the tokens' rows in it."""
        if self.table is not None:
            return self.table, tokens
        return self.embedding(mx.array([*tokens])), range(len(tokens))


def pass_parts(model: nn.Module, second: nn.Module | None = None) -> PassParts | None:
    """Return the parts of passes in the engaged gear; None if one is not native. second: the head of a better gear."""
    kernels = cpu_kernels(1)
    layers = model.get("model") if stock_code(model) in WHOLE_MODELS else None
    if kernels is None or not isinstance(layers, NativeLayers):
        return None
    chain, embedding = programs_of(layers).find(layers, kernels, chain_of), layers.embed_tokens
    part = part_of_head(embedding if model.args.tie_word_embeddings else model.lm_head, kernels)
    if chain is None or part is None:
        return None
    table = embedding.weight if is_plain_table(embedding) else None
    better = None if second is None else part_of_head(second, kernels)
    return PassParts(kernels, layers, chain, part, embedding, table, better)


Used = TypeVar("Used")


class KeptParts:
    """The parts of a gear's passes, found once: finding them takes as long as a norm of every layer.

    find: engages the gear, and returns its parts; None if impossible.
    """

    def __init__(self, find: Callable[[], PassParts | None]):
        self._find, self._parts = find, find()

    def fits(self, cache: Any) -> bool:
        """Return True if passes over a cache may be native; such passes return when they are done."""
        return self._parts is not None and bool(cache) and type(cache[0]) is KVCache

    def use(self, cache: Any, begin: Callable[[PassParts], Used | None]) -> Used | None:
        """Return the result of `begin` for the parts; None if it has none.

        The parts are found again if memory of their modules was freed.
        """
        if not self.fits(cache):
            return None
        assert self._parts is not None
        started = begin(self._parts)
        if started is None:
            self._parts = self._find()
            started = None if self._parts is None else begin(self._parts)
        return started


def part_of_head(head: nn.Module, kernels: ModuleType) -> Any:
    """Return an output head (a linear layer or a tied embedding) as a part; None if it is not native."""
    linear = head.get("projection", head)
    try:
        if not isinstance(linear, nn.Embedding):
            return native_part(linear, kernels)
        return kernels.dense_part(linear.weight, None, getattr(linear, "x_bits", 0))
    except ValueError:  # weights of an unsupported type, or that are not contiguous
        return None


def begin_pass(parts: PassParts, cache: Any, count: int) -> Any:
    """Return passes after a cache's entries, with room for `count` tokens; None for other caches, or freed memory."""
    if type(cache[0]) is not KVCache or not runs_in_turn(parts.layers, cache, (1, count)):
        return None
    keys, values = [part.keys for part in cache], [part.values for part in cache]
    return parts.kernels.begin_passes(parts.chain, parts.head, keys, values, parts.second, parts.draft_head)


def pass_logits(
    parts: PassParts, tokens: Sequence[int], cache: Any, taps: Sequence[int] = ()
) -> tuple[mx.array, dict[int, mx.array]] | None:
    """Add L tokens to the cache, and return logits (1, L, V) after each token; None if the model must run.

    Also returns the hidden states (L, D) after each number of blocks in `taps`.
    """
    passes = begin_pass(parts, cache, len(tokens)) if cache else None
    if passes is None:
        return None
    before = cache[0].offset
    logits, hidden = parts.kernels.pass_logits(passes, *parts.rows(tokens), before, taps)
    for part in cache:
        part.offset = before + len(tokens)
    return logits, {tap: hidden[place] for place, tap in enumerate(taps)}


@dataclass(frozen=True)
class NativeDraft:
    """A draft after the entries of a sequence's KV cache, whose count it does not change. Later writes invalidate it.

    cache: the sequence's, kept alive by the draft that writes to it.
    room: the maximum number of tokens.
    """

    parts: PassParts
    passes: Any
    cache: Any
    entries: int
    room: int

    def inputs(self, token: int, place: int) -> tuple[mx.array, Sequence[int], int]:
        """Return an array of embeddings, the rows of the tokens to read, and the entries before them."""
        return *self.parts.rows([token]), self.entries + place

    def best(self, token: int, place: int) -> tuple[int, float, float]:
        """Return the next token with the highest logit at a place of a draft, the entropy (bits), and its margin."""
        following: tuple[int, float, float] = self.parts.kernels.best_token(self.passes, *self.inputs(token, place))
        return following

    def sampled(
        self, token: int, place: int, temp: float, top_p: float, min_p: float, top_k: int, key: np.ndarray
    ) -> tuple[int, float, float]:
        """Return as `best`, for the token that a GumbelSampler chooses (decoding/sampling.py). key: MLX's, (2,).

        The margin includes the noise, times the temperature.
        """
        sampled_token, how = self.parts.kernels.sampled_token, (temp, top_p, min_p, top_k, *key.tolist())
        following: tuple[int, float, float] = sampled_token(self.passes, *self.inputs(token, place), *how)
        return following

    def logits(self, token: int, place: int) -> mx.array:
        """Return the logits (1, V) after a token."""
        logits: mx.array = self.parts.kernels.draft_logits(self.passes, *self.inputs(token, place))
        return logits


def begin_draft(parts: PassParts, cache: Any) -> NativeDraft | None:
    """Return a draft after the cache's entries; None for other caches, or if memory of the gear was freed."""
    passes = begin_pass(parts, cache, 1)
    if passes is None:
        return None
    before = cache[0].offset
    return NativeDraft(parts, passes, cache, before, cache[0].keys.shape[2] - before)


def is_plain_table(embedding: nn.Module) -> bool:
    """Return True if an embedding returns rows of a dense weight as float32."""
    weight = embedding.get("weight") if isinstance(embedding, nn.Embedding) else None
    if weight is None:
        return False
    return bool(getattr(embedding, "dtype", weight.dtype) == mx.float32)


def in_two_parts(
    layer: nn.Module, program: Any, kernels: ModuleType, x: mx.array, causal: bool, mask: mx.array | None, cache: Any
) -> mx.array | None:
    """Run a block in two operations; in between, the cache stores the keys and values itself."""
    padding = left_padding(cache)
    first = kernels.run_block_heads(program, x, positions_in(cache), padding)
    if first is None:
        return kept_result(layer, None)
    heads, kept = first
    shared = layer.self_attn.n_kv_heads
    keys, values = heads[:, -2 * shared : -shared], heads[:, -shared:]
    if type(cache) is NestedKVCache and (nested := cache.update(keys, values)) is not None:
        return kernels.run_block_rest(
            program, kept, x, heads, *nested.entries, causal, mask, padding, *block_planes(nested)
        )
    if type(cache) is NestedKVCache:
        keys, values = cache.keys_and_values()
    elif cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    return kernels.run_block_rest(program, kept, x, heads, keys, values, causal, mask, padding)


def kept_result(layer: nn.Module, y: mx.array | None) -> mx.array | None:
    """Return the result; None, since memory of the program was freed, drops the programs of the layer."""
    if y is None:
        programs_of(layer).forget()
    return y


def programs_of(module: nn.Module) -> Programs:
    """Return the programs of a layer, or of all layers of a model."""
    found: Programs | None = vars(module).get(PROGRAMS)
    if found is None:
        found = vars(module)[PROGRAMS] = Programs()
    return found


def forget_programs(model: nn.Module) -> None:
    """Drop all programs of a model: its layers may have different kernels now."""
    for module in model.modules():
        if PROGRAMS in vars(module):
            vars(module)[PROGRAMS].forget()


class Program(NamedTuple):
    """A native block, and a chain of only this block."""

    block: Any
    chain: Any


def program_of(layer: nn.Module, kernels: ModuleType) -> Program | None:
    """Return the native program of a block over its current modules; None if impossible."""
    try:
        block = known_program(layer, kernels)
        return None if block is None else Program(block, kernels.chain([block]))
    except ValueError:  # arrays that are not contiguous, or do not fit each other
        return None


def known_program(layer: nn.Module, kernels: ModuleType) -> Any:
    """Return as `program_of`. Raises ValueError for arrays that native kernels cannot read in place."""
    native = next(kind for kind in type(layer).__mro__ if ORIGIN in vars(kind))  # a timer may derive a class
    return native_block(layer, kernels, *BLOCK_NORMS[code_of(vars(native)[ORIGIN])])


def native_block(
    layer: nn.Module, kernels: ModuleType, before: Sequence[str], after: Sequence[str], of_embedding: str | None = None
) -> Any:
    """Return a block as `known_program`.

    Args:
        before, after: its norms, as in BLOCK_NORMS.
        of_embedding: name of the norm of the embeddings that a draft head's projections read beside the states.
    """
    attention, mlp = layer.get("self_attn"), layer.get("mlp")
    known, gates = ATTENTION_PARTS.get(stock_code(attention)), MLP.get(stock_code(mlp))
    if known is None or gates is None:
        return None
    projections, of_heads = known
    linears = [*(attention[name] for name in (*projections, "o_proj")), *(mlp[name] for name in (*gates, "down_proj"))]
    parts = [native_part(module, kernels) for module in linears]
    modules = *(layer[name] for name in (*before, *after)), *(attention[name] for name in of_heads)
    norms = [norm_of(module, kernels) for module in modules]
    rotation = rotation_of(attention["rope"])
    embedding_norm = None if of_embedding is None else norm_of(layer[of_embedding], kernels)
    if None in parts or None in norms or rotation is None or (of_embedding is not None and embedding_norm is None):
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
        of_embedding=embedding_norm,
        heads=attention.n_heads,
        key_heads=attention.n_kv_heads,
        gelu=stock_code(mlp) == GELU,
        **rotation,
        scale=attention.scale,
    )


def stock_code(module: Any) -> Code:
    """Return the code of mlx-lm's class for a module, even if it has the native class for this code."""
    return code_of(vars(type(module)).get(ORIGIN, type(module)))


def native_part(module: nn.Module, kernels: ModuleType) -> Any:
    """Return a linear layer as a part of a block; None if its exact class has none, or other kernels were chosen."""
    part = vars(type(module)).get("part")
    if part is None or (module.chosen is not None and module.chosen(1) != NATIVE):
        return None
    return part(module, kernels)


def norm_of(module: nn.Module, kernels: ModuleType) -> Any:
    """Return a norm as a part of a block; None for unknown classes."""
    shifted = isinstance(module, NativeShiftedNorm) and ORIGIN in vars(type(module))
    if not shifted and type(module) is not NativeRMSNorm:
        return None
    return kernels.norm_part(module["weight"], module.eps, plus_one=shifted)


def rotation_of(rope: nn.Module) -> dict[str, Any] | None:
    """Return the rotation of queries and keys; None for unknown classes."""
    if type(rope) is NativeRoPE:
        frequencies, scale = inverse_frequencies(rope.dims, rope.base), rope.scale
    elif type(rope) is NativeLlama3RoPE:
        frequencies, scale = rope.frequencies, 1.0
    else:
        return None
    return {"frequencies": frequencies, "traditional": bool(rope.traditional), "rotation_scale": scale}


def head_parts(head: Any, embedding: nn.Module) -> PassParts | None:
    """Return the parts of a `Head`'s passes; None if one is not native. embedding: of the tokens."""
    kernels = cpu_kernels(1)
    if kernels is None or "fc_norm" in head or "input_norm" in head or head.layer.norm_before_residual:
        return None
    try:
        block = native_block(head.layer, kernels, DRAFT_HEAD_NORMS, (), "input_layernorm")
        norm, fuse = norm_of(head.norm, kernels), native_part(head.fc, kernels)
        rows = part_of_head(head.lm_head, kernels)
        if None in (block, norm, rows, fuse):
            return None
        draft_head = kernels.draft_head(fuse, [] if head.tokens is None else head.tokens.tolist(), head.vocabulary)
        chain = kernels.chain([block], norm)
    except ValueError:  # arrays that are not contiguous
        return None
    table = embedding.weight if is_plain_table(embedding) else None
    return PassParts(kernels, head, chain, rows, embedding, table, None, draft_head)


@dataclass(frozen=True)
class HeadDraft(NativeDraft):
    """A draft of a head. Its first pass reads the tokens of hidden states that the head has not read yet."""

    tokens: Sequence[int]

    def inputs(self, token: int, place: int) -> tuple[mx.array, Sequence[int], int]:
        first = self.tokens if place == 0 else [token]
        return *self.parts.rows(first), self.entries + (place and place + len(self.tokens) - 1)


def begin_head_draft(parts: PassParts, cache: Any, tokens: Sequence[int], states: mx.array) -> HeadDraft | None:
    """Return a draft after hidden states (K, taps x D) and the K tokens after them; None if the head's module must run.

    The cache counts no entry of the draft, also none of these tokens.
    """
    passes = begin_pass(parts, cache, len(tokens)) if len(tokens) <= FEW_TOKENS else None
    if passes is None:
        return None
    parts.kernels.fuse_states(passes, mx.contiguous(states.astype(mx.float32)))
    before = positions_in(cache[0])
    return HeadDraft(parts, passes, cache, before, cache[0].keys.shape[2] - before - len(tokens) + 1, tokens)
