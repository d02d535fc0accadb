"""Attention over latent vectors (MLA), with and without an indexer that picks a few tokens."""

from .parts import COMMON, EXPERTS, FIRST_DENSE, INDEXER, LATENT, SHARED, WINDOW

DEEPSEEK = COMMON | EXPERTS | SHARED | LATENT | FIRST_DENSE
LONGCAT = DEEPSEEK | {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 64,
    "moe_topk": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
YARN = {
    "factor": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
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
        "num_hidden_layers": 6,
        "o_groups": 2,
        "o_lora_rank": 32,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 2, 2, 2, 1, 1],
        "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 2, 4, 5],
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "rms_norm_eps": 1e-20,
    },
    "glm4_moe_lite": DEEPSEEK | CHOICE | {"num_nextn_predict_layers": 1},
    "glm_moe_dsa": DEEPSEEK | INDEXER | CHOICE | {"rope_parameters": {"rope_theta": 10000.0}},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT | {"ngram_vocab_size_ratio": 4, "emb_neighbor_num": 3, "emb_split_num": 1},
    "minicpm3": COMMON
    | LATENT
    | {
        "dim_model_base": 32,
        "scale_depth": 1.0,
        "scale_emb": 1.0,
        "rope_scaling": {"original_max_position_embeddings": 256, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
    },
    "mistral4": DEEPSEEK
    | {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}},
    "youtu_llm": COMMON | LATENT,
}
