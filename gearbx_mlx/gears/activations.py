"""The type that a model computes in.

On a CPU, MLX multiplies a quantized matrix by a half-precision vector 8 to 40 times slower than by a float32 one. So a
half-precision model with quantized gears computes in float32 there. Every half-precision value is a float32 value too,
so no weight changes. Experts that are not quantized run there in float32 alone.
"""

import copyreg
from collections import UserDict
from collections.abc import Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from ..errors import GearbxError
from ..kernels.dispatch import on_cpu
from . import names
from .adapters import adapters_of, own_arrays

STORED = "stored_dtypes"  # attribute of a model that was converted to another type
DTYPES = {name: getattr(mx, name) for name in names.DTYPES}


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def dtype_named(name: str) -> mx.Dtype:
    dtype: mx.Dtype = getattr(mx, name)
    return dtype


# MLX does not say how a type is copied, and a gearbox, which is copied with its model, has some.
copyreg.pickle(mx.Dtype, lambda dtype: (dtype_named, (dtype_name(dtype),)))


def model_dtype(model: nn.Module) -> mx.Dtype:
    """The floating type of most of the model's parameters."""
    counts: dict[mx.Dtype, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            counts[array.dtype] = counts.get(array.dtype, 0) + array.size
    return max(counts, key=lambda dtype: counts[dtype], default=mx.float32)


def stored_dtype(model: nn.Module, path: str = "") -> mx.Dtype:
    """The type of a parameter in the checkpoint, or ("") of most of the model; it may compute in another."""
    stored: Mapping[str, mx.Dtype] = getattr(model, STORED, {})
    if path in stored:
        return stored[path]
    found = dict(tree_flatten(model.parameters())).get(path)
    return found.dtype if found is not None else model_dtype(model)


def compute_in(model: nn.Module, dtype: str, quantized: bool, kept: Iterable[nn.Module] = ()) -> mx.Dtype:
    """Convert the model's floating parameters to the type that it computes in.

    Args:
        model: changed in place, unless it has that type already.
        dtype: "auto" (the type that is fast on this device and changes no value), or a name of DTYPES.
        quantized: whether any quantized layer will run.
        kept: modules whose own parameters keep their type, and stay unread if they are: native kernels widen them as
            they read. Adapters always keep theirs.

    Returns:
        the type that the model computes in.

    Raises:
        GearbxError: a name that does not exist, or a type in which MLX cannot multiply the model's experts.
    """
    needs_float32 = on_cpu() and any(isinstance(module, SwitchLinear) for module in model.modules())
    own = model_dtype(model)
    checkpoint = stored_dtype(model)
    if dtype == "auto":
        target = mx.float32 if needs_float32 or (quantized and on_cpu()) else checkpoint
    elif dtype in DTYPES:
        target = DTYPES[dtype]
        if needs_float32 and target != mx.float32:
            raise GearbxError(f"--dtype {dtype}: on a CPU, MLX multiplies experts in float32 alone; leave out --dtype")
    else:
        raise GearbxError(f"dtype '{dtype}' does not exist; choose from auto, {', '.join(DTYPES)}")
    if target != own or hasattr(model, STORED):  # converted before, and perhaps not all of it
        if not hasattr(model, STORED):
            stored = {path: array.dtype for path, array in tree_flatten(model.parameters())}
            setattr(model, STORED, UserDict(stored | {"": own}))  # no dict, which would be a parameter
        unchanged = [
            (module, name, value) for module in kept for name, value in module.items() if isinstance(value, mx.array)
        ]
        unchanged += [(a, name, value) for a in adapters_of(model).values() for name, value in own_arrays(a).items()]
        now = tree_flatten(model.parameters())
        if target == checkpoint:  # back to the type of every single parameter
            converted = [(path, array.astype(stored_dtype(model, path))) for path, array in now]
        else:
            floating = [(path, array) for path, array in now if mx.issubdtype(array.dtype, mx.floating)]
            converted = [(path, array.astype(target)) for path, array in floating]
        put_parameters(model, converted)
        for module, name, value in unchanged:
            module[name] = value
        untouched = {id(value) for _, _, value in unchanged}
        mx.eval([array for _, array in tree_flatten(model.parameters()) if id(array) not in untouched])
    return target


def put_parameters(model: nn.Module, parameters: Iterable[tuple[str, mx.array]]) -> None:
    """`model.update` of the model's class, as in `put_modules`: of all gears the engaged one is converted alone."""
    type(model).update(model, tree_unflatten(list(parameters)))
