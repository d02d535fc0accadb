"""The low gear of the model drafts: self-speculative decoding with two precisions of the same weights.

It borrows the KV cache of the text, and so has nothing to prefill and to settle. A gear that is still to be made is
made beside the prompt and the first tokens, if it can be; until then decoding is plain.

Where MLX computes, the passes of a draft are queued one behind the other: each takes the token before it as an array
that is still computed. The native kernels of a CPU return a token as soon as it is there, and the margin by which it
won may end the draft early.

**Rescoring.** The best few tokens of a draft get their logits from the top gear's rows of the output head. Many drafts
fail where the head is quantized, although its input would have chosen the right token: on SmolLM2 that is one token in
thirty. A few rows of the top gear's head are some kilobytes beside the megabytes of a draft's pass. Only drafts are
rescored; a text that the low gear generates is its own.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...errors import GearbxError
from ...formats.block import KeptParts, NativeDraft, PassParts, begin_draft, pass_parts
from ...formats.exact import ExactModule
from ...formats.native import rounded_to
from ...formats.tied import IN_DRAFTS, TiedEmbedding, linear_of
from ...gears.discovery import DENSE_LAYERS
from ...gears.gearbox import Gearbox
from ...gears.ladder import Gear
from ...gears.sharding import sharding_of
from ...kernels.dispatch import on_cpu
from ...ranks.agreement import ALONE
from ..caches import Snapshot
from ..policy import LearnedPolicy
from ..response import GeneratedText
from ..rows import Proposal
from ..sampling import Chooser, GumbelSampler, LogitsReader
from . import Drafter, DraftTarget, of_draft, queued, rewound

Following = Callable[[int, int], tuple[int, float]]
"""From a token, and its place in a draft from 0 on, to the next token and the margin by which it won."""

HEAD = "lm_head"
RESCORE_TOP_K = 4  # with more, hardly another token wins
CHUNK = 256  # logits, of which the largest is found first: to sort all of a vocabulary takes ten times as long
ACTIVATION_BITS = 8  # of native drafts: as many are accepted as with 16, and a token takes 0.76 (AVX2), 0.9 of the time
FIXED_SHARE = 0.15  # of a pass, which does not depend on the bits of the gear: attention, norms, the host
RowsOf = Callable[[mx.array], mx.array]  # numbers (...) to rows (..., D) of a head


class LowGear(Drafter):
    """Draft in a low gear of the model.

    Args:
        gear: that drafts; it may be engaged after a draft.
    """

    def __init__(self, target: DraftTarget, gear: Gear):
        self._target, self.gear = target, gear
        self.name, self.cost = f"{gear.bits} bits", draft_cost(gear.bits, target.gearbox.ladder.top.bits)
        self._asked = 0  # the length that the policy chose for the next draft, if it was asked

    @classmethod
    def of(cls, target: DraftTarget) -> "LowGear | None":
        """Return the gear that drafts, the lowest if none is named; None where there is one gear alone.

        Raises:
            GearbxError: the top gear of several.
        """
        ladder = target.gearbox.ladder
        gear = ladder[0] if target.draft is None else ladder.find(target.draft)
        if gear == ladder.top and len(ladder) > 1:
            raise GearbxError(f"gears {ladder}: the top gear cannot draft for itself; give a lower one too")
        if gear == ladder.top:
            return None
        drafter = cls(target, gear)
        drafter._prepare()
        return drafter

    def _prepare(self) -> None:
        """Make the gear, or begin to; where nothing may be measured, all texts have the same drafts."""
        gearbox = self._target.gearbox
        (gearbox.make if self._target.is_fixed else gearbox.begin)(self.gear)

    @property
    def is_ready(self) -> bool:
        return self._target.gearbox.ready(self.gear)

    @functools.cached_property
    def _parts(self) -> KeptParts:
        return KeptParts(self._find)  # they run beside the gear that verifies

    def length(self, text: GeneratedText, room: int, policy: LearnedPolicy) -> int:
        """Return the length of the next draft by the policy, which is asked once for each."""
        if not self.is_ready:
            self._prepare()  # once more: a controller may have capped layers meanwhile
            if not self.is_ready:
                return 0
        if not self._asked:
            target = self._target
            early = target.chooser.tells_margins and self._parts.take(target.cache)
            self._asked = policy.length(min(room, target.most), early)
        return min(self._asked, room)

    def propose(self, text: GeneratedText, length: int, policy: LearnedPolicy) -> Proposal:
        target, self._asked = self._target, 0
        read = target.gearbox.weight_bytes_per_token(self.gear)
        with rewound(target.chooser):
            native = self._parts.use(target.cache, lambda parts: begin_draft(parts, target.cache))
            if native is not None:
                tokens, margins = self._natively(native, text, length, policy)
                return of_draft(tokens, margins, read, self.gear)
            target.gearbox.shift(self.gear)
            with Snapshot(target.cache).borrowed(), rescoring(self.second):
                drafted = queued(target.gearbox.model, target.cache, text, [text.last], length, target)
        return of_draft(*drafted, read, self.gear)

    def _find(self) -> PassParts | None:
        """Return what native drafts need of the gear; None where there can be none. The engaged gear stays."""
        gearbox, engaged = self._target.gearbox, self._target.gearbox.gear
        if self._target.agreement is not ALONE:
            return None
        gearbox.shift(self.gear)
        try:
            with rounded_to(ACTIVATION_BITS, gearbox.model):
                return pass_parts(gearbox.model, None if self.second is None else self.second.top)
        finally:
            gearbox.shift(engaged)

    def _natively(
        self, native: NativeDraft, text: GeneratedText, length: int, policy: LearnedPolicy
    ) -> tuple[list[int], list[float] | None]:
        """Draft until a token ends the text, or one more is not worth its time."""
        chooser = self._target.chooser
        following, early = natively(native, chooser, text, self._target.reader), chooser.tells_margins
        token, tokens, margins = text.last, list[int](), list[float]()
        for place in range(min(length, native.room)):
            token, margin = following(token, place)
            tokens.append(token)
            margins.append(margin)
            if token in text.ends or (early and not policy.goes_on(margins)):
                break
        return tokens, margins if early else None

    @functools.cached_property
    def second(self) -> "SecondHead | None":
        """The head that rescores; asked for once both gears are made."""
        return second_head(self._target.gearbox, self.gear)


def draft_cost(draft_bits: float, top_bits: float) -> float:
    """Return the cost of a drafted token over that of a plain one, before either is measured."""
    return FIXED_SHARE + (1 - FIXED_SHARE) * draft_bits / top_bits


def natively(draft: NativeDraft, chooser: Chooser, text: GeneratedText, reader: LogitsReader) -> Following:
    """Return what drafts the next token in one native call, or from the logits of one."""
    sampler = chooser.sampler
    if chooser.has_kernel and not isinstance(sampler, GumbelSampler):
        return lambda token, place: draft.best(token, place)[::2]
    if chooser.has_kernel and isinstance(sampler, GumbelSampler):
        kept = (sampler.top_p, sampler.min_p, sampler.top_k)
        return lambda token, place: draft.sampled(token, place, sampler.temp, *kept, key=chooser.next_key())[::2]
    written = list(text.tokens)

    def following(token: int, place: int) -> tuple[int, float]:
        if place:
            written.append(token)
        context = mx.array(written, mx.uint32) if chooser.processors else None
        chosen, margin = chooser.drafted(chooser.processed(context, draft.logits(token, place)), reader)
        return np.array(chosen).item(), math.inf if margin is None else np.array(margin).item()

    return following


@dataclass
class SecondHead:
    """The head of the top gear, a linear layer or an embedding, and where a draft looks for its own: `holder[name]`.

    rescored: the head in drafts. It is one object for all of them, since native programs of a model know its modules by
    their identity (formats/block.py), and take milliseconds to be made again.
    """

    top: nn.Module
    holder: nn.Module
    name: str
    rescored: "Rescored | None" = None


def second_head(gearbox: Gearbox, gear: Gear) -> SecondHead | None:
    """Return the head that rescores drafts of a gear; None where the top gear has the same head, or none in memory."""
    path = next((layer.path for layer in gearbox.layers if layer.path.split(".")[-1] == HEAD), gearbox.head)
    if path is None or not gearbox.keeps_all or sharding_of(gearbox.model) is not None:
        return None
    own, top = gearbox.module_in(path, gear), gearbox.module_in(path, gearbox.ladder.top)
    if own is None or top is None or own is top:
        return None
    if isinstance(own, TiedEmbedding):
        return SecondHead(top, own, IN_DRAFTS)
    place, _, name = path.rpartition(".")
    return SecondHead(top, dict(gearbox.model.named_modules())[place], name)


@contextlib.contextmanager
def rescoring(second: SecondHead | None) -> Iterator[None]:
    """In the block the engaged head rescores, where rows are looked up fast. Nothing may shift meanwhile."""
    rows = None if second is None else rows_of(linear_of(second.top))
    if second is None or rows is None:
        yield
        return
    holder, name = second.holder, second.name
    before = holder.get(name)  # none in a tied embedding, whose rows are looked up in its projection
    head = holder["projection"] if before is None else before
    if second.rescored is None or second.rescored.head is not head:
        second.rescored = Rescored(head, rows)
    holder[name] = second.rescored
    try:
        yield
    finally:
        if before is None:
            del holder[name]
        else:
            holder[name] = before


def rows_of(head: nn.Module) -> RowsOf | None:
    """Return the rows of dense weights, and on a GPU of exact ones.

    To decode some rows by MLX's operations takes a CPU a third of a draft's pass; natively it takes nothing
    (formats/block.py).
    """
    if type(head) in DENSE_LAYERS:
        return lambda chosen: head["weight"][chosen]
    return head.rows if isinstance(head, ExactModule) and not on_cpu() else None


class Rescored(nn.Module):
    """A linear layer (..., D) -> (..., V) whose largest outputs come from the rows of another weight (V, D).

    Here activations stay as they are; the native kernels of a draft may round them to bfloat16.
    """

    def __init__(self, head: nn.Module, rows: RowsOf):
        super().__init__()
        self.head, self._rows = head, rows

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.head(x)
        best = largest(logits, min(RESCORE_TOP_K, logits.shape[-1]))
        again = (self._rows(best).astype(mx.float32) * x[..., None, :].astype(mx.float32)).sum(axis=-1)
        if "bias" in self.head:
            again = again + self.head.bias[best]
        return mx.put_along_axis(logits, best, again.astype(logits.dtype), axis=-1)


def largest(logits: mx.array, count: int) -> mx.array:
    """Return where the largest numbers of each row (..., V) are: (..., count), in no order."""
    *lead, size = logits.shape
    if size <= CHUNK * count:
        return mx.argpartition(-logits, count - 1, axis=-1)[..., :count]
    filled = mx.pad(logits, [*[(0, 0)] * len(lead), (0, -size % CHUNK)], constant_values=-mx.inf)
    chunks = filled.reshape(*lead, -1, CHUNK)
    # A number that is among the largest lies in a chunk whose own largest is among those of all chunks.
    chosen = mx.argpartition(-chunks.max(axis=-1), count - 1, axis=-1)[..., :count]
    among = mx.take_along_axis(chunks, chosen[..., None], axis=-2).reshape(*lead, -1)
    places = mx.argpartition(-among, count - 1, axis=-1)[..., :count]
    return mx.take_along_axis(chosen, places // CHUNK, axis=-1) * CHUNK + places % CHUNK
