"""Matrices that stay dense because a class of the model multiplies by them in its own code."""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType

import mlx.core as mx
import mlx.nn as nn

# Methods that run before or beside generation.
ELSEWHERE = {"__init__", "_extra_repr", "sanitize", "shard", "fuse", "from_base", "to_quantized", "to_lora"}
ADAPTERS = "mlx_lm.tuner"  # whose layers are parts of adapters


def own_matrices(path: str, module: nn.Module) -> dict[str, str]:
    """Path to reason of the matrices that a module has and no gear changes.

    Args:
        module: of a class that is no linear layer that a gearbox knows.

    Returns:
        the path of the module for its `weight`, and those of other parameters of two axes, except biases.
    """
    kind = type(module).__name__
    names = [name for name, value in module.items() if name[0] != "_" and "bias" not in name and is_matrix(value)]
    if "weight" in names:
        return {path: "a convolution" if "Conv" in kind else f"layers of class {kind} are not known"}
    return {f"{path}.{name}".lstrip("."): f"a matrix that class {kind} multiplies by itself" for name in names}


def is_matrix(value: object) -> bool:
    """Whether a parameter is an array with more than one row, and more than one column."""
    return isinstance(value, mx.array) and sum(length > 1 for length in value.shape) > 1


def readers(model: nn.Module) -> dict[str, str]:
    """Path of a module to the name of a class whose code reads the module's `weight` instead of calling the module.

    Such a module cannot be replaced by one with a packed weight.
    """
    modules = dict(model.named_modules())
    read = {kind: weights_read_by(kind) for kind in {type(module) for module in modules.values()}}
    found = {}
    for path, module in modules.items():
        for chain in read[type(module)]:
            target = f"{path}.{chain}".lstrip(".")
            if target in modules:
                found[target] = type(module).__name__
    return found


def weights_read_by(kind: type[nn.Module]) -> set[str]:
    """Paths, below a module, of the modules whose weights the code of its class reads."""
    if kind.__module__.startswith(ADAPTERS):
        return set()
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {chain for name, function in functions if name not in ELSEWHERE for chain in chains(function.__code__)}


def chains(code: CodeType) -> Iterator[str]:
    """The x.y of every self.x.y.weight in a function, and in functions within it."""
    names: list[str] | None = None  # since the last `self`
    # Reading instructions takes long, and few functions know the name.
    for instruction in dis.get_instructions(code) if "weight" in code.co_names else ():
        loaded = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
        if loaded == "self":
            names = []
        elif instruction.opname == "LOAD_ATTR" and names is not None:
            if instruction.argval == "weight" and names:
                yield ".".join(names)
            names.append(instruction.argval)
        else:
            names = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from chains(constant)
