"""What the states of hybrid models cost where a verification ends early."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from pages import table
from rich.progress import track

from gearbx_mlx import Gearbox
from gearbx_mlx.benchmark.decode import random_model
from gearbx_mlx.decoding.rows import Rows, Verifier

from .studies import Found, spread, study

COMMON = {
    **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 4096},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True},
}
HYBRIDS: dict[str, dict[str, Any]] = {  # of 60 to 110 million weights
    "qwen3_next": {
        **{"linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 64},
        **{"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
        **{"partial_rotary_factor": 0.5, "num_experts": 0, "num_experts_per_tok": 0, "decoder_sparse_step": 1},
        **{"shared_expert_intermediate_size": 0, "mlp_only_layers": [], "moe_intermediate_size": 0},
    },
    "mamba2": {
        **{
            "num_heads": 32,
            "state_size": 64,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
        },
        **{"intermediate_size": 2048, "layer_norm_epsilon": 1e-5, "chunk_size": 64, "time_step_limit": (0.001, 100.0)},
        **{"time_step_rank": 64, "ssm_state_size": 64},
    },
    "lfm2": {
        **{"block_dim": 1024, "block_ff_dim": 2816, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
        **{"block_auto_adjust_ff_dim": False, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5},
        **{"full_attn_idxs": [2, 5]},
    },
}
DRAFTED, ACCEPTED, CONTEXT = 8, 5, 40


def milliseconds(compute: Callable[[], object]) -> float:
    start = time.perf_counter()
    mx.eval(compute())
    return 1e3 * (time.perf_counter() - start)


def trial(verifier: Verifier, model: nn.Module) -> tuple[float, float, float, float]:
    """Milliseconds: one token, a verification, the states after what is accepted, and these by a second pass."""
    cache = make_prompt_cache(model)
    model(mx.arange(CONTEXT)[None], cache=cache)
    mx.eval([part.state for part in cache])
    one = milliseconds(lambda: model(mx.array([[3]]), cache=cache))
    again = milliseconds(lambda: (model(mx.arange(ACCEPTED)[None], cache=cache), [part.state for part in cache]))
    start = time.perf_counter()
    rows = Rows(verifier, mx.arange(DRAFTED)[None], cache)
    mx.eval(rows.logits)
    verified = 1e3 * (time.perf_counter() - start)

    def states() -> list[Any]:
        rows.keep(ACCEPTED)
        return [part.state for part in cache]

    return one, verified, milliseconds(states), again


@study("research/tables.md", minutes=2)
def states(trials: int = 11) -> Found:
    """What a partly accepted draft costs a model that keeps states, on random hybrids.

    A verification of 8 tokens accepts 5. The states after the fifth are then made in two ways: from what it noted,
    which reads no weights of linear layers, and by a second pass over the five, which reads them all.
    """
    rows = []
    for name in HYBRIDS:
        model = random_model({"model_type": name, **COMMON, **HYBRIDS[name]})
        gearbox = Gearbox(model, "4,16", kernels="auto")
        verifier = Verifier(gearbox, gearbox.ladder.top)
        spent = [trial(verifier, model) for _ in track(range(trials + 1), name)][1:]
        medians = [f"{statistics.median(column):.1f}" for column in zip(*spent)]
        rows.append([name, *medians, spread(mine / other for _, _, mine, other in spent)])
    head = ["model", "one token, ms", "verification of 8", "states after 5", "second pass over 5", "share of that pass"]
    return Found({"states": table(head, rows)})
