"""Picture 8: the share of tokens in each gear, by workload (GEARBX 17, figure 8)."""

from collections.abc import Mapping
from typing import Any

from ...telemetry.trace import gear_color
from .routing_trace import routed, shifts
from .style import HATCHES
from .subject import NAMES, Subject
from .workloads import WORKLOADS


def measure(subject: Subject) -> dict[str, Any]:
    """For each workload the gear after each token, teacher-forced."""
    found = {}
    for name, text in WORKLOADS.items():
        entropies = subject.entropies(subject.tokens(text))
        found[name] = {"mean": sum(entropies) / len(entropies), "gears": routed(subject, entropies)[1]}
    return {"thresholds": list(subject.thresholds), "workloads": found}


def share(gears: list[str], name: str) -> float:
    return gears.count(name) / len(gears)


def draw(data: Mapping[str, Any], figure: Any) -> None:
    """A bar for each workload, divided by gear."""
    axes, workloads = figure.subplots(), data["workloads"]
    left = [0.0] * len(workloads)
    for place, gear in enumerate(NAMES):
        shares = [100 * share(found["gears"], gear) for found in workloads.values()]
        style = {"color": gear_color(place, len(NAMES)), "hatch": HATCHES[place], "edgecolor": "white"}
        axes.barh(list(workloads), shares, left=left, label=gear, **style)
        left = [start + size for start, size in zip(left, shares)]
    axes.invert_yaxis()
    axes.set(xlabel="share of tokens, %", xlim=(0, 100))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For each workload: mean entropy, share of each gear, shifts."""
    rows = []
    for name, found in data["workloads"].items():
        gears = found["gears"]
        cells = [f"{share(gears, gear):.0%}" for gear in NAMES]
        rows.append([name, str(len(gears)), f"{found['mean']:.2f}", *cells, str(len(shifts(gears)))])
    return ["workload", "tokens", "mean entropy, bits", *NAMES, "shifts"], rows
