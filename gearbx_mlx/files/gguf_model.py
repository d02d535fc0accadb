"""A GGUF file as a model that mlx-lm loads: `--model FILE.gguf`, or any name.

The first use writes a directory of the cache: configuration, tokenizer and the places of the tensors. The weights stay
in the file. Types with affine codes in groups of 32 (`CODED`) stay quantized; F16 and BF16 are unchanged. All others
become float16, such as Q6_K with 16 weights per scale.

Sources: llama.cpp's gguf-py (names of tensors and keys) and convert_hf_to_gguf.py (changes to weights). Tokenizers are
byte-level BPE ("gpt2") after a split by a regular expression, and SentencePiece ("llama") with a score for each piece.
Sources: llama.cpp's llama-vocab.cpp, and the conversion of SentencePiece in transformers.
"""

import collections
import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import GearbxError, GearbxWarning, error_context, one_line
from .gguf import CODED, GGUF_GROUP, MAGIC, Gguf, GgufTensor
from .model_directory import MAX_LAYERS, REFETCH
from .reading import shown, unreadable
from .unpacked import State, state_and_contents, unpacked

TENSORS = "tensors.json"  # file of a directory with the places of the tensors
BLOCKS_OF_27B = {"gemma2": 46, "gemma3_text": 62}  # Gemma 2 and 3 27B scale queries by the mean width of a head
ROPE_THETA = 10000.0  # default, if the file has none

# Parts of tensor names in GGUF to names in mlx-lm.
LLAMA_NAMES = {
    **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}
AROUND = {  # norms of blocks with a norm after attention and MLP, too
    **{"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"},
    "post_ffw_norm": "post_feedforward_layernorm",
}
JOINED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp as mlx-lm has it.

    name: the class in transformers. model_type: mlx-lm's. parts: names of tensors. in_pairs: whether rows of q and k
    are stored in pairs. plus_one: whether norms store their weights plus 1. fields: makes the own fields of config.json
    from the metadata, without the architecture's prefix, and the width of a head.
    """

    name: str
    model_type: str
    parts: Mapping[str, str]
    in_pairs: bool = False
    plus_one: bool = False
    fields: Callable[[Mapping[str, Any], int], dict[str, Any]] = lambda of, head: {}


def fields_of_phi3(of: Mapping[str, Any], head: int) -> dict[str, Any]:
    return {"partial_rotary_factor": of.get("rope.dimension_count", head) / head}


def fields_of_granite(of: Mapping[str, Any], head: int) -> dict[str, Any]:
    return {
        "logits_scaling": of.get("logit_scale", 1.0),
        "attention_multiplier": of.get("attention.scale", head**-0.5),
        "embedding_multiplier": of.get("embedding_scale", 1.0),
        "residual_multiplier": of.get("residual_scale", 1.0),
    }


def fields_of_gemma2(of: Mapping[str, Any], head: int) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": of.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": of.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": scaled_by(of, head, "gemma2"),
    }


def fields_of_gemma3(of: Mapping[str, Any], head: int) -> dict[str, Any]:
    scaling = {"rope_type": "linear", "factor": of.get("rope.scaling.factor", 1.0)}  # for layers with full attention
    return {
        "query_pre_attn_scalar": scaled_by(of, head, "gemma3_text"),
        "sliding_window": of["attention.sliding_window"],
        "sliding_window_pattern": of.get("attention.sliding_window_pattern", 6),
        "rope_theta": of.get("rope.freq_base", 1e6),
        "rope_local_base_freq": of.get("rope.freq_base_swa", ROPE_THETA),
        "rope_scaling": scaling if of.get("rope.scaling.type") == "linear" else None,
    }


def scaled_by(of: Mapping[str, Any], head: int, model_type: str) -> int:
    """Return the number whose square root divides the queries of a Gemma. head: mean width of a head."""
    return head if of["block_count"] == BLOCKS_OF_27B[model_type] else of.get("attention.key_length", head)


ARCHITECTURES = {  # Mistral's models have the name llama
    "llama": Architecture("LlamaForCausalLM", "llama", LLAMA_NAMES, in_pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", LLAMA_NAMES),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", LLAMA_NAMES),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", LLAMA_NAMES, in_pairs=True),
    "granite": Architecture("GraniteForCausalLM", "granite", LLAMA_NAMES, in_pairs=True, fields=fields_of_granite),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", LLAMA_NAMES | JOINED, fields=fields_of_phi3),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", LLAMA_NAMES | AROUND, plus_one=True, fields=fields_of_gemma2),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", LLAMA_NAMES | AROUND, plus_one=True, fields=fields_of_gemma3
    ),
}
FREQUENCIES = "rope_freqs.weight"  # factors by which frequencies are divided
STRETCHED = (FREQUENCIES, "rope_factors_long.weight", "rope_factors_short.weight")
OF_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def is_gguf(file: Path) -> bool:
    """Return whether the suffix or the first bytes identify a GGUF. Raises GearbxError for an unreadable file."""
    if file.suffix == ".gguf":
        return True
    try:
        with open(file, "rb") as opened:  # Ollama's files have no suffix
            return opened.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise unreadable(file, error) from error


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of a GGUF file, and its place in mlx-lm's model.

    Attributes:
        name: of the parameter in mlx-lm.
        heads: of q or k, whose rows are in pairs; 0: rows are as in mlx-lm.
        minus: subtracted from the weights.
    """

    tensor: GgufTensor
    name: str
    heads: int = 0
    minus: int = 0


@dataclass(frozen=True)
class GgufWeights:
    """The weights of a model in a GGUF file.

    Attributes:
        state: of the file when it was hashed.
        dtype: name of the type of all weights; None: quantized weights stay packed.
    """

    file: Path
    state: State
    dtype: str | None
    tensors: Sequence[ModelTensor]

    @cached_property
    def usual_type(self) -> str:
        """Name of the type of weights that have no 16-bit type in the file."""
        return usual_type(each.tensor for each in self.tensors)


_weights: dict[Path, GgufWeights] = {}  # directories of the cache to their weights


def gguf_weights(directory: Path) -> GgufWeights | None:
    """Return the weights of a directory that this process found for a GGUF file; None: any other model."""
    return _weights.get(directory)


def model_directory(file: Path, name: str, dtype: str | None, check: Callable[[Path, GgufWeights], None]) -> Path:
    """Return the cache directory of a GGUF file, with everything of a model except its weights.

    Args:
        name: start of the directory's name.
        dtype: name of the type of all weights; None: quantized weights stay packed.
        check: validates the weights when the directory is written.

    Raises:
        GearbxError: a file that cannot be read, or a cache that cannot be written.
    """
    state, source = state_and_contents(file)

    def write(place: Path) -> None:
        check(place, GgufWeights(file, state, dtype, write_model(file, place, dtype)))

    directory = unpacked(name, f"{source} {dtype}", write)
    tensors = msgspec.json.decode((directory / TENSORS).read_bytes(), type=list[ModelTensor])
    _weights[directory] = GgufWeights(file, state, dtype, tensors)
    if dtype is None:
        warn_of_widened(file, directory)
    return directory


@functools.cache  # once, though a command asks for the directory several times
def warn_of_widened(file: Path, directory: Path) -> None:
    """Warn of weights that take more memory as float16 than in the file."""
    widened = [each.tensor for each in _weights[directory].tensors if each.tensor.kind.name not in CODED]
    widened = [tensor for tensor in widened if 2 * math.prod(tensor.shape) > tensor.nbytes]
    if widened:
        stored, own = sum(tensor.nbytes for tensor in widened), sum(2 * math.prod(tensor.shape) for tensor in widened)
        warnings.warn(
            f"{file}: weights of {' and '.join(dict.fromkeys(tensor.kind.name for tensor in widened))} become float16, "
            f"{own / 1e6:.0f} MB in place of {stored / 1e6:.0f} MB; weights of {', '.join(CODED)} stay packed",
            GearbxWarning,
            stacklevel=2,
        )


def write_model(file: Path, directory: Path, dtype: str | None) -> list[ModelTensor]:
    """Write configuration, tokenizer and places of weights into an empty directory, and return these places."""
    gguf = Gguf(file)
    with error_context(file):
        check_metadata(gguf)
    try:
        config, tensors = config_of(gguf, dtype), tensors_of(gguf)
        write_tokenizer(gguf.metadata, directory)
        (directory / "config.json").write_text(json.dumps(config, indent=1))
    except (GearbxError, OSError):
        raise
    except KeyError as error:
        raise not_fitting(file, f"{error} is missing, or a list") from error
    except Exception as error:  # numbers out of range fail in a hundred ways
        raise not_fitting(file, f"a number of heads, a token or another field: {one_line(error)}") from error
    (directory / TENSORS).write_bytes(msgspec.json.encode(tensors))
    return tensors


def not_fitting(file: Path, reason: str) -> GearbxError:
    return GearbxError(f"{file}: its metadata do not fit its tensors ({reason}); {REFETCH}")


def shown_value(value: Any) -> str:
    """Return a value of the metadata as a message shows it."""
    return shown(value) if value is None or isinstance(value, str | int | float) else "a list"


def check_metadata(gguf: Gguf) -> None:
    """Validate architecture, tokenizer and tensors. Raises GearbxError for unknown or missing ones."""
    of = gguf.metadata
    known: dict[str, Collection[str]] = {"general.architecture": ARCHITECTURES, "tokenizer.ggml.model": (BPE, PIECES)}
    if of.get("tokenizer.ggml.model") == BPE:
        known["tokenizer.ggml.pre"] = WORD_CUTS
    for key, choices in known.items():
        if not isinstance(of.get(key), str) or of[key] not in choices:
            found = f"{key} is {shown_value(of.get(key))}; known are {' and '.join(choices)}"
            raise GearbxError(f"{found}; use the model as safetensors")
    pieces = of.get("split.count", 1)
    if isinstance(pieces, int) and pieces > 1:
        raise GearbxError(f"is one of {pieces} files of a model; use llama-gguf-split --merge to join them")
    architecture = of["general.architecture"]
    for name in gguf.tensors:
        if mlx_name(name, ARCHITECTURES[architecture].parts) is None and name not in STRETCHED:
            found = f"has a tensor {shown(name)}, unknown to {architecture} in mlx-lm"
            raise GearbxError(f"{found}; use the model as safetensors")
    count = of.get(f"{architecture}.block_count")
    blocks = len({name.split(".")[1] for name in gguf.tensors if name.startswith("blk.")})
    if not isinstance(count, int) or count != blocks:
        found = f"{architecture}.block_count is {shown_value(count)}, and there are tensors of {blocks} blocks"
        raise GearbxError(f"{found}; {REFETCH}")
    if blocks > MAX_LAYERS:
        raise GearbxError(f"has {blocks} blocks, and no model has more than {MAX_LAYERS}; {REFETCH}")
    embedding, tokens = gguf.tensors.get("token_embd.weight"), of.get("tokenizer.ggml.tokens")
    if embedding is None or len(embedding.shape) != 2 or not isinstance(tokens, list):
        raise GearbxError(f"has no token_embd.weight, or no tokenizer.ggml.tokens; {REFETCH}")
    if len(tokens) > embedding.shape[0]:
        raise GearbxError(f"has {len(tokens)} tokens and {embedding.shape[0]} rows of token_embd.weight; {REFETCH}")


def tensors_of(gguf: Gguf) -> list[ModelTensor]:
    """Return the tensors of a model, by their order in the file."""
    kind = ARCHITECTURES[gguf.metadata["general.architecture"]]
    heads = dict(zip(("attn_q", "attn_k"), heads_of(gguf))) if kind.in_pairs else {}
    found = []
    for tensor in gguf.tensors.values():
        name, own = mlx_name(tensor.name, kind.parts), heads.get(tensor.name.split(".")[-2], 0)
        if name is None:  # config.json has the stretching of positions
            continue
        if own and tensor.shape[0] % (2 * own):
            raise ValueError(f"{shown(tensor.name)} has {tensor.shape[0]} rows, and {own} heads")
        found.append(ModelTensor(tensor, name, own, int(kind.plus_one and "norm" in name)))
    return found


def mlx_name(tensor: str, parts: Mapping[str, str]) -> str | None:
    """Return a tensor's name in mlx-lm, or None: model.layers.3.self_attn.q_proj.weight of blk.3.attn_q.weight."""
    stem, _, kind = tensor.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    part = parts.get(block[2] if block else stem)
    if part is None or kind not in ("weight", "bias"):
        return None
    return f"model.layers.{block[1]}.{part}.{kind}" if block else f"{part}.{kind}"


def own_metadata(gguf: Gguf) -> dict[str, Any]:
    """Return the metadata without lists, and without the prefix of the architecture."""
    own = f"{gguf.metadata['general.architecture']}."
    return {
        key.removeprefix(own): value for key, value in gguf.metadata.items() if not isinstance(value, list | np.ndarray)
    }


def heads_of(gguf: Gguf) -> tuple[int, int]:
    """Return the numbers of query and key heads. Raises ValueError for none."""
    of = own_metadata(gguf)
    heads = of["attention.head_count"]
    both = heads, of.get("attention.head_count_kv", heads)
    if not all(isinstance(count, int) and count > 0 for count in both):
        raise ValueError(f"attention.head_count and head_count_kv are {both}")
    return both


def usual_type(tensors: Iterable[GgufTensor]) -> str:
    """Return the type of the weights that have no 16-bit type in a GGUF file: that of its other weights."""
    return "bfloat16" if {tensor.kind.name for tensor in tensors} <= {"BF16", "F32"} else "float16"


def config_of(gguf: Gguf, dtype: str | None) -> dict[str, Any]:
    """Return config.json of a model in a GGUF."""
    of, kind = own_metadata(gguf), ARCHITECTURES[gguf.metadata["general.architecture"]]
    vocabulary, width = gguf.tensors["token_embd.weight"].shape
    heads, kv_heads = heads_of(gguf)
    has_biases = "blk.0.attn_q.bias" in gguf.tensors
    head = of.get("attention.key_length", width // heads)
    config = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "hidden_size": width,
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": of["context_length"],
        "rms_norm_eps": of["attention.layer_norm_rms_epsilon"],
        "rope_theta": of.get("rope.freq_base", ROPE_THETA),
        "rope_scaling": stretching_of(gguf, of, head),
        "attention_bias": has_biases,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": dtype or usual_type(gguf.tensors.values()),
        "bos_token_id": of.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends_of(gguf.metadata),
        **kind.fields(of, width // heads),
    }
    if dtype is None:
        config |= quantization_of(gguf, kind)
    return config


def stretching_of(gguf: Gguf, of: Mapping[str, Any], head: int) -> dict[str, Any] | None:
    """Return the RoPE scaling of Llama 3.1 and later. Raises GearbxError for all other scaling except Gemma 3's."""
    scaling, kind = of.get("rope.scaling.type", "none"), of["general.architecture"]
    stretched = [name for name in STRETCHED if name in gguf.tensors]
    if scaling == "linear" and kind == "gemma3" and not stretched:
        return None
    if scaling == "none" and stretched == [FREQUENCIES] and kind == "llama":
        factors = gguf.weights(gguf.tensors[FREQUENCIES])
        factor = float(factors.max())
        if factors.shape == (head // 2,) and np.allclose(
            factors, factors_of_llama3(of.get("rope.freq_base", ROPE_THETA), head, factor), rtol=1e-3
        ):
            return {"rope_type": "llama3", "factor": factor, **OF_LLAMA3}
    elif scaling == "none" and not stretched:
        return None
    raise GearbxError(f"{gguf.path}: has RoPE scaling that cannot be read; use the model as safetensors")


def factors_of_llama3(theta: float, head: int, factor: float) -> np.ndarray:
    """Return the divisor of each RoPE frequency, (head / 2,): `factor` for low frequencies, 1 for high ones."""
    lengths = 2 * math.pi * theta ** (np.arange(0, head, 2) / head)  # in tokens
    low, high, original = OF_LLAMA3.values()
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def quantization_of(gguf: Gguf, kind: Architecture) -> dict[str, Any]:
    """Return the `quantization` of config.json: the most common bits, and by path other bits; empty without codes."""
    bits = {
        (mlx_name(tensor.name, kind.parts) or "").rpartition(".")[0]: CODED[tensor.kind.name]
        for tensor in gguf.tensors.values()
        if tensor.kind.name in CODED
    }
    if not bits:
        return {}
    ((most, _),) = collections.Counter(bits.values()).most_common(1)
    others = {path: {"group_size": GGUF_GROUP, "bits": own} for path, own in bits.items() if own != most}
    return {"quantization": {"group_size": GGUF_GROUP, "bits": most, "mode": "affine", **others}}


BPE, PIECES = "gpt2", "llama"
UNKNOWN_KIND, SPECIAL, OF_USER = 2, 3, 4  # types of tokens; the last two are never split
PIECE_SPACE = "▁"  # SentencePiece's space

# Pre-tokenizers of byte-level BPE by tokenizer.ggml.pre: a regular expression; None: single digits.
CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = rf"{CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
)
WORD_CUTS = {
    **dict.fromkeys(("smollm", "starcoder", "refact"), None),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WORDS % ""),
    **dict.fromkeys(("llama-bpe", "dbrx", "smaug-bpe"), WORDS % "{1,3}"),
    **{"gpt-4o": BY_CASE % (CONTRACTED + "?", CONTRACTED + "?", "{1,3}"), "tekken": BY_CASE % ("", "", "")},
}
WHOLE_WORDS = ("llama-bpe", "tekken")  # match whole words first, and prepend the BOS token
ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def write_tokenizer(of: Mapping[str, Any], directory: Path) -> None:
    """Write tokenizer.json and its settings from the metadata. Raises any error if these do not fit."""
    pieces = of["tokenizer.ggml.model"] == PIECES
    tokenizer = of_pieces(of) if pieces else of_bytes(of)
    tokens, kinds = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.token_type"]
    for chosen, special in (((SPECIAL, *([UNKNOWN_KIND] if pieces else [])), True), ((OF_USER,), False)):
        whole = [token for token, own in zip(tokens, kinds, strict=True) if own in chosen]
        added = [AddedToken(token, special=special, normalized=pieces and not special) for token in whole]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: of.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    adds_bos = of.get("tokenizer.ggml.add_bos_token", pieces or of.get("tokenizer.ggml.pre") in WHOLE_WORDS)
    if adds_bos and ids["bos"] is not None:
        bos = tokens[ids["bos"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
        )
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[place] for name, place in ids.items() if place is not None},
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in of:
        settings["chat_template"] = of["tokenizer.chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def ends_of(of: Mapping[str, Any]) -> list[int]:
    """Return the EOS tokens: the file's, and the end of a chat turn."""
    tokens, kinds = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.token_type"]
    turns = [place for place, token in enumerate(tokens) if token in ENDS_OF_TURN and kinds[place] == SPECIAL]
    named = [of["tokenizer.ggml.eos_token_id"], of.get("tokenizer.ggml.eot_token_id")]
    return [*dict.fromkeys(place for place in (*named, *turns) if place is not None)]


def of_bytes(of: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer of byte-level BPE."""
    tokens, pre = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ")) for merge in of["tokenizer.ggml.merges"]]
    places = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=places, merges=merges, ignore_merges=pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cutting(pre))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def cutting(pre: str) -> list[Any]:
    """Return the pre-tokenizers of `tokenizer.ggml.pre`."""
    expression = WORD_CUTS[pre]
    if expression is None:
        return [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def of_pieces(of: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer of SentencePiece's BPE, which merges the neighbors with the highest score first."""
    tokens, spaced = of["tokenizer.ggml.tokens"], of.get("tokenizer.ggml.add_space_prefix", True)
    places = {token: place for place, token in enumerate(tokens)}
    unknown = tokens[of.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = merges_of(places, of["tokenizer.ggml.scores"], of["tokenizer.ggml.token_type"])
    model = models.BPE(vocab=places, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", PIECE_SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(PIECE_SPACE), spaces]) if spaced else spaces
    back = [decoders.Replace(PIECE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if spaced else back)
    return tokenizer


def merges_of(places: Mapping[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Return the pairs that form a piece, highest score first."""
    found = []
    for piece, place in places.items():
        if kinds[place] in (UNKNOWN_KIND, SPECIAL):
            continue
        for end in range(1, len(piece)):
            left, right = places.get(piece[:end]), places.get(piece[end:])
            if left is not None and right is not None:
                found.append((-scores[place], left, right, piece[:end], piece[end:]))
    return [(left, right) for *_, left, right in sorted(found)]
