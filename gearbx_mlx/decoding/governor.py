"""Governor: caps the gears of a gearbox during generation, by speed and by the machine's state.

The gate (or kickdown) chooses the gear of a token; the governor limits the bits of each layer in all gears.
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
from ..gears.offload import return_memory
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
"""Path to the fewest and the most bits of a layer's cap."""


class Governor:
    """Caps a gearbox during generation: `stream_generate(..., controller=Governor(gearbox, target_tps=15))`.

    It keeps its measurements between sequences, and removes its caps when no sequence is left.

    Args:
        gearbox: of the model.
        target_tps: tokens per second; None: only the machine's state caps.
        watch: of the machine; None: only speed caps.
        sensitivity: cost of a layer at a number of bits; None: by kind and position of the layer.
        bounds: of layers that may not use all bits that they are stored at.
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
        """Decisions that changed a cap."""
        self.bits_read = 0.0
        """Bits per weight, summed over all passes."""
        self._warned = False
        self._began: float | None = None
        self._sequences = 0

    @contextmanager
    def governing(self) -> Iterator[None]:
        """Give the gearbox the governor's caps in the context."""
        if self._began is None:
            self._began = self.clock()
        self._sequences += 1
        self.resume()
        try:
            yield
        finally:
            self._sequences -= 1
            if not self._sequences:
                self.gearbox.cap({})

    def resume(self) -> None:
        """Apply the caps, which a different sequence may have changed."""
        self.gearbox.cap(self.controller.caps)

    def after(self, step: Step, seconds: float | None) -> CapDecision | None:
        """Count a token; after every few tokens, decide the caps and apply them.

        Args:
            seconds: of its computation; None if unknown, as for the first token with prefill.
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
    """Memory limit of this process for modes without caps, as a `controller` of stream_generate.

    When memory is short, MLX frees its cache. This slows generation and leaves the output unchanged. If it is not
    enough, the sequence ends with an error that names the remedy.

    Args:
        gearbox: of the model.
        sensor: of the memory, with its limit.
    """

    caps: ClassVar[bool] = False

    def __init__(self, gearbox: Gearbox, sensor: OwnMemory, clock: Callable[[], float] = time.perf_counter):
        self.gearbox, self.sensor, self.clock = gearbox, sensor, clock
        self.tokens = 0
        self._has_warned = False

    def governing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def resume(self) -> None:
        """Do nothing: memory needs no preparation for a token."""

    def after(self, step: Step, seconds: float | None) -> None:
        """Take a token. Raises GearbxError if memory exceeds the limit after MLX has freed its cache."""
        self.tokens += 1
        if self.tokens % DECIDE_EVERY or self.sensor.bytes() < MEMORY_FULL * self.sensor.limit:
            return
        return_memory()
        limit, used = human_bytes(self.sensor.limit), self.sensor.bytes()
        if used > self.sensor.limit:
            raise GearbxError(
                f"--residency: memory must stay below {limit}, got {human_bytes(used)} after {self.tokens} tokens; "
                f"set a higher limit than disk:{limit}, a lower --max-tokens, or --mode route to cap layers"
            )
        if not self._has_warned:
            self._has_warned = True
            message = f"memory is near the limit of {limit}, so MLX's cache is freed every {DECIDE_EVERY} tokens"
            warnings.warn(f"{message} and generation slows; set a higher limit", GearbxWarning, stacklevel=2)


def cap_schedule_of(gearbox: Gearbox, sensitivity: Sensitivity | None, bounds: Bounds) -> CapSchedule:
    """Return the cap schedule of a gearbox that has no caps now."""
    modules = layers_of(gearbox.model)
    layers = [range_of(gearbox, layer, bounds, used_share(layer.path, modules)) for layer in gearbox.layers]
    if sensitivity is None:
        sensitivity = default_sensitivity({layer.path: layer.module for layer in gearbox.layers})
    top = gearbox.ladder.top
    managed = sum(layer.read[layer.gears[top.index]] for layer in layers)
    return CapSchedule(layers, sensitivity, max(0, gearbox.weight_bytes_per_token(top) - managed))


def range_of(gearbox: Gearbox, layer: Layer, bounds: Bounds, share: float) -> Range:
    """Return the possible caps of a layer, and the bytes that a token reads; share: of its experts that are used.

    Raises:
        GearbxError: a layer without stored bits within its bounds.
    """
    stored = gearbox.widths_of(layer)
    least, most = bounds.get(layer.path, (0, DENSE))
    widths = tuple(bits for bits in stored if least <= bits <= most)
    if not widths:
        raise GearbxError(f"{layer.path}: needs bits from {least} to {most}, got {stored}; use widths in this range")
    read = {bits: round(share * gearbox.layer_bytes(layer, bits)) for bits in stored}
    gears = tuple(gearbox.bits_of(layer, gear) for gear in gearbox.ladder)
    weights = round(share * gearbox.layer_bytes(layer, DENSE) / gearbox.storage[layer.path].size)
    return Range(layer.path, widths, gears, read, weights)
