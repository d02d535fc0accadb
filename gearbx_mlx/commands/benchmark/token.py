"""Where the time of a token goes, in each gear."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ...cli.gearbox import settle_gears
from ...cli.gears import LayoutSettings
from ...cli.parsers.benchmark import TokenBenchmark
from ...cli.terminal import progress_bar
from ...gears.gearbox import Gearbox
from ...kernels import dispatch
from .decode import PROMPT, fill_cache, llama_bytes, load_or_make
from .kernels import bandwidth_reader, native_module, timed
from .memory import check_memory

PRODUCTS, HEAD, ATTENTION, FUSED = "products", "output head", "attention", "norms, positions, SwiGLU"
GRAPH, REST = "graph (Python)", "rest (MLX)"
PARTS = PRODUCTS, HEAD, ATTENTION, FUSED, GRAPH, REST
KERNELS = {"attention": ATTENTION, "rms_norm": FUSED, "rope": FUSED, "swiglu": FUSED}  # functions of `dispatch`

Call = Callable[[], Any]


@dataclass
class Measured:
    """Of one gear: the calls of a token by part, and what the trials took, in seconds per token."""

    calls: Mapping[str, list[Call]]
    totals: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})


def benchmark_token(settings: TokenBenchmark) -> list[dict[str, Any]]:
    """A row for each gear and part of a token's time; trials go through all gears in turn.

    Raises:
        GearbxError: no native kernels, a model that cannot be loaded, or more than memory allows.
    """
    ladder = settle_gears(settings.model, LayoutSettings(gears=settings.gears)).gears
    if settings.model is None:
        check_memory(llama_bytes(settings.shape, ladder, 1), f"--shape {settings.shape}")
    module = native_module()
    read_bandwidth = bandwidth_reader(module)
    gearbox = Gearbox(load_or_make(settings.model, settings.shape), ladder, kernels="native")
    cache = make_prompt_cache(gearbox.model)
    if settings.context:
        fill_cache(gearbox.model, cache, settings.context)
    measured = {}
    for gear in ladder:
        gearbox.shift(gear)
        measured[gear] = Measured(calls_of_token(gearbox, cache))
    bandwidths = []
    with progress_bar() as progress:
        for trial in progress.track(range(settings.trials + 1), description="trials"):
            bandwidths.append(read_bandwidth())
            for gear, found in measured.items():
                gearbox.shift(gear)
                time_token(gearbox.model, cache, found if trial else Measured(found.calls), settings.tokens)
    shared = {
        "context": settings.context,
        "read_bandwidth_gigabytes_per_second": statistics.median(bandwidths),
        "threads": module.threads(),
        "trials": settings.trials,
    }
    return [
        {"gear": gear.name, "bits": gear.bits} | row_of(part, found) | shared
        for gear, found in measured.items()
        for part in PARTS
    ]


def time_token(model: nn.Module, cache: list[Any], found: Measured, tokens: int) -> None:
    """Adds a trial: tokens of the model as it is, and after each the calls of each part by themselves."""
    spent = dict.fromkeys((*found.calls, GRAPH), 0.0)
    evaluation = 0.0
    for _ in range(tokens):
        start = time.perf_counter()
        y = model(mx.array([PROMPT[:1]]), cache=cache)[:, -1].argmax(-1)
        spent[GRAPH] += (time.perf_counter() - start) / tokens
        evaluation += timed(functools.partial(mx.eval, y, [layer.state for layer in cache])) / tokens
        for part, calls in found.calls.items():
            spent[part] += timed(functools.partial(mx.eval, [call() for call in calls])) / tokens
    total = spent[GRAPH] + evaluation
    found.totals.append(total)
    for part, seconds in (spent | {REST: total - sum(spent.values())}).items():
        found.parts[part].append(seconds)


def row_of(part: str, found: Measured) -> dict[str, Any]:
    """Medians over trials; `spread` is of the share."""
    shares = [seconds / total for seconds, total in zip(found.parts[part], found.totals)]
    return {
        "part": part,
        "seconds": statistics.median(found.parts[part]),
        "share": statistics.median(shares),
        "spread": [min(shares), max(shares)],
        "seconds_per_token": statistics.median(found.totals),
    }


def calls_of_token(gearbox: Gearbox, cache: list[Any]) -> dict[str, list[Call]]:
    """The calls that a token makes, with their arguments, in the gear that is engaged."""
    calls: dict[str, list[Call]] = {part: [] for part in (PRODUCTS, HEAD, ATTENTION, FUSED)}
    with recording(gearbox, calls):
        mx.eval(gearbox.model(mx.array([PROMPT[:1]]), cache=cache), [layer.state for layer in cache])
    return calls


@contextmanager
def recording(gearbox: Gearbox, calls: dict[str, list[Call]]) -> Iterator[None]:
    """Within it, calls of products and of `dispatch`'s functions are appended to `calls`."""
    modules = dict(gearbox.model.named_modules())
    with ExitStack() as stack:
        for layer in gearbox.layers:
            module = modules[layer.path]
            part = HEAD if layer.path == gearbox.head or layer.path.endswith("lm_head") else PRODUCTS
            method = "as_linear" if layer.path == gearbox.head else "__call__"
            noted = noting(getattr(type(module), method), part, calls)
            stack.callback(setattr, module, "__class__", type(module))
            module.__class__ = type(type(module).__name__, (type(module),), {method: noted})
        for name, part in KERNELS.items():
            stack.enter_context(patch.object(dispatch, name, noting(getattr(dispatch, name), part, calls)))
        yield


def noting(function: Callable[..., Any], part: str, calls: dict[str, list[Call]]) -> Callable[..., Any]:
    """The function, which appends each call that it answers to calls[part]."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        y = function(*args, **kwargs)
        if y is not None:
            mx.eval([value for _, value in tree_flatten([args, kwargs]) if isinstance(value, mx.array)])
            calls[part].append(lambda: function(*args, **kwargs))
        return y

    return noted
