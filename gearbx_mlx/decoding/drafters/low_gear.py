"""Drafts by the model's low gear: self-speculative decoding with two precisions of the same weights.

It borrows the sequence's KV cache, so it has no cache of its own to prefill or trim. Its gear may be made during
prefill and the first tokens. Decoding waits for a small gear (`AWAITED_BYTES`), and is plain until a large one is
ready.

MLX's kernels queue the passes of a draft one after the other: each takes the previous token as an array in computation.
Native CPU kernels return each token at once, and its margin may end the draft.

**Rescoring.** At each drafted position, the top gear's rows of the output head recompute the logits of the best few
candidates. Many drafts are rejected only because their head is quantized: one token in thirty on SmolLM2. The rows are
some kilobytes, a draft's pass reads megabytes. Only drafts are rescored; outputs in the low gear are not.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

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
from ...ranks.agreement import SINGLE_PROCESS
from ..caches import Snapshot
from ..policy import LearnedPolicy
from ..response import DRAFT, GeneratedText
from ..rows import Proposal, Verification
from ..sampling import Chooser, ChosenRows, GumbelSampler, LogitsReader
from . import Drafter, DraftTarget, last_logits, queue_draft
from .built_ahead import BuiltAhead

Following = Callable[[int, int], tuple[int, float]]
"""Function from a token and its position in a draft (from 0) to the next token and its margin."""

HEAD = "lm_head"
RESCORE_TOP_K = 4  # larger values hardly change a token
CHUNK = 256  # logits per chunk, whose maxima are compared first: sorting a whole vocabulary takes ten times as long
ACTIVATION_BITS = 8  # native drafts: accepted as often as 16-bit ones, in 0.76 (AVX2) to 0.9 of the time per token
FIXED_SHARE = 0.15  # share of a pass that the gear's bits do not change: attention, norms, the host
AWAITED_BYTES = 128e6  # decoding waits for smaller gears: 0.2 s on all cores, instead of 0.4 s of slowed tokens
RowsOf = Callable[[mx.array], mx.array]  # row numbers (...) to rows (..., D) of a head


class LowGear(Drafter):
    """Drafter that uses a low gear of the model.

    Args:
        gear: the draft gear; it may stay engaged after a draft.
    """

    def __init__(self, target: DraftTarget, gear: Gear):
        self._target, self.gear = target, gear
        self.name, self.cost = f"{gear.bits} bits", draft_cost(gear.bits, target.gearbox.ladder.top.bits)
        self._built = BuiltAhead(target)

    @classmethod
    def of(cls, target: DraftTarget) -> "LowGear | None":
        """Return the drafter for the named gear or the lowest; None if the ladder has one gear, or with a draft model.

        Raises:
            GearbxError: the top gear, if the ladder has others.
        """
        ladder = target.gearbox.ladder
        gear = ladder[0] if target.draft is None else ladder.find(target.draft)
        if gear == ladder.top and len(ladder) > 1:
            raise GearbxError(
                f"draft gear: must be below the top gear, got {gear.name}; use a lower gear of {ladder}, or omit it"
            )
        if gear == ladder.top or target.draft_model is not None:
            return None
        return cls(target, gear)

    def prepare(self) -> None:
        """Make the gear: now if draft lengths are fixed, else in a thread."""
        gearbox = self._target.gearbox
        (gearbox.make if self._target.is_fixed else gearbox.begin)(self.gear)

    @property
    def is_ready(self) -> bool:
        return self._target.gearbox.ready(self.gear)

    @functools.cached_property
    def _parts(self) -> KeptParts:
        return KeptParts(self._find)  # kept beside the verifying gear's

    def length(self, text: GeneratedText, room: int, policy: LearnedPolicy) -> int:
        """Return the policy's length of the next draft; 0 until the gear is made."""
        if not self.is_ready:
            self.prepare()  # again: other sequences' controllers may have lowered the bits of layers
            if self._target.gearbox.weight_bytes_per_token(self.gear) <= AWAITED_BYTES:
                self._target.gearbox.make(self.gear)
            if not self.is_ready:
                return 0
        target = self._target
        return policy.length(min(room, target.most), target.chooser.has_margins and self._parts.fits(target.cache))

    def propose(self, text: GeneratedText, length: int, policy: LearnedPolicy) -> Proposal:
        target, read = self._target, self._target.gearbox.weight_bytes_per_token(self.gear)
        with target.chooser.rewound():
            native = self._parts.use(target.cache, lambda parts: begin_draft(parts, target.cache))
            if native is not None:
                return Proposal(*draft_natively(native, target, text, length, policy), DRAFT, self.gear, read)
            target.gearbox.shift(self.gear)
            with Snapshot(target.cache).borrowed(), rescoring(self.rescoring_head):
                run = partial(last_logits, target.gearbox.model, target.cache)
                drafted = queue_draft(run, [text.last], text, length, target, self._built.take())
        return Proposal(*drafted, DRAFT, self.gear, read)

    def build_ahead(self, found: Verification, rows: ChosenRows) -> None:
        if self.is_ready and self._built.can_build(found):
            self._target.gearbox.shift(self.gear)
            with self._target.chooser.rewound(), rescoring(self.rescoring_head):
                self._built.build(found, rows)

    def update(self, text: GeneratedText, found: Verification | None) -> None:
        self._built.update(found)

    def _find(self) -> PassParts | None:
        """Return the parts of the gear for native drafts; None if they cannot run. The engaged gear stays."""
        gearbox, engaged = self._target.gearbox, self._target.gearbox.gear
        if self._target.agreement is not SINGLE_PROCESS:
            return None
        gearbox.shift(self.gear)
        try:
            with rounded_to(ACTIVATION_BITS, gearbox.model):
                return pass_parts(gearbox.model, None if self.rescoring_head is None else self.rescoring_head.top)
        finally:
            gearbox.shift(engaged)

    @functools.cached_property
    def rescoring_head(self) -> "RescoringHead | None":
        """Head of the top gear, found once both gears are made; None without."""
        return rescoring_head(self._target.gearbox, self.gear)


def draft_cost(draft_bits: float, top_bits: float) -> float:
    """Return the expected cost of a drafted token over a plain one's, before measurements."""
    return FIXED_SHARE + (1 - FIXED_SHARE) * draft_bits / top_bits


def draft_natively(
    native: NativeDraft, target: DraftTarget, text: GeneratedText, length: int, policy: LearnedPolicy
) -> tuple[list[int], list[float] | None]:
    """Draft until a token ends the sequence, or one more would not save time; return the tokens and known margins."""
    following, early = native_step(native, target.chooser, text, target.reader), target.chooser.has_margins
    token, tokens, margins = text.last, list[int](), list[float]()
    for place in range(min(length, native.room)):
        token, margin = following(token, place)
        tokens.append(token)
        margins.append(margin)
        if token in text.ends or (early and not policy.goes_on(margins)):
            break
    return tokens, margins if early else None


def native_step(draft: NativeDraft, chooser: Chooser, text: GeneratedText, reader: LogitsReader) -> Following:
    """Return a function that drafts the next token in one native call, or from the logits of one."""
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
class RescoringHead:
    """Output head of the top gear (a linear layer or an embedding); `holder[name]` is the draft's own head.

    rescored: the head in drafts. All drafts of a sequence share it: native programs are kept by module
    (formats/block.py), and another module would need a new program (milliseconds).
    """

    top: nn.Module
    holder: nn.Module
    name: str
    rescored: "Rescored | None" = None


def rescoring_head(gearbox: Gearbox, gear: Gear) -> RescoringHead | None:
    """Return the head that rescores drafts of a gear; None if both gears share it, or it is not in memory."""
    path = next((layer.path for layer in gearbox.layers if layer.path.split(".")[-1] == HEAD), gearbox.head)
    if path is None or not gearbox.keeps_all or sharding_of(gearbox.model) is not None:
        return None
    own, top = gearbox.module_in(path, gear), gearbox.module_in(path, gearbox.ladder.top)
    if own is None or top is None or own is top:
        return None
    if isinstance(own, TiedEmbedding):
        return RescoringHead(top, own, IN_DRAFTS)
    place, _, name = path.rpartition(".")
    return RescoringHead(top, dict(gearbox.model.named_modules())[place], name)


@contextlib.contextmanager
def rescoring(rescorer: RescoringHead | None) -> Iterator[None]:
    """Rescore drafts with rows of the top gear's head in the context, if these are fast. No shift may happen there."""
    rows = None if rescorer is None else rows_of(linear_of(rescorer.top))
    if rescorer is None or rows is None:
        yield
        return
    holder, name = rescorer.holder, rescorer.name
    before = holder.get(name)  # None: a tied embedding without IN_DRAFTS yet; `projection` is its head
    head = holder["projection"] if before is None else before
    if rescorer.rescored is None or rescorer.rescored.head is not head:
        rescorer.rescored = Rescored(head, rows)
    holder[name] = rescorer.rescored
    try:
        yield
    finally:
        if before is None:
            del holder[name]
        else:
            holder[name] = before


def rows_of(head: nn.Module) -> RowsOf | None:
    """Return a function from row numbers to rows of a dense head, on a GPU also of format exact; None otherwise.

    On a CPU, decoding exact rows with MLX's operations takes a third of a draft's pass. Native kernels do it at no cost
    (formats/block.py).
    """
    if type(head) in DENSE_LAYERS:
        return lambda chosen: head["weight"][chosen]
    return head.rows if isinstance(head, ExactModule) and not on_cpu() else None


class Rescored(nn.Module):
    """A linear layer (..., D) -> (..., V) whose largest outputs come from the rows of a second weight (V, D).

    The rescored rows' inputs are not rounded here; native kernels may round them to bfloat16.
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
    """Return the positions of the largest numbers of each row (..., V): (..., count), unordered."""
    *lead, size = logits.shape
    if size <= CHUNK * count:
        return mx.argpartition(-logits, count - 1, axis=-1)[..., :count]
    filled = mx.pad(logits, [*[(0, 0)] * len(lead), (0, -size % CHUNK)], constant_values=-mx.inf)
    chunks = filled.reshape(*lead, -1, CHUNK)
    # Each of the largest numbers is in a chunk whose maximum is among the largest maxima.
    chosen = mx.argpartition(-chunks.max(axis=-1), count - 1, axis=-1)[..., :count]
    among = mx.take_along_axis(chunks, chosen[..., None], axis=-2).reshape(*lead, -1)
    places = mx.argpartition(-among, count - 1, axis=-1)[..., :count]
    return mx.take_along_axis(chosen, places // CHUNK, axis=-1) * CHUNK + places % CHUNK
