"""Mode lossless: a low gear drafts, the top gear verifies; the text is the top gear's (self-speculative decoding)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.nn as nn

from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer
from ..kernels.dispatch import is_tuning
from ..ranks.agreement import agreement_of
from ..routing.acceptance import MOST_DRAFTED, DraftFile, DraftRule, FixedLength
from ..routing.gates import DEFAULT_WINDOW, BatchPolicy, Monitor, OneGear, highest
from ..routing.rounds import BYTES, COSTS, TIME
from ..telemetry.summary import Tally, draft_rows, draft_summary, lookup_rows, lookup_summary
from .batches import BatchText, SharedMode
from .draft_plans import DraftPlans, drafting_gear, find_file, find_rule
from .draft_trials import default_depth, depth_here, few_pass_times, times_here
from .governor import Governor
from .lossless_batch import LosslessGenerator
from .lossless_model import LosslessModel
from .mode import encoded, refuse_draft_model, vocabulary_of
from .response import GearResponse
from .wrapper import stream_wrapped


@dataclass(frozen=True)
class Lossless(SharedMode):
    """Write the top gear's text, and read fewer bytes of weights for it.

    Args:
        draft: name or bits of the gear that drafts; the curve's, or the lowest, if not given.
        curve: what `calibrate --mode lossless` wrote, a path or a DraftFile: it says when to stop drafting.
        draft_length: a fixed number of tokens to draft.
        rule: a DraftRule of your own. At most one of these three; without any, what ships for this model and ladder,
            or a rule for any model.
        cost: `time` or `bytes`: what drafts are to save, where a curve says when they end. Seconds are measured while
            texts are written, and kept for the next start; where drafts lose, the top gear goes on without. Texts do
            not depend on it. Without it time; bytes where ranks share the model, and with GEARBX_TUNE=0.
        lookup_tokens: the most tokens that the text itself may propose at once, where its last tokens occurred before
            (prompt lookup); 0: none. Without it 15, and none with a draft_length or rule.
        draft_ahead: how many steps of a draft are queued on the device beyond the one whose entropy is read, 0 to 15.
            Those beyond the end of a draft are thrown away. Without it what is fastest here (`depth_here`), 0 on a
            CPU. Texts do not depend on it.
        tolerance: nats; a proposed token stays if the top gear gives it a log-probability within that of its best
            (`sampling.Tolerance`). More than 0 is faster and no longer lossless: texts then depend on what was drafted,
            and every response says what was given up. Without it that of the curve's file, else 0.
        window: tokens in the rolling mean that responses show.

    Raises:
        GearbxError: more than one of curve, draft_length and rule; a cost with a draft_length; a cost or a number that
            does not exist.
    """

    name: ClassVar[str] = "lossless"
    trace_fields: ClassVar[tuple[str, ...]] = (
        "passes",
        "weight_bytes",
        "drafted",
        "discarded",
        "from_draft",
        "looked_up",
        "source",
        "given_up",
    )
    uncapped: ClassVar[str] = "writes the top gear's text, which a cap would change"

    draft: str | int | None = None
    curve: DraftFile | str | Path | None = None
    draft_length: int | None = None
    rule: DraftRule | None = None
    cost: str | None = None
    lookup_tokens: int | None = None
    draft_ahead: int | None = None
    tolerance: float | None = None
    window: int = DEFAULT_WINDOW

    def __post_init__(self) -> None:
        given = [name for name in ("curve", "draft_length", "rule") if getattr(self, name) is not None]
        if len(given) > 1:
            raise GearbxError(f"{' and '.join(given)} exclude each other; give one")
        if self.draft_length is not None:
            FixedLength(self.draft_length)
        if self.cost is not None and self.cost not in COSTS:
            raise GearbxError(f"cost is {self.cost}; choose from {', '.join(COSTS)}")
        if self.cost is not None and self.draft_length is not None:
            raise GearbxError("cost and draft_length exclude each other; give one")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise GearbxError(f"tolerance is {self.tolerance}; give nats, 0 or more")
        for name in ("lookup_tokens", "draft_ahead"):
            most = getattr(self, name)
            if most is not None and (type(most) is not int or not 0 <= most <= MOST_DRAFTED):
                raise GearbxError(f"{name} is {most!r}; give 0 to {MOST_DRAFTED}")

    @property
    def saves(self) -> str:
        """What drafts are to save in one process: without `cost` time, and bytes where nothing may be measured."""
        return self.cost or (TIME if is_tuning() else BYTES)

    @property
    def most_looked_up(self) -> int:
        """The most tokens that the text itself may propose at once."""
        if self.lookup_tokens is not None:
            return self.lookup_tokens
        return MOST_DRAFTED if self.rule is None and self.draft_length is None else 0

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        refuse_draft_model(self.name, kwargs)
        prompt = encoded(tokenizer, prompt)
        plans, agreement = self.plans(gearbox), agreement_of(gearbox.model)
        plan, gear = plans.of(1), plans.draft
        if plan.stretches.in_rounds:
            gearbox.make(gear)  # and not in the middle of the text
        # Measuring runs passes, which all ranks would have to do at once; their caches of times differ.
        ahead = self.draft_ahead
        if ahead is None and gear == gearbox.ladder.top:
            ahead = 0
        elif ahead is None:
            ahead = depth_here(gearbox, gear, plans.rule) if agreement.group is None else default_depth()
        wrapped = LosslessModel(
            gearbox,
            plan=plan,
            draft=gear,
            sampler=kwargs.get("sampler"),
            logits_processors=kwargs.get("logits_processors") or (),
            stop_tokens=tokenizer.eos_token_ids,
            prompt_tokens=len(prompt),
            max_tokens=kwargs.get("max_tokens", -1),
            draft_ahead=agreement.numbers([ahead])[0],
        )
        monitor = Monitor(vocabulary_of(gearbox), self.window)
        tolerance = plans.tolerance_for(kwargs.get("sampler"))
        responses = stream_wrapped(wrapped, tokenizer, prompt, monitor=monitor, tolerance=tolerance, **kwargs)
        return keeping(plans, responses)

    def batch_generator(
        self, model: nn.Module, tokenizer: Any, *, gearbox: Any, policy: BatchPolicy = highest, **kwargs: Any
    ) -> LosslessGenerator:
        """Like Mode's. All sequences draft in one gear, and are verified in the top one, whatever the policy."""
        return LosslessGenerator(tokenizer, self, self.plans(gearbox), **kwargs)

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: list[int]) -> BatchText:
        """What one text of a batch has of its own."""
        top = gearbox.ladder.top
        return BatchText(OneGear(top.index), Monitor(vocabulary_of(gearbox), self.window), top, top)

    def plans(self, gearbox: Gearbox) -> DraftPlans:
        """How to draft: by the drafting file, if there is one, and what passes cost here.

        Raises:
            GearbxError: a file for another model; costs in time where ranks share the model.
        """
        how = self.rule or self.draft_length or self.curve
        made = find_file(gearbox, how)
        rule, draft = find_rule(gearbox, made or how)
        gear = drafting_gear(gearbox, draft if self.draft is None else self.draft)
        shared = agreement_of(gearbox.model).group is not None
        if shared and self.cost == TIME:
            raise GearbxError(
                "cost 'time' is for one process, since clocks of ranks differ; leave it out, or give 'bytes'"
            )
        unit = BYTES if shared else self.saves
        usable = made is not None and gear.bits == made.draft and unit == TIME
        times = times_here(made.times, gearbox) if made is not None and usable else None
        nats = (made.tolerance if made is not None else 0.0) if self.tolerance is None else self.tolerance
        return DraftPlans(gearbox, gear, rule, unit, self.most_looked_up, times, few_pass_times, nats)

    def about(self) -> str:
        looked_up = f"up to {self.most_looked_up} tokens at once" if self.most_looked_up else "nothing"
        drafts = f"drafts save {self.saves}"
        if self.draft_length is not None:
            drafts = f"drafts of {self.draft_length} token{'s' * (self.draft_length != 1)}"
        ahead = f", written {self.draft_ahead} ahead" if self.draft_ahead else ""
        kept = f"; tokens within {self.tolerance:g} nats stay" if self.tolerance else ""
        return f"lossless: {drafts}{ahead}; lookup proposes {looked_up}{kept}"

    def summary(self, tally: Tally) -> dict[str, Any]:
        verifications = list(tally.passes.values())[-1]  # by the top gear
        drafts = draft_summary(tally, verifications) | {"discarded": tally.discarded}
        certificate = {}
        if self.tolerance or tally.not_first_choice:
            certificate = {"not_first_choice": tally.not_first_choice, "nats_given_up": tally.given_up}
        return drafts | lookup_summary(tally) | {"near_ties": tally.near_ties} | certificate

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return draft_rows(summary) + lookup_rows(summary) + certificate_rows(summary) + speed_rows(summary)


def keeping(plans: DraftPlans, responses: Iterator[GearResponse]) -> Iterator[GearResponse]:
    """The responses; when the text ends, what was learned with it is kept."""
    try:
        yield from responses
    finally:
        plans.keep()


def certificate_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a text with a tolerance gave up, as a line of a table."""
    if "not_first_choice" not in summary:
        return []
    tokens, nats = summary["tokens"], summary["nats_given_up"]
    figures = f"{summary['not_first_choice']} of {tokens} tokens, {nats:.3g} nats in all"
    return [("not the top gear's", f"{figures} ({nats / max(tokens, 1):.2g} a token)")]


def speed_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the text's speed compares with the top gear's alone, as a line of a table, where both ways were seen."""
    alone, rounds = summary.get("seconds_alone"), summary.get("seconds_in_rounds")
    if not alone or not rounds or not summary.get("tokens_per_second"):
        return []
    times = f"{summary['tokens_per_second'] * alone:.2f} times that of the top gear alone"
    if summary.get("alone_at_earlier_start"):
        times += " at an earlier start"
    if rounds > alone:
        times += f"; drafts do not pay on this machine: {1000 * rounds:.3g} ms a token, {1000 * alone:.3g} without"
    return [("speed", times)]
