"""Pictures of times: a pass (3), a token and what routing adds (6), and what fewer bytes allow (9)."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx.decoding.sampling import Entropy, fast_entropy
from gearbx_mlx.formats.rowwise import Rowwise
from gearbx_mlx.gears.gearbox import Gearbox
from gearbx_mlx.gears.ladder import Gear
from gearbx_mlx.kernels import cpu
from gearbx_mlx.routing.gates import Monitor, ThresholdGate, replay
from gearbx_mlx.telemetry.trace import BLACK, BLUE, GREEN, ORANGE, VERMILION

from .routing import EASY, HARD
from .subject import GEARS, GUIDE, HATCHES, NAMES, Subject

# Picture 3: the time of a pass, by gear, with a dequant cache and with packed kernels (GEARBX 7.1; 17, figure 3).

LADDER = ",".join(map(str, GEARS))
TRIALS, PASSES = 9, 5
WAYS = {"first": "first pass, unpacking", "cached": "dequant cache", "packed": "packed kernel"}
WAY_COLORS = dict(zip(WAYS, (ORANGE, BLUE, VERMILION)))


def pass_seconds(model: nn.Module, passes: int) -> float:
    """Processor time of a pass over one token, the mean of so many."""
    start = time.process_time()
    for _ in range(passes):
        mx.eval(model(mx.array([[1]])))
    return (time.process_time() - start) / passes


def trial_of_passes(cached: Gearbox, packed: Gearbox | None) -> dict[str, dict[str, float]]:
    """Seconds of each way, by gear; gears and ways take turns. The top gear is dense in all of them."""
    found: dict[str, dict[str, float]] = {}
    for gear in reversed(list(cached.ladder)):
        cached.shift(gear)  # which empties the caches of the gear that is left
        times = {"first": pass_seconds(cached.model, 1), "cached": pass_seconds(cached.model, PASSES)}
        if packed is not None:
            packed.shift(gear)
            pass_seconds(packed.model, 1)
            times["packed"] = pass_seconds(packed.model, PASSES)
        found[gear.name] = times
    return found


def measure_forward_latency(subject: Subject) -> dict[str, Any]:
    """Processor times of a pass over one token: for each gear and way the trials, in seconds."""
    cached = Gearbox(subject.load(), LADDER, format=Rowwise(cache=True), kernels="mlx")
    native = cpu.why_not() is None
    packed = Gearbox(subject.load(), LADDER, format="rowwise", kernels="native") if native else None
    trial_of_passes(cached, packed)  # makes the gears, and warms up
    trials = [trial_of_passes(cached, packed) for _ in range(TRIALS)]
    gears = {
        gear.name: {way: [each[gear.name][way] for each in trials] for way in trials[0][gear.name]}
        for gear in cached.ladder
    }
    return {"gears": gears, "bits": {gear.name: gear.bits for gear in cached.ladder}}


def ratios(data: Mapping[str, Any], gear: str, way: str) -> list[float]:
    """Each trial's time over that of the top gear, dense weights on MLX, in the same trial."""
    dense = list(data["gears"].values())[-1]["cached"]
    return [a / b for a, b in zip(data["gears"][gear][way], dense)]


def draw_forward_latency(data: Mapping[str, Any], figure: Any) -> None:
    """Bars: medians over dense weights on MLX, with the range of the trials."""
    axes, gears = figure.subplots(), list(data["gears"])
    ways = [way for way in WAYS if way in data["gears"][gears[0]]]
    for place, way in enumerate(ways):
        found = [ratios(data, gear, way) for gear in gears]
        middle = [statistics.median(each) for each in found]
        ends = [[m - min(e) for m, e in zip(middle, found)], [max(e) - m for m, e in zip(middle, found)]]
        left = [x + 0.27 * (place - (len(ways) - 1) / 2) for x in range(len(gears))]
        style = {"color": WAY_COLORS[way], "hatch": HATCHES[place], "label": WAYS[way], "edgecolor": "white"}
        axes.bar(left, middle, 0.25, yerr=ends, error_kw={"linewidth": 0.8, "capsize": 2}, **style)
    axes.axhline(1, **GUIDE)
    axes.set_xticks(range(len(gears)), [f"{gear} ({data['bits'][gear]} bits)" for gear in gears])
    axes.set(ylabel="processor time, dense = 1")
    axes.legend()


def table_forward_latency(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Milliseconds (median), and the ratio to dense weights on MLX with its range, for each gear and way."""
    rows = []
    for gear, ways in data["gears"].items():
        for way, times in ways.items():
            found = ratios(data, gear, way)
            spread = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
            rows.append([gear, str(data["bits"][gear]), WAYS[way], f"{1e3 * statistics.median(times):.2f}", spread])
    return ["gear", "bits", "way", "ms", "of dense"], rows


# Picture 6: where the time of a token goes: the pass, and what routing adds to it (GEARBX 17, figure 6).

PARTS = {"forward": BLUE, "entropy": ORANGE, "monitor and gate": GREEN, "shifts": VERMILION}
TOKEN_TRIALS, TOKENS = 9, 16


def seconds_of(work: Callable[[], Any], times: int) -> float:
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


def trial_of_tokens(gearbox: Gearbox, thresholds: tuple[float, ...], vocabulary: int) -> dict[str, dict[str, float]]:
    """Seconds of each part, by gear."""
    entropy, monitor, gate = fast_entropy(gearbox), Monitor(vocabulary), ThresholdGate(thresholds)
    found = {}
    for gear, other in zip(gearbox.ladder, [*gearbox.ladder[1:], gearbox.ladder[-2]]):
        spent = {"shift": shift_seconds(gearbox, gear, other), "forward": cached_pass_seconds(gearbox.model)}
        logits = mx.zeros((1, vocabulary))
        spent["entropy"] = seconds_of(partial(evaluated, entropy, logits), TOKENS)
        spent["monitor and gate"] = seconds_of(partial(routed, monitor, gate), TOKENS)
        found[gear.name] = spent
    return found


def shift_seconds(gearbox: Gearbox, gear: Gear, other: Gear) -> float:
    """Of one shift between a gear and its neighbour; ends in the gear."""
    start = time.process_time()
    for each in (gear, other, gear):
        gearbox.shift(each)
    return (time.process_time() - start) / 3


def cached_pass_seconds(model: nn.Module) -> float:
    """Of a pass over one token, on a KV cache."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1]]), cache=cache))
    return seconds_of(lambda: mx.eval(model(mx.array([[1]]), cache=cache)), TOKENS)


def evaluated(entropy: Entropy, logits: mx.array) -> None:
    mx.eval(entropy(logits))


def routed(monitor: Monitor, gate: ThresholdGate) -> None:
    gate.update(monitor.update(2.0))


def measure_token_time(subject: Subject) -> dict[str, Any]:
    """Processor times by gear and part, of each trial, and shifts per token."""
    gearbox = Gearbox(subject.load(), ",".join(map(str, GEARS)), kernels="auto")
    settings = subject.thresholds, subject.vocab_size
    trial_of_tokens(gearbox, *settings)  # makes the gears, and warms up
    return {
        "trials": [trial_of_tokens(gearbox, *settings) for _ in range(TOKEN_TRIALS)],
        "shifts": shifts_per_token(subject),
    }


def parts(data: Mapping[str, Any], gear: str) -> dict[str, list[float]]:
    """Seconds of a token in each trial, by part; a shift counts as often as there is one."""
    times = [each[gear] for each in data["trials"]]
    found = {part: [each[part] for each in times] for part in PARTS if part != "shifts"}
    return found | {"shifts": [each["shift"] * data["shifts"] for each in times]}


def draw_token_time(data: Mapping[str, Any], figure: Any) -> None:
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


def table_token_time(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
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


# Picture 9: the speedup that fewer bytes allow, over the share of tokens in low gear (GEARBX 8.1, 12.2 and 17).

READ = (0.25, 0.5, 1.0)  # bytes of low, mid and high over those of fp16
MANAGED = (1.0, 0.35)  # of the parameters
PAPER = (0.55, 0.25, 0.20)  # of the tokens in low, mid and high
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SHIFTED_TOKENS, ROUNDS = 24, 5


def speedup(shares: Sequence[float], managed: float, read: Sequence[float] = READ) -> float:
    """Time of fp16 over time in gears, if weights are all that takes time.

    Args:
        shares: of the tokens in each gear; their sum is 1.
        managed: f, the share of the parameters that have gears.
        read: bytes of the managed ones in each gear, over those in fp16.
    """
    return 1 / ((1 - managed) + managed * sum(share * bytes for share, bytes in zip(shares, read)))


def seconds_in_low(gearbox: Gearbox, low: int) -> float:
    """CPU seconds of SHIFTED_TOKENS passes of one token, the first `low` in the lowest gear, with the shift between."""
    cache = make_prompt_cache(gearbox.model)
    start = time.process_time()
    for place in range(SHIFTED_TOKENS):
        if place in (0, low):
            gearbox.shift(gearbox.ladder[0] if place < low else gearbox.ladder.top)
        mx.eval(gearbox.model(mx.array([[1]]), cache=cache))
    return time.process_time() - start


def measure_bandwidth_model(subject: Subject) -> dict[str, Any]:
    """Speedups over the top gear at each share in low gear: predicted of the bytes read, and of CPU time."""
    gearbox = Gearbox(subject.load(), "4,16")
    low, high = (gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder)
    for gear in reversed(gearbox.ladder):
        gearbox.shift(gear)
        mx.eval(gearbox.model(mx.array([[1]])))
    times = [[seconds_in_low(gearbox, round(share * SHIFTED_TOKENS)) for share in SHARES] for _ in range(ROUNDS)]
    points = []
    for place, share in enumerate(SHARES):
        ratios = sorted(row[0] / row[place] for row in times)
        bytes = high / (share * low + (1 - share) * high)
        spread = [ratios[0], ratios[-1]]
        points.append({"share": share, "bytes": bytes, "time": statistics.median(ratios), "spread": spread})
    return {"bytes": [low, high], "dtype": str(gearbox.compute_dtype), "points": points}


def draw_bandwidth_model(data: Mapping[str, Any], figure: Any) -> None:
    """Lines: the paper's model, the other tokens in high gear; markers: this model's bytes, and its CPU time."""
    axes, points = figure.subplots(), data["points"]
    places = [step / 50 for step in range(51)]
    for managed, line, color, marker in zip(MANAGED, ("-", "--"), (BLUE, VERMILION), "*P"):
        curve = [speedup((share, 0, 1 - share), managed) for share in places]
        axes.plot(places, curve, line, color=color, label=f"model, f = {managed:g}")
        mixed = {"marker": marker, "markersize": 9, "color": color, "markeredgecolor": BLACK, "linestyle": ""}
        axes.plot([PAPER[0]], [speedup(PAPER, managed)], **mixed, label=f"55/25/20, f = {managed:g}")
    shares = [point["share"] for point in points]
    axes.plot(shares, [p["bytes"] for p in points], "s:", color=GREEN, markerfacecolor="white", label="bytes, counted")
    off = [[abs(point["spread"][end] - point["time"]) for point in points] for end in (0, 1)]
    axes.errorbar(shares, [p["time"] for p in points], off, fmt="ok", capsize=2, label="CPU time, measured")
    axes.axhline(1, **GUIDE)
    axes.set(xlabel="share of tokens in low gear", ylabel="speedup over the top gear", ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def table_bandwidth_model(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For each share in low gear: the model's speedups, that of the bytes, and that of CPU time with its spread."""
    rows = [["55 % (mid 25 %)", *(f"{speedup(PAPER, managed):.2f}" for managed in MANAGED), "", ""]]
    for point in data["points"]:
        share, (least, most) = point["share"], point["spread"]
        model = [f"{speedup((share, 0, 1 - share), managed):.2f}" for managed in MANAGED]
        rows.append([f"{share:.0%}", *model, f"{point['bytes']:.2f}", f"{point['time']:.2f} ({least:.2f}-{most:.2f})"])
    return ["share in low gear", "f = 1", "f = 0.35", "bytes, counted", "CPU time, measured"], rows
