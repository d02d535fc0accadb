"""What every mode adds to mlx-lm's responses: entropy, its rolling mean, gears, passes and bytes; checks of the logits.

A controller, if there is one, takes the time of each token here.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from mlx_lm.generate import GenerationResponse

from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..routing.gates import Monitor, Reading
from .governor import Governor, MemoryGuard
from .response import GearResponse, GeneratedToken, seen_of
from .sampling import has_nan, not_finite


class Telemetry:
    """Turns the tokens of one text into responses.

    Args:
        monitor: of the rolling entropy that responses show, and that a gate judges.
        blame: returns the error for logits of a gear that are not finite.
        controller: caps the gears, or watches memory.
    """

    def __init__(
        self,
        monitor: Monitor,
        blame: Callable[[Gear], Exception],
        controller: Governor | MemoryGuard | None = None,
    ):
        self._monitor, self._blame, self._controller = monitor, blame, controller
        self._clock = time.perf_counter if controller is None else controller.clock
        self._before: Gear | None = None  # of the token before
        self.resume()

    def governing(self) -> AbstractContextManager[None]:
        """In the block the controller acts."""
        return nullcontext() if self._controller is None else self._controller.governing()

    def resume(self) -> None:
        """Begin a token: what a caller does between two tokens is not the machine's speed."""
        self._start = self._clock()

    def response(self, response: GenerationResponse, token: GeneratedToken) -> tuple[GearResponse, Reading]:
        """Return the response for a token, and what the gate judges.

        Raises:
            GearbxError: log-probabilities that are not finite.
        """
        gear, decision = token.step.gear, None
        if self._controller is not None:
            seconds = None if self._before is None else self._clock() - self._start
            decision = self._controller.after(token.step, seconds)
        if has_nan(token.logprobs, token.entropy):
            raise self._blame(gear)
        reading = self._monitor.update(token.entropy)
        shown = vars(response) | seen_of(token.step, token.entropy, reading.mean, self._before, token.near_tie)
        self._before = gear
        return GearResponse(**shown, decision=decision), reading


def blame_of(gearbox: Gearbox | Observer) -> Callable[[Gear], Exception]:
    """Return what names the layer to blame for logits of a gear that are not finite."""

    def error(gear: Gear) -> Exception:
        gearbox.shift(gear)
        return not_finite(gearbox.model, f"gear '{gear.name}'", gearbox.compute_dtype)

    return error
