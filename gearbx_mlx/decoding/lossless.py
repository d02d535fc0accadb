"""Mode lossless: a low gear drafts, the top gear verifies; the text is the top gear's (self-speculative decoding)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.nn as nn

from ..errors import GearbxError
from ..gears.output_head import vocabulary
from ..routing.acceptance import DraftRule, FixedLength
from ..routing.draft_file import DraftFile
from ..routing.monitor import DEFAULT_WINDOW, Monitor
from ..telemetry.summary import Tally, draft_rows, draft_summary
from .draft_rules import find_rule
from .governor import Governor
from .lossless_model import LosslessModel
from .mode import Mode
from .prompt import encoded
from .refused import refuse_draft_model
from .response import GearResponse
from .responses import stream_wrapped


@dataclass(frozen=True)
class Lossless(Mode):
    """Write the top gear's text, and read fewer bytes of weights for it.

    Args:
        draft: name or bits of the gear that drafts; the curve's, or the lowest, if not given.
        curve: what `calibrate --mode lossless` wrote, a path or a DraftFile: it says when to stop drafting.
        draft_length: a fixed number of tokens to draft.
        rule: a DraftRule of your own. At most one of these three; without any, what ships for this model and ladder,
            or a rule for any model.
        window: tokens in the rolling mean that responses show.

    Raises:
        GearbxError: more than one of curve, draft_length and rule.
    """

    name: ClassVar[str] = "lossless"
    trace_fields: ClassVar[tuple[str, ...]] = ("passes", "weight_bytes", "drafted", "from_draft")
    uncapped: ClassVar[str] = "writes the top gear's text, which a cap would change"

    draft: str | int | None = None
    curve: DraftFile | str | Path | None = None
    draft_length: int | None = None
    rule: DraftRule | None = None
    window: int = DEFAULT_WINDOW

    def __post_init__(self) -> None:
        given = [name for name in ("curve", "draft_length", "rule") if getattr(self, name) is not None]
        if len(given) > 1:
            raise GearbxError(f"{' and '.join(given)} exclude each other; give one")
        if self.draft_length is not None:
            FixedLength(self.draft_length)

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        refuse_draft_model(self.name, kwargs)
        rule, draft = self.rule, None
        if rule is None:
            rule, draft = find_rule(gearbox, self.curve if self.draft_length is None else self.draft_length)
        prompt = encoded(tokenizer, prompt)
        wrapped = LosslessModel(
            gearbox,
            rule,
            draft=draft if self.draft is None else self.draft,
            sampler=kwargs.get("sampler"),
            logits_processors=kwargs.get("logits_processors") or (),
            stop_tokens=tokenizer.eos_token_ids,
            prompt_tokens=len(prompt),
            max_tokens=kwargs.get("max_tokens", -1),
        )
        return stream_wrapped(wrapped, tokenizer, prompt, monitor=Monitor(vocabulary(model), self.window), **kwargs)

    def summary(self, tally: Tally) -> dict[str, Any]:
        verifications = list(tally.passes.values())[-1]  # by the top gear
        return draft_summary(tally, verifications) | {"near_ties": tally.near_ties}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return draft_rows(summary)
