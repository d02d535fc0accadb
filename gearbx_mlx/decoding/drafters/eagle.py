"""Drafts by a draft head: one layer that reads the model's hidden states (EAGLE-3; Li et al., 2503.01840).

For each token of the sequence but the first, the head's KV cache has an entry, made of the token and of the hidden
states before it. A draft begins with a pass over the unread hidden states, whose last output drafts a token. Each
further token is one more pass, over the drafted token and the head's previous output. Entries of drafted tokens are
dropped, since accepted tokens get entries of true hidden states.

Hidden states wait unread while other drafters propose, or none does; if more than MAX_UNREAD wait, the head reads them.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...compat.loops import set_entries
from ...formats.block import FEW_TOKENS, KeptParts, PassParts, begin_head_draft, head_parts
from ...kernels.dispatch import on_cpu
from ...ranks.agreement import SINGLE_PROCESS
from ..head_files import attached_head
from ..heads import Head, embedding_of
from ..hidden import Hidden
from ..policy import LearnedPolicy
from ..response import DRAFT, GeneratedText
from ..rows import Proposal, Verification
from . import Drafter, DraftTarget, queue_draft
from .low_gear import draft_natively

FIXED_COST = 0.05  # cost of a step in plain tokens, besides reading its weights
MAX_UNREAD = 256  # hidden states that wait for a draft, at most


class Eagle(Drafter):
    """Drafter that uses a draft head.

    Args:
        cache: the head's. Between rounds it has an entry for each read token of the sequence but the first.
    """

    acceptance = 0.5  # after 20 minutes of training; if it were higher, a head would be tried before a low gear

    def __init__(self, target: DraftTarget, head: Head, cache: list[Any]):
        self._target, self._head, self._cache = target, head, cache
        self.taps, self.name = head.taps, f"head {head.fingerprint[:8]}"
        top = target.gearbox.ladder.top
        self.cost = FIXED_COST + head.bytes_in_use / max(1, target.gearbox.weight_bytes_per_token(top))
        self._before = cache[0].offset  # entries of earlier sequences
        self._read = 0  # entries of this sequence; the cache may have more, of a draft
        self._unread: list[mx.array] = []  # hidden states (K, taps x D) of passes, in order
        self._is_lost = False  # True if a pass had no hidden states

    @classmethod
    def of(cls, target: DraftTarget) -> "Eagle | None":
        """Return the drafter of the head that is the draft model, or is attached to the model; None without one.

        Raises:
            GearbxError: a head of a different model.
        """
        model, given = target.gearbox.model, target.draft_model
        head = attached_head(model) if given is None else given
        if not isinstance(head, Head):
            return None
        head.check(model)
        cache = target.draft_cache
        cache[:] = cache or make_prompt_cache(head)
        return cls(target, head, cache)

    def prepare(self) -> None:
        gearbox = self._target.gearbox
        self._head.put_in(gearbox.kernels.native and on_cpu(), gearbox.compute_dtype)

    @property
    def _waiting(self) -> int:
        """Tokens of the sequence whose hidden states are unread."""
        return sum(map(len, self._unread))

    def prefill(self, tokens: mx.array, hidden: Hidden) -> None:
        before = self._waiting  # 1 after an earlier part, whose last states belong to this part's first token
        self._add(hidden, tokens.size)
        self._read_states(tokens[1 - before :])
        mx.eval([part.state for part in self._cache])

    @functools.cached_property
    def _parts(self) -> KeptParts:
        def find() -> PassParts | None:
            return head_parts(self._head, self._embedding_now()) if self._target.agreement is SINGLE_PROCESS else None

        return KeptParts(find)

    def length(self, text: GeneratedText, room: int, policy: LearnedPolicy) -> int:
        """Return the policy's length of the next draft; 0 after a pass without hidden states."""
        if self._is_lost:
            return 0
        target = self._target
        return policy.length(min(room, target.most), target.chooser.has_margins and self._parts.fits(self._cache))

    def propose(self, text: GeneratedText, length: int, policy: LearnedPolicy) -> Proposal:
        with self._target.chooser.rewound():
            if self._waiting > FEW_TOKENS:
                self._read_states(self._tokens_of(text)[:-1])
            states, following = mx.concatenate(self._unread), text.tokens[-self._waiting :]
            native = self._parts.use(self._cache, lambda parts: begin_head_draft(parts, self._cache, following, states))
            if native is None:
                queued = queue_draft(self._passes(), following, text, length, self._target)
                return Proposal(*queued, DRAFT, weight_bytes=self._head.nbytes)
            drafted = draft_natively(native, self._target, text, length, policy)
        self._read, self._unread = self._read + len(following), []
        set_entries(self._cache[0], self._before + self._read)
        return Proposal(*drafted, DRAFT, weight_bytes=self._head.nbytes)

    def _passes(self) -> Callable[[mx.array], mx.array]:
        """Return a function that runs a pass of a draft, and returns the logits (1, V) after its tokens."""
        states: mx.array | None = None  # the output of the latest pass

        def logits_after(tokens: mx.array) -> mx.array:
            nonlocal states
            if states is None:
                states = self._read_states(tokens)
            else:
                states = self._head(self._embedded(tokens), states[:, -1:], self._cache)
            return self._head.logits(states[:, -1])

        return logits_after

    def update(self, text: GeneratedText, found: Verification | None) -> None:
        """Keep the hidden states of the accepted rows; at the end of the sequence, read those that are left."""
        if found is not None:
            self._add(found.hidden, found.kept)
        known = len(text.tokens) - 1  # tokens that follow a hidden state; fewer than before if some were dropped
        if self._waiting > known - self._read:
            self._unread = [mx.concatenate(self._unread)[: max(0, known - self._read)]]
        self._read = min(self._read, known)
        drafted = self._cache[0].offset - self._before - self._read
        for part in self._cache if drafted else ():
            part.trim(drafted)
        if self._waiting and (found is None or self._waiting > MAX_UNREAD):
            tokens = self._tokens_of(text)
            self._read_states(tokens if found is None else tokens[:-1])  # a draft begins with unread states
            mx.async_eval([part.state for part in self._cache])

    def _add(self, hidden: Hidden, rows: int) -> None:
        """Take the hidden states of the first rows of a pass."""
        self._is_lost = self._is_lost or not all(tap in hidden for tap in self.taps)
        if not self._is_lost:
            self._unread.append(mx.concatenate([hidden[tap][:rows] for tap in self.taps], axis=-1))

    def _tokens_of(self, text: GeneratedText) -> mx.array:
        """Return the token that follows each unread hidden state."""
        return mx.array(text.tokens[self._read + 1 : self._read + 1 + self._waiting], mx.uint32)

    def _read_states(self, tokens: mx.array) -> mx.array:
        """Return the head's output (1, K, D) for K tokens after unread hidden states."""
        count = tokens.size
        rows = mx.concatenate(self._unread) if self._unread else mx.zeros((0, 1))
        self._read, self._unread = self._read + count, [rows[count:]] if count < len(rows) else []
        return self._head(self._embedded(tokens), self._head.fuse(rows[None, :count]), self._cache) if count else rows

    def _embedded(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (1, K, D) of tokens: the head's own or the model's, in the engaged gear."""
        embedded: mx.array = self._embedding_now()(tokens)
        return embedded[None]

    @functools.cached_property
    def _embedding_now(self) -> Callable[[], Any]:
        own, model = self._head.get("embed_tokens"), embedding_of(self._target.gearbox.model)
        assert model is not None  # else `check` refuses the head
        return model if own is None else lambda: own
