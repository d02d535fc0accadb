"""Unpromised names and classes of mlx-lm and MLX.

- Private names (with an underscore), each behind a function.
- mlx-lm has many copies of the same class. They are identified by the bytecode of their `__call__` (`code_of`).
- Its models call functions by names in their modules. A subclass has the same code with replaced functions
  (`calling`): mlx-lm is not changed.
- An `nn.Module` is a dictionary of arrays and modules, with attributes. So a module can change its class
  over the same arrays, in a copy (`as_class`) or temporarily in place (`of_classes`), where gearboxes find it.
- Some classes read the weight of a module directly, instead of calling it. The source of their functions shows it
  (`readers`). A function without source counts as reading the weight of every module that it names.
- Some modules compile steps for themselves: such a step keeps the weights of the gear in which it first ran
  (`CompiledSteps`).
"""

import ast
import contextlib
import copy
import inspect
import sys
import textwrap
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError
from .versions import untested

Code = tuple[Any, ...]
ORIGIN = "mlx_lm_class"  # attribute of a replacement class: the class of mlx-lm


def code_of(kind: type) -> Code:
    """Return the `__call__` of a class as comparable bytecode; the class itself if it has none."""
    code = getattr(kind.__call__, "__code__", None)
    return (code.co_code, code.co_consts, code.co_names, code.co_argcount, code.co_flags) if code else (kind,)


def stock_class(kind: Any) -> type[nn.Module] | None:
    """Return the class of mlx-lm that `kind` replaces; None for other classes."""
    return vars(kind).get(ORIGIN)


def standing_for(kind: Any, added: Mapping[str, Any], *first: type) -> type[nn.Module]:
    """Return a subclass that replaces mlx-lm's class `kind`. first: mixins."""
    return type(f"Native{kind.__name__}", (*first, kind), {**added, ORIGIN: kind})


def calling(kind: Any, replaced: Mapping[str, tuple[Any, Any]]) -> type[nn.Module] | None:
    """Return a subclass of mlx-lm's class `kind` whose `__call__` calls replaced functions; None if it calls none.

    Args:
        replaced: name by which mlx-lm's models call a function, to mlx-lm's function and its replacement.
    """
    call = kind.__call__
    if not isinstance(call, FunctionType):
        return None
    replacements = {
        name: own
        for name, (theirs, own) in replaced.items()
        if name in call.__code__.co_names and call.__globals__.get(name) is theirs
    }
    if not replacements:
        return None
    return standing_for(kind, {"__call__": with_globals(call, replacements)})


def with_globals(function: FunctionType, named: Mapping[str, Any]) -> Any:
    """Return a copy of a function with replaced global names."""
    own = {**function.__globals__, **named}
    made = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def bare(kind: type[nn.Module]) -> nn.Module:
    """Return a module without arrays. MLX's constructors draw random numbers; a shift must draw none."""
    module: nn.Module = kind.__new__(kind)  # type: ignore[call-overload]
    nn.Module.__init__(module)
    return module


def as_class(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a copy of the module in a different class, over the same arrays."""
    made = bare(kind)
    dict.update(made, module)
    own = vars(module).items()  # includes the names that do not train, a set per module
    vars(made).update({name: copy.copy(value) if isinstance(value, set) else value for name, value in own})
    return made


@contextlib.contextmanager
def of_classes(changes: Iterable[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Change the classes of modules in the block, to subclasses with a different `__call__`."""
    own = []
    try:
        for module, kind in changes:
            own.append((module, type(module)))
            become(module, kind)
        yield
    finally:
        for module, kind in reversed(own):
            become(module, kind)


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the same as `model.modules()`, in the same order and a fraction of its time."""
    return (module for _, module in named_modules_of(model))


def named_modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the same as `model.named_modules()`, in the same order and a fraction of its time."""
    yield "", model
    waiting = [*named_children("", model.children())]  # for a wrapper, the children of its model
    while waiting:
        path, module = waiting.pop()
        yield path, module
        waiting += named_children(f"{path}.", module)


def named_children(prefix: str, parts: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules directly within a module, and within its lists and dictionaries, by path."""
    for name, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
        if isinstance(part, nn.Module):
            yield f"{prefix}{name}", part
        elif isinstance(part, dict | list):
            yield from named_children(f"{prefix}{name}.", part)


def become(module: Any, kind: Any) -> None:
    """Change the class of an object, to a subclass or back."""
    object.__setattr__(module, "__class__", kind)


def frequencies_of(rope: Any) -> mx.array:
    """Return positions per radian of mlx-lm's Llama3RoPE, (dims / 2,)."""
    return rope._freqs


def generation_stream() -> Any:
    """Return the stream on which mlx-lm generates, chosen when mlx-lm is imported; None before."""
    return getattr(sys.modules.get("mlx_lm.generate"), "generation_stream", None)


def model_classes(config: dict) -> Any:
    """Return the classes of a model's type and of its arguments. Raises mlx-lm's errors for an unknown type."""
    from mlx_lm.utils import _get_classes

    return _get_classes(config)


def own_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of transformers inside of mlx-lm's wrapper."""
    return getattr(tokenizer, "_tokenizer", tokenizer)


# Methods that are not part of a forward pass.
NO_PRODUCTS = {"__init__", "_extra_repr", "sanitize", "shard", "fuse", "from_base", "to_quantized", "to_lora"}


def readers(model: nn.Module) -> dict[str, str]:
    """Return path of a module to the name of a class whose code reads the module's `weight` without calling it.

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
    """Return paths, below a module, of the modules whose weights the code of its class reads."""
    if kind.__module__.startswith("mlx_lm.tuner"):  # layers in this package are parts of adapters
        return set()
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {chain for name, function in functions if name not in NO_PRODUCTS for chain in chains(function)}


def chains(function: FunctionType) -> Iterator[str]:
    """Yield the x.y of every self.x.y.weight in a function, and in functions within it."""
    named = names_in(function.__code__)
    if "weight" not in named:  # few functions have the name, and parsing is slow
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
    """Return the names that a function and those within it use."""
    within = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*within)


STEP_NAME = "_step"  # attribute for compiled steps in mlx-lm's classes: kimi_k3, on Metal
COMPILED = type(mx.compile(lambda: None))


class CompiledSteps:
    """The compiled steps of a model, separate for each gear."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._modules = [module for module in model.modules() if STEP_NAME in vars(module)]
        self._steps: dict[Hashable, list[Any]] = {}

    def change(self, before: Hashable, gear: Hashable) -> None:
        """Put the steps of a gear into the model: its earlier ones, or none, so that they are compiled again.

        Raises:
            GearbxError: an untested version of mlx-lm keeps steps in other attributes.
        """
        for path, module in self._model.named_modules() if untested() else ():
            for name, value in vars(module).items():
                if isinstance(value, COMPILED) and name != STEP_NAME:
                    raise GearbxError(f"{path} keeps a compiled step of one gear as {name}: {untested()}")
        self._steps[before] = [getattr(module, STEP_NAME) for module in self._modules]
        self._put(self._steps.get(gear, [None] * len(self._modules)))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove all steps in the block; steps compiled in it are dropped."""
        steps = [getattr(module, STEP_NAME) for module in self._modules]
        try:
            self._put([None] * len(steps))
            yield
        finally:
            self._put(steps)

    def forget(self) -> None:
        """Drop all steps, since gears have different layers now."""
        self._steps.clear()
        self._put([None] * len(self._modules))

    def _put(self, steps: list[Any]) -> None:
        for module, step in zip(self._modules, steps):
            setattr(module, STEP_NAME, step)
