"""A GGUF file as a model that mlx-lm loads: `--model FILE.gguf`, or any name.

At its first use it becomes a directory of the cache: weights, configuration, tokenizer. Q8_0, Q4_0, Q4_1, Q4_K and Q5_K
are affine codes in groups of 32, which are put in MLX's order without a detour through dense weights. Q6_K becomes
float16, since 16 weights share a scale; other encodings are dense as they are.

Source: llama.cpp's gguf-py (names of tensors and keys) and its convert_hf_to_gguf.py (what it changes of weights).
"""

import collections
import hashlib
import json
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs
from mlx_lm.utils import load_model

from ..errors import GearbxError, GearbxWarning, one_line
from .gguf import AGAIN, CODED, GROUP, MAGIC, Gguf, GgufTensor, codes_of
from .gguf_tokenizer import BPE, CUTS, PIECES, ends_of, write_tokenizer
from .reading import shown, unreadable
from .writing import make_directory, unwritable

SUFFIX = ".gguf"
FORM = 2  # of what is written; another one is not taken from the cache
WIDENED = "gguf_unpacked"  # a field of config.json that is ours: what takes more memory than in the file
BLOCKS_OF_27B = 62  # of Gemma 3, whose queries are scaled by the mean width of a head
ROPE_THETA = 10000.0  # where the file has none
DENSE = {"F16": mx.float16, "BF16": mx.bfloat16}  # F32 is for norms and biases, and becomes the type of the others

# A part of a tensor's name in GGUF to its name in mlx-lm.
PARTS = {
    **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}
AROUND = {  # the norms of a block that has one behind its attention and its MLP, too
    **{"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"},
    "post_ffw_norm": "post_feedforward_layernorm",
}
JOINED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True)
class Architecture:
    """What an architecture of llama.cpp is in mlx-lm.

    name: of the class, as transformers has it. model_type: of mlx-lm. parts: names of tensors. in_pairs: whether rows
    of q and k are kept in pairs. plus_one: whether the weights of norms have 1 added.
    """

    name: str
    model_type: str
    parts: Mapping[str, str] = field(default_factory=lambda: PARTS)
    in_pairs: bool = False
    plus_one: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", in_pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", in_pairs=True),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", PARTS | JOINED),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", PARTS | AROUND, plus_one=True),
}
STRETCHED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def is_gguf(file: Path) -> bool:
    """Whether a file is a GGUF: its name or its first bytes say so. Raises GearbxError if it cannot be read."""
    if file.suffix == SUFFIX:
        return True
    try:
        with open(file, "rb") as opened:  # Ollama's files have no suffix
            return opened.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise unreadable(file, error) from error


def gguf_directory(file: Path) -> Path:
    """The directory that a file becomes at its first use; the same file is not written twice.

    Raises:
        GearbxError: no GGUF, a damaged one, an architecture, tokenizer or encoding that is not known; a cache that
            cannot be written.
    """
    try:
        about = file.stat()
        stamp = f"{file.resolve()} {about.st_size} {about.st_mtime_ns} {FORM}"
    except OSError as error:
        raise unreadable(file, error) from error
    name = f"{file.stem}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"
    directory = unpacked(name, lambda: Gguf(file), dense=False)
    announce(file, directory)
    return directory


def announce(file: Path, directory: Path) -> None:
    """Warn of weights that take more memory than in the file."""
    try:
        widened = json.loads((directory / "config.json").read_bytes()).get(WIDENED, {})
    except (OSError, ValueError):  # of which the loading of the directory tells
        return
    for encoding, (stored, own) in widened.items():
        warnings.warn(
            f"{file}: weights of {encoding} are unpacked to float16, and take {own / 1e6:.0f} MB in place of "
            f"{stored / 1e6:.0f} MB; weights of {', '.join(CODED)} stay packed",
            GearbxWarning,
            stacklevel=2,
        )


def unpacked(name: str, opened: Callable[[], Gguf], dense: bool) -> Path:
    """A directory of the cache, which is made of a GGUF if it is not there. dense: all weights in bfloat16."""
    directory = platformdirs.user_cache_path("gearbx-mlx", appauthor=False) / name
    if directory.is_dir():
        return directory
    gguf = opened()
    check(gguf)
    make_directory(directory.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=directory.parent) as work:
            unpack(gguf, Path(work) / name, dense)
            check_loads(gguf, Path(work) / name)
            if not directory.exists():  # another process may have been quicker
                (Path(work) / name).rename(directory)
    except OSError as error:
        if not directory.is_dir():
            raise unwritable(directory, error) from error
    return directory


def check(gguf: Gguf) -> None:
    """Raises GearbxError for an architecture, a tokenizer or a tensor that is not known, or that is missing."""
    of, path = gguf.metadata, gguf.path
    known = [("general.architecture", ARCHITECTURES), ("tokenizer.ggml.model", (BPE, PIECES))]
    if of.get("tokenizer.ggml.model") == BPE:
        known.append(("tokenizer.ggml.pre", CUTS))
    for key, choices in known:
        if of.get(key) not in choices:
            raise GearbxError(
                f"{path}: {key} is {shown(of.get(key))}; what can be read has {' or '.join(choices)}; give the model "
                "as safetensors"
            )
    parts = ARCHITECTURES[of["general.architecture"]].parts
    for name in gguf.tensors:
        if name_of(name, parts) is None and name not in STRETCHED:
            raise GearbxError(
                f"{path}: has a tensor {shown(name)}, which no {of['general.architecture']} of mlx-lm has; {AGAIN}"
            )
    key = f"{of['general.architecture']}.block_count"
    blocks = len({name.split(".")[1] for name in gguf.tensors if name.startswith("blk.")})
    if of.get(key) != blocks:
        raise GearbxError(f"{path}: {key} is {shown(of.get(key))}, and there are tensors of {blocks} blocks; {AGAIN}")
    embedding = gguf.tensors.get("token_embd.weight")
    tokens = of.get("tokenizer.ggml.tokens")
    if embedding is None or len(embedding.shape) != 2 or not isinstance(tokens, list):
        raise GearbxError(f"{path}: has no token_embd.weight, or no tokenizer.ggml.tokens; {AGAIN}")
    if len(tokens) > embedding.shape[0]:
        raise GearbxError(
            f"{path}: has {len(tokens)} tokens and {embedding.shape[0]} rows of token_embd.weight; {AGAIN}"
        )


def unpack(gguf: Gguf, directory: Path, dense: bool) -> None:
    """Write a model as a directory that mlx-lm loads."""
    kind = ARCHITECTURES[gguf.metadata["general.architecture"]]
    try:
        config = config_of(gguf, kind)
        directory.mkdir()
        weights: dict[str, mx.array] = {}
        bits: dict[str, int] = {}
        for tensor in gguf.tensors.values():
            name = name_of(tensor.name, kind.parts) or ""
            heads = heads_of(tensor, config) if kind.in_pairs else None
            one = int(kind.plus_one and "norm" in name)
            for part, array in arrays_of(gguf, tensor, dense, one):
                stored = array if heads is None else in_halves(array, heads)
                weights[f"{name.rpartition('.')[0]}.{part}" if part else name] = stored
            if not dense and tensor.encoding.name in CODED:
                bits[name.rpartition(".")[0]] = CODED[tensor.encoding.name]
        write_tokenizer(gguf.metadata, directory)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        fields = "a number of heads, a token or another field is beyond what there is"
        problem = f"{error} is missing" if isinstance(error, KeyError) else f"{fields}: {one_line(error)}"
        raise GearbxError(f"{gguf.path}: its metadata do not fit its tensors ({problem}); {AGAIN}") from error
    if bits:
        config["quantization"] = quantization_of(bits)
    if not dense:
        config |= {"torch_dtype": "float16", WIDENED: widened_by(gguf)}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def check_loads(gguf: Gguf, directory: Path) -> None:
    """Raises GearbxError for metadata, such as a number of layers or widths, with which mlx-lm has other weights."""
    try:
        load_model(directory, lazy=True)
    except Exception as error:  # a configuration that does not fit fails in a hundred ways
        problem = one_line(error).partition(",")[0]
        raise GearbxError(f"{gguf.path}: its metadata do not fit its tensors ({problem}); {AGAIN}") from error


def arrays_of(gguf: Gguf, tensor: GgufTensor, dense: bool, one: int = 0) -> Iterator[tuple[str, mx.array]]:
    """What a tensor is in MLX: its codes, scales and biases by their names; or, with the name "", its weights.

    Args:
        one: what is subtracted from weights.
    """
    packed = None if dense else codes_of(gguf, tensor)
    if packed is not None:
        yield from zip(("weight", "scales", "biases"), map(mx.array, packed[1:]))
        return
    dtype = mx.bfloat16 if dense else DENSE.get(tensor.encoding.name, mx.float16)
    yield "", (mx.array(gguf.weights(tensor)) - one).astype(dtype)


def widened_by(gguf: Gguf) -> dict[str, list[int]]:
    """Encodings whose weights become float16, to their bytes in the file and as they become."""
    found: dict[str, list[int]] = {}
    for tensor in gguf.tensors.values():
        if tensor.encoding.block > 1 and tensor.encoding.name not in CODED:
            stored, own = found.get(tensor.encoding.name, [0, 0])
            found[tensor.encoding.name] = [stored + tensor.nbytes, own + 2 * math.prod(tensor.shape)]
    return found


def quantization_of(bits: Mapping[str, int]) -> dict[str, Any]:
    """The field of config.json: what most layers have, and by path what others have."""
    (most, _), *_ = collections.Counter(bits.values()).most_common()
    others = {path: {"group_size": GROUP, "bits": own} for path, own in bits.items() if own != most}
    return {"group_size": GROUP, "bits": most, "mode": "affine", **others}


def name_of(tensor: str, parts: Mapping[str, str] = PARTS) -> str | None:
    """The name in mlx-lm of a tensor of a GGUF: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight.

    Args:
        parts: of the architecture.
    """
    stem, _, kind = tensor.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    part = parts.get(block[2] if block else stem)
    if part is None or kind not in ("weight", "bias"):
        return None
    return f"model.layers.{block[1]}.{part}.{kind}" if block else f"{part}.{kind}"


def heads_of(tensor: GgufTensor, config: Mapping[str, Any]) -> int | None:
    """How many heads the rows of a tensor belong to, of q and k; None for another one."""
    counts = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return counts.get(tensor.name.split(".")[-2])


def in_halves(weight: mx.array, heads: int) -> mx.array:
    """Rows of q or k as mlx-lm rotates them, in halves of a head; llama.cpp keeps those of a Llama in pairs."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def config_of(gguf: Gguf, kind: Architecture) -> dict[str, Any]:
    """config.json of a model in a GGUF."""
    own = f"{gguf.metadata['general.architecture']}."
    of = {key.removeprefix(own): value for key, value in gguf.metadata.items()}
    vocabulary, width = gguf.tensors["token_embd.weight"].shape
    heads = of["attention.head_count"]
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"attention.head_count is {shown(heads)}")
    scaling = of.get("rope.scaling.type", "none")
    linear = scaling == "linear" and kind.model_type == "gemma3_text"
    if not (scaling == "none" or linear) or any(name in gguf.tensors for name in STRETCHED):
        raise GearbxError(f"{gguf.path}: stretches rotary positions, which is not read; give the model as safetensors")
    return {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "hidden_size": width,
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": of.get("attention.head_count_kv", heads),
        "head_dim": of.get("attention.key_length", width // heads),
        "vocab_size": vocabulary,
        "max_position_embeddings": of["context_length"],
        "rms_norm_eps": of["attention.layer_norm_rms_epsilon"],
        "rope_theta": of.get("rope.freq_base", ROPE_THETA),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": of.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends_of(of),
        **OWN_FIELDS.get(kind.model_type, lambda of, head: {})(of, width // heads),
    }


def fields_of_phi3(of: Mapping[str, Any], head: int) -> dict[str, Any]:
    """head: the width of one."""
    return {"partial_rotary_factor": of.get("rope.dimension_count", head) / head}


def fields_of_gemma3(of: Mapping[str, Any], head: int) -> dict[str, Any]:
    """Every sixth layer attends to the whole text, and its positions alone may be stretched."""
    large = of["block_count"] == BLOCKS_OF_27B
    scaling = {"rope_type": "linear", "factor": of.get("rope.scaling.factor", 1.0)}
    return {
        "query_pre_attn_scalar": head if large else of.get("attention.key_length", head),
        "sliding_window": of["attention.sliding_window"],
        "sliding_window_pattern": of.get("attention.sliding_window_pattern", 6),
        "rope_theta": of.get("rope.freq_base", 1e6),
        "rope_local_base_freq": of.get("rope.freq_base_swa", ROPE_THETA),
        "rope_scaling": scaling if of.get("rope.scaling.type") == "linear" else None,
    }


OWN_FIELDS = {"phi3": fields_of_phi3, "gemma3_text": fields_of_gemma3}
