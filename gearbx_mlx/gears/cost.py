"""The cost of a gear (GEARBX 9 and 15): the bytes that a decoded token reads, and the time that they take.

Bytes are counted from the arrays of the modules that run. The formulas for time are the paper's.

Floating arrays are counted in the checkpoint's type. On a CPU a half-precision checkpoint computes in float32 (see
activations.py); counting four bytes per weight there would flatter every gear below the top one.
"""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .adapters import holders_of, layers_of, own_arrays
from .experts import used_share
from .output_head import is_table
from .towers import in_tower


def stored_bytes(array: mx.array, storage: mx.Dtype) -> int:
    """Bytes of an array whose floating values are stored as `storage`."""
    return array.size * storage.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes


def layer_bytes(module: nn.Module, storage: mx.Dtype) -> int:
    """Bytes of the weights, scales and biases of a module; for experts, of all of them."""
    return sum(stored_bytes(array, storage) for _, array in tree_flatten(module.parameters()))


def token_bytes(
    model: nn.Module,
    managed: Mapping[str, float],
    storage: Mapping[str, mx.Dtype],
    head: str | None,
    positions: int = 1,
) -> int:
    """The bytes of weights of the whole model that decoding one token reads.

    Args:
        model: an mlx-lm model.
        managed: path to bytes of the layers that change gear; the others count as they are.
        storage: path to the type in which a layer's floating values are stored; "" for the rest of the model.
        head: the path of the embedding that is the output head too; None where no embedding is.
        positions: tokens computed in one pass.

    Returns:
        bytes: every parameter once, except in towers for images or sound. A mixture of experts counts only those that
        a token uses (for several positions, as if no two used the same), and an embedding one row, unless it is the
        output head too. Adapters count in their own type.
    """
    modules = layers_of(model)
    containers = {path[:dot] for path in modules for dot, char in enumerate(path) if char == "."} | {""}
    total = 0.0
    for path, module in modules.items():
        dtype = storage.get(path, storage[""])
        if path.rpartition(".")[0] in managed:
            continue  # a part of a tied embedding
        if in_tower(path):
            continue
        if path in managed:
            total += managed[path] * used_share(path, modules, positions)
        elif is_table(module) and path != head:
            total += layer_bytes(module, dtype) * min(1.0, positions / len(module.weight))
        elif path in containers:
            own = (array for name, array in module.items() if isinstance(array, mx.array) and name[0] != "_")
            total += sum(stored_bytes(array, dtype) for array in own)
        else:
            total += layer_bytes(module, dtype) * used_share(path, modules, positions)
    for path, holder in holders_of(model).items():
        looked_up = is_table(modules[path]) and path != head
        read = adapter_bytes(holder, storage[""], positions if looked_up else None)
        total += read * used_share(path, modules, positions)
    return round(total)


def adapter_bytes(adapter: nn.Module, storage: mx.Dtype, rows: int | None) -> float:
    """Bytes of an adapter that a token reads, without the layer under it.

    Args:
        storage: the type of the bias, which DoRA and a sum over ranks take from their layer.
        rows: of an embedding's adapter, how many are looked up; None: all are read.
    """
    total = float(stored_bytes(adapter["bias"], storage)) if "bias" in adapter else 0.0
    for name, array in own_arrays(adapter).items():
        total += array.nbytes * (1 if rows is None or name == "lora_b" else rows / len(array))
    return total


def whole_model_speedup(managed_share: float, reduction: float) -> float:
    """Decoding speed relative to the top gear, if bytes decide the time (GEARBX 15): 1 / ((1 - f) + f / k).

    Args:
        managed_share: f, the share of the top gear's bytes per token that managed layers read, 0 to 1.
        reduction: k, the bytes of those layers in the top gear over those in this gear.
    """
    return 1 / ((1 - managed_share) + managed_share / reduction)


def dynamic_speedup(
    gear_tokens: Mapping[str, int], gear_seconds: Mapping[str, float], top: str, shifts: int, shift_seconds: float
) -> float:
    """Speed of a run that changes gear relative to one in the top gear (GEARBX 9): N t_top / T_dynamic.

    Args:
        gear_tokens: tokens computed in each gear.
        gear_seconds: seconds per token of each gear, `top` among them.
        shifts: number of shifts.
        shift_seconds: of one shift.
    """
    spent = shifts * shift_seconds + sum(count * gear_seconds[gear] for gear, count in gear_tokens.items())
    return sum(gear_tokens.values()) * gear_seconds[top] / spent


def break_even_tokens(shift_seconds: float, seconds_before: float, seconds_after: float) -> float | None:
    """Tokens after which a faster gear has made up for the shift into it (GEARBX 9).

    None where the new gear is not faster.
    """
    saved = seconds_before - seconds_after
    return shift_seconds / saved if saved > 0 else None
