"""Transformers with a cache that grows and an MLP in every layer."""

from .parts import COMMON, PAIRS, VOCABULARY

GPT = {
    "n_embd": 64,
    "n_head": 2,
    "n_layer": 2,
    "n_inner": 128,
    "n_ctx": 256,
    "n_positions": 256,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": VOCABULARY,
}
FULL_BLOCK = {
    "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
}
LINEAR_BLOCK = {
    "attention": {"n_heads_in_group": None, "no_op": False, "replace_with_linear": True},
    "ffn": {"ffn_mult": None, "no_op": False, "replace_with_linear": True},
}

DENSE = {
    "afm7": {
        "vocab_size": VOCABULARY,
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "hidden_dim_scale_factor": 3.0,
    },
    "apertus": COMMON | {"post_norm": True, "qk_norm": True, "mlp_bias": True},
    "bitnet": COMMON,
    "cohere": COMMON,
    "ernie4_5": COMMON | {"use_bias": False},
    "exaone": COMMON | {"num_layers": 2},
    "gemma": COMMON,
    "gemma2": COMMON | {"query_pre_attn_scalar": 32.0},
    "glm": COMMON,
    "glm4": COMMON,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": COMMON | {"rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True},
    "gptj": GPT | {"rotary_dim": 16},
    "granite": COMMON
    | {"logits_scaling": 1.0, "attention_multiplier": 0.2, "embedding_multiplier": 1.0, "residual_multiplier": 1.0},
    "helium": COMMON,
    "hunyuan_v1_dense": COMMON
    | {
        "rope_scaling": {
            "alpha": 1000.0,
            "factor": 1.0,
            "type": "dynamic",
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "original_max_position_embeddings": 256,
        }
    },
    "internlm2": COMMON,
    "internlm3": COMMON,
    "iquestloopcoder": COMMON | {"loop_num": 2, "loop_window_size": 16},
    "lille-130m": GPT | {"block_size": 256, "n_kv_heads": 1, "rope_theta": 10000.0, "layer_norm_eps": 1e-5},
    "llama": COMMON,
    "llama4_text": COMMON | {"intermediate_size_mlp": 128, "no_rope_layers": [0, 1], "use_qk_norm": True},
    "mimo": COMMON,
    "minicpm": COMMON | {"dim_model_base": 32, "scale_depth": 1.0, "scale_emb": 1.0},
    "nanbeige": COMMON | {"num_loops": 2},
    "nanochat": PAIRS,
    "nemotron": COMMON | {"hidden_act": "relu2"},
    "nemotron-nas": COMMON | {"block_configs": [FULL_BLOCK, LINEAR_BLOCK]},
    "olmo2": COMMON,
    "openelm": {
        "head_dim": 32,
        "num_transformer_layers": 2,
        "model_dim": 64,
        "vocab_size": VOCABULARY,
        "ffn_dim_divisor": 64,
        "num_query_heads": [2, 4],
        "num_kv_heads": [1, 2],
        "ffn_multipliers": [1.0, 2.0],
    },
    "phi": COMMON,
    "phi3": COMMON | {"partial_rotary_factor": 1.0},
    "phi3small": COMMON
    | {"dense_attention_every_n_layers": 2, "ff_intermediate_size": 128, "gegelu_limit": 20.0}
    | {"vocab_size": 100352, "mup_embedding_multiplier": 1.0},  # the class writes to logits of tokens up to 100351
    "plamo": COMMON | {"n_shared_head": 2},
    "qwen": COMMON | {"kv_channels": 32, "intermediate_size": 256},
    "qwen2": COMMON,
    "qwen3": COMMON,
    "seed_oss": COMMON,
    "smollm3": COMMON | {"no_rope_layers": [1, 0]},
    "stablelm": COMMON | {"use_qkv_bias": True},
    "starcoder2": COMMON,
    "talkie": PAIRS,
    "telechat3": COMMON,
}
