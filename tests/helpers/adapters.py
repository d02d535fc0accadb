"""Adapters with random numbers, as mlx-lm saves them."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from conftest import normal
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

RANK, SCALE = 4, 2.0


def save_adapter(model: nn.Module, path: Path, kind: str, keys: list[str] | None = None, dtype=mx.float32) -> Path:
    """An adapter with random numbers for a model; the model then has it too."""
    path.mkdir()
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0} | ({"keys": keys} if keys else {})
    settings = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    model.freeze()
    linear_to_lora_layers(model, 2, parameters, kind == "dora")
    arrays = dict(tree_flatten(model.trainable_parameters()))
    for i, (name, array) in enumerate(arrays.items()):
        noise = normal(*array.shape, seed=i)
        changed = array * (1 + 0.2 * noise) if name.endswith(".m") else array + 0.05 * noise
        arrays[name] = changed.astype(dtype)
    mx.save_safetensors(str(path / "adapters.safetensors"), arrays)
    return path
