"""Verification: one forward pass over several tokens, and the KV cache as it is after any of them.

Verification accepts the first few proposed tokens. The cache then has to be the same as without the rejected ones.

- A cache that only appends is cut.
- A sliding window loses its last entries. The pass has kept all entries that its first token attends to. The mask lets
  each token attend to the same entries as in a pass of its own: the cache, attention sinks (`--max-kv-size`), and the
  latest tokens. mlx-lm's mask for several tokens slides over the sinks too, and a few models ask for a window that is
  wider than their cache.
- A recurrent layer has only the state after the last token. The state after an earlier one is computed again, from the
  state before the pass and the outputs of the linear layers. A linear layer treats tokens independently. The outputs of
  a pass over K tokens thus contain the outputs of a pass over the first n, computed together or one by one. No
  weights of linear layers are read.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from ..compat.arrays import dtype_name
from ..compat.classes import modules_of, of_classes
from ..compat.latent_attention import has_latent_attention, one_token_class
from ..compat.loops import cut_window
from ..compat.versions import is_tested
from ..errors import GearbxWarning
from ..formats.block import KeptParts, PassParts, pass_logits, pass_parts
from ..gears.discovery import QUANTIZED
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from .caches import APPENDING, Cache, Snapshot, parts
from .hidden import Hidden, of_one_sequence, recorded
from .mode import decode_lock
from .response import DRAFT, LOOKUP, MODEL, Step, single_pass

PROPOSED = {DRAFT: "drafted", LOOKUP: "lookup_drafted"}  # source of a proposal to the field of a step that counts it
UNMASKED = {"mlx_lm.models.phi3small"}  # adds its boolean mask to the scores, so tokens attend to later ones
Tokens = Sequence[int] | mx.array
"""K token ids, or an array (K,) that the device may still compute."""


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow a sequence.

    Attributes:
        tokens: k token ids: a list if they are known, an array (k,) that the device may still compute.
        source: DRAFT or LOOKUP; MODEL for no tokens.
        margins: k differences between a token's logit and the next best one; None if unknown.
        gear: that drafted them; None without a gear.
        weight_bytes: read by the drafter's passes, one per token.
    """

    tokens: Sequence[int] | mx.array = ()
    source: str = MODEL
    margins: Sequence[float] | mx.array | None = None
    gear: Gear | None = None
    weight_bytes: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def array(self) -> mx.array:
        return self.tokens if isinstance(self.tokens, mx.array) else mx.array([*self.tokens], mx.uint32)

    @property
    def is_known(self) -> bool:
        """Readiness of the tokens: False while a device may still compute them."""
        return not isinstance(self.tokens, mx.array)


NO_TOKENS = Proposal()


class VerifiedPass(Protocol):
    """One pass over K tokens; the KV cache keeps the first few.

    Attributes:
        logits: (1, K, V), after each of the tokens.
        count: K.
        kept: number of the tokens that the KV cache holds.
        hidden: states of the K tokens, as the verifier's `taps` name them.
    """

    logits: mx.array
    count: int
    kept: int
    hidden: Hidden

    def keep(self, rows: int) -> None: ...
    def steps(self, proposal: Proposal, accepted: int, **of_cache: Any) -> Iterator[Step]: ...


class RunsPasses(Protocol):
    """Passes whose logits choose the tokens of a sequence: `Verifier`, `KickdownVerifier` or `PairVerifier`."""

    def prefill(self, tokens: mx.array, cache: Any, **embedded: mx.array) -> Hidden: ...
    def verify(self, tokens: Any, cache: Any, **embedded: mx.array) -> VerifiedPass: ...
    def is_synchronous(self, cache: Any) -> bool: ...
    def exclusive(self) -> contextlib.AbstractContextManager[None]: ...


class Verifier:
    """Passes in one gear of a gearbox. A pass over several tokens computes each as in a pass of its own.

    Args:
        gear: of the passes.
        prefill_gear: None: `gear`.
        taps: numbers of blocks after which passes return the hidden states.
    """

    def __init__(self, gearbox: Gearbox, gear: Gear, prefill_gear: Gear | None = None, taps: Sequence[int] = ()):
        self.gearbox, self.gear, self.prefill_gear, self.taps = gearbox, gear, prefill_gear or gear, taps
        self._found: KeptParts | None = None
        self._caps = gearbox.caps  # caps of the found parts

    def prefill(self, tokens: mx.array, cache: Cache, **embedded: mx.array) -> Hidden:
        """Prefill a part (n,) of the prompt, and return its hidden states."""
        self.gearbox.shift(self.prefill_gear)
        with recorded(self.gearbox.model, self.taps) as outputs:
            self.gearbox.model(tokens[None], cache=cache, **embedded)
        return of_one_sequence(outputs)

    def verify(self, tokens: Tokens, cache: Cache, **embedded: mx.array) -> "Verification":
        """Return the logits after each of the tokens.

        Args:
            embedded: `input_embeddings` (1, K, D) of the tokens; without it the model's own.
        """
        return Verification(self, tokens, cache, **embedded)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the gearbox in the context, and restore its gear afterwards."""
        with decode_lock(self.gearbox):
            engaged = self.gearbox.gear
            try:
                yield
            finally:
                self.gearbox.shift(engaged)

    def is_synchronous(self, cache: Cache) -> bool:
        """Return whether a pass is computed in the call, and not queued for a device."""
        return self._parts.fits(cache)

    def run(self, tokens: Tokens, cache: Cache, **embedded: mx.array) -> tuple[mx.array, Hidden]:
        """Return logits (1, K, V) and hidden states."""
        if self._parts.fits(cache) and not embedded:
            known: list[int] = np.array(tokens).tolist() if isinstance(tokens, mx.array) else [*tokens]
            found = self._parts.use(cache, lambda parts: pass_logits(parts, known, cache, self.taps))
            if found is not None:
                return found
        self.gearbox.shift(self.gear)
        inputs = (tokens if isinstance(tokens, mx.array) else mx.array([*tokens], mx.uint32))[None]
        with contextlib.ExitStack() as passing:
            outputs = passing.enter_context(recorded(self.gearbox.model, self.taps))
            if inputs.shape[1] > 1:
                passing.enter_context(single_token_masks(cache))
                passing.enter_context(of_classes(self._short_path))
            return self.gearbox.model(inputs, cache=cache, **embedded), of_one_sequence(outputs)

    @property
    def _parts(self) -> KeptParts:
        """Native parts of the gear, found again after a controller has capped layers."""
        if self._found is None or self._caps is not self.gearbox.caps:
            self._found, self._caps = KeptParts(self._find), self.gearbox.caps
        return self._found

    def _find(self) -> PassParts | None:
        self.gearbox.shift(self.gear)
        return pass_parts(self.gearbox.model)

    @functools.cached_property
    def linear_layers(self) -> list[nn.Module]:
        """Linear layers of the engaged gear at first use."""
        return linear_layers(self.gearbox.model)

    @functools.cached_property
    def _short_path(self) -> list[tuple[nn.Module, type]]:
        """Modules with latent attention, each with a class that computes several tokens as its own computes one."""
        found = [(module, one_token_class(type(module))) for module in latent_attention(self.gearbox.model)]
        return [(module, kind) for module, kind in found if kind is not None]


class Verification:
    """One pass over K tokens.

    Args:
        verifier: runs the pass, in its gear.
        tokens: input of the pass.
        cache: of the model.
        embedded: as in `Verifier.verify`.

    Attributes:
        gear: of the pass.
        logits: (1, K, V), after each of the tokens.
        hidden: their states (K, D), after the blocks that the verifier taps.
        kept: number of the tokens that the cache holds: all, until `keep` changes it.
    """

    def __init__(self, verifier: Verifier, tokens: Tokens, cache: Cache, **embedded: mx.array):
        self._verifier, self._tokens, self._cache = verifier, tokens, cache
        self.gear = verifier.gear
        self.kept = self.count = len(tokens)
        self._before = Snapshot(cache)
        has_states = any(not can_drop_last(kind) for kind in {*map(type, self._before.parts)})
        self._outputs: LayerOutputs | None = None
        if has_states and self.count > 1:
            verifier.gearbox.shift(verifier.gear)
            self._outputs = LayerOutputs(verifier.linear_layers, self.count)
        try:
            with contextlib.nullcontext() if self._outputs is None else self._outputs.noted_by(recording):
                self.logits, self.hidden = verifier.run(tokens, cache, **embedded)
        except BaseException:
            self._before.restore()
            raise

    @property
    def step(self) -> Step:
        """Step of a token that only this pass computed."""
        return single_pass(self._verifier.gearbox, self.gear, self.count)

    def steps(self, proposal: Proposal, accepted: int, **of_cache: Any) -> Iterator[Step]:
        """Yield the steps of the accepted tokens and of the next one. The first has the passes of the round.

        Args:
            of_cache: fields of a step about the KV cache.
        """
        first = self.step
        none, passes = Step(first.gear, (0,) * len(first.passes)), list(first.passes)
        if proposal.gear is not None:
            passes[proposal.gear.index] += len(proposal)
        counted: dict[str, Any] = {} if proposal.source == MODEL else {PROPOSED[proposal.source]: len(proposal)}
        read = first.weight_bytes + proposal.weight_bytes
        first = replace(first, passes=tuple(passes), weight_bytes=read, **counted, **of_cache)
        for place in range(accepted + 1):
            by = proposal.source if place < accepted else MODEL
            gear = proposal.gear if by == DRAFT and proposal.gear is not None else first.gear
            yield replace(none if place else first, gear=gear, source=by)

    def keep(self, rows: int) -> None:
        """Set the cache to its state after the first `rows` tokens; rows: at most `kept`."""
        dropped, self.kept = self.kept - rows, rows
        if not dropped:
            return
        if not rows:
            self._before.restore()
        elif self._outputs is not None:
            self._before.restore()
            self._again(rows)
        else:
            for part in self._before.parts:
                if type(part) is RotatingKVCache:
                    cut_window(part, dropped)
                else:
                    part.trim(dropped)

    def _again(self, rows: int) -> None:
        """Compute the states after the first tokens again, from the outputs of the linear layers."""
        assert self._outputs is not None
        verifier = self._verifier
        with verifier.gearbox.compiled.aside(), self._outputs.noted_by(recalling):
            verifier.run(self._tokens[:rows], self._cache)


def latent_attention(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model with latent attention."""
    return [module for module in modules_of(model) if has_latent_attention(module)]


def warn_of_other_paths(gearbox: Gearbox) -> None:
    """Warn if a model computes several tokens differently from one, and this may change the output."""
    kinds: set[Any] = {type(module) for module in latent_attention(gearbox.model)}
    others = {kind.__name__ for kind in kinds if one_token_class(kind) is None}
    if type(gearbox.model).__module__ in UNMASKED:
        others = {type(gearbox.model).__module__}
    elif gearbox.compute_dtype == mx.float32:
        return
    if others:
        message = (
            f"{min(others)} computes several tokens differently from one, so the output of mode 'lossless' in "
            f"{dtype_name(gearbox.compute_dtype)} may differ from the top gear's; use mode 'static' for that"
        )
        warnings.warn(message, GearbxWarning, stacklevel=4)


def can_drop_last(kind: type) -> bool:
    """Return whether a cache keeps all entries in a pass over several tokens, so that the last ones can be dropped."""
    return kind in (*APPENDING, ChunkedKVCache) or (kind is RotatingKVCache and is_tested())


def make_mask(part: RotatingKVCache, count: int, window_size: int | None = None, **kwargs: Any) -> Any:
    """Return the mask (count, keys) of `count` new tokens: the sinks, and the window that ends with each token.

    It is mlx-lm's mask if every token attends there to the same entries as in a pass of its own.
    """
    narrow = window_size is not None and window_size < part.max_size
    usual = part.keep == 0 and window_size in (None, part.max_size)
    if count == 1 or narrow or usual:
        return RotatingKVCache.make_mask(part, count, window_size, **kwargs)
    before = min(part.offset, part.max_size - 1)  # number of entries that mlx-lm keeps before the new ones
    own, keys = mx.arange(before, before + count)[:, None], mx.arange(before + count)
    return (keys <= own) & ((keys < part.keep) | (keys > own - (part.max_size - part.keep)))


@contextlib.contextmanager
def single_token_masks(cache: Cache) -> Iterator[None]:
    """Use `make_mask` for the sliding windows of a cache in the context."""
    windows = [part for part in parts(cache) if type(part) is RotatingKVCache]
    for part in windows:
        part.make_mask = partial(make_mask, part)
    try:
        yield
    finally:
        for part in windows:
            del part.make_mask


LINEAR = (nn.Linear, *QUANTIZED)
NOTES = "outputs_of_a_pass"  # attribute of a layer during a pass


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers of the engaged gear."""
    return [module for module in model.modules() if isinstance(module, LINEAR)]


class LayerOutputs:
    """Outputs of linear layers in one pass over K tokens.

    Args:
        layers: of the gear of the pass.
        count: K, two or more.
    """

    def __init__(self, layers: Sequence[nn.Module], count: int):
        self.count = count
        self._layers = layers
        self._outputs: list[list[mx.array | None]] = [[] for _ in layers]

    def _usable(self, outputs: list[mx.array | None]) -> Iterator[mx.array | None]:
        """Yield the outputs of a layer, with None where the token of an output is unknown.

        A layer that was called K times with one vector each got the tokens one by one.
        """
        one_by_one = len(outputs) == self.count
        return iter([y if y is not None and (y.ndim == 3 or one_by_one) else None for y in outputs])

    @contextlib.contextmanager
    def noted_by(self, kind_of: Callable[[Any, int], type[nn.Module]]) -> Iterator[None]:
        """Make layers `recording` in the context, or `recalling` for the first n tokens of the pass."""
        notes: Iterable[Any] = self._outputs if kind_of is recording else map(self._usable, self._outputs)
        for layer, its_notes in zip(self._layers, notes):
            object.__setattr__(layer, NOTES, its_notes)  # outside of the module's dictionary of parameters
        try:
            with of_classes((layer, kind_of(type(layer), self.count)) for layer in self._layers):
                yield
        finally:
            for layer in self._layers:
                vars(layer).pop(NOTES, None)


@functools.cache
def recording(kind: Any, count: int) -> type[nn.Module]:
    """Return a subclass of a linear layer's class that records its outputs: None for inputs other than (1, K, I) or
    (1, I)."""

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array = kind.__call__(self, x, *args, **kwargs)
        by_position = x.shape[:-1] == y.shape[:-1] and x.shape[:-1] in ((1, count), (1,))
        getattr(self, NOTES).append(y if by_position else None)
        return y

    return type(kind.__name__, (kind,), {"__call__": call})


@functools.cache
def recalling(kind: Any, count: int) -> type[nn.Module]:
    """Return a subclass of a linear layer's class that returns recorded outputs, for the tokens of its input."""

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array | None = next(getattr(self, NOTES), None)
        if y is None or x.ndim != y.ndim:
            return kind.__call__(self, x, *args, **kwargs)
        return y if x.ndim == 2 else y[:, : x.shape[1]]

    return type(kind.__name__, (kind,), {"__call__": call})
