"""Several tokens on the path that a model's code takes for one: multi-head latent attention (DeepSeek V2, section 2.1).

For one token mlx-lm multiplies the query into the latent space and attends to the latents themselves. For several it
multiplies all latents out to keys and values. Both are the same attention, with other roundings: in half precision they
differ enough to change a text. Verified tokens must take the path that they would take alone.

mlx-lm has nine such classes, each with other projections before and behind the two branches. So the subclass has the
source of its class, with the condition `L == 1` of these branches met: a copy by hand would be the whole of each.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask

from .versions import is_tested

ABSORBED = {"embed_q", "unembed_out"}  # what such a branch multiplies by


def has_latent_attention(module: nn.Module) -> bool:
    """Return whether a module is one of latent attention."""
    return module.keys() >= ABSORBED


def one_token_class(kind: Any) -> type[nn.Module] | None:
    """Return a subclass of a class of latent attention whose `__call__` takes the branch for one token; nothing else
    changes.

    None where the source is not to be had or has no such branch, and with versions of mlx-lm that are not tested.
    """
    return rewritten(kind) if is_tested() else None


@functools.cache
def rewritten(kind: Any) -> type[nn.Module] | None:
    """Like `one_token_class`. It has the code of `kind`: nothing in mlx-lm is changed."""
    call = kind.__call__
    if getattr(call, "__closure__", None):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    except (OSError, TypeError, SyntaxError):
        return None
    branches = AlwaysShort()
    tree = ast.fix_missing_locations(branches.visit(tree))
    if not branches.found:
        return None
    made: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(call), "exec"), call.__globals__, made)
    return type(kind.__name__, (kind,), {"__call__": with_mask_array(made["__call__"])})


class AlwaysShort(ast.NodeTransformer):
    """Meets the condition `L == 1` of every branch that multiplies by one of ABSORBED."""

    found = 0

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        match node.test:
            case ast.Compare(left=ast.Name(), ops=[ast.Eq()], comparators=[ast.Constant(value=1)]):
                if any(names(branch) & ABSORBED for branch in node.body):
                    self.found += 1
                    node.test = ast.copy_location(ast.Constant(True), node.test)
        return node


def names(node: ast.AST) -> set[str]:
    return {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def with_mask_array(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`call`, which gets a causal mask as an array: the branch for one token adds it to the scores."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def masked(*args: Any, **kwargs: Any) -> mx.array:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("mask") == "causal":
            cache = given.arguments.get("cache")
            x = given.args[1]
            given.arguments["mask"] = create_causal_mask(x.shape[1], 0 if cache is None else cache.offset)
        return call(*given.args, **given.kwargs)

    return masked
