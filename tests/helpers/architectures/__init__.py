"""A tiny random instance of every class in mlx_lm.models: structure without sense."""

import copy
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from gearbx_mlx.kernels import metal

from .configs import DENSE, LATENTS, MIXTURES, STATES, WINDOWS, WRAPPERS
from .configs import GROUP as GROUP
from .configs import VOCABULARY as VOCABULARY

CONFIGS: dict[str, dict] = DENSE | WINDOWS | MIXTURES | LATENTS | STATES | WRAPPERS
UNBUILDABLE = {"olmo": "mlx_lm.models.olmo ends the process if the package ai2-olmo is not installed"}
METAL_ONLY = {
    "bitnet": "its ternary layers have a kernel for Metal only",
    "muse_spark": "its norms have a kernel for Metal only",
}
LOUDNESS = 3.0  # of linear layers, against the embedding


def installed() -> list[str]:
    """The modules of the installed mlx_lm.models that define a model. Nothing is imported: one of them exits."""
    directory = Path(importlib.import_module("mlx_lm.models").__path__[0])
    names = (found.name for found in pkgutil.iter_modules([str(directory)]))
    defines = re.compile(r"^class ModelArgs\b", re.MULTILINE)
    return [name for name in names if defines.search((directory / f"{name}.py").read_text(encoding="utf-8"))]


def why_not(name: str) -> str | None:
    """The reason why there is no instance of mlx_lm.models.NAME that runs on this machine, if there is one."""
    if name in UNBUILDABLE:
        return UNBUILDABLE[name]
    if name not in CONFIGS:
        return f"mlx_lm.models.{name} has no tiny config; add one to tests/helpers/architectures"
    return None if metal.available() else METAL_ONLY.get(name)  # on a Mac the tests compute on its CPU


def as_initialised(name: str, seed: int = 0, dtype: mx.Dtype = mx.float32, **change: Any) -> nn.Module:
    """The instance of mlx_lm.models.NAME with the weights that its class begins with; `change` replaces fields."""
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name} | copy.deepcopy(CONFIGS[name]) | change  # some classes write into their config
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def tiny(name: str, dtype: mx.Dtype = mx.float32, seed: int = 0, **change: Any) -> nn.Module:
    """The instance of mlx_lm.models.NAME, with weights that make its texts differ.

    As initialised, many of these models repeat one token, and some have weights of zero. Here what was zero is random,
    and linear layers are large enough to outvoice the embedding.
    """
    model = as_initialised(name, seed, **change)
    for module in model.modules():
        for key, value in module.items():
            if not isinstance(value, mx.array) or value.ndim < 2 or not mx.issubdtype(value.dtype, mx.floating):
                continue
            if not mx.any(value).item():
                module[key] = mx.random.normal(value.shape) * value.shape[-1] ** -0.5
            elif "Linear" in type(module).__name__ and key == "weight":
                module[key] = LOUDNESS * value
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


# What fails, by kind of test, with a short reason. When one is mended, its line goes: a strict test says so.
SEVERAL = "mlx-lm adds its boolean mask to the scores: several tokens see later ones, and a warning says so"
IDENTITY = "an upper bound: some of the chosen experts have no weights"
OF_OTHERS = "an upper bound: layers that use the keys and values of others have projections that nothing reads"
NO_EFFECT = "an upper bound: the class reads arrays that change nothing"

LOSSLESS = {"phi3small": SEVERAL}
BYTES = {"longcat_flash": IDENTITY, "longcat_flash_ngram": IDENTITY, "gemma3n": OF_OTHERS, "kimi_k3": NO_EFFECT}
UNMANAGED: dict[str, str] = {}
EXPECTED = {"lossless": LOSSLESS, "bytes": BYTES, "unmanaged": UNMANAGED}
