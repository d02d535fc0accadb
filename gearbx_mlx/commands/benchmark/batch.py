"""Batches in one gear by our batch generator, beside mlx-lm's own over the same model with the same kernels."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import batch_generate as mlx_batch_generate

from ...cli.gearbox import settle_gears
from ...cli.gears import LayoutSettings
from ...cli.parsers.benchmark import BatchBenchmark
from ...cli.terminal import progress_bar
from ...decoding.route import Static
from ...decoding.stream import batch_generate
from ...gears.discovery import vocabulary
from ...gears.gearbox import Gearbox
from ...gears.ladder import Gear
from ...loading import load
from .decode import check_llama, load_or_make
from .in_turn import in_turn, ratio_row
from .machine import bandwidth_meter, kernels_here

PROMPT_TOKENS = 16


def benchmark_batch(settings: BatchBenchmark) -> list[dict[str, Any]]:
    """A row for each gear and number of texts: tokens per second of ours, beside mlx-lm's.

    Raises:
        GearbxError: a model that cannot be loaded, or more than memory allows.
    """
    ladder = settle_gears(settings.model, LayoutSettings(gears=settings.gears)).gears
    if settings.model is None:
        check_llama(settings.shape, ladder, 1)
    read_bandwidth = bandwidth_meter()
    model, tokenizer = load_or_make(settings.model, settings.shape), load(settings.model)[1]
    gearbox = Gearbox(model, ladder, kernels=kernels_here())
    cases = [(gear, size) for gear in ladder for size in settings.sizes]
    rows = []
    with progress_bar() as progress:
        for gear, size in progress.track(cases, description="batches"):
            ours, theirs = time_batches(gearbox, tokenizer, gear, size, settings.tokens, settings.trials)
            ratios = [other / mine for mine, other in zip(ours, theirs)]
            figures = {
                "batch_size": size,
                "tokens_per_second": size / statistics.median(ours),
                "tokens_per_second_of_mlx_lm": size / statistics.median(theirs),
            }
            rows.append(ratio_row(gear, ratios, figures, read_bandwidth))
    return rows


def time_batches(
    gearbox: Gearbox, tokenizer: Any, gear: Gear, size: int, tokens: int, trials: int
) -> tuple[list[float], list[float]]:
    """Seconds per step of a batch by ours and by mlx-lm's, trial by trial, in turn."""
    model = gearbox.model
    prompts = random_prompts(model, size)
    never_ends = EndlessTokenizer(tokenizer)

    def ours() -> Any:
        return batch_generate(model, never_ends, prompts, max_tokens=tokens, mode=Static(gear.name), gearbox=gearbox)

    def theirs() -> Any:
        gearbox.shift(gear)
        return mlx_batch_generate(model, never_ends, prompts, max_tokens=tokens)

    return in_turn(lambda: timed_loop(ours) / tokens, lambda: timed_loop(theirs) / tokens, trials)


def timed_loop(loop: Callable[[], Any]) -> float:
    """Seconds of a whole batch, from its prompts to its texts."""
    begun = time.perf_counter()
    loop()
    return time.perf_counter() - begun


def random_prompts(model: nn.Module, size: int) -> list[list[int]]:
    """As many prompts of one length, the same in every run."""
    drawn, count = random.Random(0), vocabulary(model)
    return [[drawn.randrange(1, count) for _ in range(PROMPT_TOKENS)] for _ in range(size)]


class EndlessTokenizer:
    """A tokenizer without a token that ends a text, so that every text has the same length."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
