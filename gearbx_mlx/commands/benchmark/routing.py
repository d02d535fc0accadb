"""What entropy, monitor, gate and record add to a token."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import mlx.nn as nn
import mlx_lm

from ...cli.gearbox import settle_gears
from ...cli.gears import LayoutSettings
from ...cli.parsers.benchmark import RoutingBenchmark
from ...cli.terminal import progress_bar
from ...decoding.route import Route
from ...decoding.stream import stream_generate
from ...gears.gearbox import Gearbox
from ...loading import load
from ...routing.gates import ThresholdGate
from .decode import PROMPT, check_llama, load_or_make
from .in_turn import in_turn, ratio_row
from .machine import bandwidth_meter, kernels_here, timed


class Stay(ThresholdGate):
    """Does all the work of a gate, and stays in the gear."""

    def update(self, *reading: Any) -> int:
        gear = self.gear
        super().update(*reading)
        self.gear = gear
        return gear


def benchmark_routing(settings: RoutingBenchmark) -> list[dict[str, Any]]:
    """A row for each gear: seconds of a token that is routed, beside one of mlx-lm's own loop.

    Raises:
        GearbxError: a model that cannot be loaded, or more than memory allows.
    """
    ladder = settle_gears(settings.model, LayoutSettings(gears=settings.gears)).gears
    if settings.model is None:
        check_llama(settings.shape, ladder, 1)
    read_bandwidth = bandwidth_meter()
    model, tokenizer = load_or_make(settings.model, settings.shape), load()[1]
    gearbox = Gearbox(model, ladder, kernels=kernels_here())
    rows = []
    with progress_bar() as progress:
        task = progress.add_task("trials", total=len(ladder) * (settings.trials + 1))
        for gear in ladder:
            gearbox.shift(gear)
            plain, routed = time_loops(
                model, tokenizer, gearbox, settings.tokens, settings.trials, lambda: progress.advance(task)
            )
            ratios = [mine / other for mine, other in zip(routed, plain)]
            figures = {"seconds": statistics.median(routed), "seconds_of_mlx_lm": statistics.median(plain)}
            rows.append(ratio_row(gear, ratios, figures, read_bandwidth))
    return rows


def time_loops(
    model: nn.Module, tokenizer: Any, gearbox: Gearbox, tokens: int, trials: int, progress: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Seconds per token of mlx-lm's own loop and of a routed one, trial by trial, in the gear that is engaged."""

    def plain() -> Iterator:
        return mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=tokens + 1)

    def routed() -> Iterator:
        gate = Stay(tuple(map(float, range(1, len(gearbox.ladder)))))
        mode = Route(gate=gate, initial_gear=gearbox.gear.name)
        return stream_generate(model, tokenizer, PROMPT, tokens + 1, mode=mode, gearbox=gearbox)

    return in_turn(
        lambda: seconds_per_token(plain(), tokens), lambda: seconds_per_token(routed(), tokens), trials, progress
    )


def seconds_per_token(steps: Iterator, tokens: int) -> float:
    """Of a loop, after its first token."""
    next(steps)
    return timed(lambda: list(steps)) / tokens
