"""A draft head as files in the EAGLE-3 format of speculators, which mlx-vlm and vLLM read."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..files.writing import replacing_arrays, write_text
from .training import PLACES, Trainer

GROUP_SIZE = 64  # weights per scale, if quantized


def head_config(trainer: Trainer, model: dict[str, Any], bits: int | None) -> dict[str, Any]:
    """Return config.json of a head. model: the configuration of its model. bits: of quantized weights."""
    shape = trainer.shape
    layer = {
        **{name: value for name, value in vars(shape).items() if name != "draft_vocab_size"},
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": model.get("max_position_embeddings", 2048),
        "mlp_bias": False,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    quantization = {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": PLACES}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(trainer.target.layers),
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": model.get("architectures", []), "name_or_path": None},
        },
        **({"quantization": quantization} if bits else {}),
    }


def head_arrays(trainer: Trainer, bits: int | None, embeddings: bool) -> dict[str, mx.array]:
    """Return the arrays of a head; matrices are bfloat16, or have this many bits if their width allows."""
    arrays = dict(trainer.weights)
    if embeddings:
        arrays["embed_tokens.weight"] = trainer.target.embedding.rows(mx.arange(trainer.shape.vocab_size))
    arrays["fc.weight"] = arrays["fc.weight"] / trainer.target.scale  # so that it takes unscaled states
    arrays["lm_head.weight"] = trainer.rows
    found: dict[str, mx.array] = {}
    for name, array in arrays.items():
        path = name.removesuffix(".weight")
        if bits and array.ndim == 2 and array.shape[1] % GROUP_SIZE == 0:
            parts = mx.quantize(array.astype(mx.bfloat16), GROUP_SIZE, bits)
            found |= {f"{path}.{part}": each for part, each in zip(("weight", "scales", "biases"), parts)}
        else:
            found[name] = array.astype(mx.bfloat16)
    offsets = trainer.tokens - np.arange(len(trainer.tokens))
    found["d2t"] = mx.array(offsets.astype(np.int64))
    found["t2d"] = mx.array(np.isin(np.arange(trainer.shape.vocab_size), trainer.tokens))
    return found


def save_head(
    directory: Path, trainer: Trainer, model: dict[str, Any], bits: int | None = None, embeddings: bool = False
) -> None:
    """Write a head. Each file of an earlier head is replaced as a whole.

    Args:
        model: the configuration of the head's model.
        bits: of quantized matrices, which only MLX reads; None: bfloat16.
        embeddings: write a copy of the model's embeddings too.

    Raises:
        GearbxError: a file that cannot be written.
    """
    with replacing_arrays(directory / "model.safetensors") as place:
        mx.save_safetensors(place, head_arrays(trainer, bits, embeddings), {"format": "mlx"})
    write_text(directory / "config.json", json.dumps(head_config(trainer, model, bits), indent=2) + "\n")
