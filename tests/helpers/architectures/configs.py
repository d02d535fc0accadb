"""The tiny configs, by the kind of model. What they share stands first."""

from typing import Any

# fmt: off

VOCABULARY = 128
GROUP = 32  # a group size that divides all widths
WINDOW = 16  # a prompt of a dozen tokens and a short text fill it
SLIDING, FULL = "sliding_attention", "full_attention"

# Sizes of all classes stand together: each class takes the fields that it knows, and leaves the others.
COMMON: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "head_dim": 32, "rope_scaling": None,
    "attention_bias": False, "mlp_bias": False, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    # the same by other names
    "n_embd": 64, "n_head": 2, "n_layer": 2, "n_inner": 128, "n_ctx": 256, "n_positions": 256, "block_size": 256,
    "n_kv_heads": 1, "hidden_dim": 64, "num_layers": 2, "model_dim": 64, "num_transformer_layers": 2, "d_model": 64,
    "n_layers": 2, "n_heads": 2, "num_vocab": VOCABULARY, "kv_channels": 32, "ff_intermediate_size": 128,
    "intermediate_size_mlp": 128, "window_size": WINDOW, "sliding_window_size": WINDOW, "attention_window_size": WINDOW,
    "layernorm_epsilon": 1e-5, "rotary_emb_base": 10000,
    # scales and shares
    "logits_scaling": 1.0, "attention_multiplier": 0.2, "residual_multiplier": 1.0, "mup_embedding_multiplier": 1.0,
    "scale_depth": 1.0, "scale_emb": 1.0, "dim_model_base": 32, "hidden_dim_scale_factor": 3.0, "rotary_pct": 0.25,
    # parts that one class has
    "use_bias": False, "post_norm": True, "qk_norm": True, "n_shared_head": 2, "num_kv_reuse_layers": 2,
    "ffn_dim_divisor": 64, "loop_window_size": 16, "num_loops": 2, "dense_attention_every_n_layers": 2,
    "gegelu_limit": 20.0, "sliding_window_layers": [0], "conv_window": 2, "global_head_dim": 64,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2,
    # experts, where there are any; the first layer has an MLP if a class can have both
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2,
    "moe_top_k": 2, "moe_topk": 2, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "num_shared_expert": 1,
    "shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "shared_intermediate_size": 64,
    "share_expert_dim": 64, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    "moe_layers_enum": "1", "is_moe_layer": [False, True],
    "decoder_sparse_step": 1, "mlp_only_layers": [], "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
    # attention over latent vectors
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    # states
    "mamba_n_heads": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_proj_bias": False,
    "mamba_conv_bias": True, "mamba_expand": 2, "mamba_dt_rank": 32, "state_size": 8, "ssm_state_size": 8,
    "conv_kernel": 4, "use_conv_bias": True, "n_groups": 1, "linear_num_value_heads": 2, "linear_num_key_heads": 1,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3, "full_attention_interval": 2,
    "conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [1], "a_low_rank_dim": 32, "v_low_rank_dim": 32,
    "gate_low_rank_dim": 32, "decay_low_rank_dim": 32,
}
PAIRS = COMMON | {"num_key_value_heads": 2}  # as many heads of keys as of queries
WINDOWED = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 64}
INDEXER = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}  # fewer tokens than a text has
GRANITE = COMMON | {"embedding_multiplier": 1.0}

# Transformers with a cache that grows and an MLP in every layer.

FULL_BLOCK = {
    "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
}
LINEAR_BLOCK = {
    "attention": {"n_heads_in_group": None, "no_op": False, "replace_with_linear": True},
    "ffn": {"ffn_mult": None, "no_op": False, "replace_with_linear": True},
}

DENSE = dict.fromkeys((
    "bitnet", "cohere", "ernie4_5", "exaone", "gemma", "glm", "glm4", "gpt2", "helium", "internlm2", "internlm3",
    "iquestloopcoder", "lille-130m", "llama", "mimo", "minicpm", "nanbeige", "olmo2", "phi", "plamo", "qwen2", "qwen3",
    "seed_oss", "starcoder2", "telechat3",
), COMMON) | {
    "afm7": COMMON | {"num_layers": 4, "num_heads": 2, "num_kv_heads": 1},
    "apertus": COMMON | {"mlp_bias": True},
    "gemma2": COMMON | {"query_pre_attn_scalar": 32.0},
    "gpt_bigcode": COMMON | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gpt_neox": COMMON | {"use_parallel_residual": True},
    "gptj": COMMON | {"rotary_dim": 16},
    "granite": GRANITE,
    "hunyuan_v1_dense": COMMON
    | {
        "rope_scaling": {
            "alpha": 1000.0, "factor": 1.0, "type": "dynamic", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 0.0, "original_max_position_embeddings": 256,
        }
    },
    "llama4_text": COMMON | {"no_rope_layers": [0, 1], "use_qk_norm": True},
    "nanochat": PAIRS,
    "nemotron": COMMON | {"hidden_act": "relu2"},
    "nemotron-nas": COMMON | {"block_configs": [FULL_BLOCK, LINEAR_BLOCK]},
    "openelm": COMMON | {"num_query_heads": [2, 4], "num_kv_heads": [1, 2], "ffn_multipliers": [1.0, 2.0]},
    "phi3": COMMON | {"partial_rotary_factor": 1.0},
    "phi3small": COMMON | {"vocab_size": 100352},  # the class writes to logits of tokens up to 100351
    "qwen": COMMON | {"intermediate_size": 256},
    "smollm3": COMMON | {"no_rope_layers": [1, 0]},
    "stablelm": COMMON | {"use_qkv_bias": True},
    "talkie": PAIRS,
}

# Models some of whose layers look back at a window only, without and with experts.

GEMMA3 = COMMON | {"query_pre_attn_scalar": 32, "sliding_window": WINDOW, "sliding_window_pattern": 2}
GEMMA4: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2, "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        SLIDING: {"rope_theta": 10000.0},
    },
}
LLAMA_4_SCALING = {"rope_theta": 10000.0, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}
MINISTRAL = COMMON | WINDOWED | {"rope_parameters": LLAMA_4_SCALING}
ROPES = {SLIDING: {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}, FULL: {"rope_theta": 1e6}}

WINDOWS = dict.fromkeys(("afmoe", "exaone_moe", "gpt_oss", "laguna"), COMMON | EXPERTS | WINDOWED) | {
    "baichuan_m1": COMMON | {"sliding_window": WINDOW},
    "cohere2": COMMON | {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "exaone4": COMMON | {"sliding_window": WINDOW, "sliding_window_pattern": "LG"},
    "gear": COMMON | {"num_hidden_layers": 3, "layer_types": [SLIDING, "conv_mixer", FULL], "sliding_window": WINDOW},
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "mellum": COMMON | EXPERTS | WINDOWED | {"rope_parameters": ROPES},
    "mimo_v2_flash": PAIRS
    | EXPERTS
    | {
        "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "n_shared_experts": None, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "swa_rope_theta": 1000.0, "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1, "swa_head_dim": 32, "swa_v_head_dim": 32,
    },
    "ministral3": MINISTRAL,
    "muse_glimmer": COMMON | WINDOWED,
    "olmo3": COMMON | WINDOWED,
    "plamo3": COMMON | {"sliding_window_pattern": 2},
    "spark2_5": COMMON | WINDOWED | {"rope_parameters": ROPES},
    "step3p5": COMMON
    | WINDOWED
    | {
        "num_attention_groups": 1, "rope_theta": [10000.0] * 2, "moe_intermediate_size": 64,
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
    },
}

# Mixtures of experts with attention over the whole text.

MIXTURE = COMMON | EXPERTS
SCALED_ROPE = {
    "type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16, "long_mscale": 1.25,
    "short_mscale": 1.25, "original_max_position_embeddings": 256,
}

MIXTURES: dict[str, dict[str, Any]] = dict.fromkeys((
    "bailing_moe", "deepseek", "dots1", "ernie4_5_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open",
), MIXTURE) | {
    "Klear": MIXTURE | {"mlp_only_layers": [0]},
    "dbrx": COMMON
    | {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "glm4_moe": MIXTURE | {"use_qk_norm": True},
    "granitemoe": GRANITE,
    "hunyuan": MIXTURE | {"use_qk_norm": True, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "minimax": PAIRS | {"rotary_dim": 16},
    "phimoe": MIXTURE | {"rope_scaling": SCALED_ROPE},
    "phixtral": COMMON | {"num_heads": 2, "rotary_dim": 16},
}

# Attention over latent vectors (MLA), with and without an indexer that picks a few tokens.

DEEPSEEK = PAIRS | EXPERTS
LONGCAT = DEEPSEEK | {
    "attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 2, "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 64, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}
YARN = {
    "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 256,
}
CHOICE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}

LATENTS = {
    "deepseek_v2": DEEPSEEK | {"topk_method": "greedy", "rope_scaling": YARN | {"type": "yarn"}},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK | INDEXER,
    "deepseek_v41": DEEPSEEK
    | INDEXER
    | {
        "num_hidden_layers": 6, "o_groups": 2, "o_lora_rank": 32, "sliding_window": WINDOW,
        "compress_ratios": [0, 2, 2, 2, 1, 1], "kv_source_layer_ids": [1, 4], "index_source_layer_ids": [1, 2, 4, 5],
        "candidate_source_layer_id": 4, "candidate_topk_blocks": 4, "candidate_block_size": 2, "hc_mult": 2,
        "hc_sinkhorn_iters": 2, "rms_norm_eps": 1e-20,
    },
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK | INDEXER | CHOICE | {"rope_parameters": {"rope_theta": 10000.0}},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT | {"ngram_vocab_size_ratio": 4, "emb_neighbor_num": 3, "emb_split_num": 1},
    "minicpm3": PAIRS
    | {"rope_scaling": {"original_max_position_embeddings": 256, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
    "mistral4": DEEPSEEK | {"rope_parameters": YARN | LLAMA_4_SCALING | {"rope_type": "yarn"}},
    "youtu_llm": PAIRS,
}

# Models whose layers, all or some, carry a state from token to token.

LING = DEEPSEEK | {"layer_group_size": 2, "group_norm_size": 2}
DELTA = {"num_heads": 2, "head_dim": 32, "kda_layers": [1], "full_attn_layers": [2], "short_conv_kernel_size": 3}
KIMI: dict[str, Any] = DEEPSEEK | {
    "linear_attn_config": DELTA, "num_experts_per_token": 2, "model_max_length": 256, "mla_use_nope": True
}
LFM = COMMON | {
    "block_dim": 64, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False
}
HADAMARD = {  # its vectors are rotated in blocks of 512 and its weights packed
    "schema_version": 1, "tensor_namespace": "mlx-lm-text",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": [{"path": "lm_head", "block": 512, "embedding": False, "dtype": "float16"}],
    "text_config": COMMON | {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 16},
}

STATES = {
    "bailing_hybrid": LING,
    "bailing_moe_linear": LING,
    "bailing_moe_v3": LING | {"short_conv_kernel_size": 4},
    "falcon_h1": COMMON | {"mamba_d_ssm": 64, "mamba_d_head": 32},
    "granitemoehybrid": GRANITE | {"layer_types": ["mamba", "attention"], "mamba_d_head": 64},
    "jamba": MIXTURE
    | {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": KIMI,
    "lfm2": LFM,
    "lfm2_moe": LFM | EXPERTS | {"use_expert_bias": True},
    "mamba": COMMON | {"time_step_rank": 32},
    "mamba2": COMMON | {"num_heads": 4, "time_step_limit": [0.01, 10.0], "time_step_rank": "auto"},
    "nemotron_h": MIXTURE
    | {"hybrid_override_pattern": ["M", "*", "-", "E"], "mamba_num_heads": 4, "mamba_head_dim": 32},
    "olmo_hybrid": COMMON | {"layer_types": ["linear_attention", FULL], "linear_allow_neg_eigval": True},
    "plamo2": COMMON | {"hidden_size_per_head": 32, "mamba_num_heads": 2},
    "prism_hadamard_qwen35": HADAMARD,
    "qwen3_5": {"text_config": COMMON | {"model_type": "qwen3_5"}},
    "qwen3_5_moe": {"text_config": MIXTURE | {"model_type": "qwen3_5_moe"}},
    "qwen3_next": MIXTURE,
    "recurrent_gemma": COMMON
    | {
        "num_hidden_layers": 3, "conv1d_width": 4, "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": COMMON,
}

# Language models inside multimodal checkpoints: the config of the language model is a part of theirs.


def text(model_type: str, config: dict) -> dict:
    """The config of a wrapper around this one."""
    return {"text_config": config | {"model_type": model_type}, "vocab_size": VOCABULARY}


WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": text("gemma3_text", GEMMA3),
    "gemma3n": text(
        "gemma3n",
        COMMON
        | {
            "num_hidden_layers": 4, "sliding_window": WINDOW, "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0, "layer_types": [SLIDING, FULL] * 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0], "altup_num_inputs": 4, "altup_coef_clip": 1.0,
            "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 32,
        },
    ),
    "gemma4": text("gemma4_text", GEMMA4),
    "kimi_k25": text("kimi_k2", DEEPSEEK),
    "kimi_k3": text(
        "kimi_linear",
        KIMI
        | {
            "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
            "linear_attn_config": DELTA
            | {"gate_lower_bound": -5.0, "use_full_rank_gate": True, "short_conv_kernel_size": 4},
            "mla_use_output_gate": True, "routed_expert_hidden_size": 32, "latent_moe_use_norm": True,
            "attn_res_block_size": 2,
        },
    ),
    "kimi_vl": text("deepseek_v3", DEEPSEEK),
    "lfm2-vl": text("lfm2", LFM),
    "llama4": text(
        "llama4_text",
        COMMON
        | {
            "num_hidden_layers": 4, "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2,
            "use_qk_norm": True, "num_experts_per_tok": 1,
        },
    ),
    "minimax_m3_vl": text(
        "minimax_m3_vl",
        COMMON
        | {
            "dense_intermediate_size": 128, "rotary_dim": 16, "layer_types": [FULL, "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"], "index_n_heads": 1, "index_head_dim": 32, "index_block_size": 2,
            "index_topk_blocks": 2,
        },
    ),
    "mistral3": text("ministral3", MINISTRAL),
    "muse_spark": text(
        "muse_spark",
        MIXTURE
        | WINDOWED
        | {
            "num_hidden_layers": 3,  # the first and the last one stay dense
            "layer_types": [SLIDING, SLIDING, FULL], "num_shared_experts": 0, "post_norm_eps": 1e-8,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "layer_rope_theta": [10000.0, 10000.0, 0], "final_logit_softcapping": 20.0, "output_multiplier": 0.7,
            "moe_hidden_size": 64,
        },
    ),
    "pixtral": text("llama", COMMON),
    "qwen2_vl": text("qwen2", COMMON),
    "qwen3_vl": text("qwen3", COMMON),
    "qwen3_vl_moe": text("qwen3_moe", MIXTURE),
}
