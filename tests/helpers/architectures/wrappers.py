"""Language models inside multimodal checkpoints: the config of the language model is a part of theirs."""

from typing import Any

from .latent import DEEPSEEK
from .mixtures import MIXTURES
from .parts import COMMON, EXPERTS, FULL, SHARED, SLIDING, VOCABULARY, WINDOW, WINDOWED
from .states import KIMI, LFM
from .windows import GEMMA3, GEMMA4, MINISTRAL


def text(model_type: str, config: dict) -> dict:
    """The config of a wrapper around this one."""
    return {"text_config": config | {"model_type": model_type}, "vocab_size": VOCABULARY}


WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": text("gemma3_text", GEMMA3),
    "gemma3n": text(
        "gemma3n",
        COMMON
        | {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": WINDOW,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": [SLIDING, FULL] * 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
            "hidden_size_per_layer_input": 32,
            "altup_num_inputs": 4,
            "altup_coef_clip": 1.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 32,
        },
    ),
    "gemma4": text("gemma4_text", GEMMA4),
    "kimi_k25": text("kimi_k2", DEEPSEEK),
    "kimi_k3": text(
        "kimi_linear",
        KIMI
        | {
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "linear_attn_config": KIMI["linear_attn_config"]
            | {"gate_lower_bound": -5.0, "use_full_rank_gate": True, "short_conv_kernel_size": 4},
            "mla_use_output_gate": True,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
            "attn_res_block_size": 2,
        },
    ),
    "kimi_vl": text("deepseek_v3", DEEPSEEK),
    "lfm2-vl": text("lfm2", LFM),
    "llama4": text(
        "llama4_text",
        COMMON
        | EXPERTS
        | {
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "use_qk_norm": True,
            "num_experts_per_tok": 1,
        },
    ),
    "minimax_m3_vl": text(
        "minimax_m3_vl",
        COMMON
        | EXPERTS
        | {
            "dense_intermediate_size": 128,
            "shared_intermediate_size": 64,
            "rotary_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": [FULL, "minimax_m3_sparse"],
            "index_n_heads": 1,
            "index_head_dim": 32,
            "index_block_size": 2,
            "index_topk_blocks": 2,
        },
    ),
    "mistral3": text("ministral3", MINISTRAL),
    "muse_spark": text(
        "muse_spark",
        COMMON
        | EXPERTS
        | WINDOWED
        | {
            "num_hidden_layers": 3,  # the first and the last one stay dense
            "layer_types": [SLIDING, SLIDING, FULL],
            "post_norm_eps": 1e-8,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "layer_rope_theta": [10000.0, 10000.0, 0],
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.7,
            "moe_hidden_size": 64,
        },
    ),
    "pixtral": text("llama", COMMON),
    "qwen2_vl": text("qwen2", COMMON),
    "qwen3_vl": text("qwen3", COMMON),
    "qwen3_vl_moe": text("qwen3_moe", MIXTURES["qwen3_moe"] | SHARED),
}
