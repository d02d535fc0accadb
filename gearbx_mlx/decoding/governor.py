"""The governor: while a gearbox generates, it caps the gears by speed and by the state of the machine.

The router (or kickdown) chooses the gear of a token; the governor says how many bits a layer may have in any gear.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

from ..errors import GearbxError, GearbxWarning
from ..gears.adapters import layers_of
from ..gears.cost import used_share
from ..gears.discovery import Layer, default_sensitivity
from ..gears.gearbox import Gearbox
from ..gears.ladder import DENSE
from ..gears.offload import hand_back
from ..machine.controller import (
    DECIDE_EVERY,
    MEMORY_FULL,
    CapDecision,
    CapSchedule,
    Controller,
    Range,
    Sensitivity,
    SteadyBudget,
)
from ..machine.sensors import MachineState, OwnMemory, Watch
from ..settings import human_bytes
from .response import Step

Bounds = Mapping[str, tuple[int, int]]
"""Path to the fewest and the most bits that a layer may be capped to."""


class Governor:
    """Caps a gearbox while it generates: `stream_generate(..., controller=Governor(gearbox, target_tps=15))`.

    It remembers what it has learnt from one text to the next. Between texts there is no cap.

    Args:
        gearbox: of the model.
        target_tps: tokens per second; None: the machine's state alone caps.
        watch: of the machine; None: speed alone caps.
        sensitivity: cost of a layer at a number of bits; by kind and place of the layer, if not given.
        bounds: of layers that may not have all bits that they are stored at.
        clock: seconds.

    Raises:
        GearbxError: a target that is not positive, layers with a single width.
    """

    caps: ClassVar[bool] = True

    def __init__(
        self,
        gearbox: Gearbox,
        target_tps: float | None = None,
        *,
        watch: Watch | None = None,
        sensitivity: Sensitivity | None = None,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.gearbox = gearbox
        self.watch = watch
        self.clock = clock
        self.controller = Controller(cap_schedule_of(gearbox, sensitivity, bounds or {}), target_tps)
        self.budget = SteadyBudget()
        self.state = MachineState()
        self.decisions: list[CapDecision] = []
        """Those that moved a cap."""
        self.bits_read = 0.0
        """Bits per weight, added up over all passes."""
        self._warned = False
        self._began: float | None = None

    @contextmanager
    def governing(self) -> Iterator[None]:
        """While a text is written, the gearbox has the governor's caps."""
        if self._began is None:
            self._began = self.clock()
        self.gearbox.cap(self.controller.caps)
        try:
            yield
        finally:
            self.gearbox.cap({})

    def after(self, step: Step, seconds: float | None) -> CapDecision | None:
        """Take a token, decide where it is time to, and put the caps into the model.

        Args:
            seconds: that it took to compute; None: not known, as for the first token, which has the prompt in it.
        """
        controller = self.controller
        self.bits_read += controller.schedule.bits(step.weight_bytes, sum(step.passes))
        if controller.due and self.watch is not None:
            self.state = self.watch.state(self.clock() - (self._began or 0.0), controller.tokens)
            self.budget.update(self.state)
            for problem in self.watch.problems():
                warnings.warn(problem, GearbxWarning, stacklevel=2)
        decision = controller.token(seconds, step.passes, self.budget.share)
        if decision is None:
            return None
        decision = replace(decision, machine=self.state.known)
        if decision.moved:
            self.decisions.append(decision)
            self.gearbox.cap(controller.caps)
        if controller.out_of_reach and not self._warned:
            self._warned = True
            warnings.warn(controller.out_of_reach, GearbxWarning, stacklevel=2)
        return decision

    def summary(self) -> dict[str, Any]:
        """Return the controller's part of a run's summary."""
        controller = self.controller
        bits = controller.schedule.bits(controller.schedule.read(controller.top)[controller.position], 1)
        return {
            "target_tps": controller.target,
            "cap_changes": len(self.decisions),
            "capped_bits_per_weight": bits,
            "out_of_reach": controller.out_of_reach,
            "machine": self.state.known,
        }


class MemoryGuard:
    """Holds a limit of this process's memory for modes that nothing may cap, as a `controller` of stream_generate.

    Nothing happens until memory is short. Then MLX hands its spare memory back, which costs speed and no text; where
    that is not enough, the text ends with an error that names the remedy.

    Args:
        gearbox: of the model.
        sensor: of the memory, with its limit.
    """

    caps: ClassVar[bool] = False

    def __init__(self, gearbox: Gearbox, sensor: OwnMemory, clock: Callable[[], float] = time.perf_counter):
        self.gearbox, self.sensor, self.clock = gearbox, sensor, clock
        self.tokens = 0
        self._told = False

    def governing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after(self, step: Step, seconds: float | None) -> None:
        """Take a token. Raises GearbxError where the limit is passed, and nothing is left to be handed back."""
        self.tokens += 1
        if self.tokens % DECIDE_EVERY or self.sensor.bytes() < MEMORY_FULL * self.sensor.limit:
            return
        hand_back()
        limit, used = human_bytes(self.sensor.limit), self.sensor.bytes()
        if used > self.sensor.limit:
            raise GearbxError(
                f"--residency disk:{limit}: this process has {human_bytes(used)} after {self.tokens} tokens; give "
                "more, or a shorter text, or use --mode route, which caps layers"
            )
        if not self._told:
            self._told = True
            said = f"memory is near the limit of {limit}: MLX's spare memory is handed back every {DECIDE_EVERY} tokens"
            warnings.warn(f"{said}, which costs speed; the text stays the same", GearbxWarning, stacklevel=2)


def cap_schedule_of(gearbox: Gearbox, sensitivity: Sensitivity | None, bounds: Bounds) -> CapSchedule:
    """Return all tables of caps of a gearbox that has no cap."""
    modules = layers_of(gearbox.model)
    layers = [range_of(gearbox, layer, bounds, used_share(layer.path, modules)) for layer in gearbox.layers]
    if sensitivity is None:
        sensitivity = default_sensitivity({layer.path: layer.module for layer in gearbox.layers})
    top = gearbox.ladder.top
    managed = sum(layer.read[layer.gears[top.index]] for layer in layers)
    return CapSchedule(layers, sensitivity, max(0, gearbox.weight_bytes_per_token(top) - managed))


def range_of(gearbox: Gearbox, layer: Layer, bounds: Bounds, share: float) -> Range:
    """Return what a layer may be capped to, and what a token reads of it; `share` of its experts is used.

    Raises:
        GearbxError: none of the bits that the layer is stored at is within its bounds.
    """
    stored = gearbox.widths_of(layer)
    least, most = bounds.get(layer.path, (0, DENSE))
    widths = tuple(bits for bits in stored if least <= bits <= most)
    if not widths:
        raise GearbxError(f"{layer.path} is stored at {stored} bits, and none is from {least} to {most}; add one")
    read = {bits: round(share * gearbox.layer_bytes(layer, bits)) for bits in stored}
    gears = tuple(gearbox.bits_of(layer, gear) for gear in gearbox.ladder)
    weights = round(share * gearbox.layer_bytes(layer, DENSE) / gearbox.storage[layer.path].size)
    return Range(layer.path, widths, gears, read, weights)
