"""Picture 6: where the time of a token goes: the pass, and what routing adds to it (GEARBX 17, figure 6)."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ...decoding.sampling import Entropy, fast_entropy
from ...gears.gearbox import Gearbox
from ...gears.ladder import Gear
from ...routing.gates import Monitor, ThresholdGate, replay
from ...telemetry.trace import BLUE, GREEN, ORANGE, VERMILION
from .style import HATCHES
from .subject import GEARS, NAMES, Subject
from .workloads import EASY, HARD

PARTS = {"forward": BLUE, "entropy": ORANGE, "monitor and gate": GREEN, "shifts": VERMILION}
TRIALS, TOKENS = 9, 16


def seconds(work: Callable[[], Any], times: int) -> float:
    """Processor time of one call, the mean of so many."""
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times


def shifts_per_token(subject: Subject) -> float:
    """How often mode route changes gear on the easy, the hard and once more the easy text."""
    entropies = [bits for text in (EASY, HARD, EASY) for bits in subject.entropies(subject.tokens(text))]
    gears = replay(entropies, Monitor(subject.vocab_size), ThresholdGate(subject.thresholds))
    return sum(one != other for one, other in pairwise(gears)) / len(gears)


def trial(gearbox: Gearbox, thresholds: tuple[float, ...], vocabulary: int) -> dict[str, dict[str, float]]:
    """Seconds of each part, by gear."""
    entropy, monitor, gate = fast_entropy(gearbox), Monitor(vocabulary), ThresholdGate(thresholds)
    found = {}
    for gear, other in zip(gearbox.ladder, [*gearbox.ladder[1:], gearbox.ladder[-2]]):
        spent = {"shift": shift_seconds(gearbox, gear, other), "forward": pass_seconds(gearbox.model)}
        logits = mx.zeros((1, vocabulary))
        spent["entropy"] = seconds(partial(evaluated, entropy, logits), TOKENS)
        spent["monitor and gate"] = seconds(partial(routed, monitor, gate), TOKENS)
        found[gear.name] = spent
    return found


def shift_seconds(gearbox: Gearbox, gear: Gear, other: Gear) -> float:
    """Of one shift between a gear and its neighbour; ends in the gear."""
    start = time.process_time()
    for each in (gear, other, gear):
        gearbox.shift(each)
    return (time.process_time() - start) / 3


def pass_seconds(model: nn.Module) -> float:
    """Of a pass over one token, on a KV cache."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1]]), cache=cache))
    return seconds(lambda: mx.eval(model(mx.array([[1]]), cache=cache)), TOKENS)


def evaluated(entropy: Entropy, logits: mx.array) -> None:
    mx.eval(entropy(logits))


def routed(monitor: Monitor, gate: ThresholdGate) -> None:
    gate.update(monitor.update(2.0))


def measure(subject: Subject) -> dict[str, Any]:
    """Processor times by gear and part, of each trial, and shifts per token."""
    gearbox = Gearbox(subject.load(), ",".join(map(str, GEARS)), kernels="auto")
    settings = subject.thresholds, subject.vocab_size
    trial(gearbox, *settings)  # makes the gears, and warms up
    return {"trials": [trial(gearbox, *settings) for _ in range(TRIALS)], "shifts": shifts_per_token(subject)}


def parts(data: Mapping[str, Any], gear: str) -> dict[str, list[float]]:
    """Seconds of a token in each trial, by part; a shift counts as often as there is one."""
    times = [each[gear] for each in data["trials"]]
    found = {part: [each[part] for each in times] for part in PARTS if part != "shifts"}
    return found | {"shifts": [each["shift"] * data["shifts"] for each in times]}


def draw(data: Mapping[str, Any], figure: Any) -> None:
    """Bars of the medians: a whole token on the left, and what routing adds, larger, on the right."""
    whole, added = figure.subplots(1, 2)
    for axes, shown in ((whole, list(PARTS)), (added, list(PARTS)[1:])):
        bottom = [0.0] * len(NAMES)
        for place, part in enumerate(PARTS):
            if part not in shown:
                continue
            heights = [1e3 * statistics.median(parts(data, gear)[part]) for gear in NAMES]
            style = {"color": PARTS[part], "hatch": HATCHES[place], "edgecolor": "white", "label": part}
            axes.bar(NAMES, heights, 0.6, bottom=bottom, **style)
            bottom = [base + height for base, height in zip(bottom, heights)]
        axes.set(xlabel="gear", ylabel="processor time of a token, ms")
    added.set_title("without the pass")
    figure.legend(*whole.get_legend_handles_labels(), loc="outside right upper")


def table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Medians in microseconds, and the share of what routing adds, with the range of the trials."""
    rows = []
    for gear, bits in zip(NAMES, GEARS):
        found = parts(data, gear)
        added = [sum(found[part][i] for part in PARTS if part != "forward") for i in range(len(data["trials"]))]
        shares = [more / (more + pass_) for more, pass_ in zip(added, found["forward"])]
        times = [f"{1e6 * statistics.median(found[part]):.1f}" for part in PARTS]
        spread = f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"
        rows.append([f"{gear} ({bits} bits)", *times, spread])
    return ["gear", *(f"{part}, µs" for part in PARTS), "routing adds"], rows
