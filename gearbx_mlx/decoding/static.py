"""Mode static: one gear from the first token to the last.

With the same kernels and in the same type as all other modes: the top gear's text is the one that mode lossless writes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.nn as nn

from ..gears.output_head import vocabulary
from ..routing.gates import OneGear
from ..routing.monitor import DEFAULT_WINDOW, Monitor
from ..telemetry.summary import Tally, draft_rows, draft_summary
from .governor import Governor
from .mode import Mode
from .response import GearResponse
from .route import in_engaged_gear, routed


@dataclass(frozen=True)
class Static(Mode):
    """Stay in one gear.

    Args:
        gear: name or bits; the top gear if not given.
        window: tokens in the rolling mean that responses show.
    """

    name: ClassVar[str] = "static"
    uncapped: ClassVar[str] = "stays in the gear that it is given"

    gear: str | int | None = None
    window: int = DEFAULT_WINDOW

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        ladder = gearbox.ladder
        gear = ladder.top if self.gear is None else ladder.find(self.gear)
        gearbox.shift(gear)
        tokens = in_engaged_gear(model, tokenizer, prompt, gearbox, **kwargs)
        monitor = Monitor(vocabulary(model), self.window)
        return routed(tokens, gearbox, OneGear(gear.index), monitor, gear, controller)

    def summary(self, tally: Tally) -> dict[str, Any]:
        return draft_summary(tally, sum(tally.passes.values())) if tally.drafted else {}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return draft_rows(summary)
