"""Models some of whose layers look back at a window only, without and with experts."""

from typing import Any

from .parts import COMMON, EXPERTS, FULL, PAIRS, SHARED, SLIDING, VOCABULARY, WINDOW, WINDOWED

GEMMA3 = COMMON | {"query_pre_attn_scalar": 32, "sliding_window": WINDOW, "sliding_window_pattern": 2}
GEMMA4: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL] * 2,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        SLIDING: {"rope_theta": 10000.0},
    },
    "tie_word_embeddings": True,
}
MINISTRAL = (
    COMMON
    | WINDOWED
    | {"rope_parameters": {"rope_theta": 10000.0, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}}
)
ROPES = {SLIDING: {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}, FULL: {"rope_theta": 1e6}}

WINDOWS = {
    "afmoe": COMMON | EXPERTS | SHARED | WINDOWED | {"num_dense_layers": 1},
    "baichuan_m1": COMMON | {"sliding_window": WINDOW, "sliding_window_layers": [0], "conv_window": 2},
    "cohere2": COMMON | {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "exaone4": COMMON | {"sliding_window": WINDOW, "sliding_window_pattern": "LG"},
    "exaone_moe": COMMON | EXPERTS | SHARED | WINDOWED | {"is_moe_layer": [False, True]},
    "gear": COMMON | {"num_hidden_layers": 3, "layer_types": [SLIDING, "conv_mixer", FULL], "sliding_window": WINDOW},
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gpt_oss": COMMON | EXPERTS | WINDOWED,
    "laguna": COMMON | EXPERTS | SHARED | WINDOWED | {"mlp_layer_types": ["dense", "sparse"]},
    "mellum": COMMON | EXPERTS | WINDOWED | {"rope_parameters": ROPES},
    "mimo_v2_flash": PAIRS
    | EXPERTS
    | {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "v_head_dim": 32,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
    },
    "ministral3": MINISTRAL,
    "muse_glimmer": COMMON | WINDOWED,
    "olmo3": COMMON | WINDOWED,
    "plamo3": COMMON | {"window_size": WINDOW, "sliding_window_pattern": 2},
    "spark2_5": COMMON | WINDOWED | {"rope_parameters": ROPES},
    "step3p5": COMMON
    | WINDOWED
    | {
        "num_attention_groups": 1,
        "rope_theta": [10000.0] * 2,
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
        "moe_layers_enum": "1",
    },
}
