"""What a gear costs (GEARBX 9 and 15): bytes that a decoded token reads, and the time that follows from them.

Bytes are counted from the arrays of the modules that run; the formulas below them are those of the paper.

Floating arrays are counted in the type that the checkpoint stores them in: a half-precision checkpoint is computed in
float32 on a CPU (see activations.py), and counting four bytes there would flatter every gear below the top one.
"""

from collections.abc import Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

HEADS = {"lm_head", "embed_out", "output", "ff_out", "head"}
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k")


def stored_bytes(array: mx.array, storage: mx.Dtype) -> int:
    """Bytes of an array, its floating values taken as `storage`."""
    return array.size * storage.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes


def layer_bytes(module: nn.Module, storage: mx.Dtype) -> int:
    """Bytes of weights, scales and biases of a layer that is no gear; of experts, all of them."""
    return sum(stored_bytes(array, storage) for _, array in tree_flatten(module.parameters()))


def token_bytes(
    model: nn.Module, managed: Mapping[str, int], storage: Mapping[str, mx.Dtype], positions: int = 1
) -> int:
    """Bytes of weights that decoding one token reads from the whole model.

    Args:
        model: an mlx-lm model.
        managed: path to bytes, for the layers that change gear; the others are counted as they are.
        storage: path to the type that a layer's floating values are stored in; "" for the rest of the model.
        positions: tokens that are computed in one pass.

    Returns:
        bytes: every parameter once, but of a mixture of experts only those that a token uses (of several positions,
        as if none used another's), and of an embedding one row, unless it is the output head as well.
    """
    modules = dict(model.named_modules())
    containers = {path[:dot] for path in modules for dot, char in enumerate(path) if char == "."} | {""}
    head_is_separate = separate_head(modules)
    total = 0.0
    for path, module in modules.items():
        kept_as = storage.get(path, storage[""])
        if path.rpartition(".")[0] in managed:
            continue  # a part of a tied embedding
        if path in managed:
            total += managed[path] * used_share(path, modules, positions)
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            rows = module.weight.shape[0]
            total += layer_bytes(module, kept_as) / (rows / positions if head_is_separate else 1)
        elif path in containers:
            own = (value for value in module.values() if isinstance(value, mx.array))
            total += sum(stored_bytes(array, kept_as) for array in own)
        else:
            total += layer_bytes(module, kept_as) * used_share(path, modules, positions)
    return round(total)


def separate_head(paths: Iterable[str]) -> bool:
    """Whether a model has an output head of its own: else its embedding is the head as well."""
    return any(path.split(".")[-1] in HEADS for path in paths)


def used_share(path: str, modules: Mapping[str, nn.Module], positions: int = 1) -> float:
    """The share of a layer's weights that tokens use: all, or the chosen experts of a mixture."""
    experts = getattr(modules[path], "num_experts", None)
    if not experts:
        return 1.0
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):  # the block that routes is an ancestor of the experts
        block = modules.get(".".join(parts[:end]))
        for name in EXPERTS_PER_TOKEN:
            chosen = getattr(block, name, None)
            if isinstance(chosen, int):
                return min(1.0, positions * chosen / experts)
    return 1.0


def whole_model_speedup(managed_share: float, reduction: float) -> float:
    """Decoding speed against the top gear, if time is bytes (GEARBX 15): 1 / ((1 - f) + f / k).

    Args:
        managed_share: f, the share of the top gear's bytes per token that managed layers read, 0 to 1.
        reduction: k, the top gear's bytes of those layers over this gear's.
    """
    return 1 / ((1 - managed_share) + managed_share / reduction)


def dynamic_speedup(
    gear_tokens: Mapping[str, int], gear_seconds: Mapping[str, float], top: str, shifts: int, shift_seconds: float
) -> float:
    """Speed of a run that changed gear, against one in the top gear alone (GEARBX 9): N t_top / T_dynamic.

    Args:
        gear_tokens: tokens computed in each gear.
        gear_seconds: seconds per token of each gear, `top` among them.
        shifts: number of shifts.
        shift_seconds: of one of them.
    """
    spent = shifts * shift_seconds + sum(count * gear_seconds[gear] for gear, count in gear_tokens.items())
    return sum(gear_tokens.values()) * gear_seconds[top] / spent


def break_even_tokens(shift_seconds: float, seconds_before: float, seconds_after: float) -> float | None:
    """Tokens that a gear has to be kept for until it has made up for the shift into it (GEARBX 9).

    None where the new gear is no faster per token.
    """
    saved = seconds_before - seconds_after
    return shift_seconds / saved if saved > 0 else None
