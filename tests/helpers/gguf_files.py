"""GGUF files, written by the rules of their format."""

import struct
from itertools import zip_longest

import mlx.core as mx
import numpy as np
from conftest import tiny_model, weights_of
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from gearbx_mlx.files import gguf_model
from gearbx_mlx.files.gguf import is_known

F32, F16, Q4_0, Q5_0, Q8_0, Q6_K, Q8_K, BF16 = 0, 1, 2, 6, 8, 14, 15, 30
KINDS = [kind for kind in GGMLQuantizationType if is_known(kind)]
UNSIGNED, FLOAT, STRING, ARRAY = 4, 6, 8, 9
WORDS = [chr(0x100 + n) if n < 33 else chr(n) if n < 127 else chr(0x100 + n - 94) for n in range(250)]
rng = np.random.default_rng(0)


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(tensors=(), entries=(), magic=b"GGUF", version=3, offsets=()):
    """A file: tensors are (name, shape, type, bytes), entries (key, type, bytes). offsets: of the first, if wrong."""
    head = magic + struct.pack("<IQQ", version, len(tensors), len(entries))
    head += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in entries)
    data = b""
    for (name, shape, kind, content), offset in zip_longest(tensors, offsets):
        said = len(data) if offset is None else offset
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, said)
        data += content + bytes(-len(content) % 32)
    return head + bytes(-len(head) % 32) + data


def random_blocks(kind, count):
    """Blocks of any bytes that stand for moderate weights."""
    blocks = rng.integers(0, 256, (500, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        most = np.abs(dequantize(blocks, GGMLQuantizationType(kind))).max(axis=1)
    return rng.choice(blocks[most < 100], count)


CLASSES = {"gemma3": "gemma3_text"}  # of mlx-lm, by the name of llama.cpp
CHANGES = {
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "gemma3": {"num_hidden_layers": 7},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.25},
}
SCALES = {  # keys of llama.cpp to fields of mlx-lm
    **{"logit_scale": "logits_scaling", "attention.scale": "attention_multiplier"},
    **{"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"},
    **{name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
}


def name_in_gguf(name, architecture="llama"):
    parts = {mlx: theirs for theirs, mlx in gguf_model.ARCHITECTURES[architecture].parts.items()}
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{parts[stem]}.{kind}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{parts[part]}.{kind}"


def in_pairs(weight, heads):
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def encoded(array, kind):
    """An array as GGUF stores it."""
    if kind == F32:
        return array.astype(np.float32).tobytes()
    if kind == F16:
        return array.astype(np.float16).tobytes()
    if kind not in (Q4_0, Q5_0, Q8_0):
        return random_blocks(kind, array.size // GGML_QUANT_SIZES[kind][0]).tobytes()
    return quantize(array.astype(np.float32), GGMLQuantizationType(kind)).tobytes()


def write(path, model, kind=F16, architecture=None, more=(), **changes):
    """A model of mlx-lm as a GGUF, with a vocabulary of single characters. more: tensors of float32."""
    args, architecture = model.args, architecture or model.args.model_type
    of_llama, plus_one = architecture in ("llama", "smollm3", "granite"), architecture.startswith("gemma")
    tensors = []
    for name, array in weights_of(model).items():
        stored = np.array(array.astype(mx.float32))
        heads = {"q_proj": args.num_attention_heads, "k_proj": args.num_key_value_heads}.get(name.split(".")[-2])
        if heads and of_llama:
            stored = in_pairs(stored, heads)
        if plus_one and "norm" in name:
            stored = stored + 1
        own = kind if stored.ndim == 2 else F32
        tensors.append((name_in_gguf(name, architecture), stored.shape, own, encoded(stored, own)))
    tensors += [(name, array.shape, F32, encoded(array, F32)) for name, array in more]
    numbers = {
        "block_count": args.num_hidden_layers,
        "context_length": 512,
        "embedding_length": args.hidden_size,
        "feed_forward_length": args.intermediate_size,
        "attention.head_count": args.num_attention_heads,
        "attention.head_count_kv": args.num_key_value_heads,
        "attention.key_length": getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads,
    }
    if architecture == "gemma3":
        numbers |= {"attention.sliding_window": args.sliding_window}
    entries = {f"{architecture}.{key}": (UNSIGNED, struct.pack("<I", value)) for key, value in numbers.items()}
    floats = {"attention.layer_norm_rms_epsilon": args.rms_norm_eps, "rope.freq_base": args.rope_theta}
    floats |= {key: getattr(args, field) for key, field in SCALES.items() if hasattr(args, field)}
    entries |= {f"{architecture}.{key}": (FLOAT, struct.pack("<f", value)) for key, value in floats.items()}
    words = {"general.architecture": architecture, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    entries |= {key: (STRING, text(value)) for key, value in (words | changes).items() if isinstance(value, str)}
    rows = [*WORDS, *(f"<{n}>" for n in range(args.vocab_size - len(WORDS)))]
    entries["tokenizer.ggml.tokens"] = ARRAY, struct.pack("<IQ", STRING, len(rows)) + b"".join(map(text, rows))
    entries["tokenizer.ggml.token_type"] = ARRAY, struct.pack(f"<IQ{len(rows)}i", 5, len(rows), *[1] * len(rows))
    entries["tokenizer.ggml.merges"] = ARRAY, struct.pack("<IQ", STRING, 0)
    entries["tokenizer.ggml.eos_token_id"] = UNSIGNED, struct.pack("<I", 0)
    entries |= {key: value for key, value in changes.items() if isinstance(value, tuple)}
    path.write_bytes(gguf(tensors, [(key, *value) for key, value in entries.items()]))
    return path


def tiny_as(architecture, **change):
    changes = CHANGES.get(architecture, {}) | change
    model = tiny_model(CLASSES.get(architecture, architecture), vocab_size=256, **changes)
    if architecture.startswith("gemma"):  # a file of it does not say this
        model.args.query_pre_attn_scalar = model.args.head_dim
        for layer in model.layers:
            layer.self_attn.scale = model.args.head_dim**-0.5
        norms = {name: array for name, array in weights_of(model).items() if "norm" in name}
        changed = [(name, (mx.random.normal(array.shape) / 4).astype(array.dtype)) for name, array in norms.items()]
        model.load_weights(changed, strict=False)
    return model
