"""Models whose layers, all or some, carry a state from token to token."""

from typing import Any

from .parts import COMMON, EXPERTS, FIRST_DENSE, FULL, GATED_DELTA, LATENT, PAIRS, SHARED, SPARSE_STEP, WINDOW

LING = PAIRS | EXPERTS | SHARED | FIRST_DENSE | {"layer_group_size": 2, "group_norm_size": 2}
QWEN = COMMON | GATED_DELTA
DELTA = {"num_heads": 2, "head_dim": 32, "kda_layers": [1], "full_attn_layers": [2], "short_conv_kernel_size": 3}
KIMI: dict[str, Any] = (
    COMMON
    | EXPERTS
    | LATENT
    | SHARED
    | FIRST_DENSE
    | {"linear_attn_config": DELTA, "num_experts_per_token": 2, "model_max_length": 256, "mla_use_nope": True}
)
LFM = COMMON | {
    "conv_bias": False,
    "conv_L_cache": 3,
    "full_attn_idxs": [1],
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
MAMBA = COMMON | {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 32}
HADAMARD = {  # its vectors are rotated in blocks of 512 and its weights packed
    "schema_version": 1,
    "tensor_namespace": "mlx-lm-text",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": [{"path": "lm_head", "block": 512, "embedding": False, "dtype": "float16"}],
    "text_config": QWEN | {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 16},
}

STATES = {
    "bailing_hybrid": LING | LATENT,
    "bailing_moe_linear": LING,
    "bailing_moe_v3": LING | LATENT | {"short_conv_kernel_size": 4, "moe_shared_expert_intermediate_size": 64},
    "falcon_h1": COMMON
    | {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_d_conv": 4},
    "granitemoehybrid": COMMON
    | EXPERTS
    | {
        "layer_types": ["mamba", "attention"],
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 2,
        "mamba_d_head": 64,
        "mamba_proj_bias": False,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "jamba": COMMON
    | EXPERTS
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 32,
    },
    "kimi_linear": KIMI,
    "lfm2": LFM,
    "lfm2_moe": LFM | EXPERTS | {"use_expert_bias": True, "num_dense_layers": 1},
    "mamba": MAMBA,
    "mamba2": MAMBA | {"num_heads": 4, "n_groups": 1, "time_step_limit": [0.01, 10.0], "time_step_rank": "auto"},
    "nemotron_h": COMMON
    | EXPERTS
    | {
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmo_hybrid": QWEN | {"layer_types": ["linear_attention", FULL], "linear_allow_neg_eigval": True},
    "plamo2": COMMON
    | {
        "hidden_size_per_head": 32,
        "attention_window_size": WINDOW,
        "mamba_d_state": 8,
        "mamba_num_heads": 2,
        "mamba_step": 2,
    },
    "prism_hadamard_qwen35": HADAMARD,
    "qwen3_5": {"text_config": QWEN | {"model_type": "qwen3_5"}},
    "qwen3_5_moe": {"text_config": QWEN | EXPERTS | SHARED | {"model_type": "qwen3_5_moe"}},
    "qwen3_next": QWEN | EXPERTS | SHARED | SPARSE_STEP,
    "recurrent_gemma": COMMON
    | {
        "num_hidden_layers": 3,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": COMMON | {"a_low_rank_dim": 32, "v_low_rank_dim": 32, "gate_low_rank_dim": 32, "decay_low_rank_dim": 32},
}
