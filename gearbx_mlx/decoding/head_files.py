"""Draft heads as files: where the head of a model is, and how it is read. `heads.py` has the fields and the module."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..compat.arrays import same_random_numbers
from ..errors import GearbxError, GearbxWarning, one_line
from ..files.model_directory import check_regular, count_arrays, parse_object
from ..files.reading import read_as, typed
from ..files.user_cache import CacheUnusable, cache_entry
from ..gears.mapped import sampled
from ..gears.tensor_files import fingerprint_of, samples_of
from ..gears.weight_files import weight_files
from .heads import Head, HeadConfig, LayerConfig, Quantization
from .hidden import blocks_of

CONFIG, WEIGHTS = "config.json", "*.safetensors"
COMPLETE = "use the directory of a complete EAGLE-3 head in safetensors"
LAYER = ("midlayer.", "layers.0.")  # prefixes of the layer's tensors: SpecForge and SGLang, vLLM and mlx-vlm
UNUSED = re.compile(r"t2d$|verifier_|.*rotary_emb|input_norm|fc_norm|norm\.weight$")  # names of tensors that others use
ATTACHED = "draft_head"  # attribute of a model, outside of its parameters
KIND_FIELDS = ("architectures", "model_type", "speculators_model_type")
FOLDER, KEPT = "draft_head", "heads"  # in the directory of a model, and in the user's cache


def attach_head(model: nn.Module, head: "Head | Path | None") -> None:
    """Attach a head to a model, for drafts in mode lossless. A head in a directory is read at first use."""
    vars(model)[ATTACHED] = head


def attached_head(model: nn.Module) -> Head | None:
    """Return the head that was attached to a model; None without one, or, with a warning, for one that does not fit."""
    found: Head | Path | None = vars(model).get(ATTACHED)
    if not isinstance(found, Path):
        return found
    head = None
    try:
        head = read_head(found, model)
    except GearbxError as error:
        warnings.warn(f"{error}; this model has no draft head", GearbxWarning, stacklevel=7)
    attach_head(model, head)
    return head


def find_head(directory: Path) -> Path | None:
    """Return the directory of a model's head: in the model's, else in the user's cache; None without one."""
    if (directory / FOLDER / CONFIG).is_file():
        return directory / FOLDER
    try:
        kept = kept_head(directory) if cache_entry(KEPT).is_dir() else None
    except (CacheUnusable, GearbxError, OSError):  # whatever reads the cache or the weights next reports it
        return None
    return kept if kept is not None and (kept / CONFIG).is_file() else None


def kept_head(directory: Path) -> Path:
    """Return the place of a model's head in the user's cache, by samples of its weights; it may be missing.

    Raises:
        CacheUnusable: a cache that other users can write to, or that cannot be read.
        GearbxError, OSError: weights that cannot be read.
    """
    return cache_entry(f"{KEPT}/{sampled(weight_files(directory))[:16]}")


def is_head(directory: Path) -> bool:
    """Return whether a directory has a draft head of any kind; False if its config.json cannot be read."""
    try:
        content = read_as(directory / CONFIG, parse_object, "a configuration", COMPLETE)
    except GearbxError:
        return False
    return any("eagle" in str(content.get(name)).lower() for name in KIND_FIELDS)


def config_of(directory: Path) -> tuple[dict[str, Any], HeadConfig]:
    """Return config.json, and its fields of a head. Raises GearbxError as `read_as`."""

    def parse(text: str) -> tuple[dict[str, Any], HeadConfig]:
        content = parse_object(text)
        return content, typed(content, HeadConfig)

    return read_as(directory / CONFIG, parse, "the configuration of a draft head", COMPLETE)


def read_head(directory: Path, model: nn.Module) -> Head:
    """Return the head in a directory, for a model.

    Raises:
        GearbxError: a damaged head, a form that this package does not run, or a head of a different model.
    """
    check_regular(directory)
    content, config = config_of(directory)
    layer = content.get("transformer_layer_config")  # speculators; else the fields are the file's own

    def parse(text: str) -> LayerConfig:
        return typed(content if layer is None else layer, LayerConfig)

    own = read_as(directory / CONFIG, parse, "the configuration of a draft head", COMPLETE)
    if not config.is_eagle3 or own.num_hidden_layers != 1 or own.hidden_act != "silu":
        raise GearbxError(f"{directory}: not an EAGLE-3 head with one layer and silu; use one of these, or omit it")
    count_arrays(directory, WEIGHTS)
    try:
        with same_random_numbers():  # MLX's constructors draw some
            head = Head(own.arguments(), config, config.taps(len(blocks_of(model))), str(directory))
            head.check(model)
            load_weights(head, directory, config, config.embed_requires_grad or own.hidden_size != head.width)
    except GearbxError:
        raise
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:  # as MLX and mlx-lm raise them
        raise GearbxError(f"{directory}: cannot be read as a draft head ({one_line(error)}); {COMPLETE}") from error
    return head


def load_weights(head: Head, directory: Path, config: HeadConfig, has_embedding: bool) -> None:
    """Load a head's tensors. has_embedding: True if its embedding differs from the model's. Raises MLX's errors."""
    arrays: dict[str, mx.array] = {}
    for file in sorted(directory.glob(WEIGHTS)):
        stored: Any = mx.load(str(file))
        arrays |= {renamed(name): array for name, array in stored.items()}
    if config.quantization is not None:
        arrays = dequantized(arrays, config.quantization)
    rows, own = arrays.pop("d2t", None), arrays.pop("embed_tokens.weight", None)
    wanted = dict(tree_flatten(head.parameters()))
    arrays = {name: array for name, array in arrays.items() if name in wanted or not UNUSED.match(name)}
    if has_embedding and own is not None:
        head.embed_tokens = nn.Embedding(head.vocabulary, head.layer.input_layernorm.weight.size)
        arrays["embed_tokens.weight"] = own
    elif head.layer.input_layernorm.weight.size != head.width:
        raise ValueError("no embed_tokens.weight, and the model's embedding has a different width")
    head.load_weights([*arrays.items()])
    mx.eval(head.parameters())
    head.tokens = tokens_of(rows, len(head.lm_head.weight), head.vocabulary)
    head.fingerprint = fingerprint_of(samples_of(dict(tree_flatten(head.parameters()))))


def dequantized(arrays: Mapping[str, mx.array], by: Quantization) -> dict[str, mx.array]:
    """Return arrays with dense matrices in the place of quantized ones."""
    found = dict(arrays)
    for stem in [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]:
        scales, biases = found.pop(f"{stem}.scales"), found.pop(f"{stem}.biases")
        weight = found[f"{stem}.weight"]
        found[f"{stem}.weight"] = mx.dequantize(weight, scales, biases, by.group_size, by.bits)
    return found


def renamed(name: str) -> str:
    """Return the name in `Head` of a tensor from any release."""
    name = name.removeprefix("model.")
    prefix = next((each for each in LAYER if name.startswith(each)), None)
    return name if prefix is None else f"layer.{name.removeprefix(prefix)}"


def tokens_of(offsets: mx.array | None, rows: int, vocabulary: int) -> np.ndarray | None:
    """Return the tokens (R,) of output rows; None for all in order. Raises ValueError for a row without a token.

    Args:
        offsets: `d2t` (R,), the token of each row minus the row's number.
    """
    if offsets is None and rows == vocabulary:
        return None
    if offsets is not None and offsets.shape == (rows,):
        tokens = np.array(offsets).astype(int) + np.arange(rows)
        if len({*tokens.tolist()} & {*range(vocabulary)}) == rows:
            return tokens
    raise ValueError(f"d2t does not name a token for each of {rows} output rows")
