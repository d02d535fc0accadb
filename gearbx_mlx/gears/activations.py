"""Floating types of a model: in its checkpoint, and in its computations.

On a CPU, MLX multiplies a quantized matrix by a half-precision vector 8 to 40 times slower than by a float32 one. So a
half-precision model with quantized gears computes in float32 there. Every half-precision value is a float32 value too,
so no weight changes. Experts that are not quantized run only in float32 there.

If a model gets a different type after its gearbox was made (`set_dtype`), gears follow when they are engaged.
"""

from collections import Counter, UserDict
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from ..errors import GearbxError, check_choice
from ..formats.native import Native, NativeEmbedding
from ..formats.tied import QuantizedTable, TiedEmbedding, linear_of
from ..kernels.dispatch import on_cpu
from .adapters import adapters_of, own_arrays
from .ladder import DTYPE_NAMES

STORED = "stored_dtypes"  # attribute of a model whose type was converted
DTYPES = {name: getattr(mx, name) for name in DTYPE_NAMES}


def model_dtype(model: nn.Module) -> mx.Dtype:
    """Return the floating type of most of the model's parameters."""
    counts: Counter[mx.Dtype] = Counter()
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            counts[array.dtype] += array.size
    return max(counts, key=lambda dtype: counts[dtype], default=mx.float32)


def stored_dtype(model: nn.Module, path: str = "") -> mx.Dtype:
    """Return the floating type of a parameter in the checkpoint; the most common one for "" or quantized weights."""
    stored: Mapping[str, mx.Dtype] = getattr(model, STORED, {})
    if path in stored:
        return stored[path]
    found = dict(tree_flatten(model.parameters())).get(path)
    if found is not None and mx.issubdtype(found.dtype, mx.floating):
        return found.dtype
    return stored[""] if stored else model_dtype(model)


def stored_bytes(array: mx.array, storage: mx.Dtype) -> int:
    """Return bytes of an array whose floating values are stored as `storage`."""
    return array.size * storage.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes


def layer_bytes(module: nn.Module, storage: mx.Dtype) -> int:
    """Return bytes of the weights, scales and biases of a module; for experts, of all of them."""
    return sum(stored_bytes(array, storage) for _, array in tree_flatten(module.parameters()))


def compute_in(model: nn.Module, dtype: str, quantized: bool, kept: Iterable[nn.Module] = ()) -> mx.Dtype:
    """Convert the model's floating parameters, in place, to the type that it computes in, and return that type.

    Args:
        dtype: "auto" (the type that is fast on this device and changes no value), or a name of DTYPES.
        quantized: whether any quantized layer will run.
        kept: modules whose own parameters keep their type, and stay unread if they are: native kernels widen them as
            they read. Adapters always keep theirs.

    Raises:
        GearbxError: a name that does not exist, or a type in which MLX cannot multiply the model's experts.
    """
    check_choice("dtype", dtype, ("auto", *DTYPES))
    needs_float32 = on_cpu() and any(isinstance(module, SwitchLinear) for module in model.modules())
    own = model_dtype(model)
    checkpoint = stored_dtype(model)
    if dtype == "auto":
        target = mx.float32 if needs_float32 or (quantized and on_cpu()) else checkpoint
    else:
        target = DTYPES[dtype]
        if needs_float32 and target != mx.float32:
            raise GearbxError(f"--dtype {dtype}: on a CPU, MLX multiplies experts in float32 only; omit --dtype")
    if target != own or hasattr(model, STORED):  # converted before, and perhaps not all of it
        now = [
            (path, array) for path, array in tree_flatten(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)
        ]
        if not hasattr(model, STORED):
            stored = {path: array.dtype for path, array in now}
            setattr(model, STORED, UserDict(stored | {"": own}))  # a dict would be a parameter
        unchanged = [
            (module, name, value) for module in kept for name, value in module.items() if isinstance(value, mx.array)
        ]
        unchanged += [(a, name, value) for a in adapters_of(model).values() for name, value in own_arrays(a).items()]
        if target == checkpoint:  # back to the type of every single parameter
            converted = [(path, array.astype(stored_dtype(model, path))) for path, array in now]
        else:
            converted = [(path, array.astype(target)) for path, array in now]
        # Called on the class: the model's own `update` is for all gears, and only the engaged one is converted.
        type(model).update(model, tree_unflatten(converted))
        for module, name, value in unchanged:
            module[name] = value
        untouched = {id(value) for _, _, value in unchanged}
        mx.eval([array for _, array in tree_flatten(model.parameters()) if id(array) not in untouched])
    return target


class CurrentType:
    """The current type of a model, read from a parameter that no gear changes. managed: the modules in gears."""

    def __init__(self, model: nn.Module, managed: Iterable[nn.Module], dtype: mx.Dtype):
        of_gears = {*map(id, managed)}
        own = (
            (module, name)
            for module in model.modules()
            if id(module) not in of_gears and not isinstance(module, Native)
            for name, value in module.items()
            if isinstance(value, mx.array) and value.dtype == dtype
        )
        self._place = next(own, None)
        self._made_in, self._changed = dtype, False

    def follow(self, modules: Any) -> None:
        """Convert a tree of modules to the current type. Native ones keep the type of their arrays, and read any."""
        if self._place is None:
            return
        module, name = self._place
        dtype = module[name].dtype
        if dtype == self._made_in and not self._changed:
            return
        self._changed = True
        for _, module in tree_flatten(modules, is_leaf=lambda value: isinstance(value, nn.Module)):
            if isinstance(module, TiedEmbedding | QuantizedTable | NativeEmbedding):
                module.dtype = dtype
            if not isinstance(linear_of(module), Native):
                module.set_dtype(dtype)
