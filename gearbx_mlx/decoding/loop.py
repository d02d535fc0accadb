"""The loop of mode lossless: draft, verify, accept (speculative decoding: Leviathan, Kalman, Matias, 2023, 2211.17192).

A round proposes tokens that may follow the text, computes the top gear's logits after all of them in one pass, and
chooses from each row what the top gear alone would choose there. What was proposed is accepted as long as both agree,
and the first token where they do not is the top gear's own. So a wrong proposal costs time and changes nothing.

    while the text goes on:
        proposal = propose()             # by the text itself (lookup), a low gear, or another model; perhaps nothing
        rows     = verify(proposal)      # one pass of the top gear
        tokens   = accept(rows)          # one read of the device

Nothing is read in between where the device computes by itself: the drafted tokens and their verification are queued one
behind the other. Where the policy wants no draft, the top gear writes alone, and runs one token ahead as mlx-lm does.

Sampling is exact by common random numbers: a token is drafted with the random numbers that will choose at its place,
from logits that went through the same processors (GEARBX 10.1).
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..compat.arrays import random_state, set_random_state
from ..errors import GearbxError, GearbxWarning, one_line
from ..gears.gearbox import Gearbox
from ..ranks.agreement import ALONE, Agreement
from ..routing.lookup import Lookup
from .caches import gears_of, in_common, length
from .drafters import Drafter, Proposal, TextSoFar
from .mode import turn
from .policy import MAX_DRAFTED, LearnedPolicy
from .response import DRAFT, LOOKUP, MODEL, SampledToken, Step, WrittenToken, single_pass
from .rows import Rows, Verifier
from .sampling import Choice, Chooser, LogitsReader, kv_read, rounding_of

UNLIMITED = 2**40  # entries of a KV cache
CLEARED = 256  # tokens between two times that MLX gives back the memory that it keeps, as in mlx-lm


@dataclass
class Queued:
    """A token that the top gear is computing.

    Attributes:
        token: (1,).
        logprobs: (1, V), of the distribution that it is sampled from.
        seen: (1, 2) or more, what is read of it, in the columns of `Choice`.
        step: how it comes about.
        context: the text before it, for logits processors.
    """

    token: mx.array
    logprobs: mx.array
    seen: mx.array
    step: Step
    context: mx.array | None


@dataclass
class Loop:
    """Writes a text as the top gear does, from proposals that its passes verify.

    Args:
        gearbox: in whose top gear the text is written.
        cache: the KV cache of the model, one entry a layer.
        text: what was written; begins with the prompt.
        chooser: samples the tokens.
        policy: how much to propose.
        reader: of logits.
        drafter: proposes; None: the text alone does.
        lookup: of the text, which proposes up to `most_looked_up` tokens; None: it proposes nothing.
        agreement: of ranks that share the model.
        most_drafted: the most tokens that the drafter is to propose at once.
        quantize: puts the KV cache into fewer bits once it has `quantized_from` entries, as mlx-lm does.
        keeps_cache: True if a caller goes on with the KV cache.
        stream: on which all of it is computed.
        prefill_step: tokens of a prompt that are read at once.
        told: is told how many tokens of the prompt were read, and how many there are.
        embeddings: of the prompt's tokens (n, D), in place of the model's own.
        clock: seconds.
    """

    gearbox: Gearbox
    cache: list[Any]
    text: TextSoFar
    chooser: Chooser
    policy: LearnedPolicy
    reader: LogitsReader
    drafter: Drafter | None = None
    lookup: Lookup | None = None
    most_looked_up: int = MAX_DRAFTED
    agreement: Agreement = ALONE
    most_drafted: int = MAX_DRAFTED
    quantize: Callable[[list[Any]], None] = lambda cache: None
    quantized_from: int = UNLIMITED
    keeps_cache: bool = False
    stream: Any = None
    prefill_step: int = 2048
    told: Callable[[int, int], None] = lambda read, tokens: None
    embeddings: mx.array | None = None
    clock: Callable[[], float] = time.perf_counter
    rows: Rows | None = field(default=None, init=False)
    """The latest verification."""
    shown: int = field(default=0, init=False)
    """How many of its tokens were handed out."""

    def __post_init__(self) -> None:
        self._verifier = Verifier(self.gearbox, self.gearbox.ladder.top)
        self._away = 0.0  # seconds that readers of the tokens took
        self._unread = True  # whether the last token is not in the KV cache
        self._asked: int | None = None  # length of the next draft, where the policy was asked before its time

    def write(self) -> Generator[WrittenToken, None, None]:
        """Read the prompt, and yield the tokens of the text.

        When it ends or is closed, the cache holds the tokens that were yielded, and nothing else.
        """
        self._prefill()
        rounds = self._rounds()
        try:
            for count, token in enumerate(rounds):
                left = self.clock()
                yield token
                self._away += self.clock() - left  # what a reader does with a token is no time of ours
                if count % CLEARED == 0:
                    mx.clear_cache()
        except GeneratorExit:
            rounds.close()
            if self.keeps_cache:
                self._leave()
            raise
        self._leave()

    def _rounds(self) -> Generator[WrittenToken, None, None]:
        yield self._first()
        while self.text.goes_on:
            start = self._now()
            proposal = self._propose()
            if proposal is None:
                yield from self._alone()
                continue
            for token in self._verified(proposal, start):
                self.shown += 1
                yield token

    # A round: draft, verify, accept.

    def _propose(self) -> Proposal | None:
        """Return what may follow the text: what stands further up, or what the drafter writes; None where
        neither pays."""
        room = self._room
        if room < 1:
            return None
        taken = self._looked_up(room)
        if taken:
            return Proposal(LOOKUP, mx.array(taken, mx.uint32))
        most = min(self._next_length(room), room)
        return self._drafted(most) if most > 0 else None

    def _verified(self, proposal: Proposal, start: float) -> Iterator[WrittenToken]:
        """Yield the tokens of a round that began at `start`."""
        drafted_at = self._now()
        with self._stream():
            last = mx.array([self.text.last], mx.uint32)
            self.rows = Rows(self._verifier, mx.concatenate([last, proposal.tokens])[None], self.cache)
            self.shown = 0
            try:
                written, margins = self._accept(proposal, self.rows)
            except BaseException:  # of a sampler or a logits processor, or an interrupt
                self.rows.keep(0)
                raise
            self.rows.keep(len(written))
            self.quantize(self.cache)
            if self.drafter is not None:
                self.drafter.settle(self.text)
            self._unread = True
        self.policy.add_round(
            drafted=proposal.count if proposal.source == DRAFT else 0,
            accepted=len(written) - 1,
            rows=proposal.count + 1,
            seconds=self._now() - start,
            draft_seconds=drafted_at - start if proposal.is_read else None,
            margins=margins,
        )
        yield from written

    def _accept(self, proposal: Proposal, rows: Rows) -> tuple[list[WrittenToken], list[float]]:
        """Choose the tokens after each row, as far as the ones before them were proposed, and add them to the text.

        Returns them, and the margins of what was proposed, if they are known.
        """
        logits = rows.logits[0]
        logprobs, chosen, states = self._chosen(logits, proposal)
        seen = self.reader.choices(logprobs if states else logits)
        margins = mx.zeros(0) if proposal.margins is None else proposal.margins
        magnitude = mx.abs(logits).max() if states else mx.zeros(0)
        found, tokens, proposed, won, largest = self._read(seen, chosen, proposal.tokens, margins, magnitude)
        if not states:
            tokens, largest = found[:, Choice.TOKEN].astype(int), found[:, Choice.MAGNITUDE]
        near = found[:, Choice.BEST] - found[:, Choice.NEXT] <= rounding_of(largest.max(), logits.dtype)
        accepted = in_common(tokens, proposed)
        written = []
        for place, step in enumerate(self._steps(proposal, accepted)):
            token, bits = int(tokens[place]), float(found[place, Choice.ENTROPY])
            written.append(WrittenToken(token, logprobs[place], SampledToken(bits, step, bool(near[place]))))
            self.text.add(token)
            if not self.text.goes_on:
                break
        if states:
            set_random_state(states[len(written) - 1])
        return written, won.tolist()

    # What a round needs.

    def _now(self) -> float:
        """Return seconds, those of readers left out."""
        return self.clock() - self._away

    @property
    def _room(self) -> int:
        """The most tokens that may be proposed: the top gear adds one, and a KV cache is quantized between passes."""
        until_quantized = self.quantized_from - length(self.cache) - 1
        if until_quantized < 0:
            until_quantized = UNLIMITED
        return int(min(self.text.room - 1, until_quantized))

    def _next_length(self, room: int) -> int:
        """Return the most tokens of the next draft. The policy is asked once for each."""
        asked, self._asked = self._asked, None
        if asked is not None:
            return asked
        if self.drafter is None:
            return 0
        return self.policy.length(min(room, self.most_drafted), self.drafter.reads_early(self.cache))

    def _looked_up(self, room: int) -> list[int]:
        """Return the tokens that the text itself proposes, as far as they are worth a verification."""
        if self.lookup is None:
            return []
        self.lookup.follow(self.text.tokens, self.text.prompt)
        room = min(room, self.most_looked_up)
        found = self.lookup.proposed(room)
        if not found:
            return []
        right = self.lookup.agreement.probabilities(self.lookup.run, len(found))
        return self.text.until_end(found[: self.policy.looked_up(right, room)])

    def _drafted(self, most: int) -> Proposal | None:
        assert self.drafter is not None
        try:
            with self._stream():
                proposal = self.drafter.propose(self.text, self.cache, most, self.policy.goes_on)
        except GearbxError:
            raise
        except Exception as error:  # a text must not end where only a draft has failed
            self.drafter = None
            said = f"mode 'lossless' cannot draft for this model ({one_line(error)}); the top gear goes on alone"
            warnings.warn(said, GearbxWarning, stacklevel=6)
            return None
        return proposal if proposal.count else None

    def _chosen(self, logits: mx.array, proposal: Proposal) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Choose a token from each row of logits (K, V), one after the other.

        Returns their log-probabilities (K, V), the tokens (K,), and MLX's random state after each. With processors
        there are rows up to the first token that was not proposed: a processor sees nothing but what is text. Greedily,
        the reader of the logits finds the tokens, and no random numbers are drawn.
        """
        chooser = self.chooser
        if chooser.greedy and not chooser.processors:
            return self.reader.normalized(logits), mx.zeros(0, mx.uint32), []
        context = self._context()
        found, tokens, states = list[mx.array](), list[mx.array](), list[mx.array]()
        for row in range(len(logits)):
            logprobs = self.reader.normalized(chooser.processed(context, logits[row : row + 1]))
            tokens += self.agreement.arrays(chooser.sample(logprobs).reshape(1).astype(mx.uint32))
            found.append(logprobs)
            states.append(random_state())
            if context is None or row == proposal.count:
                continue
            proposed = proposal.tokens[row : row + 1]
            if np.array(tokens[-1] != proposed).item():
                break
            context = mx.concatenate([context, proposed])
        return mx.concatenate(found), mx.concatenate(tokens), states

    def _read(self, *arrays: mx.array) -> list[np.ndarray]:
        """Read arrays of 32-bit numbers, those of rank 0 on all ranks, in one wait for the device."""
        arrays = self.agreement.arrays(*arrays)
        flat = np.array(mx.concatenate([each.reshape(-1).view(mx.uint32) for each in arrays]))
        numbers, begin = list[np.ndarray](), 0
        for each in arrays:
            part, begin = flat[begin : begin + each.size].reshape(each.shape), begin + each.size
            numbers.append(part.view(np.float32) if each.dtype == mx.float32 else part)
        return numbers

    def _steps(self, proposal: Proposal, accepted: int) -> Iterator[Step]:
        """Yield how each token of a round came about. The round's passes stand with the first one."""
        gearbox, top = self.gearbox, self.gearbox.ladder.top
        ran = {top: 1} | ({proposal.gear: proposal.count} if proposal.gear is not None else {})
        of_round: dict[str, Any] = {
            "passes": tuple(ran.get(gear, 0) for gear in gearbox.ladder),
            "weight_bytes": gearbox.weight_bytes_per_token(top, proposal.count + 1) + proposal.weight_bytes,
            "drafted": proposal.count if proposal.source == DRAFT else 0,
            "looked_up": proposal.count if proposal.source == LOOKUP else 0,
            **kv_read(gears_of(self.cache)),
        }
        nothing = {"passes": (0,) * len(gearbox.ladder)}
        for place in range(accepted + 1):
            by = proposal.source if place < accepted else MODEL
            gear = proposal.gear if by == DRAFT and proposal.gear is not None else top
            yield Step(gear, source=by, **(nothing if place else of_round))

    # Prefill.

    def _prefill(self) -> None:
        """Read the prompt, but for its last token, into the KV caches of the model and of the drafter."""
        tokens, last = mx.array(self.text.tokens, mx.uint32), self.text.prompt - 1
        gears = gears_of(self.cache)
        if gears is not None:
            gears.begin_prompt()
        self.told(0, self.text.prompt)
        for begin in range(0, last, self.prefill_step):
            end = min(begin + self.prefill_step, last)
            with self._stream():
                self.gearbox.shift(self.gearbox.ladder.top)
                self.gearbox.model(tokens[None, begin:end], cache=self.cache, **self._embedded(begin, end))
                self.quantize(self.cache)
                mx.eval([part.state for part in self.cache])
                if self.drafter is not None:
                    self.drafter.read(tokens[begin:end])
            self.told(end, self.text.prompt)
            mx.clear_cache()

    def _embedded(self, begin: int, end: int) -> dict[str, Any]:
        """Return the keyword of the model for a part of the prompt that has embeddings."""
        return {} if self.embeddings is None else {"input_embeddings": self.embeddings[None, begin:end]}

    def _first(self) -> WrittenToken:
        """Return the token after the prompt."""
        last = self.text.prompt - 1
        inputs = mx.array([self.text.last], mx.uint32)
        first = self._taken(self._queue(inputs, self._context(), **self._embedded(last, last + 1)))
        self.told(self.text.prompt, self.text.prompt)
        return first

    # The top gear alone.

    def _alone(self) -> Iterator[WrittenToken]:
        """Write by the top gear alone, one token ahead, as long as nothing is to be proposed."""
        coming: Queued | None = self._queue(mx.array([self.text.last], mx.uint32), self._context())
        while coming is not None:
            start = self._now()
            ahead = self._queue(coming.token, coming.context, ahead=True) if self._stays_alone() else None
            written = self._taken(coming)
            self._unread = ahead is None
            self.policy.add_plain(self._now() - start)
            yield written
            coming = ahead if self.text.goes_on else None

    def _stays_alone(self) -> bool:
        """Return whether the token after the one that is computed is the top gear's own too."""
        room = self._room - 1
        if room < 1:
            return False  # the last token but one: nothing runs ahead of the end
        if self._looked_up(room):
            return False
        self._asked = self._next_length(room) or None
        return self._asked is None

    def _context(self) -> mx.array | None:
        """Return the text so far (n,), if logits processors ask for it."""
        return self.text.array() if self.chooser.processors else None

    def _queue(self, token: mx.array, context: mx.array | None, ahead: bool = False, **of_token: Any) -> Queued:
        """Begin to compute the token after this one (1,)."""
        if ahead and context is not None:
            context = mx.concatenate([context, token.reshape(-1).astype(context.dtype)])
        with self._stream():
            self.gearbox.shift(self.gearbox.ladder.top)
            logits = self.gearbox.model(token.reshape(1, 1), cache=self.cache, **of_token)[:, -1]
            logits = self.chooser.processed(context, logits)
            self.quantize(self.cache)
            logprobs = self.reader.normalized(logits)
            if self.reader.is_native and self.chooser.greedy and self.agreement is ALONE:
                seen = self.reader.choices(logits)
                chosen = seen[:, Choice.TOKEN].astype(mx.uint32)
            else:
                chosen, bits = self.agreement.arrays(self.chooser.sample(logprobs), self.reader.entropy(logprobs))
                # In one array, and now: what is computed later would wait for the pass that is queued behind this one.
                seen = mx.concatenate([chosen.astype(mx.float32), bits])[None]
            mx.async_eval(chosen, seen, logprobs)  # left for later, they made the next passes a tenth slower
        step = replace(single_pass(self.gearbox, self.gearbox.ladder.top), **kv_read(gears_of(self.cache)))
        return Queued(chosen, logprobs, seen, step, context)

    def _taken(self, coming: Queued) -> WrittenToken:
        """Wait for a token, and add it to the text."""
        seen = np.array(coming.seen)[0]
        token, bits = int(seen[Choice.TOKEN]), float(seen[Choice.ENTROPY])
        self.rows = None  # the cache holds no more than the text
        self.text.add(token)
        return WrittenToken(token, coming.logprobs[0], SampledToken(bits, coming.step))

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else mx.stream(self.stream)

    # The end.

    def _leave(self) -> None:
        """Leave the KV cache, and MLX's random numbers, as mlx-lm does: it has begun one token more."""
        with turn(self.gearbox), self._stream():
            engaged = self.gearbox.gear
            if self.rows is not None and self.shown < self.rows.kept:
                self.rows.keep(self.shown + 1)
                self._unread = False
            if self._unread:
                self._queue(mx.array([self.text.last], mx.uint32), self._context())
            self.gearbox.shift(engaged)
