"""Drafters: what proposes tokens for the top gear to verify. Each is one file here and one line in `DRAFTERS`.

A drafter may ask for what is in its `DraftTarget` and in the `GeneratedText`: the tokens so far, the KV cache of the
text, and the gearbox, whose `module_in(path, ladder.top)` is the top gear's head or embedding. It keeps a KV cache of
its own if it needs one. After each verification it sees the rows that were computed (`settle`). It gives tokens, their
margins if it knows them, and their cost.

A draft leaves no trace: neither in the KV cache of the text, nor in the random numbers. A token is drafted with the
random numbers that will choose at its place, so that both agree as often as can be (GEARBX 10.1).
"""

import contextlib
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ...compat.arrays import same_random_numbers
from ...gears.gearbox import Gearbox
from ...gears.ladder import Gear
from ...ranks.agreement import ALONE, Agreement
from ..caches import Cache
from ..policy import MAX_DRAFTED, LearnedPolicy
from ..response import DRAFT, GeneratedText
from ..rows import Proposal, VerifiedPass
from ..sampling import MLX_READER, Chooser, LogitsReader

DRAFTERS = {  # in the order in which they are asked; of those that read weights, a text has the first that it can have
    "lookup": "gearbx_mlx.decoding.drafters.lookup:Lookup",
    "other model": "gearbx_mlx.decoding.drafters.other_model:OtherModel",
    "low gear": "gearbx_mlx.decoding.drafters.low_gear:LowGear",
}


@dataclass(frozen=True)
class DraftTarget:
    """What a drafter drafts for.

    Attributes:
        gearbox: its top gear verifies.
        cache: the KV cache of the text; between rounds it holds all tokens but the last.
        chooser, reader: how the tokens are chosen from logits.
        draft: name or bits of the gear that drafts; None: the lowest.
        lookup_tokens: the most tokens of a proposal by prompt lookup; 0: none.
        is_fixed: True if drafts do not depend on anything measured.
        agreement: of ranks that share the model.
        draft_model, draft_cache: a second model that was given to draft, and its entries of the prompt cache.
        most: tokens that may be drafted at once.
        room: tokens that prompt, text and a draft may have together.
    """

    gearbox: Gearbox
    cache: Cache
    chooser: Chooser
    reader: LogitsReader = MLX_READER
    draft: str | int | None = None
    lookup_tokens: int = 0
    is_fixed: bool = True
    agreement: Agreement = ALONE
    draft_model: nn.Module | None = None
    draft_cache: list[Any] = field(default_factory=list)
    most: int = MAX_DRAFTED
    room: float = math.inf


class Drafter:
    """Proposes tokens that may follow a text. A subclass stands in a file of its own and in `DRAFTERS`.

    Attributes:
        reads_weights: False for tokens that cost no pass.
        name: the key under which times and acceptance are kept for it.
        cost: of a drafted token, as a share of a plain one, before anything is measured.
    """

    reads_weights: ClassVar[bool] = True
    name: str
    cost: float

    @property
    def is_ready(self) -> bool:
        """False while something is made for it beside the text, so that times of passes do not count."""
        return True

    @classmethod
    def of(cls, target: DraftTarget) -> "Drafter | None":
        """Return the drafter for a text; None where there can be none.

        Raises:
            GearbxError: settings that do not fit the target.
        """
        raise NotImplementedError

    def prefill(self, tokens: mx.array) -> None:
        """Read a part (n,) of the prompt. Its last token is never read."""

    def length(self, text: GeneratedText, room: int, policy: LearnedPolicy) -> int:
        """Return the most tokens that a proposal would have now, at most `room`; 0: none is worth its time."""
        raise NotImplementedError

    def propose(self, text: GeneratedText, length: int, policy: LearnedPolicy) -> Proposal:
        """Return one to `length` tokens. The KV cache of the text is afterwards as it was.

        Where margins are known one by one, `policy.goes_on` is asked after each.
        """
        raise NotImplementedError

    def settle(self, text: GeneratedText, found: VerifiedPass | None) -> None:
        """Take note of the text after a verification, whoever proposed its tokens.

        Args:
            found: the rows of which the first were kept; None: the text has ended or was closed, and all its tokens are
                in its KV cache.
        """


def drafters_for(target: DraftTarget) -> list[Drafter]:
    """Return the drafters of a text, in the order in which they are asked. Raises GearbxError as theirs do."""
    found = list[Drafter]()
    for place in DRAFTERS.values():
        kind: type[Drafter] = pkgutil.resolve_name(place)
        if kind.reads_weights and any(each.reads_weights for each in found):
            continue
        drafter = kind.of(target)
        if drafter is not None:
            found.append(drafter)
    return found


def rewound(chooser: Chooser) -> contextlib.AbstractContextManager[None]:
    """In the block random numbers are drawn that will be drawn again after it."""
    # A greedy text draws nothing; to put numbers back for each of its drafts would only make MLX's graph longer.
    return same_random_numbers() if chooser.draws else contextlib.nullcontext()


def queued(
    model: nn.Module, cache: Cache, text: GeneratedText, unread: Sequence[int], length: int, target: DraftTarget
) -> tuple[mx.array, mx.array | None]:
    """Queue the passes of a draft without waiting for any: tokens (k,), and margins (k,) if the chooser knows them.

    Args:
        unread: tokens of the text that the model is to read first, the last one among them.
    """
    chooser = target.chooser
    context = text.array() if chooser.processors else None
    inputs, tokens, margins = mx.array([*unread], mx.uint32), list[mx.array](), list[mx.array]()
    for _ in range(length):
        logits = chooser.processed(context, model(inputs[None], cache=cache)[:, -1])
        token, margin = chooser.drafted(logits, target.reader)
        (inputs,) = target.agreement.arrays(token.reshape(1).astype(mx.uint32))
        mx.async_eval(inputs)
        tokens.append(inputs)
        if margin is not None:
            margins.append(margin.reshape(1))
        context = None if context is None else mx.concatenate([context, inputs])
    return mx.concatenate(tokens), mx.concatenate(margins) if margins else None


def of_draft(tokens: Sequence[int] | mx.array, margins: Any, weight_bytes: int, gear: Gear | None = None) -> Proposal:
    """Return drafted tokens. weight_bytes: of one pass of the drafter."""
    return Proposal(tokens, DRAFT, margins, gear, len(tokens) * weight_bytes)
