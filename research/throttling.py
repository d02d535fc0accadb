"""A machine that gets hot, runs low on battery and memory, and how the controller responds, for docs/machine.md."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler
from pages import table

from gearbx_mlx import Gearbox, Governor, load, stream_generate
from gearbx_mlx.machine.readers import THERMAL, MachineState, Point, Scripted, Watch
from gearbx_mlx.telemetry.trace import BLUE, GREEN, LEGEND_OUTSIDE, VERMILION, gear_color, get_pyplot, save

from .studies import Found, study

TOP_SPEED = 18.0  # tokens per second in the top gear, while nothing throttles the machine
FIXED_SHARE = 0.2  # share of a token's time in the top gear that does not depend on the bytes it reads
PROMPTS = (
    "A baker makes 36 rolls in the morning and half as many in the afternoon. How many rolls does she make in 5 days?",
    "Tom has 12 red and 15 blue marbles. He gives 9 of them to Ann. How many marbles does he have left?",
    "A train goes 60 miles in an hour. How many miles does it go in a day, if it rests for 8 hours?",
)
GEARS, CAP_BITS = "8", (4, 5, 6)  # a single gear: only the controller changes anything
SETTLED, IN_TOKENS = 0.10, 60  # the speed has settled when it stays this near to the target, as a share of it


@dataclass
class Scenario:
    """What the machine does over time.

    slower: (second, factor): from then on reading takes this many times as long. states: (second, state) likewise.
    """

    name: str
    target: float
    seconds: float
    slower: Sequence[tuple[float, float]] = ()
    states: Sequence[tuple[float, dict]] = ()
    noise: float = 0.05


STORY = Scenario(
    "a hot afternoon",
    target=15.0,
    seconds=130,
    slower=((30, 1.7), (60, 1.0)),
    states=(
        (0, {"thermal": "nominal", "battery": 0.9, "charging": False, "memory": 0.5}),
        (30, {"thermal": "fair"}),
        (45, {"thermal": "serious"}),
        (60, {"thermal": "nominal"}),
        *((65 + 3 * step, {"battery": 0.55 - 0.05 * step}) for step in range(10)),
        (100, {"charging": True}),
        (112, {"memory": 0.93}),
        (120, {"memory": 0.6}),
    ),
)


class Machine:
    """The simulated machine: the time of every token, and a clock."""

    def __init__(self, scenario: Scenario, gearbox: Gearbox, seed: int = 0, real_time: bool = False):
        self.scenario, self.gearbox, self.real_time = scenario, gearbox, real_time
        self.time = 0.0
        self.random = np.random.default_rng(seed)
        self.fixed = FIXED_SHARE / TOP_SPEED
        self.per_byte = (1 - FIXED_SHARE) / TOP_SPEED / gearbox.weight_bytes_per_token(gearbox.ladder.top)
        self.sampler = make_sampler(0.0)

    def clock(self) -> float:
        return self.time

    def slower(self) -> float:
        return [1.0, *(factor for since, factor in self.scenario.slower if since <= self.time)][-1]

    def seconds(self, read: float) -> float:
        """The time of a token that reads these bytes, without noise."""
        return self.fixed + self.slower() * self.per_byte * read

    def sample(self, logprobs: mx.array) -> mx.array:
        """A sampler that also advances the clock: mlx-lm calls it once per pass."""
        began = time.perf_counter()
        read = self.gearbox.weight_bytes_per_token(self.gearbox.gear)
        seconds = self.seconds(read) * math.exp(self.scenario.noise * self.random.standard_normal())
        token = self.sampler(logprobs)
        if self.real_time:
            mx.eval(token)
            time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
        self.time += seconds
        return token


@dataclass
class Token:
    """One token, and the state of everything when it came.

    seconds: when it came. taken: the time that it took. speed: tokens per second with its caps, without noise. top:
    tokens per second without caps.
    """

    seconds: float
    taken: float
    speed: float
    top: float
    bits: float
    position: int
    caps: dict[str, int]
    state: MachineState
    slower: float
    share: float
    moved: int = 0
    reason: str = ""


@dataclass
class Run:
    scenario: Scenario
    tokens: list[Token] = field(default_factory=list)
    fastest: list[float] = field(default_factory=list)
    """Tokens per second with every layer at its fewest bits."""
    out_of_reach: str | None = None


def made(gears: str = GEARS) -> tuple[Gearbox, Any]:
    """The gearbox of the model that ships, and its tokenizer."""
    model, tokenizer = load(None)
    return Gearbox(model, gears, widths=CAP_BITS, kernels="auto"), tokenizer


def simulate(
    scenario: Scenario,
    gearbox: Gearbox,
    tokenizer: Any,
    seed: int = 0,
    real_time: bool = False,
    controlled: bool = True,
) -> Run:
    """Generate one text after the other until the scenario's time is over."""
    machine = Machine(scenario, gearbox, seed, real_time)
    script = Scripted([Point(at, MachineState(**state)) for at, state in scenario.states])
    target = scenario.target if controlled else 1e-9  # a target that never needs a cap
    governor = Governor(gearbox, target, watch=Watch([script]), clock=machine.clock)
    top = gearbox.weight_bytes_per_token(gearbox.ladder.top)
    schedule = governor.controller.schedule
    fewest = schedule.read(governor.controller.top)[-1]
    run, prompts = Run(scenario), cycle(PROMPTS)
    while machine.time < scenario.seconds:
        prompt = next(prompts)
        before = math.nan  # the first token includes the prompt
        for response in stream_generate(
            gearbox.model, tokenizer, prompt, 150, gearbox=gearbox, controller=governor, sampler=machine.sample
        ):
            now, before = machine.time - before, machine.time
            read = gearbox.weight_bytes_per_token(gearbox.gear)
            decision = response.decision
            token = Token(
                machine.time,
                now,
                1 / machine.seconds(read),
                1 / machine.seconds(top),
                schedule.bits(read, 1),
                governor.controller.position,
                governor.controller.caps,
                governor.state,
                machine.slower(),
                governor.budget.share,
                len(decision.moved) if decision else 0,
                decision.reason if decision else "",
            )
            run.tokens.append(token)
            run.fastest.append(1 / machine.seconds(fewest))
            if machine.time >= scenario.seconds:
                break
    run.out_of_reach = governor.controller.out_of_reach
    return run


@dataclass
class Settling:
    """How the speed settled after a change of the machine.

    goal: tokens per second, the target or the nearest reachable speed. tokens: until the speed stays near the goal.
    overshoot: how far it went beyond, relative to the goal. late_changes: of the caps, more than 60 tokens after the
    change. reversals: late changes in the opposite direction of the last. error: at the end, relative to the goal.
    """

    at: float
    slower: float
    goal: float
    tokens: int
    overshoot: float
    late_changes: int
    reversals: int
    error: float


def settling(run: Run) -> list[Settling]:
    """How the speed settled after the beginning and after every change of the machine's speed."""
    found = []
    changes = [place for place, t in enumerate(run.tokens) if not place or t.slower != run.tokens[place - 1].slower]
    for first, end in zip(changes, [*changes[1:], len(run.tokens)]):
        tokens = run.tokens[first:end]
        goal = max(min(run.scenario.target, run.fastest[first]), tokens[0].top)
        away = np.array([token.speed / goal - 1 for token in tokens])
        outside = np.flatnonzero(np.abs(away) > SETTLED)
        side = -np.sign(away[0]) if abs(away[0]) > SETTLED else 0
        beyond = away * side if side else np.abs(away)
        moves = np.diff([token.position for token in tokens[IN_TOKENS:]])
        moves = moves[moves != 0]
        found.append(
            Settling(
                tokens[0].seconds,
                tokens[0].slower,
                goal,
                int(outside[-1]) + 1 if len(outside) else 0,
                float(max(0.0, beyond.max())),
                len(moves),
                int(np.count_nonzero(np.diff(np.sign(moves)))),
                float(away[-1]),
            )
        )
    return found


def steps(target: float, noise: float, slower: float = 1.7, seconds: float = 30) -> Scenario:
    """A machine that slows down once, recovers, and does nothing else."""
    back = ((seconds / 3, slower), (2 * seconds / 3, 1.0))
    return Scenario(f"target {target:g}, noise {noise:.0%}", target, seconds, back, noise=noise)


def rows(measured: list[dict]) -> str:
    """The table: one row for each target and noise, with the worst of its steps and seeds."""
    names = list(dict.fromkeys((entry["target"], entry["noise"]) for entry in measured))
    found = []
    for target, noise in names:
        of = [entry for entry in measured if (entry["target"], entry["noise"]) == (target, noise)]
        down = max(entry["tokens"] for entry in of if entry["slower"] > 1)
        up = max(entry["tokens"] for entry in of if entry["slower"] == 1)
        overshoot = max(entry["overshoot"] for entry in of)
        late, reversals = (sum(entry[name] for entry in of) for name in ("late_changes", "reversals"))
        cells = [f"{overshoot:.1%}", f"{late / len(of):.2f}", reversals]
        found.append([f"{target:g}", f"{noise:.0%}", len(of), down, up, *cells])
    head = ["target", "noise", "steps", "settled, throttled", "settled, not throttled", "overshoot", "late changes"]
    return table([*head, "up and down"], found)


WINDOW = 10  # tokens: speeds are means over them


def draw(run: Run, bare: Run, path: Path) -> None:
    """Draw speed, caps, bits and the machine over time. bare: the same scenario without the controller."""
    pyplot = get_pyplot()
    figure, (speed, caps, bits, state) = pyplot.subplots(
        4, 1, figsize=(10, 9), sharex=True, layout="constrained", height_ratios=(3, 2, 1.3, 1.7)
    )
    times = [token.seconds for token in run.tokens]
    draw_speed(speed, times, run, bare)
    draw_caps(caps, times, run)
    bits.step(times, [token.bits for token in run.tokens], where="post", color="0.2", linewidth=1)
    bits.set(ylabel="bits per weight")
    draw_state(state, times, run)
    for axes in (speed, caps, state):
        axes.legend(**LEGEND_OUTSIDE)
    for axes in (speed, caps, bits, state):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, dpi=120)


def draw_speed(axes: Any, times: list[float], run: Run, bare: Run) -> None:
    taken = np.array([token.taken for token in run.tokens])
    measured = [1 / np.nanmean(taken[i - WINDOW : i]) for i in range(WINDOW, len(times))]
    axes.plot(times[WINDOW:], measured, color=BLUE, linewidth=1, label=f"measured, over {WINDOW} tokens")
    axes.plot([t.seconds for t in bare.tokens], [t.top for t in bare.tokens], color="0.6", linewidth=1, label="no cap")
    axes.axhline(run.scenario.target, color="0.2", linestyle="--", linewidth=1, label="target")
    axes.set(ylabel="tokens/s", title="A machine that is throttled, empty and full, and what the controller does")
    axes.set_ylim(0, None)


def draw_caps(axes: Any, times: list[float], run: Run) -> None:
    widths = sorted({bits for token in run.tokens for bits in token.caps.values()})
    counts = [[sum(cap == width for cap in token.caps.values()) for token in run.tokens] for width in widths]
    colors = [gear_color(place, len(widths)) for place in range(len(widths))]
    axes.stackplot(times, counts, labels=[f"{width} bits" for width in widths], colors=colors, step="post")
    axes.set(ylabel="layers capped to")


def draw_state(axes: Any, times: list[float], run: Run) -> None:
    heat = [THERMAL.index(token.state.thermal or "nominal") / (len(THERMAL) - 1) for token in run.tokens]
    axes.step(times, heat, where="post", color=VERMILION, linewidth=1.4, label="heat: nominal to critical")
    charge = [1.0 if token.state.battery is None else token.state.battery for token in run.tokens]
    axes.step(times, charge, where="post", color=BLUE, linewidth=1.2, linestyle="--", label="battery")
    memory = [token.state.memory or 0.0 for token in run.tokens]
    axes.step(times, memory, where="post", color=GREEN, linewidth=1.2, linestyle="-.", label="memory in use")
    axes.step(times, [token.share for token in run.tokens], where="post", color="0.2", linestyle=":", label="budget")
    axes.set(ylabel="machine", xlabel="seconds", ylim=(-0.05, 1.05))


@study("research/tables.md", writes="images/throttling.png", minutes=4)
def throttling(real_time: bool = False, seeds: int = 3) -> Found:
    """A simulated machine that is throttled, and how soon the controller settles.

    The model really generates, with the controller's caps. Time is simulated, so a run is the same everywhere: a token
    is a fixed time, the time to read its weights at a throttled bandwidth, and noise.

    Args:
        real_time: Wait for the simulated time of every token of the picture.
        seeds: Runs of every target and noise.
    """
    loaded = made()
    run = simulate(STORY, *loaded, real_time=real_time)
    bare = simulate(STORY, *loaded, controlled=False)
    measured = []
    for target in (12.0, 15.0, 20.0, 100.0):
        for noise in (0.0, 0.05, 0.1):
            for seed in range(seeds):
                for found in settling(simulate(steps(target, noise), *loaded, seed)):
                    measured.append({"target": target, "noise": noise, "seed": seed, **asdict(found)})
    tokens = [{**asdict(token), "state": token.state.known} for token in run.tokens]
    data = {"steps": measured, "tokens": tokens}
    return Found({"steps": rows(measured)}, data, {"throttling.png": partial(draw, run, bare)})
