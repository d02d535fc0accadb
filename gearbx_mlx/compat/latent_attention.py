"""Multi-head latent attention for several tokens on the code path for one (DeepSeek V2, section 2.1).

For one token mlx-lm multiplies the query into the latent space and attends to the latents themselves. For several it
expands all latents to keys and values. Both are the same attention, with different roundings: in half precision they
differ enough to change the output. Verified tokens must take the path of single tokens.

mlx-lm has nine such classes, each with different projections before and after the two branches. So the subclass has the
source of its class, with the condition `L == 1` of these branches always met; a manual copy would be the whole class.
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

ABSORBED = {"embed_q", "unembed_out"}  # projections in such a branch


def has_latent_attention(module: nn.Module) -> bool:
    """Return True for a module with latent attention."""
    return module.keys() >= ABSORBED


def one_token_class(kind: Any) -> type[nn.Module] | None:
    """Return a subclass of a class of latent attention whose `__call__` always takes the branch for one token.

    The result is None if the source is not available or has no such branch, and with untested versions of mlx-lm.
    """
    return rewritten(kind) if is_tested() else None


@functools.cache
def rewritten(kind: Any) -> type[nn.Module] | None:
    """Return `one_token_class`, with the code of `kind`: mlx-lm is not changed."""
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
    """A transformer that meets the condition `L == 1` of every branch with an ABSORBED projection."""

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
    """Return `call` with causal masks converted to arrays, since the branch for one token adds them to the scores."""
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
