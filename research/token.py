"""Parts of a token's time in each gear: matmuls, output head, attention, the other fused operations, graph.

The parts are those of a token whose operations run one by one. A token with one operation per block is timed too, to
show the savings of blocks. The rest is the token's time minus all parts: MLX's evaluation. It can be negative on a busy
machine.
"""

import functools
import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx.benchmark.decode import FIRST_TOKENS, fill_cache
from gearbx_mlx.benchmark.decode import trials as counted
from gearbx_mlx.benchmark.measuring import BandwidthMeter, Rows, spread_of, timed
from gearbx_mlx.compat.classes import of_classes
from gearbx_mlx.formats import block
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.kernels import dispatch
from gearbx_mlx.telemetry.trace import BLACK, SERIES, get_pyplot, save

from .decoding_costs import as_table, engaged
from .studies import Found, study

PRODUCTS, HEAD, ATTENTION, FUSED = "products", "output head", "attention", "norms, positions, gates"
GRAPH, REST = "graph (Python)", "rest (MLX)"
AS_BLOCKS, GRAPH_AS_BLOCKS = WITH_BLOCKS = "as blocks", "graph as blocks"
TOKEN = "token"  # all parts of single operations
TIMED = PRODUCTS, HEAD, ATTENTION, FUSED  # by themselves
KERNELS = {"attention": ATTENTION} | dict.fromkeys(("rms_norm", "rope", "swiglu", "geglu"), FUSED)  # of `dispatch`
COLUMNS = ("gear", "bits", "part", "seconds", "share", "spread", "seconds_per_token", "operations_per_layer")

Call = Callable[[], Any]


@dataclass
class TokenParts:
    """One gear's calls of a token by part, its operations per layer, and the trials' seconds per token."""

    calls: Mapping[str, list[Call]]
    operations: float
    operations_as_blocks: float
    trials: list[dict[str, float]] = field(default_factory=list)


@study(writes="images/token.svg", minutes=3)
def token(
    model: str | None = None,
    shape: str = "1024x8",
    gears: str | None = None,
    tokens: int = 16,
    trials: int = 5,
    context: int = 0,
) -> Found:
    """Time the parts of a token in each gear; all gears alternate within a trial.

    Args:
        model: Model; a random Llama if omitted.
        shape: WIDTHxLAYERS of the random Llama.
        context: Tokens in the KV cache before the first one.
    """
    gearbox, read_bandwidth = engaged(model, shape, gears, context), BandwidthMeter()
    cache = make_prompt_cache(gearbox.model)
    if context:
        fill_cache(gearbox.model, cache, context)
    measured = {}
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        measured[gear] = token_parts(gearbox, cache)
    bandwidths = []
    for trial in counted(trials):
        bandwidths.append(read_bandwidth())
        for gear, found in measured.items():
            gearbox.shift(gear)
            spent = time_token(gearbox.model, cache, found.calls, tokens)
            if trial:
                found.trials.append(spent)
    shared = {
        "context": context,
        "read_bandwidth_gigabytes_per_second": statistics.median(bandwidths),
        "trials": trials,
    } | read_bandwidth.row
    rows = [
        {"gear": gear.name, "bits": gear.bits} | row_of(part, found) | shared
        for gear, found in measured.items()
        for part in parts_of(found)
    ]
    return Found({"token": as_table(COLUMNS, rows)}, rows, {"token.svg": functools.partial(draw_token, rows)})


def parts_of(found: TokenParts) -> tuple[str, ...]:
    """Return the parts on this device: the rest includes MLX's fused operations, and blocks are for the CPU."""
    timed_parts = (part for part in TIMED if found.calls[part])
    return (*timed_parts, GRAPH, REST, *(WITH_BLOCKS if dispatch.cpu_kernels(1) else ()))


def single_operations() -> AbstractContextManager[Any]:
    """In the block, no transformer block runs as one operation."""
    return patch.object(block, "cpu_kernels", lambda vectors: None)


def token_parts(gearbox: Gearbox, cache: list[Any]) -> TokenParts:
    """Return the constants of all trials, for the engaged gear."""
    calls: dict[str, list[Call]] = {part: [] for part in TIMED}
    with single_operations():
        with recording(gearbox, calls):
            mx.eval(gearbox.model(mx.array([FIRST_TOKENS[:1]]), cache=cache), [layer.state for layer in cache])
        operations = operations_per_layer(gearbox.model, cache)
    return TokenParts(calls, operations, operations_per_layer(gearbox.model, cache))


def time_token(model: nn.Module, cache: list[Any], calls: Mapping[str, list[Call]], tokens: int) -> dict[str, float]:
    """Return seconds per token of each part, and of a TOKEN of single operations.

    Each of the tokens is computed by single operations, then the calls of each part by themselves, then with blocks.
    """
    spent = dict.fromkeys((*calls, GRAPH, TOKEN, *WITH_BLOCKS), 0.0)
    for _ in range(tokens):
        with single_operations():
            add_token(spent, model, cache, GRAPH, TOKEN)
        for part, some in calls.items():
            spent[part] += timed(functools.partial(mx.eval, [call() for call in some]))
        add_token(spent, model, cache, GRAPH_AS_BLOCKS, AS_BLOCKS)
    spent[REST] = spent[TOKEN] - sum(spent[part] for part in (*calls, GRAPH))
    return {part: seconds / tokens for part, seconds in spent.items()}


def add_token(spent: dict[str, float], model: nn.Module, cache: list[Any], graph: str, total: str) -> None:
    """Adds the seconds of one token to spent[total], and to spent[graph] those in which Python builds the graph."""
    start = time.perf_counter()
    y = next_token(model, cache)
    spent[graph] += time.perf_counter() - start
    mx.eval(y, [layer.state for layer in cache])
    spent[total] += time.perf_counter() - start


def next_token(model: nn.Module, cache: list[Any]) -> mx.array:
    """(1,) the token that follows, greedily; not evaluated."""
    return model(mx.array([FIRST_TOKENS[:1]]), cache=cache)[:, -1].argmax(-1)


def operations_per_layer(model: nn.Module, cache: list[Any]) -> float:
    """Operations in MLX's graph of a token, with those of embedding and output head, over the number of layers."""
    text = io.StringIO()
    mx.export_to_dot(text, next_token(model, cache))
    mx.eval([layer.state for layer in cache])
    return text.getvalue().count("shape=rectangle") / len(model.layers)  # operations are boxes, arrays are not


def row_of(part: str, found: TokenParts) -> dict[str, Any]:
    """Return medians over trials; `share` is a part's share of a token of single operations, `spread` that share's."""
    shares = [trial[part] / trial[TOKEN] for trial in found.trials]
    return {
        "part": part,
        "seconds": statistics.median(trial[part] for trial in found.trials),
        "share": statistics.median(shares),
        "spread": spread_of(shares),
        "seconds_per_token": statistics.median(trial[TOKEN] for trial in found.trials),
        "operations_per_layer": found.operations_as_blocks if part in WITH_BLOCKS else found.operations,
    }


@contextmanager
def recording(gearbox: Gearbox, calls: dict[str, list[Call]]) -> Iterator[None]:
    """Within it, calls of products and of `dispatch`'s functions are appended to `calls`, with their arguments."""
    modules = dict(gearbox.model.named_modules())
    with ExitStack() as stack:
        for layer in gearbox.layers:
            module = modules[layer.path]
            part = HEAD if layer.path == gearbox.head or layer.path.endswith("lm_head") else PRODUCTS
            method = "as_linear" if layer.path == gearbox.head else "__call__"
            noted = noting(getattr(type(module), method), part, calls)
            kind = type(type(module).__name__, (type(module),), {method: noted})
            stack.enter_context(of_classes([(module, kind)]))
        for name, part in KERNELS.items():
            stack.enter_context(patch.object(dispatch, name, noting(getattr(dispatch, name), part, calls)))
        yield


def noting(function: Callable[..., Any], part: str, calls: dict[str, list[Call]]) -> Callable[..., Any]:
    """Return the function, which appends each call that it answers to calls[part]."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        y = function(*args, **kwargs)
        if y is not None:
            mx.eval([value for _, value in tree_flatten([args, kwargs]) if isinstance(value, mx.array)])
            calls[part].append(lambda: function(*args, **kwargs))
        return y

    return noted


def draw_token(rows: Rows, path: Path) -> None:
    """Draw a bar for each gear: milliseconds of each part of a token, and a line at the time with blocks.

    A part that is negative is shown as 0.
    """
    pyplot = get_pyplot()
    gears = list(dict.fromkeys(row["gear"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.7 * len(gears)), layout="constrained")
    ends = dict.fromkeys(gears, 0.0)
    parts = list(dict.fromkeys(row["part"] for row in rows if row["part"] not in WITH_BLOCKS))
    for part, color in zip(parts, SERIES[1:]):
        some = [row for row in rows if row["part"] == part]
        sizes = [max(0.0, 1e3 * row["seconds"]) for row in some]
        starts = [ends[row["gear"]] for row in some]
        axes.barh([bar_of(row) for row in some], sizes, left=starts, color=color, label=part)
        ends = {gear: start + size for gear, start, size in zip(gears, starts, sizes)}
    some = [row for row in rows if row["part"] == AS_BLOCKS]
    line = {"linestyle": "", "marker": "|", "markersize": 30, "markeredgewidth": 2, "color": BLACK}
    axes.plot([1e3 * row["seconds"] for row in some], [bar_of(row) for row in some], label=AS_BLOCKS, **line)
    axes.invert_yaxis()  # the first gear on top
    axes.set(xlabel="milliseconds of a token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=0.4, frameon=False)
    save(figure, path)


def bar_of(row: Mapping[str, Any]) -> str:
    """Return the name of a gear's bar."""
    return f"{row['gear']}, {row['bits']} bits"
