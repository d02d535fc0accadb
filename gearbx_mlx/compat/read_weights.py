"""Weights that a class of the model reads in its own code, instead of calling the module that has them.

The text of its functions says so. A function whose text is not to be had counts as one that reads the weight of every
module that it names.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType

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
    return {chain for name, function in functions if name not in ELSEWHERE for chain in chains(function)}


def chains(function: FunctionType) -> Iterator[str]:
    """The x.y of every self.x.y.weight in a function, and in functions within it."""
    named = names_in(function.__code__)
    if "weight" not in named:  # few functions know the name, and to read a text takes long
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        yield from named
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "weight":
            *inner, first = reversed(ast.unparse(node.value).split("."))
            if first == "self" and inner:
                yield ".".join(reversed(inner))


def names_in(code: CodeType) -> set[str]:
    """The names that a function and those within it use."""
    within = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*within)
