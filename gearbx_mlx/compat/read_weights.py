"""Weights that a class of the model reads in its own code, instead of calling the module that has them."""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType

import mlx.nn as nn

# Methods that run before or beside generation.
ELSEWHERE = {"__init__", "_extra_repr", "sanitize", "shard", "fuse", "from_base", "to_quantized", "to_lora"}
ADAPTERS = "mlx_lm.tuner"  # whose layers are parts of adapters


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
