"""A model that drafts in a low gear and verifies the whole draft in one pass of the top gear.

mlx-lm runs it like any other model, and gets the top gear's logits. When mlx-lm asks for one token, the model drafts
the next few and computes the top gear's logits for all of them in one pass. As long as mlx-lm then samples the tokens
that were drafted, the model answers from these logits. So sampling, logits processors, stop tokens and lengths stay
mlx-lm's own, and a wrong draft costs time and changes nothing.

Draft and verification share their noise (GEARBX 10.1): a token is drafted with the random numbers that mlx-lm will use
to sample its position, so that both choose the same token wherever their distributions agree.

Both gears use one KV cache. The entries of the low gear are taken back before the top gear writes its own. Entries of
tokens that mlx-lm does not have yet are hidden, and brought back when it asks for them.
"""

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from ..errors import GearbxError, GearbxWarning
from ..gears.activations import dtype_name
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..routing.acceptance import MOST_DRAFTED, DraftRule, default_rule
from .caches import borrowed, length, room, take_back, untrimmable
from .step import Draft, Step
from .wrapper import ModelWrapper

NOISE = 4  # units in the last place of the largest logit: less than that between two logits is a near-tie


@dataclass
class Verified:
    """The top gear's logits (1, N, V) for a token and the draft after it; mlx-lm has got `place` of them.

    `cache` and its `length` in tokens are as they were when mlx-lm got the last of them.
    """

    tokens: list[int]
    logits: mx.array
    noise: mx.array
    cache: list[Any]
    length: int
    place: int = 1


class LosslessModel(ModelWrapper):
    """A model that computes the top gear's logits, those of a whole draft in one pass.

    Args:
        gearbox: of the model, with two gears or more.
        rule: when to stop drafting; the uncalibrated one if not given.
        draft: the gear that drafts; the lowest if not given.
        sampler, logits_processors: mlx-lm's own, so that drafts are what it will choose; greedy without.
        stop_tokens: tokens after which nothing is drafted.
        prompt_tokens: how many tokens the prompt has.
        max_tokens: how many will be generated; -1: no limit.

    Raises:
        GearbxError: a ladder of one gear, a draft gear that is the top one, latent attention in half precision. When
            called: a cache from which nothing can be taken back.
    """

    def __init__(
        self,
        gearbox: Gearbox,
        rule: DraftRule | None = None,
        *,
        draft: Gear | str | int | None = None,
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
        stop_tokens: Collection[int] = (),
        prompt_tokens: int = 0,
        max_tokens: int = -1,
    ):
        super().__init__(gearbox)
        self.top = gearbox.ladder.top
        self.draft = gearbox.ladder[0] if draft is None else gearbox.ladder.find(draft)
        if self.draft == self.top:
            raise GearbxError(f"gears {gearbox.ladder}: the top gear cannot draft for itself; give a lower one too")
        check_attention(gearbox)
        self.rule = rule or default_rule()
        self.sampler = sampler
        self.logits_processors = tuple(logits_processors)
        self.stop_tokens = frozenset(stop_tokens)
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self._history = History()
        self._verified: Verified | None = None
        self._running: Any = None  # the cache of the step before

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None, **kwargs: Any
    ) -> mx.array:
        kwargs = self.model_keywords(input_embeddings, kwargs)
        if inputs.size != 1 or cache is None or kwargs:
            self._verified = None
            self._history.add(inputs)
            read = self.gearbox.weight_bytes_per_token(self.top)
            self.step = Step(self.top, (), self.passes(self.top), read)
            return self.run(self.top, inputs, cache, **kwargs)
        self._history.add(inputs)
        token = np.array(inputs).item()
        found = self._verified_logits(token, cache)
        return self._draft_and_verify(token, cache) if found is None else found

    def _verified_logits(self, token: int, cache: Any) -> mx.array | None:
        """Logits (1, 1, V) from the last verification, if this token is the one that was drafted."""
        verified = self._verified
        if (
            verified is None
            or verified.place == len(verified.tokens)
            or verified.tokens[verified.place] != token
            or len(cache) != len(verified.cache)
            or any(a is not b for a, b in zip(cache, verified.cache))  # mlx-lm has begun to quantize it, say
            or length(cache) != verified.length
        ):
            return None
        take_back(cache, -1)
        place = verified.place
        verified.place += 1
        verified.length += 1
        self.step = Step(self.top, (), self.passes(), 0, self._drafted(verified, place), 0, verified.noise)
        return verified.logits[:, place : place + 1]

    def _draft_and_verify(self, token: int, cache: Any) -> mx.array:
        """The logits (1, 1, V) of the token itself, after drafting what follows it and verifying the draft."""
        self._verified = None
        tokens = [token]
        entropies: list[float] = []
        most = self._most(token, cache)
        if most > 0:
            drafted, entropies = self._drafts(token, cache, most)
            tokens += drafted
            with borrowed(cache):
                logits = self.run(self.top, mx.array([tokens]), cache)
            take_back(cache, -1)
        else:
            logits = self.run(self.top, mx.array([tokens]), cache)
        noise = NOISE * mx.finfo(logits.dtype).eps * mx.abs(logits).max()
        verified = Verified(tokens, logits, noise, list(cache), length(cache))
        ran = [self.draft] * len(entropies) + [self.top]
        read = len(entropies) * self.gearbox.weight_bytes_per_token(self.draft)
        read += self.gearbox.weight_bytes_per_token(self.top, len(tokens))
        rounding = noise if len(tokens) > 1 else None
        self.step = Step(
            self.top, tuple(entropies), self.passes(*ran), read, self._drafted(verified, 0), len(entropies), rounding
        )
        self._verified = verified
        return logits[:, :1]

    def _drafted(self, verified: Verified, place: int) -> Draft | None:
        """The draft of the token that the logits at this place predict."""
        return Draft(verified.tokens[place + 1], self.draft) if place + 1 < len(verified.tokens) else None

    def _most(self, token: int, cache: Any) -> int:
        """The most tokens to draft: none past the end of the text, and all of them can be taken back.

        Raises GearbxError for a cache that cannot be used. If one fills up on the way, the top gear goes on alone.
        """
        running, self._running = self._running is cache, cache
        free = room(cache) - 1  # the token itself goes in too
        if free < 1 and not running:
            raise untrimmable(cache, "lossless")
        if free < 1:
            warnings.warn(f"the top gear goes on alone: {untrimmable(cache, 'lossless')}", GearbxWarning, stacklevel=4)
        made = len(self._history) - self.prompt_tokens + 1  # tokens, the one of this step included
        if made < 1 or token in self.stop_tokens:
            return 0
        left = self.max_tokens - made if self.max_tokens >= 0 else MOST_DRAFTED
        return int(min(MOST_DRAFTED, left, free))

    def _drafts(self, token: int, cache: Any, most: int) -> tuple[list[int], list[float]]:
        """Drafted tokens and the entropies (bits) of their distributions; cache and random numbers do not change."""
        drafted: list[int] = []
        entropies: list[float] = []
        history = self._history.tokens() if self.logits_processors else []
        self.rule.begin()
        with borrowed(cache), same_random_numbers():
            while len(drafted) < most:
                logits = self.run(self.draft, mx.array([[token]]), cache)[:, -1]
                for processor in self.logits_processors:
                    logits = processor(mx.array(history + drafted, mx.uint32), logits)
                logprobs = logits - mx.logsumexp(logits, keepdims=True)
                entropy = self.entropy(logprobs)
                sampled = self.sampler(logprobs) if self.sampler else mx.argmax(logprobs, axis=-1)
                mx.eval(entropy, sampled)
                token = np.array(sampled).item()
                drafted.append(token)
                entropies.append(float(entropy))
                if token in self.stop_tokens or not self.rule.goes_on(entropies[-1]):
                    break
        return drafted, entropies


def check_attention(gearbox: Gearbox) -> None:
    """Raises GearbxError for multi-head latent attention in half precision.

    It computes one token in another order than several, and the difference decides between tokens that are far from a
    near-tie.
    """
    latent = any(isinstance(module, MultiLinear | QuantizedMultiLinear) for module in gearbox.model.modules())
    if latent and gearbox.compute_dtype != mx.float32:
        raise GearbxError(
            f"mode 'lossless' in {dtype_name(gearbox.compute_dtype)}: this model's latent attention rounds several "
            "tokens otherwise than one, which changes the text; give --dtype float32, or use mode 'route'"
        )


class History:
    """The tokens that the model was called with: logits processors need them."""

    def __init__(self) -> None:
        self._parts: list[mx.array] = []
        self._count = 0

    def add(self, inputs: mx.array) -> None:
        self._parts.append(inputs.reshape(-1))
        self._count += inputs.size

    def __len__(self) -> int:
        return self._count

    def tokens(self) -> list[int]:
        if len(self._parts) > 1:
            self._parts = [mx.concatenate([part.astype(mx.uint32) for part in self._parts])]
        return np.array(self._parts[0]).tolist()


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Random numbers drawn in the block will be drawn again after it."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)  # a key is its seed
