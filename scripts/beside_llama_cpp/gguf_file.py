"""One of mlx-lm's Llamas as a GGUF file, which llama.cpp reads."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

TYPES = {4: "Q4_0", 8: "Q8_0", 16: "F16"}  # of llama.cpp, by the bits of our gears
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(path: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    owner = path.removesuffix(".weight")
    if owner in NAMES:
        return f"{NAMES[owner]}.weight"
    number, _, rest = owner.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[rest]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection in the order in which llama.cpp rotates them.

    mlx-lm rotates row i of a head together with row i + half, llama.cpp rows 2 i and 2 i + 1.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def in_their_order(path: str, weight: np.ndarray, args: Any) -> np.ndarray:
    """A weight as llama.cpp expects it: queries and keys have their rows interleaved."""
    if "q_proj" in path:
        return interleaved(weight, args.num_attention_heads)
    if "k_proj" in path:
        return interleaved(weight, args.num_key_value_heads)
    return weight


def write_gguf(model: Any, file: Path, kind: str, context: int, tokenizer: Path | None = None) -> None:
    """Write every matrix in a type of llama.cpp, and norms in float32. A tied head is the embeddings there too.

    Args:
        kind: Q4_0, Q8_0, F16 or F32.
        context: tokens that the model is said to be for.
        tokenizer: the demo model's tokenizer.json; without one, llama.cpp takes and gives numbers of tokens alone.
    """
    import gguf

    args, target = model.args, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(args.num_hidden_layers)
    writer.add_context_length(context)
    writer.add_embedding_length(args.hidden_size)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.num_attention_heads)
    writer.add_head_count_kv(args.num_key_value_heads)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    writer.add_rope_dimension_count(args.hidden_size // args.num_attention_heads)
    writer.add_rope_freq_base(args.rope_theta)
    writer.add_vocab_size(args.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_vocabulary(writer, json.loads(tokenizer.read_text(encoding="utf-8")))
    for path, array in tree_flatten(model.parameters()):
        weight = in_their_order(path, np.array(array.astype(mx.float32)), args)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(path), weight)
        else:
            writer.add_tensor(gguf_name(path), gguf.quants.quantize(weight, target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, content: dict[str, Any]) -> None:
    """A byte-level BPE with single digits, as in the demo model's tokenizer.json: one token begins and ends texts."""
    import gguf

    numbers = content["model"]["vocab"]
    special = {token["id"]: token["content"] for token in content["added_tokens"] if token["special"]}
    names = sorted(numbers, key=numbers.__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")  # single digits, then the words of GPT-2
    writer.add_token_list(names)
    writer.add_token_types([control if number in special else normal for number in range(len(names))])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(min(special))
    writer.add_eos_token_id(min(special))
    writer.add_add_bos_token(True)
