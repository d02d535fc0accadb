"""Mode lossless: self-speculative decoding, whose output equals the top gear's.

This class has the settings: `loop.py` generates, `drafters/` propose tokens, `policy.py` chooses their number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.nn as nn

from ..gears.gearbox import Gearbox, Observer, attached
from ..gears.in_place import own_codes, without_gears
from ..gears.ladder import DRAFT_FORMAT, EXACT_LADDER, Ladder
from ..gears.saved import saved_gears
from ..kernels.dispatch import CPU, device, is_tuning
from ..ranks.agreement import agreement_of
from ..routing.gates import BatchPolicy, Monitor, OneGear, highest
from ..telemetry.summary import Tally, draft_rows, draft_summary
from .batches import BatchGenerator, SequenceState, SharedMode
from .drafters import Drafter, DraftTarget, drafters_for
from .drafters.lookup import LookupMemory
from .generation import Telemetry, responses
from .governor import Governor
from .learned import KeptPolicy, policy_of, speed_rows
from .mode import vocabulary_of
from .modes import LosslessSettings
from .plan import DecodePlan, DecodeState, Keywords
from .policy import DEFAULT_LENGTH, MAX_DRAFTED, FixedPolicy
from .response import GearResponse
from .rows import Verifier, warn_of_other_paths
from .sampling import Chooser, blame_of, reader_of


@dataclass(frozen=True)
class Lossless(LosslessSettings, SharedMode):
    """Mode lossless: the top gear's output with fewer bytes of weights read.

    Times of passes and acceptance rates are learned during generation, and kept for the next start. Plain decoding
    takes over if drafting is slower. If nothing may be measured (ranks that share the model, GEARBX_TUNE=0), drafts
    have 3 tokens.

    Args:
        settings: the fields of `LosslessSettings`.

    Raises:
        GearbxError: a number outside its bounds.
    """

    name: ClassVar[str] = "lossless"
    trace_fields: ClassVar[tuple[str, ...]] = (
        "passes",
        "weight_bytes",
        "drafted",
        "from_draft",
        "lookup_drafted",
        "source",
    )
    no_caps_reason: ClassVar[str] = "generates the top gear's output, which a cap would change"

    @property
    def max_lookup_tokens(self) -> int:
        """Most tokens per proposal of prompt lookup."""
        if self.lookup_tokens is not None:
            return self.lookup_tokens
        return MAX_DRAFTED if self.draft_length is None else 0

    def gearbox_for(self, model: nn.Module, gearbox: Gearbox | Observer | None) -> Gearbox | Observer | None:
        """Return the gearbox, as Mode does; on a GPU without one, create gears that MLX's kernels run fast."""
        if gearbox is None and attached(model) is None and device() != CPU and not without_gears(model):
            gearbox = gearbox_of_mlx(model)
        return super().gearbox_for(model, gearbox)

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        warn_of_other_paths(gearbox)
        how = Keywords(**kwargs)
        text = how.text(model, tokenizer, prompt)
        chooser, reader, agreement = how.chooser(), reader_of(gearbox), agreement_of(gearbox.model)
        cache, draft_cache = how.caches(gearbox.model)
        memory = self.memory_for(gearbox, tokenizer)
        target = DraftTarget(
            gearbox,
            cache,
            chooser,
            reader,
            agreement=agreement,
            draft=self.draft,
            lookup_tokens=self.max_lookup_tokens,
            table=None if memory is None else memory.table,
            is_fixed=self.is_fixed(gearbox),
            draft_model=how.draft_model,
            draft_cache=draft_cache,
            most=MAX_DRAFTED if how.draft_model is None else min(how.num_draft_tokens or MAX_DRAFTED, MAX_DRAFTED),
            room=text.prompt + text.room,
        )

        def cost(drafter: Drafter) -> float:
            return 0.0 if target.is_fixed else policy_of(gearbox, drafter, chooser).policy.token_cost

        drafters = drafters_for(target, cost)
        drafter = next((each for each in drafters if each.reads_weights), None)
        kept = self.policy_for(gearbox, drafter, chooser)
        verifier = Verifier(gearbox, gearbox.ladder.top, taps=sorted({tap for each in drafters for tap in each.taps}))
        plan = DecodePlan(verifier, how, chooser, reader, kept.policy, agreement)
        monitor = Monitor(vocabulary_of(gearbox), self.window)
        telemetry = Telemetry(monitor, blame_of(gearbox), controller)
        state = DecodeState(text, cache, drafters)

        def finish(tokens: int) -> None:
            kept.note(tokens)
            if memory is not None:
                memory.save()

        return responses(plan, state, tokenizer, telemetry, finish=finish)

    def batch_generator(
        self, model: nn.Module, tokenizer: Any, *, gearbox: Any, policy: BatchPolicy = highest, **kwargs: Any
    ) -> BatchGenerator:
        """Return a generator, as Mode does. The top gear generates all sequences, without drafts."""
        return BatchGenerator(model, tokenizer, gearbox, self, highest, **kwargs)

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> SequenceState:
        top = gearbox.ladder.top
        return SequenceState(OneGear(top.index), Monitor(vocabulary_of(gearbox), self.window), top, top)

    def is_fixed(self, gearbox: Gearbox) -> bool:
        """Return whether draft lengths are fixed: `draft_length` is set, GEARBX_TUNE=0, or several ranks."""
        return self.draft_length is not None or not is_tuning() or agreement_of(gearbox.model).group is not None

    def memory_for(self, gearbox: Gearbox, tokenizer: Any) -> LookupMemory | None:
        """Return the tokens of earlier sequences for prompt lookup; None if each sequence has its own."""
        if self.is_fixed(gearbox) or not self.max_lookup_tokens or not (self.share_lookup or self.remember):
            return None
        return LookupMemory.of(gearbox, self.remember, tokenizer, vocabulary_of(gearbox))

    def policy_for(self, gearbox: Gearbox, drafter: Drafter | None, chooser: Chooser) -> KeptPolicy:
        """Return the learned policy of a gearbox; a fixed length if `is_fixed`."""
        if self.is_fixed(gearbox):
            share = None if drafter is None else drafter.cost
            return KeptPolicy(FixedPolicy(self.draft_length or DEFAULT_LENGTH, share))
        return policy_of(gearbox, drafter, chooser)

    def about(self) -> str:
        lookup = f"up to {self.max_lookup_tokens} tokens" if self.max_lookup_tokens else "none"
        length = DEFAULT_LENGTH if self.draft_length is None and not is_tuning() else self.draft_length
        drafts = "draft length learned" if length is None else f"drafts of {length} token{'s' * (length != 1)}"
        return f"lossless: {drafts}; prompt lookup {lookup}"

    def summary(self, tally: Tally) -> dict[str, Any]:
        return draft_summary(tally, verifications=list(tally.passes.values())[-1])  # by the top gear

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return draft_rows(summary) + speed_rows(summary)


def gearbox_of_mlx(model: nn.Module) -> Gearbox:
    """Return a gearbox for MLX's kernels: the checkpoint's own gears or bits, else a 4-bit gear beside the weights."""
    codes = own_codes(model)
    if codes is not None:
        return Gearbox(model, Ladder([codes.bits]))
    return Gearbox(model) if saved_gears(model) is not None else Gearbox(model, EXACT_LADDER, format=DRAFT_FORMAT)
