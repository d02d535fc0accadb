"""Inputs that are whole: tiny models of several kinds, and a file of each kind that commands read or leave behind."""

import importlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from gearbx_mlx.loading import DEMO_MODEL

from . import running

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 4096,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "head_dim": 32,
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "norm_topk_prob": True},
}
STATES = {"state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4}
WINDOWS = {"query_pre_attn_scalar": 32, "sliding_window": 16, "sliding_window_pattern": 2}
HYBRID = {
    **{"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 128},
    **{"block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
    **{"layer_types": ["conv", "full_attention"]},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "small": ("llama", SIZES | {"num_hidden_layers": 1}),
    "mixture": ("qwen3_moe", SIZES | EXPERTS),
    "recurrent": ("mamba", SIZES | STATES | {"tie_word_embeddings": True}),
    "hybrid": ("lfm2", SIZES | HYBRID),
    "sliding": ("gemma3_text", SIZES | WINDOWS),
    "quantized": ("llama", SIZES),
}
QUESTIONS: list[dict] = [{"question": "Tom has 2 apples and buys 3. How many?", "answer": "2 + 3 = 5\n#### 5"}] * 3
TEXT = "Once upon a time there was a king who had three sons, and the youngest was the wisest of them all. " * 8
LORA: dict[str, Any] = {
    "num_layers": 1,
    "lora_parameters": {"rank": 2, "scale": 1.0, "dropout": 0.0},
    "fine_tune_type": "lora",
}


@dataclass(frozen=True)
class Step:
    """A command that makes an input. stop: as for `running.run`."""

    name: str
    line: str
    stop: tuple[str, int] | None = None


COMMANDS = (
    Step("convert", "--model llama --mlx-path geared --gears 4,8,16"),
    Step("convert", "--model llama --mlx-path exact --gears 4,16 --format exact"),
    Step("calibrate", "--model llama -m 4 --out thresholds.json"),
    Step("sensitivity", "--model llama --bits 4,5 --num-samples 1 --sequence-length 8 --out manifest.json"),
    Step(
        "sensitivity",
        "--model llama --bits 4,5 --num-samples 1 --sequence-length 8 --out begun.json",
        ("gearbx_mlx.files.journal:Journal.add", 4),
    ),
    Step("allocate", "--model llama --num-samples 1 --sequence-length 8 --gears 4,5 --exchanges 0"),
)


def save_model(path: Path, architecture: str, settings: dict[str, Any]) -> nn.Module:
    """A random model as a directory that mlx-lm loads, with the demo model's tokenizer."""
    path.mkdir()
    mx.random.seed(0)
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    config = {"model_type": architecture} | settings
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if path.name == "quantized":
        nn.quantize(model, 64, 4)
        config["quantization"] = {"group_size": 64, "bits": 4}
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, path)
    return model


def save_cache(path: Path, model: nn.Module, name: str) -> None:
    """A prompt cache of three tokens."""
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    save_prompt_cache(str(path), cache, {"model": name, "tokenizer_config": "{}"})


def save_adapter(path: Path, model: nn.Module) -> None:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(LORA))
    model.freeze()
    linear_to_lora_layers(model, LORA["num_layers"], LORA["lora_parameters"])
    mx.save_safetensors(str(path / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))


def lines(objects: list[dict]) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def make_inputs(directory: Path) -> Iterator[str]:
    """Make every input in a directory. Yields a word for each step of the work.

    Raises:
        RuntimeError: a command did not make what it should.
    """
    for name, (architecture, settings) in MODELS.items():
        yield name
        model = save_model(directory / name, architecture, settings)
        if name == "llama":
            save_cache(directory / "cache.safetensors", model, name)
            save_adapter(directory / "adapter", model)
    texts = {"prompts.txt": "Once upon\nHow many?\n", "prompts.jsonl": lines([{"prompt": "Once"}, {"text": "Why?"}])}
    texts |= {"text.txt": TEXT, "gsm8k.jsonl": lines(QUESTIONS)}
    for name, text in texts.items():
        (directory / name).write_text(text)
    for step in COMMANDS:
        yield step.name
        outcome = running.run(step.name, step.line.split(), directory, 300, step.stop)
        if outcome.status not in (0, 130):
            raise RuntimeError(f"{step.name} {step.line}: {outcome}")
