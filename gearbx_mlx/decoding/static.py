"""Mode static: one gear from the first token to the last.

With the same kernels and in the same type as all other modes: the top gear's text is the one that mode lossless writes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.nn as nn

from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..routing.batch_policy import BatchPolicy, highest
from ..routing.gates import OneGear
from ..routing.monitor import DEFAULT_WINDOW, Monitor
from ..telemetry.summary import Tally, draft_rows, draft_summary
from .batches.generator import BatchGenerator
from .batches.sequence import BatchText
from .governor import Governor
from .known_vocabulary import vocabulary_of
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
        gear = self.gear_of(gearbox)
        gearbox.shift(gear)
        tokens = in_engaged_gear(model, tokenizer, prompt, gearbox, **kwargs)
        monitor = Monitor(vocabulary_of(gearbox), self.window)
        return routed(tokens, gearbox, OneGear(gear.index), monitor, gear, controller)

    def batch_generator(
        self, model: nn.Module, tokenizer: Any, *, gearbox: Any, policy: BatchPolicy = highest, **kwargs: Any
    ) -> BatchGenerator:
        return BatchGenerator(model, tokenizer, gearbox, self, policy, **kwargs)

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: list[int]) -> BatchText:
        """What one text of a batch has of its own."""
        gear = self.gear_of(gearbox)
        return BatchText(OneGear(gear.index), Monitor(vocabulary_of(gearbox), self.window), gear)

    def gear_of(self, gearbox: Gearbox | Observer) -> Gear:
        """Raises GearbxError for a gear that the ladder does not have."""
        return gearbox.ladder.top if self.gear is None else gearbox.ladder.find(self.gear)

    def summary(self, tally: Tally) -> dict[str, Any]:
        return draft_summary(tally, sum(tally.passes.values())) if tally.drafted else {}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return draft_rows(summary)
