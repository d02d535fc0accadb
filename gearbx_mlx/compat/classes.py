"""Classes of mlx-lm and MLX: known by their code, given other functions, and exchanged under a module.

- mlx-lm has many copies of the same class. They are known by the bytecode of their `__call__` (`code_of`).
- Its models call functions by names in their modules. A subclass has the same code with other functions in their place
  (`calling`): nothing in mlx-lm is changed.
- An `nn.Module` is a dictionary of arrays and modules with attributes beside it. So a module of one class becomes one
  of another over the same arrays (`as_class`), or for a while in its own place (`of_classes`), where gearboxes find it.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import mlx.nn as nn

Code = tuple[Any, ...]
ORIGIN = "mlx_lm_class"  # attribute of a class that stands for one of mlx-lm's: that class


def code_of(kind: type) -> Code:
    """What the `__call__` of a class does, as far as its own code says."""
    code = getattr(kind.__call__, "__code__", None)
    return (code.co_code, code.co_consts, code.co_names, code.co_argcount, code.co_flags) if code else (kind,)


def stock_class(kind: Any) -> type[nn.Module] | None:
    """The class of mlx-lm that `kind` stands for; None for other classes."""
    return vars(kind).get(ORIGIN)


def standing_for(kind: Any, added: Mapping[str, Any], *first: type) -> type[nn.Module]:
    """A subclass of mlx-lm's class `kind` that stands for it. first: classes in front of it."""
    return type(f"Native{kind.__name__}", (*first, kind), {**added, ORIGIN: kind})


def calling(kind: Any, replaced: Mapping[str, tuple[Any, Any]]) -> type[nn.Module] | None:
    """A subclass of mlx-lm's class `kind` whose `__call__` calls other functions; None if it calls none of these.

    Args:
        replaced: name by which mlx-lm's models call a function, to mlx-lm's function and the one in its place.
    """
    call = kind.__call__
    if not isinstance(call, FunctionType):
        return None
    ours = {
        name: own
        for name, (theirs, own) in replaced.items()
        if name in call.__code__.co_names and call.__globals__.get(name) is theirs
    }
    if not ours:
        return None
    return standing_for(kind, {"__call__": with_globals(call, ours)})


def with_globals(function: FunctionType, named: Mapping[str, Any]) -> Any:
    """A copy of a function for which these global names mean something else."""
    own = {**function.__globals__, **named}
    made = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def bare(kind: type[nn.Module]) -> nn.Module:
    """A module without arrays. MLX's constructors draw random numbers, and a shift must not change those of a text."""
    module: nn.Module = kind.__new__(kind)  # type: ignore[call-overload]
    nn.Module.__init__(module)
    return module


def as_class(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """The module as one of another class, over the same arrays."""
    made = bare(kind)
    dict.update(made, module)
    own = vars(module).items()  # among them the names that do not train, of which each module has a set
    vars(made).update({name: copy.copy(value) if isinstance(value, set) else value for name, value in own})
    return made


@contextlib.contextmanager
def of_classes(changes: Iterable[tuple[nn.Module, Any]]) -> Iterator[None]:
    """In the block, modules have other classes: subclasses of their own with another `__call__`."""
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
    """What `model.modules()` lists, in a fraction of its time: that makes a name for each."""
    yield model
    waiting: list[Any] = list(model.children().values())  # of a wrapper those of its model
    while waiting:
        part = waiting.pop()
        if isinstance(part, nn.Module):
            yield part
        within = part.values() if isinstance(part, dict) else part
        waiting += [each for each in within if isinstance(each, dict | list)]


def become(module: Any, kind: Any) -> None:
    """Make an object one of another class from now on: a subclass of its own, or that class again."""
    object.__setattr__(module, "__class__", kind)
