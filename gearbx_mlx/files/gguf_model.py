"""A GGUF file as a model that mlx-lm loads: `--model FILE.gguf`.

At its first use it becomes a directory of the cache: weights, configuration, tokenizer. Q8_0, Q4_0 and Q4_1 are affine
codes in groups of 32, which are put in MLX's order without a detour through dense weights. Other encodings stay dense.

Source: llama.cpp's gguf-py (names of tensors and keys) and llama-vocab.cpp (how texts are cut).
"""

import collections
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import GearbxError
from .gguf import AGAIN, Gguf, GgufTensor, codes_of
from .reading import shown, unreadable
from .writing import make_directory, unwritable

SUFFIX = ".gguf"
GROUP = 32  # weights of a block, which share a scale
SPECIAL, OF_USER = 3, 4  # types of tokens that stand for no text, or that no text is cut in
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
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
IN_PAIRS = ("llama",)  # whose rows of q and k llama.cpp keeps in pairs

# How texts are cut before byte-level BPE, by tokenizer.ggml.pre: digits one by one, or this expression.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {"smollm": None, "qwen2": WORDS % r"\p{N}", "llama-bpe": WORDS % r"\p{N}{1,3}"}


def gguf_directory(file: Path) -> Path:
    """The directory that a file becomes at its first use; the same file is not written twice.

    Raises:
        GearbxError: no GGUF, a damaged one, an architecture, tokenizer or encoding that is not known; a cache that
            cannot be written.
    """
    try:
        about = file.stat()
        stamp = f"{file.resolve()} {about.st_size} {about.st_mtime_ns}"
    except OSError as error:
        raise unreadable(file, error) from error
    return unpacked(f"{file.stem}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}", lambda: Gguf(file), dense=False)


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
            if not directory.exists():  # another process may have been quicker
                (Path(work) / name).rename(directory)
    except OSError as error:
        if not directory.is_dir():
            raise unwritable(directory, error) from error
    return directory


def check(gguf: Gguf) -> None:
    """Raises GearbxError for an architecture, a tokenizer or a tensor that is not known, or that is missing."""
    of, path = gguf.metadata, gguf.path
    known = ("general.architecture", ARCHITECTURES), ("tokenizer.ggml.model", ["gpt2"]), ("tokenizer.ggml.pre", CUTS)
    for key, choices in known:
        if of.get(key) not in choices:
            raise GearbxError(
                f"{path}: {key} is {shown(of.get(key))}; what can be read has {' or '.join(choices)}; give the model "
                "as safetensors"
            )
    for name in gguf.tensors:
        if name_of(name) is None:
            raise GearbxError(
                f"{path}: has a tensor {shown(name)}, which no {of['general.architecture']} of mlx-lm has; {AGAIN}"
            )
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
    try:
        config = config_of(gguf)
        directory.mkdir()
        weights: dict[str, mx.array] = {}
        bits: dict[str, int] = {}
        for tensor in gguf.tensors.values():
            name = name_of(tensor.name) or ""
            heads = heads_of(tensor, config) if gguf.metadata["general.architecture"] in IN_PAIRS else None
            for part, array in arrays_of(gguf, tensor, dense):
                stored = array if heads is None else in_halves(array, heads)
                weights[f"{name.rpartition('.')[0]}.{part}" if part else name] = stored
                if part == "scales":
                    bits[name.rpartition(".")[0]] = 8 if tensor.encoding.name == "Q8_0" else 4
        write_tokenizer(gguf.metadata, directory)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise GearbxError(f"{gguf.path}: its metadata do not fit its tensors ({error!r}); {AGAIN}") from error
    if bits:
        config["quantization"] = quantization_of(bits)
    if not dense:
        config["torch_dtype"] = "float16"
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def arrays_of(gguf: Gguf, tensor: GgufTensor, dense: bool) -> Iterator[tuple[str, mx.array]]:
    """What a tensor is in MLX: its codes, scales and biases by their names; or, with the name "", its weights."""
    packed = None if dense else codes_of(gguf, tensor)
    if packed is not None:
        codes, scales, biases = packed
        yield from {"weight": mx.array(codes), "scales": mx.array(scales), "biases": mx.array(biases)}.items()
        return
    dtype = mx.bfloat16 if dense else DENSE.get(tensor.encoding.name, mx.float16)
    yield "", mx.array(gguf.weights(tensor)).astype(dtype)


def quantization_of(bits: Mapping[str, int]) -> dict[str, Any]:
    """The field of config.json: what most layers have, and by path what others have."""
    (most, _), *_ = collections.Counter(bits.values()).most_common()
    others = {path: {"group_size": GROUP, "bits": own} for path, own in bits.items() if own != most}
    return {"group_size": GROUP, "bits": most, "mode": "affine", **others}


def name_of(tensor: str) -> str | None:
    """The name in mlx-lm of a tensor of a GGUF: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
    stem, _, kind = tensor.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    part = PARTS.get(block[2] if block else stem)
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


def config_of(gguf: Gguf) -> dict[str, Any]:
    """config.json of a model in a GGUF."""
    kind = gguf.metadata["general.architecture"]
    of = {key.removeprefix(f"{kind}."): value for key, value in gguf.metadata.items()}
    vocabulary, width = gguf.tensors["token_embd.weight"].shape
    heads = of["attention.head_count"]
    if not all(isinstance(of[key], int) and of[key] > 0 for key in ("attention.head_count", "block_count")):
        raise ValueError("attention.head_count and block_count are no numbers")
    scaling = {key: value for key, value in of.items() if key.startswith("rope.scaling.type")}
    if set(scaling.values()) - {"none"} or "rope_freqs.weight" in gguf.tensors:
        raise GearbxError(f"{gguf.path}: stretches rotary positions, which is not read; give the model as safetensors")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
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
        "eos_token_id": of["tokenizer.ggml.eos_token_id"],
    }


def write_tokenizer(of: Mapping[str, Any], directory: Path) -> None:
    """tokenizer.json, byte-level BPE, and its settings with the chat template."""
    tokens, kinds = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in of["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cutting(of["tokenizer.ggml.pre"]))
    if of["tokenizer.ggml.pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((SPECIAL, True), (OF_USER, False)):
        whole = [token for token, own in zip(tokens, kinds, strict=True) if own == kind]
        added = [AddedToken(token, special=special, normalized=False) for token in whole]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{ours}_token": of.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in named.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[place] for name, place in ids.items() if place is not None},
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in of:
        settings["chat_template"] = of["tokenizer.chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def cutting(pre: str) -> list[Any]:
    """How a text is cut before its parts are merged."""
    expression = CUTS[pre]
    if expression is None:
        return [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
