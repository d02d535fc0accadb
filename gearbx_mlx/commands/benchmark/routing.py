"""What entropy, monitor, gate and record add to a token."""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import mlx_lm
from rich.progress import Progress

from ...cli import terminal
from ...cli.gears import settle_gears
from ...decoding.stream import stream_generate
from ...gears.gearbox import Gearbox
from ...gears.ladder import Ladder
from ...loading import load
from ...routing.gates import ThresholdGate
from .decode import PROMPT, model_of
from .kernels import bandwidth_reader, native_module, timed


class Stay(ThresholdGate):
    """Does all the work of a gate, and stays in the gear."""

    def update(self, *reading: Any) -> int:
        gear = self.gear
        super().update(*reading)
        self.gear = gear
        return gear


def benchmark_routing(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each gear: seconds of a token that is routed, beside one of mlx-lm's own loop.

    Raises:
        GearbxError: no native kernels, a shape or ladder that does not exist.
    """
    settle_gears(args)
    module, ladder = native_module(), Ladder.parse(args.gears)
    read_bandwidth = bandwidth_reader(module)
    model, tokenizer = model_of(args), load()[1]
    gearbox = Gearbox(model, ladder, kernels="native")

    def plain() -> Iterator:
        return mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=args.tokens + 1)

    def routed() -> Iterator:
        gate = Stay(tuple(map(float, range(1, len(ladder)))))
        gear = gearbox.gear.name
        return stream_generate(model, tokenizer, PROMPT, args.tokens + 1, gearbox=gearbox, gate=gate, initial_gear=gear)

    def seconds_of(way: Callable[[], Iterator]) -> float:
        steps = way()
        next(steps)
        return timed(lambda: list(steps)) / args.tokens

    rows = []
    with Progress(console=terminal.messages, transient=True) as progress:
        task = progress.add_task("trials", total=len(ladder) * (args.trials + 1))
        for gear in ladder:
            gearbox.shift(gear)
            seconds: dict[Any, list[float]] = {plain: [], routed: []}
            for number in range(args.trials + 1):
                for way in (plain, routed) if number % 2 else (routed, plain):
                    spent = seconds_of(way)
                    if number:  # the first round is a warm-up
                        seconds[way].append(spent)
                progress.advance(task)
            ratios = [mine / other for mine, other in zip(seconds[routed], seconds[plain])]
            rows.append(
                {
                    "gear": gear.name,
                    "bits": gear.bits,
                    "seconds": statistics.median(seconds[routed]),
                    "seconds_of_mlx_lm": statistics.median(seconds[plain]),
                    "ratio": statistics.median(ratios),
                    "spread": [min(ratios), max(ratios)],
                    "read_bandwidth_gigabytes_per_second": read_bandwidth(),
                    "threads": module.threads(),
                    "trials": args.trials,
                }
            )
    return rows
