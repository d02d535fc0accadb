"""Drafters: sources of tokens for the top gear to verify. Each is a file here and a line in `DRAFTERS`.

A drafter may use its `DraftTarget` and the `GeneratedText`: the tokens so far, the sequence's KV cache, and the
gearbox, whose `module_in(path, ladder.top)` is the top gear's head or embedding. It has its own KV cache if necessary.
It returns tokens, their margins if known, and the bytes that its passes read. After each verification it gets the
computed rows (`update`), with the hidden states after the blocks that it names (`taps`).

Drafting changes neither the KV cache nor the random numbers of the sequence. A token is drafted with the random numbers
of its position, to maximize the acceptance rate (GEARBX 10.1).
"""

import math
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ...gears.gearbox import Gearbox
from ...ranks.agreement import SINGLE_PROCESS, Agreement
from ...routing.ngrams import NgramTable
from ..caches import Cache
from ..hidden import Hidden
from ..policy import ACCEPTANCE, MAX_DRAFTED, LearnedPolicy
from ..response import GeneratedText
from ..rows import Proposal, Verification
from ..sampling import MLX_READER, Chooser, ChosenRows, LogitsReader

DRAFTERS = {  # a sequence uses at most one drafter that reads weights: the cheapest, by measurements
    "lookup": "gearbx_mlx.decoding.drafters.lookup:Lookup",
    "other model": "gearbx_mlx.decoding.drafters.other_model:OtherModel",
    "low gear": "gearbx_mlx.decoding.drafters.low_gear:LowGear",
    "draft head": "gearbx_mlx.decoding.drafters.eagle:Eagle",
}


@dataclass(frozen=True)
class DraftTarget:
    """Sequence, models and settings of a drafter.

    Attributes:
        gearbox: its top gear verifies.
        cache: the KV cache of the sequence; between rounds it holds all tokens but the last.
        chooser, reader: choose tokens from logits.
        draft: name or bits of the draft gear; None: the lowest.
        lookup_tokens: the most tokens per proposal of prompt lookup; 0: none.
        table: n-grams of prompt lookup, also of earlier sequences; None: of this sequence alone.
        is_fixed: True if drafts do not depend on measurements.
        agreement: of ranks that share the model.
        draft_model, draft_cache: a second model or a head that drafts, and its entries of the prompt cache; None and []
            without.
        most: tokens per draft.
        room: maximum tokens of prompt and output.
    """

    gearbox: Gearbox
    cache: Cache
    chooser: Chooser
    reader: LogitsReader = MLX_READER
    draft: str | int | None = None
    lookup_tokens: int = 0
    table: NgramTable | None = None
    is_fixed: bool = True
    agreement: Agreement = SINGLE_PROCESS
    draft_model: nn.Module | None = None
    draft_cache: list[Any] = field(default_factory=list)
    most: int = MAX_DRAFTED
    room: float = math.inf


class Drafter:
    """A source of tokens that may follow a sequence. A subclass has its own file and a line in `DRAFTERS`.

    Attributes:
        reads_weights: False for tokens without a forward pass.
        taps: numbers of blocks, from 1, after which it needs the hidden states of all tokens.
        name: key of its times and acceptance rates.
        cost: of a drafted token, as a share of a plain one, before measurements.
        acceptance: acceptance rate of its tokens before measurements.
    """

    reads_weights: ClassVar[bool] = True
    acceptance: ClassVar[float] = ACCEPTANCE
    taps: Sequence[int] = ()
    name: str
    cost: float

    @property
    def is_ready(self) -> bool:
        """Readiness: False while a thread makes the draft gear and slows the passes."""
        return True

    @classmethod
    def of(cls, target: DraftTarget) -> "Drafter | None":
        """Return the drafter for a sequence; None if this class does not fit it.

        Raises:
            GearbxError: settings that do not fit the target.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Begin what drafts need, such as a gear. It is called once, before `prefill`, if the sequence uses it."""

    def prefill(self, tokens: mx.array, hidden: Hidden) -> None:
        """Prefill tokens (n,) of the prompt; its last token is never among them.

        Args:
            hidden: their states after the blocks of `taps`, and maybe others.
        """

    def length(self, text: GeneratedText, room: int, policy: LearnedPolicy) -> int:
        """Return the most tokens that a proposal would have now, at most `room`; 0: no proposal saves time."""
        raise NotImplementedError

    def propose(self, text: GeneratedText, length: int, policy: LearnedPolicy) -> Proposal:
        """Return one to `length` tokens, and leave the KV cache of the sequence unchanged.

        With margins known one by one, `policy.goes_on` may end the proposal after each of them.
        """
        raise NotImplementedError

    def build_ahead(self, found: Verification, rows: ChosenRows) -> None:
        """Build the graph of the next draft's first token in advance, while a device computes a verification.

        Args:
            found: the verified rows; the KV cache of the sequence holds all of them.
            rows: the token after each row, which the device may still compute.
        """

    def update(self, text: GeneratedText, found: Verification | None) -> None:
        """Take the sequence after a verification, also of a different drafter's tokens.

        Args:
            found: the verified rows, with their hidden states after `taps`; None at the end of the sequence, when its
                KV cache holds all tokens.
        """


def drafters_for(target: DraftTarget, cost: Callable[[Drafter], float] = lambda drafter: 0.0) -> list[Drafter]:
    """Return the drafters of a sequence in order of priority: lookup, and one that reads weights.

    Args:
        cost: time of a token in rounds of a drafter, in plain tokens. The cheapest is used; of equal ones the first.

    Raises:
        GearbxError: as their `of`.
    """
    kinds: list[type[Drafter]] = [pkgutil.resolve_name(place) for place in DRAFTERS.values()]
    found = [drafter for kind in kinds if (drafter := kind.of(target)) is not None]
    cheapest = min((each for each in found if each.reads_weights), key=cost, default=None)
    used = [each for each in found if each is cheapest or not each.reads_weights]
    for each in used:
        each.prepare()
    return used


Drafted = tuple[mx.array, mx.array | None]
"""A drafted token (1,), and its margin (1,) if the chooser knows it."""


def last_logits(model: nn.Module, cache: Cache, tokens: mx.array) -> mx.array:
    """Run a pass over tokens (n,), add their entries to the cache, and return the logits (1, V) after the last one."""
    logits: mx.array = model(tokens[None], cache=cache)[:, -1]
    return logits


def drafted_token(logits: mx.array, context: mx.array | None, target: DraftTarget) -> Drafted:
    """Return the token after logits (1, V), without evaluating it. context: the tokens so far, for processors."""
    token, margin = target.chooser.drafted(target.chooser.processed(context, logits), target.reader)
    (token,) = target.agreement.arrays(token.reshape(1).astype(mx.uint32))
    return token, None if margin is None else margin.reshape(1)


def queue_draft(
    logits_after: Callable[[mx.array], mx.array],
    unread: Sequence[int],
    text: GeneratedText,
    length: int,
    target: DraftTarget,
    first: Drafted | None = None,
) -> Drafted:
    """Queue the passes of a draft. Return tokens (k,), and margins (k,) if the chooser knows them, not evaluated.

    Args:
        logits_after: runs a pass over tokens (n,), and returns the logits (1, V) after them.
        unread: tokens of the first pass, which end with the sequence's last token.
        first: the first token, if its graph is built; the pass over `unread` is then omitted.
    """
    context = text.array() if target.chooser.processors else None
    inputs, tokens, margins = mx.array([*unread], mx.uint32), list[mx.array](), list[mx.array]()
    for _ in range(length):
        inputs, margin = first or drafted_token(logits_after(inputs), context, target)
        mx.async_eval(inputs)
        first = None
        tokens.append(inputs)
        if margin is not None:
            margins.append(margin)
        context = None if context is None else mx.concatenate([context, inputs])
    return mx.concatenate(tokens), mx.concatenate(margins) if margins else None
