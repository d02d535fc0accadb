"""Mixtures of experts with attention over the whole text."""

from typing import Any

from .parts import COMMON, EXPERTS, FIRST_DENSE, PAIRS, SHARED, SPARSE_STEP, VOCABULARY

MIXTURE = COMMON | EXPERTS
GRANITE = {"logits_scaling": 1.0, "attention_multiplier": 0.2, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
SCALED_ROPE = {
    "type": "longrope",
    "long_factor": [1.0] * 16,
    "short_factor": [1.0] * 16,
    "long_mscale": 1.25,
    "short_mscale": 1.25,
    "original_max_position_embeddings": 256,
}

MIXTURES: dict[str, dict[str, Any]] = {
    "Klear": MIXTURE | SHARED | SPARSE_STEP | {"mlp_only_layers": [0]},
    "bailing_moe": MIXTURE | SHARED | FIRST_DENSE | {"topk_group": 1},
    "dbrx": {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "n_layers": 2,
        "n_heads": 2,
    },
    "deepseek": MIXTURE | SHARED | FIRST_DENSE,
    "dots1": MIXTURE | SHARED | FIRST_DENSE,
    "ernie4_5_moe": COMMON
    | {
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_capacity": [],
    },
    "glm4_moe": MIXTURE | SHARED | FIRST_DENSE | {"use_qk_norm": True},
    "granitemoe": MIXTURE | GRANITE,
    "hunyuan": MIXTURE
    | {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "minimax": PAIRS | EXPERTS | {"shared_intermediate_size": 64, "rotary_dim": 16},
    "mixtral": MIXTURE,
    "olmoe": MIXTURE,
    "phimoe": MIXTURE | {"rope_scaling": SCALED_ROPE},
    "phixtral": EXPERTS | {"num_vocab": VOCABULARY, "model_dim": 64, "num_heads": 2, "num_layers": 2, "rotary_dim": 16},
    "qwen2_moe": MIXTURE | SHARED,
    "qwen3_moe": MIXTURE | SPARSE_STEP,
    "solar_open": MIXTURE | SHARED | FIRST_DENSE,
}
