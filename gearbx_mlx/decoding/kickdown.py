"""Mode kickdown: the low gear computes a token first; where it is in doubt, a higher gear computes the token again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.nn as nn

from ..gears.discovery import vocabulary
from ..routing.monitor import DEFAULT_WINDOW, Monitor
from ..telemetry.summary import Tally
from .governor import Governor
from .kickdown_model import GearedModel, RecomputeRule
from .mode import Mode
from .refused import refuse_draft_model
from .response import GearResponse
from .responses import stream_wrapped


@dataclass(frozen=True)
class Kickdown(Mode):
    """Climb the ladder for the tokens that need it.

    Args:
        thresholds: bits, one fewer than there are gears; the paper's, scaled to the vocabulary, if not given.
        rule: whether to compute a token again, in place of thresholds.
        window: tokens in the rolling mean that responses show.
    """

    name: ClassVar[str] = "kickdown"
    trace_fields: ClassVar[tuple[str, ...]] = ("passes", "weight_bytes")

    thresholds: Sequence[float] | None = None
    rule: RecomputeRule | None = None
    window: int = DEFAULT_WINDOW

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        refuse_draft_model(self.name, kwargs)
        # Logits processors change the distribution that is sampled, so that its entropy is not the one computed here.
        share = not kwargs.get("logits_processors")
        geared = GearedModel(gearbox, self.thresholds, rule=self.rule, share_entropy=share)
        monitor = Monitor(vocabulary(model), self.window)
        return stream_wrapped(geared, tokenizer, prompt, monitor=monitor, controller=controller, **kwargs)

    def summary(self, tally: Tally) -> dict[str, Any]:
        return {"recomputed": tally.recomputed}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("recomputed", f"{summary['recomputed']} tokens, in a higher gear")]
