"""The wall clock of whole texts: the top gear, route and lossless, on our kernels and on MLX's."""

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...cli.gearbox import in_whole_weights, require_gearbox, settle_gears
from ...cli.gears import GearFlags, LayoutSettings
from ...cli.prompts import MIXED
from ...decoding.lossless import Lossless
from ...decoding.mode import Mode
from ...decoding.route import Route, Static
from ...decoding.stream import stream_generate
from ...gears.gearbox import Gearbox
from ...loading import gears_of, load
from .machine import MLX, paths_here

TOP = "top gear"
MODES: dict[str, type[Mode]] = {TOP: Static, "route": Route, "lossless": Lossless}


@dataclass
class Run:
    """The times of a mode on a path: seconds per token, the tokens of each prompt, peak memory."""

    path: str
    name: str
    gearbox: Gearbox
    tokenizer: Any
    mode: Mode
    peak_memory: int = 0
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def write(self, tokens: int) -> tuple[list[float], list[list[int]]]:
        """Seconds per token and tokens of each prompt's text."""
        made = [self.text(prompt, tokens) for prompt in MIXED]
        return [seconds for seconds, _ in made], [text for _, text in made]

    def text(self, prompt: str, tokens: int) -> tuple[float, list[int]]:
        """Seconds per token after the first one, and the tokens."""
        steps = stream_generate(
            self.gearbox.model, self.tokenizer, prompt, tokens, mode=self.mode, gearbox=self.gearbox
        )
        written = [next(steps).token]
        start = time.perf_counter()
        written += [response.token for response in steps]
        return (time.perf_counter() - start) / max(len(written) - 1, 1), written


def runs_of(model: str | None, gears: str | None, tokens: int) -> Iterator[Run]:
    """Every mode on every path, each after an uncounted round of texts that shows its peak memory.

    Each path has a model of its own. As in `generate --mode lossless`, bfloat16 weights are in format exact if neither
    `gears` nor the checkpoint says which gears.
    """
    for path, kernels, activations in paths_here():
        gc.collect()  # models of earlier sections, or their end would count as ours
        before = mx.get_active_memory()
        flags = GearFlags(kernels=kernels, activations=activations)
        settings = settle_gears(model, LayoutSettings(gears=gears), flags)
        loaded, tokenizer = load(model)
        if gears is None and gears_of(model) is None:
            settings = in_whole_weights(settings, loaded)
        gearbox = require_gearbox(settings, loaded, model)
        del loaded
        for name, mode in MODES.items():
            run = Run(path, name, gearbox, tokenizer, mode())
            mx.reset_peak_memory()
            run.texts = run.write(tokens)[1]
            run.peak_memory = mx.get_peak_memory() - before
            yield run


def time_runs(runs: list[Run], tokens: int) -> None:
    """One trial: every run in turn."""
    for run in runs:
        run.seconds += run.write(tokens)[0]


def row_of(run: Run, runs: list[Run]) -> dict[str, Any]:
    """Medians over trials and prompts. `ratio`: to MLX's top gear; `identical`: a share of texts."""
    base, own = (next(each for each in runs if (each.path, each.name) == (path, TOP)) for path in (MLX, run.path))
    ratios = [slow / fast for slow, fast in zip(base.seconds, run.seconds)]
    same = [text == wanted for text, wanted in zip(run.texts, own.texts)]
    return {
        "mode": run.name,
        "path": run.path,
        "format": run.gearbox.format.name,
        "gears": str(run.gearbox.ladder),
        "tokens": sum(map(len, run.texts)),
        "tokens_per_second": 1 / statistics.median(run.seconds),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "identical": sum(same) / len(same),
        "peak_memory_bytes": run.peak_memory,
    }
