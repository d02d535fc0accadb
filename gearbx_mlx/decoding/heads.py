"""Draft heads in the released EAGLE-3 format (Li et al., 2503.01840), as SpecForge, SGLang, vLLM and mlx-vlm read it.

A head is one transformer layer. For each token it reads the token's embedding and the model's hidden states of the
previous position, after several of the model's blocks. The head's own output rows turn its output into logits of the
next token. In drafts, the output replaces hidden states that the model has not computed yet.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from msgspec import Meta, Struct

from ..compat.classes import modules_of, named_modules_of
from ..errors import GearbxError
from ..formats import get_format
from ..formats.native import with_kernels
from ..gears.discovery import vocabulary
from .hidden import blocks_of

OF_THIS_MODEL = "use a head that was trained for this model"
EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "embeddings")  # names of the embedding in mlx-lm's models
BITS, GROUP_SIZE = 4, 64  # drafts are accepted as often as with the original weights
BYTES_IN_USE = 4.5 / 8  # per weight, with scales and biases
ACTIVATION_BITS = 8  # for native matmuls

Size = Annotated[int, Meta(ge=1, le=2**24)]
Layers = tuple[Annotated[int, Meta(ge=0, le=2**16)], ...]


class LayerConfig(Struct, frozen=True):
    """Fields of a head's layer, named and with the defaults as in a Llama's config.json."""

    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"

    def arguments(self) -> llama.ModelArgs:
        """Return the layer's arguments for mlx-lm's classes."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        del values["hidden_act"], values["rope_parameters"]
        rope = self.rope_parameters
        if rope is not None:
            values["rope_theta"] = rope.get("rope_theta", self.rope_theta)
            values["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        return llama.ModelArgs(model_type="llama", **values)


class EagleConfig(Struct, frozen=True):
    """Field `eagle_config`. Its layers are numbers of blocks from 0 whose outputs the head reads (SGLang)."""

    eagle_aux_hidden_state_layer_ids: Layers | None = None


class Quantization(Struct, frozen=True):
    """Field `quantization`, as mlx-lm writes it."""

    group_size: Literal[32, 64, 128]
    bits: Literal[2, 3, 4, 5, 6, 8]
    mode: Literal["affine"] = "affine"


class HeadConfig(Struct, frozen=True):
    """Other fields of a head. Here (vLLM), a layer counts the blocks before a state: one more than in eagle_config."""

    architectures: tuple[str, ...] = ()
    model_type: str | None = None
    speculators_model_type: str | None = None
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = True
    embed_requires_grad: bool = False
    eagle_config: EagleConfig | None = None
    quantization: Quantization | None = None
    eagle_aux_hidden_state_layer_ids: Layers | None = None

    @property
    def is_eagle3(self) -> bool:
        return "eagle3" in f"{self.architectures} {self.model_type} {self.speculators_model_type}".lower()

    def taps(self, blocks: int) -> tuple[int, ...]:
        """Return the numbers of blocks after which the head reads hidden states, for a model of so many blocks."""
        if self.eagle_aux_hidden_state_layer_ids is not None:
            return self.eagle_aux_hidden_state_layer_ids
        outputs = None if self.eagle_config is None else self.eagle_config.eagle_aux_hidden_state_layer_ids
        return (2, blocks // 2, blocks - 3) if outputs is None else tuple(each + 1 for each in outputs)


class HeadLayer(nn.Module):
    """The layer: attention reads the token's embedding beside the hidden state."""

    def __init__(self, args: llama.ModelArgs, norm_before_residual: bool):
        super().__init__()
        size = args.hidden_size
        self.input_layernorm = nn.RMSNorm(size, args.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(size, args.rms_norm_eps)
        self.self_attn, self.mlp = llama.Attention(args), llama.MLP(args)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = len(self.self_attn[name].weight)
            self.self_attn[name] = nn.Linear(2 * size, rows, args.attention_bias)
        self.norm_before_residual = norm_before_residual

    def __call__(self, embedded: mx.array, states: mx.array, cache: Any = None) -> mx.array:
        """Return the states (1, K, D) after tokens, from their embeddings and the states before them."""
        normed = self.hidden_norm(states)
        both = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        mask = create_attention_mask(both, cache)
        x = (normed if self.norm_before_residual else states) + self.self_attn(both, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """A draft head.

    Args:
        args: of its layer.
        config: its other fields.
        taps: numbers of blocks after which it reads hidden states.
        name: in errors.

    Attributes:
        width, vocabulary: D of the hidden states, and V of the logits, both the model's.
        tokens: (R,) the token of each of its R output rows; None if it has a row for each token.
        fingerprint: of its weights.
    """

    def __init__(self, args: llama.ModelArgs, config: HeadConfig, taps: Sequence[int], name: str = "draft head"):
        super().__init__()
        size, read = args.hidden_size, config.target_hidden_size or args.hidden_size
        self.taps, self.width, self.vocabulary, self.name = tuple(taps), read, args.vocab_size, name
        self.fc = nn.Linear(len(taps) * read, size, bias=False)
        self.layer = HeadLayer(args, config.norm_before_residual)
        self.norm = nn.RMSNorm(size, args.rms_norm_eps) if config.norm_output else nn.Identity()
        self.lm_head = nn.Linear(size, config.draft_vocab_size or args.vocab_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(len(taps) * read, args.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(read, args.rms_norm_eps) for _ in taps]
        self.tokens: np.ndarray | None = None
        self.fingerprint = ""
        self._checked: weakref.ref[nn.Module] | None = None  # a model whose head it is
        self._is_quantized = False

    def check(self, model: nn.Module) -> None:
        """Validate that this is a head of the model. Raises GearbxError otherwise."""
        if self._checked is not None and self._checked() is model:
            return
        blocks, embedding = len(blocks_of(model)), embedding_of(model)
        if embedding is None or not blocks:
            raise GearbxError(
                f"{self.name}: {type(model).__module__} has no blocks that a head can read; omit the head"
            )
        width = embedding()(mx.array([0])).shape[-1]
        sizes = ("hidden size", self.width, width), ("vocabulary", self.vocabulary, vocabulary(model))
        for what, own, its in sizes:
            if own != its:
                raise GearbxError(f"{self.name}: its {what} is {own}, and the model's is {its}; {OF_THIS_MODEL}")
        if not self.taps or not all(1 <= tap <= blocks for tap in self.taps):
            read = ", ".join(map(str, self.taps))
            raise GearbxError(f"{self.name}: reads after blocks {read}, and the model has {blocks}; {OF_THIS_MODEL}")
        self._checked = weakref.ref(model)

    @property
    def layers(self) -> list[nn.Module]:
        """Layers with a KV cache, for `make_prompt_cache`."""
        return [self.layer]

    def fuse(self, hidden: mx.array) -> mx.array:
        """Fuse the model's hidden states (1, K, taps x D), concatenated by tap, into states of the head's width."""
        if "fc_norm" in self:
            parts = mx.split(hidden, len(self.fc_norm), axis=-1)
            hidden = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts)], axis=-1)
        return self.fc(self.input_norm(hidden) if "input_norm" in self else hidden)

    def __call__(self, embedded: mx.array, states: mx.array, cache: Any = None) -> mx.array:
        """Return the states (1, K, D) after tokens, as `HeadLayer` does. cache: of `make_prompt_cache(head)`."""
        return self.layer(embedded, states, None if cache is None else cache[0])

    def logits(self, states: mx.array) -> mx.array:
        """Return logits (..., V) of the next tokens; -inf for tokens that have no row."""
        rows = self.lm_head(self.norm(states))
        if self.tokens is None:
            return rows
        none = mx.full((*rows.shape[:-1], self.vocabulary), -mx.inf, rows.dtype)
        none[..., self._columns] = rows
        return none

    @functools.cached_property
    def _columns(self) -> mx.array:
        assert self.tokens is not None
        return mx.array(self.tokens)

    def put_in(self, native: bool, dtype: mx.Dtype) -> None:
        """Quantize the linear layers to 4 bits, once, for native CPU kernels or MLX's. dtype: of activations."""
        if self._is_quantized:
            return
        self._is_quantized = True
        quantizer = get_format("affine")
        for path, module in [*named_modules_of(self)]:
            put = with_kernels(module, native)
            if isinstance(put, nn.Linear) and put.weight.shape[1] % GROUP_SIZE == 0:
                put.x_bits = ACTIVATION_BITS  # for the quantizer, which chooses the order of the codes
                put = quantizer.modules(put, BITS, (BITS,), GROUP_SIZE, put.weight.dtype)[BITS]
                put.x_bits = ACTIVATION_BITS
            if put is not module and path:
                self.update_modules(tree_unflatten([(path, put)]))
        if not native:
            self.set_dtype(dtype)
        mx.eval(self.parameters())

    @property
    def bytes_in_use(self) -> float:
        """Bytes that a drafted token reads once `put_in` has quantized the head."""
        if self._is_quantized:
            return self.nbytes
        sizes = (array.size for name, array in tree_flatten(self.parameters()) if not name.startswith("embed"))
        return BYTES_IN_USE * sum(sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that a drafted token reads."""
        return sum(array.nbytes for name, array in tree_flatten(self.parameters()) if not name.startswith("embed"))


def embedding_of(model: nn.Module) -> Callable[[], Any] | None:
    """Return a function that returns a model's embedding in the engaged gear; None if its name is unknown."""
    for module in modules_of(model):
        name = next((each for each in EMBEDDINGS if each in module), None)
        if name is not None:
            return lambda: module[name]
    return None
