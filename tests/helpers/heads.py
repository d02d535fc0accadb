"""Draft heads with random weights, saved in the released format."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from conftest import normal

ROWS = 40  # output rows: fewer than the vocabulary


def save_head(
    directory: Path, model, prefix: str = "midlayer", rows: int | None = ROWS, seed: int = 3, **change
) -> Path:
    """Save a head of a model; rows: None for a row per token.

    prefix: "midlayer": names and configuration of SpecForge; "layers.0": those of vLLM and mlx-vlm.
    """
    args, size = model.args, model.args.hidden_size
    heads, shared, width, wide = 4, 2, change.get("head_dim", 16), 96
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": width,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": args.vocab_size,
        "draft_vocab_size": rows or args.vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, args.num_hidden_layers - 1]},
    }
    shapes = {
        "fc.weight": (size, 3 * size),
        "lm_head.weight": (config["draft_vocab_size"], size),
        **{
            f"{prefix}.self_attn.{name}_proj.weight": (n * width, 2 * size)
            for name, n in zip("qkv", (heads, shared, shared))
        },
        f"{prefix}.self_attn.o_proj.weight": (size, heads * width),
        **{f"{prefix}.mlp.{name}_proj.weight": (wide, size) for name in ("gate", "up")},
        f"{prefix}.mlp.down_proj.weight": (size, wide),
    }
    arrays = {name: normal(*shape, seed=seed + i, scale=0.2) for i, (name, shape) in enumerate(shapes.items())}
    norms = [f"{prefix}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    for i, name in enumerate((*norms, "norm")):
        arrays[f"{name}.weight"] = 1 + normal(size, seed=seed + 50 + i, scale=0.1)
    if rows is not None:
        tokens = np.sort(np.random.default_rng(seed).permutation(args.vocab_size)[:rows])
        arrays["d2t"] = mx.array(tokens - np.arange(rows), mx.int64)
        arrays["t2d"] = mx.array(np.isin(np.arange(args.vocab_size), tokens))
    config |= change
    if prefix != "midlayer":
        config |= {"eagle_aux_hidden_state_layer_ids": [1, 2, args.num_hidden_layers], "eagle_config": None}
        own = {"speculators_model_type": "eagle3", "draft_vocab_size": config["draft_vocab_size"]}
        config = (
            own
            | {"architectures": ["Eagle3Speculator"], "transformer_layer_config": config}
            | {name: config.pop(name) for name in ("eagle_aux_hidden_state_layer_ids",)}
        )
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
