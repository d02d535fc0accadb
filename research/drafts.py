"""What prompt lookup and costs in time save in mode lossless, and what states cost."""

import importlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from pages import table
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless, load, stream_generate
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.decoding.rows import Verifier
from gearbx_mlx.telemetry.summary import Tally, draft_summary, lookup_summary

from .lossless import encode
from .studies import HELD_OUT, TALES, Found, spread, study

MODES = {
    f"{cost}, {name}": Lossless(cost=cost, lookup_tokens=most, draft_ahead=0)
    for cost in ("bytes", "time")
    for name, most in (("no lookup", 0), ("lookup", 15))
}
ALONE = "top gear alone"


@dataclass
class Counted:
    """What a mode did in all texts. ratios: for each text, the time of the top gear alone over that of this mode."""

    tally: Tally
    identical: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    ratios: list[float] = field(default_factory=list)


def timed(responses):
    """The responses, and the seconds after the first of them: by the clock, and of the processor."""
    found: list[Any] = []
    begun = (0.0, 0.0)
    for response in responses:
        if not found:
            begun = time.perf_counter(), time.process_time()
        found.append(response)
    return found, time.perf_counter() - begun[0], time.process_time() - begun[1]


def compare(gearbox, tokenizer, prompts, max_tokens, label):
    """Mode to what it counted, and the texts of the top gear alone."""
    gears = [gear.name for gear in gearbox.ladder]
    counted, texts = {name: Counted(Tally.of(gears)) for name in (ALONE, *MODES)}, []
    for prompt in track(prompts, label):
        gearbox.shift(gearbox.ladder.top)
        run, alone, cpu = timed(mlx_lm.stream_generate(gearbox.model, tokenizer, prompt, max_tokens))
        texts.append([response.token for response in run])
        counted[ALONE].seconds += alone
        counted[ALONE].cpu_seconds += cpu
        for name, mode in MODES.items():
            responses = stream_generate(gearbox.model, tokenizer, prompt, max_tokens, gearbox=gearbox, mode=mode)
            run, seconds, cpu = timed(responses)
            one = counted[name]
            for response in run:
                one.tally.add(response)
            one.seconds += seconds
            one.cpu_seconds += cpu
            one.identical += [response.token for response in run] == texts[-1]
            one.ratios.append(alone / seconds)
    return counted, texts


def summed_up(counted, gearbox):
    """Mode to its figures; those of the mode relative to the top gear alone."""
    return {name: figures_of(one, counted[ALONE], gearbox) for name, one in counted.items() if name != ALONE}


def figures_of(one, alone, gearbox):
    tally, top = one.tally, gearbox.ladder.top
    verifications = tally.passes[top.name]
    return {
        **draft_summary(tally, verifications),
        **lookup_summary(tally),
        "tokens": tally.tokens,
        "texts": len(one.ratios),
        "identical": one.identical,
        "passes_per_token": (verifications + tally.drafted) / tally.tokens,
        "verifications_per_token": verifications / tally.tokens,
        "weight_bytes_per_token": tally.mean(tally.weight_bytes),
        "times_fewer_bytes": gearbox.weight_bytes_per_token(top) * tally.tokens / tally.weight_bytes,
        "times_as_fast": alone.seconds / one.seconds,
        "times_as_fast_median": statistics.median(one.ratios),
        "times_less_cpu": alone.cpu_seconds / one.cpu_seconds,
    }


COMMON = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
HYBRIDS = {
    "qwen3_next": {
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.5,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "mlp_only_layers": [],
        "moe_intermediate_size": 0,
    },
    "mamba2": {
        "num_heads": 32,
        "state_size": 64,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "intermediate_size": 2048,
        "layer_norm_epsilon": 1e-5,
        "chunk_size": 64,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": 64,
        "ssm_state_size": 64,
    },
    "lfm2": {
        "block_dim": 1024,
        "block_ff_dim": 2816,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "full_attn_idxs": [2, 5],
    },
}
DRAFTED, ACCEPTED, CONTEXT = 8, 5, 40


def hybrid(name: str) -> nn.Module:
    """A random model of 60 to 110 million weights in bfloat16."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **COMMON, **HYBRIDS[name]}))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


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
    rows = verifier.rows(mx.arange(DRAFTED)[None], cache)
    mx.eval(rows.logits)
    verified = 1e3 * (time.perf_counter() - start)
    rows.show(ACCEPTED)
    return one, verified, milliseconds(lambda: [part.state for part in cache]), again


@study("docs/lossless.md", minutes=20)
def lookup(
    prompts: list[Path] = [HELD_OUT, TALES],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [40, 10],  # noqa: B006
    num_repeated: int = 20,
    max_tokens: int = 96,
    gears: str = "3,16",
    format: str = "exact",
) -> Found:
    """What prompt lookup and costs in time save in mode lossless.

    The demo model answers the prompts, and then prompts that make it repeat itself: a prompt, the model's own answer,
    and the prompt again. For every prompt in turn, the top gear alone writes the text, and then lossless mode with
    costs in bytes and in time, without lookup and with it. The time of the prompt does not count.

    Args:
        prompts: Files: one per line, or JSON Lines as in GSM8K.
        num_prompts: Of each file.
        num_repeated: Prompts that are repeated.
    """
    model, tokenizer = load()
    gearbox = Gearbox(model, gears, format=format, kernels="native")
    texts = [read_prompts(file)[:count] for file, count in zip(prompts, num_prompts, strict=True)]
    asked = [list(encode(tokenizer, text)) for text in itertools.chain(*texts)]
    for mode in MODES.values():  # a warm-up
        list(stream_generate(model, tokenizer, asked[0], 8, gearbox=gearbox, mode=mode))
    plain, answers = compare(gearbox, tokenizer, asked, max_tokens, "prompts")
    repeated = [prompt + answer + prompt for prompt, answer in zip(asked, answers)][:num_repeated]
    again, _ = compare(gearbox, tokenizer, repeated, max_tokens, "repeated prompts")
    results = {"text": summed_up(plain, gearbox), "repeated": summed_up(again, gearbox)}
    return Found({"lookup": lookup_table(results)}, results)


def lookup_table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    head = ["prompts", "costs, lookup", "identical", "passes per token", "times fewer bytes", "drafted (accepted)"]
    rows = [
        [
            *(prompts, name, f"{one['identical']} of {one['texts']}", f"{one['passes_per_token']:.2f}"),
            *(f"{one['times_fewer_bytes']:.2f}", f"{one['drafted']} ({one['accepted']})"),
            *(f"{one['looked_up']} ({one['lookup_accepted']})", f"{one['times_as_fast']:.2f}"),
            *(f"{one['times_as_fast_median']:.2f}", f"{one['times_less_cpu']:.2f}"),
        ]
        for prompts, modes in results.items()
        for name, one in modes.items()
    ]
    return table([*head, "looked up (accepted)", "times as fast", "median", "times less CPU"], rows)


@study("docs/performance.md", minutes=2)
def states(trials: int = 11) -> Found:
    """What a partly accepted draft costs a model that keeps states, on random hybrids.

    A verification of 8 tokens accepts 5. The states after the fifth are then made in two ways: from what it noted,
    which reads no weights of linear layers, and by a second pass over the five, which reads them all.
    """
    rows = []
    for name in HYBRIDS:
        model = hybrid(name)
        gearbox = Gearbox(model, "4,16", kernels="auto")
        verifier = Verifier(gearbox, gearbox.ladder.top)
        spent = [trial(verifier, model) for _ in track(range(trials + 1), name)][1:]
        medians = [f"{statistics.median(column):.1f}" for column in zip(*spent)]
        rows.append([name, *medians, spread(mine / other for _, _, mine, other in spent)])
    head = ["model", "one token, ms", "verification of 8", "states after 5", "second pass over 5", "share of that pass"]
    return Found({"states": table(head, rows)})
