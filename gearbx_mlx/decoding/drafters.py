"""Who proposes: the low gear of the same model, or another model. The text itself does it too (routing/lookup.py).

A drafter writes a few tokens that may follow a text; the loop (loop.py) verifies them. A new one, such as heads that
predict several tokens, is a class with the method `propose`. A draft leaves no trace: neither in the text's KV cache,
nor in the random numbers. A token is drafted with the random numbers that will choose at its place.

Where MLX computes, the steps of a draft are queued one behind the other, and nobody waits for them: each takes the
token before it as an array that is still computed. The native kernels of a CPU return a token as soon as it is there.
There nothing waits, and the margin by which a token won may end a draft early.

The head of a draft looks twice: its best few tokens get their logits from the top gear's rows of the head. Many drafts
fail where the head is rounded, although what it reads would have chosen the right token: on SmolLM2 that is one token
in thirty. A few rows of the top gear's head are some kilobytes beside the megabytes of a draft's pass. Only drafts look
twice; a text that the low gear writes itself is its own.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..compat.arrays import same_random_numbers
from ..formats.block import KeptParts, NativeDraft, PassParts, begin_draft, pass_parts
from ..formats.exact import ExactModule
from ..formats.tied import IN_DRAFTS, TiedEmbedding, linear_of
from ..gears.discovery import DENSE_LAYERS
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.sharding import sharding_of
from ..kernels.dispatch import on_cpu
from ..ranks.agreement import ALONE, Agreement
from .caches import Cache, Snapshot
from .response import DRAFT
from .sampling import Chooser, GumbelSampler, LogitsReader

Following = Callable[[int, int], tuple[int, float]]
"""From a token, and its place in a draft from 0 on, to the next token and the margin by which it won."""

GoesOn = Callable[[Sequence[float]], bool]
"""From the margins of a draft so far to whether one more token pays."""

HEAD = "lm_head"
SEEN_TWICE = 4  # with more, hardly another token wins
CHUNK = 256  # logits, of which the largest is found first: to sort all of a vocabulary takes ten times as long
FIXED_SHARE = 0.15  # of a pass, which does not depend on the bits of the gear: attention, norms, the host
RowsOf = Callable[[mx.array], mx.array]  # numbers (...) to rows (..., D) of a head


@dataclass
class TextSoFar:
    """A text in the making.

    Args:
        tokens: of the prompt, and what was written after it.
        ends: tokens that end the text.
        room: how many tokens may still be written; infinite without a limit.
    """

    tokens: list[int]
    ends: frozenset[int]
    room: float = math.inf

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        """Tokens of the prompt."""

    @property
    def last(self) -> int:
        """The token that the next pass reads."""
        return self.tokens[-1]

    @property
    def goes_on(self) -> bool:
        """True until a token ends the text, or there is no room."""
        written = len(self.tokens) > self.prompt
        return self.room > 0 and not (written and self.last in self.ends)

    def ends_with(self, count: int) -> bool:
        """True if the text has ended, and so many tokens were written."""
        return not self.goes_on and len(self.tokens) == self.prompt + count

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.room -= 1

    def until_end(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens up to the first one that ends the text, which is among them."""
        last = next((place for place, token in enumerate(tokens, 1) if token in self.ends), len(tokens))
        return list(tokens[:last])

    def array(self) -> mx.array:
        return mx.array(self.tokens, mx.uint32)


@dataclass
class Proposal:
    """Tokens that may follow a text.

    Attributes:
        source: DRAFT or LOOKUP.
        tokens: (k,), which the device may still compute.
        margins: (k,), by how much each token's logit won; None where that is not known.
        gear: of the ladder, that drafted them, if one did.
        weight_bytes: what the passes of the drafter read, one for each token.
        is_read: True if each token was read when it was drafted, so that the draft is over.
    """

    source: str
    tokens: mx.array
    margins: mx.array | None = None
    gear: Gear | None = None
    weight_bytes: int = 0
    is_read: bool = False

    @property
    def count(self) -> int:
        return self.tokens.size


class Drafter:
    """Proposes tokens that may follow a text.

    Attributes:
        name: of the times and rates that are kept about it, such as "4 bits".
        cost: of a drafted token over that of a plain one, before anything is measured.
    """

    name: str
    cost: float
    chooser: Chooser
    reader: LogitsReader
    agreement: Agreement

    def read(self, tokens: mx.array) -> None:
        """Read a part (n,) of the prompt. Its last token is never read."""

    def reads_early(self, cache: Cache) -> bool:
        """True if margins are known one by one, so that they may end a draft."""
        return False

    def propose(self, text: TextSoFar, cache: Cache, most: int, goes_on: GoesOn) -> Proposal:
        """Draft up to `most` tokens, one at least. The text's KV cache is afterwards as it was.

        Args:
            goes_on: to be asked after each token, where its margin is known at once.
        """
        raise NotImplementedError

    def settle(self, text: TextSoFar) -> None:
        """Take note that a proposal, of whomever, was verified, and that what was accepted of it is in the text."""

    def queued(
        self, model: nn.Module, cache: Cache, text: TextSoFar, unread: Sequence[int], most: int
    ) -> tuple[mx.array, mx.array | None]:
        """Queue the steps of a draft, without waiting: tokens (k,), and their margins (k,) if the chooser knows them.

        Args:
            unread: tokens of the text that the model is to read first, the last one among them.
        """
        context = text.array() if self.chooser.processors else None
        inputs, tokens, margins = mx.array([*unread], mx.uint32), list[mx.array](), list[mx.array]()
        for _ in range(most):
            logits = self.chooser.processed(context, model(inputs[None], cache=cache)[:, -1])
            token, margin = self.chooser.drafted(logits, self.reader)
            (inputs,) = self.agreement.arrays(token.reshape(1).astype(mx.uint32))
            mx.async_eval(inputs)
            tokens.append(inputs)
            if margin is not None:
                margins.append(margin.reshape(1))
            context = None if context is None else mx.concatenate([context, inputs])
        return mx.concatenate(tokens), mx.concatenate(margins) if margins else None


@dataclass
class LowGear(Drafter):
    """Drafts in a low gear of the model, whose KV cache it borrows, and so has nothing to read and to settle.

    Args:
        gear: that drafts; it may be engaged after a draft.
        agreement: of the ranks that share the model.
    """

    gearbox: Gearbox
    gear: Gear
    chooser: Chooser
    reader: LogitsReader
    agreement: Agreement = ALONE

    def __post_init__(self) -> None:
        self._parts = KeptParts(self._find)  # they run beside the gear that verifies
        self.name, self.cost = f"{self.gear.bits} bits", draft_cost(self.gear.bits, self.gearbox.ladder.top.bits)

    def propose(self, text: TextSoFar, cache: Cache, most: int, goes_on: GoesOn) -> Proposal:
        with rewound(self.chooser):
            native = self._parts.use(cache, lambda parts: begin_draft(parts, cache))
            if native is not None:
                return self._natively(native, text, most, goes_on)
            self.gearbox.shift(self.gear)
            with Snapshot(cache).borrowed(), looking(self.second):
                tokens, margins = self.queued(self.gearbox.model, cache, text, [text.last], most)
        return self._proposal(tokens, margins)

    def reads_early(self, cache: Cache) -> bool:
        return self.chooser.tells_margins and self._parts.take(cache)

    def _find(self) -> PassParts | None:
        """Engage the gear, and return what native drafts need of it; None where there can be none."""
        if self.agreement is not ALONE:
            return None
        self.gearbox.shift(self.gear)
        return pass_parts(self.gearbox.model, None if self.second is None else self.second.top)

    def _proposal(self, tokens: mx.array, margins: mx.array | None) -> Proposal:
        read = tokens.size * self.gearbox.weight_bytes_per_token(self.gear)
        return Proposal(DRAFT, tokens, margins, self.gear, read)

    def _natively(self, native: NativeDraft, text: TextSoFar, most: int, goes_on: GoesOn) -> Proposal:
        """Draft until a token ends the text, or one more does not pay."""
        following, early = natively(native, self.chooser, text, self.reader), self.chooser.tells_margins
        token, tokens, margins = text.last, list[int](), list[float]()
        for place in range(min(most, native.room)):
            token, margin = following(token, place)
            tokens.append(token)
            margins.append(margin)
            if token in text.ends or (early and not goes_on(margins)):
                break
        told = mx.array(margins, mx.float32) if early else None
        return replace(self._proposal(mx.array(tokens, mx.uint32), told), is_read=True)

    @functools.cached_property
    def second(self) -> "SecondHead | None":
        """The head that looks twice; asked for once both gears are made."""
        return second_head(self.gearbox, self.gear)


@dataclass
class OtherModel(Drafter):
    """Drafts with another, smaller model of the same tokenizer, which has a KV cache of its own.

    Args:
        cache: of the draft model; like the text's, all but the last token are in it.
        weight_bytes: that one of its passes reads.
    """

    model: nn.Module
    cache: list[Any]
    chooser: Chooser
    reader: LogitsReader
    weight_bytes: int
    agreement: Agreement = ALONE
    name: str = "another model"
    cost: float = 0.25  # a draft model has about a quarter of the weights, or less

    def __post_init__(self) -> None:
        self.known = 0
        """Tokens of the text that are in the cache."""

    def read(self, tokens: mx.array) -> None:
        self.model(tokens[None], cache=self.cache)
        mx.eval([part.state for part in self.cache])
        self.known += tokens.size

    def propose(self, text: TextSoFar, cache: Cache, most: int, goes_on: GoesOn) -> Proposal:
        with rewound(self.chooser):
            tokens, margins = self.queued(self.model, self.cache, text, text.tokens[self.known :], most)
        self.known = len(text.tokens) + most - 1  # the last drafted token was not read
        return Proposal(DRAFT, tokens, margins, weight_bytes=most * self.weight_bytes)

    def settle(self, text: TextSoFar) -> None:
        """Take back what it read beyond the text."""
        right = len(text.tokens) - 1  # all but the last token, which the top gear chose, may have been drafted
        if self.known > right:
            for part in self.cache:
                part.trim(self.known - right)
            self.known = right


def draft_cost(draft_bits: float, top_bits: float) -> float:
    """Return the cost of a drafted token over that of a plain one, before either is measured."""
    return FIXED_SHARE + (1 - FIXED_SHARE) * draft_bits / top_bits


def natively(draft: NativeDraft, chooser: Chooser, text: TextSoFar, reader: LogitsReader) -> Following:
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


def rewound(chooser: Chooser) -> contextlib.AbstractContextManager[None]:
    """Random numbers that a text draws in the block will be drawn again after it."""
    # A greedy text draws nothing; to put numbers back for each of its drafts would only make MLX's graph longer.
    draws = not chooser.greedy or chooser.processors
    return same_random_numbers() if draws else contextlib.nullcontext()


@dataclass
class SecondHead:
    """The head of the top gear, a linear layer or an embedding, and where a draft looks for its own: `holder[name]`.

    look: what stands there in drafts. It is one object for all of them, since native programs of a model know its
    modules by their identity (formats/block.py), and take milliseconds to be made again.
    """

    top: nn.Module
    holder: nn.Module
    name: str
    look: "SecondLook | None" = None


def second_head(gearbox: Gearbox, gear: Gear) -> SecondHead | None:
    """Return what a draft of this gear looks at twice; None where the top gear has the same head, or none in memory."""
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
def looking(second: SecondHead | None) -> Iterator[None]:
    """Let the head of the gear that is engaged look twice, where rows are looked up fast. Nothing may shift
    meanwhile."""
    rows = None if second is None else rows_of(linear_of(second.top))
    if second is None or rows is None:
        yield
        return
    holder, name = second.holder, second.name
    before = holder.get(name)  # none in a tied embedding, whose rows are looked up in its projection
    head = holder["projection"] if before is None else before
    if second.look is None or second.look.head is not head:
        second.look = SecondLook(head, rows)
    holder[name] = second.look
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


class SecondLook(nn.Module):
    """A linear layer (..., D) -> (..., V) whose largest outputs come from the rows of another weight (V, D).

    Here activations stay as they are; the native kernels of a draft may round them to bfloat16.
    """

    def __init__(self, head: nn.Module, rows: RowsOf):
        super().__init__()
        self.head, self._rows = head, rows

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.head(x)
        best = largest(logits, min(SEEN_TWICE, logits.shape[-1]))
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
