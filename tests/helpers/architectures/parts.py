"""What the tiny configs share: sizes, experts, windows and latent attention, under mlx-lm's usual names."""

from typing import Any

VOCABULARY = 128
GROUP = 32  # a group size that divides all widths
WINDOW = 16  # a prompt of a dozen tokens and a short text fill it
SLIDING, FULL = "sliding_attention", "full_attention"

# A class takes the fields that it knows.
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "head_dim": 32,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
PAIRS = COMMON | {"num_key_value_heads": 2}  # as many heads of keys as of queries
WINDOWED = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
SHARED = {"n_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 64}
FIRST_DENSE = {"first_k_dense_replace": 1}  # the first layer has an MLP, the second one experts
SPARSE_STEP = {"decoder_sparse_step": 1, "mlp_only_layers": []}

LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
INDEXER = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}  # fewer tokens than a text has

GATED_DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
}
